"""Results: the document stored for a task.

The keys and their order are those that every peer writes. A document may be compressed; it
then says so itself, in front of its bytes, and is read whatever our own settings are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

COMPRESSED_PREFIX: Final = b"\0celery-compressed\0"
READY_STATES: Final = frozenset({"SUCCESS", "FAILURE", "REVOKED"})
"""States that are the end of a task."""
EXCEPTION_STATES: Final = frozenset({"RETRY", "FAILURE", "REVOKED"})
"""States whose result is an encoded failure."""


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
