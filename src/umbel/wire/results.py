"""Results: the document stored for a task, and the parts of a chord.

The keys and their order are those that every peer writes. A document may be compressed; it
then says so itself, in front of its bytes, and is read whatever our own settings are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from umbel.wire.compression import compress, decompress
from umbel.wire.content import JSON, accept_set, as_bytes, decode, dumps_json, encode, loads_json
from umbel.wire.limits import BAD_COMPRESSION, DEFAULT_LIMITS, UNDECODABLE, Limits, Refusal
from umbel.wire.reprs import safe_repr

COMPRESSED_PREFIX: Final = b"\0celery-compressed\0"
_METHOD_BYTES_MAX: Final = 64
READY_STATES: Final = frozenset({"SUCCESS", "FAILURE", "REVOKED"})
"""States that are the end of a task."""
EXCEPTION_STATES: Final = frozenset({"RETRY", "FAILURE", "REVOKED"})
"""States whose result is an encoded failure."""

_MEMBER_MARK: Final = 1  # what peers put first in a chord part


def meta_document(
    task_id: str,
    status: str,
    result: Any,
    *,
    traceback: str | None = None,
    children: Sequence[Any] | None = None,
    date_done: str | None = None,
    group_id: str | None = None,
    parent_id: str | None = None,
    extended: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document stored for a task; `date_done` counts for final states only."""
    meta: dict[str, Any] = {
        "status": status,
        "result": result,
        "traceback": traceback,
        "children": children,
        "date_done": date_done if status in READY_STATES else None,
    }
    if group_id:
        meta["group_id"] = group_id
    if parent_id:
        meta["parent_id"] = parent_id
    if extended:
        meta.update(extended)
    meta["task_id"] = task_id
    return meta


def extended_fields(
    *,
    name: str | None,
    args: Any,
    kwargs: Any,
    worker: str | None,
    retries: int | None,
    queue: str | None,
    stamped_headers: Sequence[str] | None = None,
    stamps: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `result_extended` adds to the document; stamps are there when the task has some."""
    fields: dict[str, Any] = {
        "name": name,
        "args": args,
        "kwargs": kwargs,
        "worker": worker,
        "retries": retries,
        "queue": queue,
    }
    if stamps:
        names = list(stamped_headers or ())
        fields["stamped_headers"] = names
        fields.update((stamp, stamps[stamp]) for stamp in names if stamp in stamps)
    return fields


def write_meta(
    meta: Mapping[str, Any], *, serializer: str = "json", compression: str | None = None
) -> bytes:
    """The stored form of a document, compressed if asked for."""
    body = encode(meta, serializer).body
    if not compression:
        return body
    packed, content_type = compress(body, compression)
    return COMPRESSED_PREFIX + content_type.encode("ascii") + b"\0" + packed


def read_meta(
    data: bytes | str | memoryview | bytearray,
    limits: Limits = DEFAULT_LIMITS,
    *,
    serializer: str = "json",
) -> dict[str, Any]:
    """The document that was stored; refused unless it is a mapping with a status."""
    raw = as_bytes(data, limits)
    if raw.startswith(COMPRESSED_PREFIX):
        raw = _unpacked(raw, limits)
    if serializer in ("json", JSON):
        meta = loads_json(raw, limits)
    else:
        accept = accept_set((serializer,))
        meta = decode(raw, next(iter(accept)), None, accept=accept, limits=limits)
    if not isinstance(meta, dict) or not isinstance(meta.get("status"), str):
        raise Refusal(
            UNDECODABLE,
            f"a stored result must be a mapping with a 'status', got {safe_repr(meta, 80)}",
        )
    return meta


def member(task_id: str, state: str, result: Any) -> bytes:
    """One finished part of a chord; a failure is given in its encoded form."""
    return dumps_json([_MEMBER_MARK, task_id, state, result])


def read_member(
    data: bytes | str | memoryview | bytearray, limits: Limits = DEFAULT_LIMITS
) -> tuple[str, str, Any]:
    """Task id, state and result of one finished part of a chord."""
    part = loads_json(as_bytes(data, limits), limits)
    if (
        not isinstance(part, list)
        or len(part) != 4
        or not isinstance(part[1], str)
        or not isinstance(part[2], str)
    ):
        raise Refusal(
            UNDECODABLE,
            f"a chord part must be [1, task id, state, result], got {safe_repr(part, 80)}",
        )
    return part[1], part[2], part[3]


def _unpacked(raw: bytes, limits: Limits) -> bytes:
    start = len(COMPRESSED_PREFIX)
    end = raw.find(b"\0", start, start + _METHOD_BYTES_MAX)
    if end < 0:
        raise Refusal(BAD_COMPRESSION, "a compressed result does not say how it is compressed")
    method = raw[start:end].decode("utf-8", "replace")
    return decompress(raw[end + 1 :], method, limits.body_bytes)
