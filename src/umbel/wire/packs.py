"""Revocations and digests on the wire: packed where there are many of them.

Control messages are JSON, and fifty thousand ids with their times take megabytes of it. Here they
are put into columns: ids that are UUIDs as sixteen bytes each, times as eight, the bytes of all
numbers ordered by their significance, so that what they have in common is next to each other. Most
revocations live equally long: then that is said once. All of it is deflated, and text again by
base64: `{"packed": "..."}`.

A pack comes from anybody who can reach the broker. What is none gives None, and no pack takes more
than `UNPACKED_BYTES_MAX`. What is in it is checked by who merges it, as if it had come as JSON.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

# Fewer than so many are as well off in JSON.
PACKED_MIN: Final = 100
UNPACKED_BYTES_MAX: Final = 16 * 2**20

_UUID_BYTES, _UUID_CHARS = 16, 36
_TIME_BYTES: Final = 8


class _Columns(msgspec.Struct, array_like=True):
    """Lives: those whose key is a UUID first, each kind the oldest first."""

    uuids: bytes
    names: list[str]
    stamps: bytes
    life_s: float  # of those that are not in `untils`
    untils: dict[int, float]  # by their places


Lives = Mapping[str, Sequence[float]]


def packed_lives(told: Any) -> Any:
    """What is told of revocations, `{kind: {key: [stamp, until]}}`, smaller if there are many."""
    if not isinstance(told, dict) or sum(map(len, told.values())) < PACKED_MIN:
        return told
    return _pack({kind: _columns(lives) for kind, lives in told.items()})


def unpacked_lives(told: Any) -> Any:
    """The inverse of `packed_lives`; None for a pack that can not be read."""
    if not _is_pack(told):
        return told
    columns = _unpack(told, _lives_decoder)
    if columns is None:
        return None
    found = {kind: _rows(one) for kind, one in columns.items()}
    return None if None in found.values() else found


def packed_digest(digest: Any) -> Any:
    """A digest, smaller if it is of many."""
    if not isinstance(digest, dict) or sum(map(len, digest.values())) < PACKED_MIN:
        return digest
    return _pack({kind: _sums(one) for kind, one in digest.items()})


def unpacked_digest(digest: Any) -> Any:
    """The inverse of `packed_digest`; an empty one, which is none, where it can not be read."""
    if not _is_pack(digest):
        return digest
    found = _unpack(digest, _digest_decoder)
    return {} if found is None else {kind: _named(one) for kind, one in found.items()}


# -- columns ---------------------------------------------------------------------------------


def _columns(lives: Lives) -> _Columns:
    uuids: list[tuple[float, float, bytes]] = []
    others: list[tuple[float, float, str]] = []
    for key, (stamp, until) in lives.items():
        raw = _uuid_bytes(key)
        if raw is None:
            others.append((stamp, until, key))
        else:
            uuids.append((stamp, until, raw))
    uuids.sort()
    others.sort()
    times = [(stamp, until) for stamp, until, _ in (*uuids, *others)]
    life_s = times[0][1] - times[0][0] if times else 0.0
    return _Columns(
        uuids=b"".join(raw for _, _, raw in uuids),
        names=[key for _, _, key in others],
        stamps=_by_significance(struct.pack(f"<{len(times)}d", *(stamp for stamp, _ in times))),
        life_s=life_s,
        untils={n: until for n, (stamp, until) in enumerate(times) if stamp + life_s != until},
    )


def _rows(columns: _Columns) -> dict[str, list[float]] | None:
    uuids, size = columns.uuids, len(columns.stamps)
    if len(uuids) % _UUID_BYTES or size % _TIME_BYTES:
        return None
    count = size // _TIME_BYTES
    keys = [_uuid_text(uuids[n : n + _UUID_BYTES]) for n in range(0, len(uuids), _UUID_BYTES)]
    keys += columns.names
    if len(keys) != count:
        return None
    stamps = struct.unpack(f"<{count}d", _in_order(columns.stamps))
    life_s, untils = columns.life_s, columns.untils
    return {
        key: [stamp, untils.get(n, stamp + life_s)]
        for n, (key, stamp) in enumerate(zip(keys, stamps, strict=True))
    }


def _uuid_bytes(key: str) -> bytes | None:
    """The bytes of a key that is a UUID as they are usually written."""
    if len(key) != _UUID_CHARS:
        return None
    try:
        raw = bytes.fromhex(key.replace("-", ""))
    except ValueError:
        return None
    return raw if len(raw) == _UUID_BYTES and _uuid_text(raw) == key else None


def _uuid_text(raw: bytes) -> str:
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _by_significance(numbers: bytes) -> bytes:
    return b"".join(numbers[n::_TIME_BYTES] for n in range(_TIME_BYTES))


def _in_order(numbers: bytes) -> bytes:
    count = len(numbers) // _TIME_BYTES
    found = bytearray(len(numbers))
    for n in range(_TIME_BYTES):
        found[n::_TIME_BYTES] = numbers[n * count : (n + 1) * count]
    return bytes(found)


# -- digests: a sum of eight bytes for each of up to 256 buckets -----------------------------


def _sums(digest: Mapping[str, str]) -> bytes:
    rows = ((int(bucket, 16), int(total, 16)) for bucket, total in digest.items())
    return b"".join(struct.pack("<BQ", *row) for row in rows)


def _named(sums: bytes) -> dict[str, str]:
    whole = sums[: len(sums) - len(sums) % struct.calcsize("<BQ")]
    return {f"{bucket:x}": f"{total:x}" for bucket, total in struct.iter_unpack("<BQ", whole)}


# -- packs -----------------------------------------------------------------------------------


def _is_pack(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"packed"}


def _pack(content: Any) -> dict[str, str]:
    return {"packed": base64.b64encode(zlib.compress(_encode(content))).decode("ascii")}


def _unpack(pack: dict[str, Any], decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    text = pack["packed"]
    if not isinstance(text, str):
        return None
    try:
        engine = zlib.decompressobj()
        data = engine.decompress(base64.b64decode(text, validate=True), UNPACKED_BYTES_MAX)
        return decoder.decode(data) if engine.eof else None
    except (binascii.Error, zlib.error, msgspec.MsgspecError, ValueError, RecursionError):
        return None


_encode = msgspec.msgpack.Encoder().encode
_lives_decoder = msgspec.msgpack.Decoder(dict[str, _Columns])
_digest_decoder = msgspec.msgpack.Decoder(dict[str, bytes])
