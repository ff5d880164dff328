"""The events that every task sends, as fixed forms.

A task that goes well tells three things: received, started, succeeded. They are most of what a
worker with events says, so they are not made as mappings but as these: half the time to make,
half to write, and nothing for the garbage collector to look at. What is written is the same, field
by field and in the same order, as the mapping that the stamper makes of any other event. Fields
that are unset are not written (`wire.event_fields`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class TaskForm(msgspec.Struct, gc=False, tag_field="type"):
    """What every event says; fields are what they are, nothing here checks them."""

    hostname: str
    pid: int
    utcoffset: float
    clock: int
    timestamp: float
    seq: int
    inc: int
    uuid: str


class TaskReceived(TaskForm, gc=False, tag="task-received"):
    """A message became a request."""

    name: str
    args: str
    kwargs: str
    root_id: str
    parent_id: str | None
    retries: int
    eta: Any
    expires: Any
    queue: str | UnsetType = UNSET
    group_id: str | UnsetType = UNSET
    redelivered: bool | UnsetType = UNSET
    deliveries: int | UnsetType = UNSET
    payload_bytes: int | UnsetType = UNSET


class TaskStarted(TaskForm, gc=False, tag="task-started"):
    """The pool has begun."""

    queue: str | UnsetType = UNSET
    code_version: str | UnsetType = UNSET


class TaskSucceeded(TaskForm, gc=False, tag="task-succeeded"):
    """The task's code has returned."""

    result: str
    runtime: float
    cpu_s: float | UnsetType = UNSET
    memory_peak_bytes: int | UnsetType = UNSET
    chord_id: str | UnsetType = UNSET


def kind_of(event: dict[str, Any] | TaskForm) -> str:
    """The type of an event, whichever way it was made."""
    kind = event.__struct_config__.tag if isinstance(event, TaskForm) else event["type"]
    return str(kind)


def as_event(form: TaskForm) -> dict[str, Any]:
    """The same as a mapping."""
    fields = {name: getattr(form, name) for name in form.__struct_fields__}
    told = {name: value for name, value in fields.items() if value is not UNSET}
    return {"type": form.__struct_config__.tag, **told}
