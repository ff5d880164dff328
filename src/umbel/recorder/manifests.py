"""What a segment says of itself, in the key-value metadata of its Parquet footer, under `umbel`.

    {"format": 1, "recorder": "...", "rows": 2, "sequences": [["w1@a", 77, [[1, 2]]]]}

`sequences` are the sequence numbers in it, per hostname and incarnation (or series, of those who
send events for a worker), as ranges whose both ends belong to them. So what is missing from a log
is known without reading a single row, and the manifest is there if and only if the segment is. A
compacted segment also names those it stands for: `"replaces": ["<name>", ...]`. With `"retained":
true` only a part of their events is in it: the others were removed on purpose (`retention`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from umbel.recorder.errors import Damaged
from umbel.recorder.log import FORMAT, Log
from umbel.recorder.rows import DICTIONARY, utf8

KEY: Final = b"umbel"

Range = tuple[int, int]
Key = tuple[str, int]


class Manifest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """See the module's text."""

    format: int
    recorder: str = ""
    rows: int = 0
    sequences: list[tuple[str, int, list[Range]]] = []
    replaces: list[str] = []
    retained: bool = False


class Footer(msgspec.Struct, kw_only=True):
    """What the end of a segment tells; `manifest` is None where somebody else wrote it."""

    rows: int
    bytes: int  # before compression
    manifest: Manifest | None


def segment_bytes(
    table: pa.Table,
    recorder: str,
    sequences: Mapping[Key, Iterable[int | Range]],
    replaces: Iterable[str] = (),
) -> pa.Buffer:
    """A whole segment: the rows as Parquet, and its manifest."""
    manifest = manifest_bytes(recorder, table.num_rows, sequences, replaces)
    stream = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({KEY: manifest}),
        stream,
        compression="zstd",
        use_dictionary=[name for name in DICTIONARY if name in table.schema.names],
    )
    return stream.getvalue()


def manifest_bytes(
    recorder: str,
    rows: int,
    sequences: Mapping[Key, Iterable[int | Range]],
    replaces: Iterable[str] = (),
    *,
    retained: bool = False,
) -> bytes:
    """A manifest, as it stands in the footer."""
    told: dict[str, Any] = {
        "format": FORMAT,
        "recorder": recorder,
        "rows": rows,
        "sequences": [[utf8(key[0]), key[1], ranges(seen)] for key, seen in sequences.items()],
    }
    if named := list(replaces):
        told["replaces"] = named
    if retained:
        told["retained"] = True
    return json.dumps(told, separators=(",", ":")).encode()


def read_footer(log: Log, path: str) -> Footer:
    """What the end of a segment tells. Raises `Damaged`, and FileNotFoundError if it has gone."""
    try:
        with log.open_file(path) as file:
            return footer_of(file)
    except FileNotFoundError:
        raise
    except Exception as exc:  # Arrow and each store have exceptions of their own
        raise Damaged(f"{log.url}/{path} can not be read: {exc}") from exc


def footer_of(file: BinaryIO) -> Footer:
    """The same, of an open file."""
    metadata = pq.read_metadata(file)
    text = (metadata.metadata or {}).get(KEY)
    try:
        manifest = None if text is None else msgspec.json.decode(text, type=Manifest)
    except msgspec.DecodeError:
        manifest = None
    size = sum(
        metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)
    )
    return Footer(rows=metadata.num_rows, bytes=size, manifest=manifest)


def ranges(numbers: Iterable[int | Range]) -> list[Range]:
    """Numbers and ranges, in any order and any number of times, as ranges that do not touch."""
    made: list[Range] = []
    start = end = None
    for one in sorted((n, n) if isinstance(n, int) else (n[0], n[1]) for n in numbers):
        if end is None or one[0] > end + 1:
            if start is not None and end is not None:
                made.append((start, end))
            start, end = one
        else:
            end = max(end, one[1])
    if start is not None and end is not None:
        made.append((start, end))
    return made


def gaps(seen: Iterable[Range]) -> list[Range]:
    """What is missing between ranges that are in order and do not touch."""
    return [(one[1] + 1, other[0] - 1) for one, other in itertools.pairwise(seen)]
