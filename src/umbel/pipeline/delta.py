"""The tables as Delta Lake tables, for readers other than Umbel: Spark, duckdb, polars, Trino.

    TABLES/<table>/_delta_log/00000000000000000007.json    one commit for each build that changed it

Spark writes Parquet files, the driver commits them through the package `deltalake`. A commit adds
the files that a build wrote, with their statistics, and removes those that they replace. It carries
the number of the build as the application transaction `umbel-build`.

Commits are per table, and `_tables.json`, which is replaced after all of them, names the version of
every table: whoever reads these versions sees one build. A build that is killed between its commits
and that file leaves Delta ahead of it. The next build takes such commits back (`take_back`) before
the files that they name are removed.

Where two builds write the same tables in an object store, which has no locks, the commit of `runs`
decides: every build makes one, before all others, and only as the successor of the version that it
started from.

The log of Delta is derived from `_tables.json`: if it cannot be read, or its columns are those of
another version of Umbel, it is made anew.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from umbel.pipeline.errors import HistoryError
from umbel.pipeline.footers import read_footer
from umbel.pipeline.places import Place
from umbel.stores import store_of

LOG: Final = "_delta_log"
APPLICATION: Final = "umbel-build"
FIRST: Final = "runs"
# Versions of which the files are gone are of no use to anybody.
CONFIGURATION: Final[Mapping[str, str | None]] = {
    "delta.checkpointInterval": "20",
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}
THREADS: Final = 8
# Longer texts are cut by other writers, which makes their greatest value a matter of care.
TEXT_CHARS_MAX: Final = 32

Entry = Mapping[str, Any]  # of a table in the index: rows, files, version
Footers = Mapping[str, pq.FileMetaData]


def is_possible(tables: Place) -> bool:
    """Whether the package can write there: on local disks and in the usual object stores."""
    return tables.is_local or store_of(tables.url) is not None


def commit(
    tables: Place,
    entries: Mapping[str, Entry],
    published: Mapping[str, Entry],
    batch: int,
    footers: Footers,
) -> dict[str, int]:
    """Commit the files of all tables that differ from those published; gives all versions.

    Raises `HistoryError`, with nothing committed, if another build has published meanwhile.
    """
    if not is_possible(tables):
        return {}
    versions: dict[str, int] = {}
    changed = []
    for name, entry in entries.items():
        before = published.get(name, {})
        version = before.get("version")
        if version is not None and _paths(name, entry) == _paths(name, before):
            versions[name] = version
        elif not name.startswith("_"):
            changed.append(name)

    def one(name: str) -> int:
        return _advance(tables, name, entries[name], published.get(name), batch, footers)

    changed.sort(key=lambda name: name != FIRST)
    for name in changed[:1]:
        versions[name] = one(name)
    with ThreadPoolExecutor(THREADS) as pool:
        versions.update(zip(changed[1:], pool.map(one, changed[1:]), strict=True))
    return versions


def take_back(tables: Place, published: Mapping[str, Entry], batch: int) -> dict[str, int]:
    """Undo commits of builds that did not live to publish; gives the new versions, if any.

    Logs of tables that no build has published are removed, logs that have gone are made anew.
    """
    if not is_possible(tables):
        return {}
    for name in tables.names():
        is_table = not name.startswith(("_", ".")) and tables.names(f"{name}/{LOG}")
        if is_table and name not in published:
            tables.remove(f"{name}/{LOG}")
    versions = {}
    for name, entry in published.items():
        if (version := entry.get("version")) is not None:
            logged = tables.names(f"{name}/{LOG}")
            if not logged or f"{version + 1:020}.json" in logged:
                versions[name] = _advance(tables, name, entry, None, batch, {})
    return versions


def is_of(tables: Place, name: str, entry: Entry) -> bool:
    """Whether the newest version of a table has the files of an entry."""
    try:
        found = DeltaTable(_uri(tables, name), storage_options=_options(tables))
    except DeltaError:
        return False
    return _committed(found) == _paths(name, entry)


def _advance(
    tables: Place,
    name: str,
    entry: Entry,
    known: Entry | None,
    batch: int,
    footers: Footers,
) -> int:
    """Make these the files of a table, of which `known` is published; gives the version."""
    uri, options, wanted = _uri(tables, name), _options(tables), _paths(name, entry)
    properties = CommitProperties(
        app_transactions=[Transaction(APPLICATION, batch)], max_commit_retries=0
    )
    with _explained(tables, name):
        found = _opened(tables, name)
        version = None if known is None else known.get("version")
        if found is not None and version is not None and found.version() != version:
            raise HistoryError(meanwhile(tables))
        if version is None or known is None:
            there = set() if found is None else _committed(found)
        else:
            there = _paths(name, known)
        new = wanted - there if found is not None else wanted
        adds = [_added(tables, f"{name}/{path}", path, footers) for path in sorted(new)]
        schema = _schema(tables, name, wanted, footers)
        if found is not None and found.schema() != schema:
            tables.remove(f"{name}/{LOG}")
            return _advance(tables, name, entry, None, batch, footers)
        if found is None:
            create_table_with_add_actions(
                uri,
                schema,
                adds,
                name=name,
                configuration=CONFIGURATION,
                storage_options=options,
                commit_properties=properties,
            )
            made = 0
        else:
            now = int(time.time() * 1_000)
            removed = [
                RemoveAction(path, data_change=True, deletion_timestamp=now)
                for path in sorted(there - wanted)
            ]
            made = found.version() + 1
            found.create_write_transaction(
                [*adds, *removed], "append", schema, commit_properties=properties
            )
    tables.flush(f"{name}/{LOG}")
    return made


def _opened(tables: Place, name: str) -> DeltaTable | None:
    """The table as Delta has it; None where it has none that can be read."""
    if not tables.names(f"{name}/{LOG}"):
        return None
    try:
        return DeltaTable(_uri(tables, name), storage_options=_options(tables))
    except DeltaError:
        if not tables.is_local:  # a store writes whole objects: it is not damaged, but out of reach
            raise
        tables.remove(f"{name}/{LOG}")
        return None


def _committed(table: DeltaTable) -> set[str]:
    return set(pa.table(table.get_add_actions()).column("path").to_pylist())


def _paths(name: str, entry: Entry) -> set[str]:
    """The files of a table, below its folder."""
    return {one["path"].removeprefix(f"{name}/") for one in entry.get("files", ())}


# -- files -------------------------------------------------------------------------------------


def _added(tables: Place, whole: str, path: str, footers: Footers) -> AddAction:
    stats = json.dumps(statistics(_footer(tables, whole, footers)))
    return AddAction(path, tables.size(whole), {}, int(time.time() * 1_000), True, stats)


def _footer(tables: Place, path: str, footers: Footers) -> pq.FileMetaData:
    return footers.get(path) or read_footer(tables, path)


def statistics(footer: pq.FileMetaData) -> dict[str, Any]:
    """What Delta says of a file, so that readers can skip it: least and greatest values."""
    found: dict[str, list[pq.Statistics]] = {}
    for group in range(footer.num_row_groups):
        columns = footer.row_group(group)
        for number in range(columns.num_columns):
            column = columns.column(number)
            if "." not in column.path_in_schema and column.statistics is not None:
                found.setdefault(column.path_in_schema, []).append(column.statistics)
    told: dict[str, Any] = {"numRecords": footer.num_rows}
    told["minValues"], told["maxValues"], told["nullCount"] = {}, {}, {}
    for name, groups in found.items():
        if len(groups) != footer.num_row_groups:
            continue
        if all(one.has_null_count for one in groups):
            told["nullCount"][name] = sum(one.null_count for one in groups)
        bounded = [one for one in groups if one.has_min_max]
        values = [value for one in bounded for value in (one.min, one.max)]
        is_known = len(bounded) == sum(one.num_values > 0 for one in groups)
        if values and is_known and all(map(_is_plain, values)):
            told["minValues"][name], told["maxValues"][name] = min(values), max(values)
    return told


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= TEXT_CHARS_MAX
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _schema(tables: Place, name: str, paths: Iterable[str], footers: Footers) -> Schema:
    """The columns of the files, of which any may be null."""
    path = min(paths)
    columns = _footer(tables, f"{name}/{path}", footers).schema.to_arrow_schema()
    return Schema.from_arrow(pa.schema([_nullable(one) for one in columns]))


def _nullable(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _with_nulls(field.type))


def _with_nulls(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", _with_nulls(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([_nullable(one) for one in kind])
    return kind


# -- where -------------------------------------------------------------------------------------


def _uri(tables: Place, name: str) -> str:
    return str(tables.path(name)) if tables.is_local else tables.at(name)


def _options(tables: Place, environment: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """What the package does not find in the environment by itself."""
    if tables.is_local or not tables.url.startswith("s3"):
        return None
    made = {}
    if environment.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        made["allow_http"] = "true"
    if not (environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")):
        made["aws_region"] = "us-east-1"
    return made or None


@contextlib.contextmanager
def _explained(tables: Place, name: str) -> Iterator[None]:
    try:
        yield
    except CommitFailedError:
        raise HistoryError(meanwhile(tables)) from None
    except (DeltaError, OSError) as exc:
        reason = " ".join(str(exc).split())[:300]
        raise HistoryError(f"cannot write {tables.shown}/{name}/{LOG}: {reason}") from exc


def meanwhile(tables: Place) -> str:
    """Why a build must not publish: another one has, since it began."""
    return (
        f"another build has published {tables.shown} meanwhile: nothing was changed by this one; "
        "let one build at a time write them"
    )
