"""What a task's events say about the task: the tables, and the slow, obvious way to apply them.

Events of a task fall into *classes*: sent, received, started, and so on; whatever a user sends
under a type of his own is of the class custom. Events are ordered by (clock, timestamp, origin),
see `umbel.cluster.clock`; what is equal in all three by type, then by a hash of the content. The
rules:

| of a task              | comes from                                                             |
| ---------------------- | ---------------------------------------------------------------------- |
| state                  | the strongest class (`PRECEDENCE`) with an event after the last retry; |
|                        | if there is none, RETRY                                                |
| sent, received, ...    | the time of the last event of that class                               |
| a field                | the last event of each class that carries it (`FIELD_CLASSES`); of     |
|                        | several classes the one whose last event, having the field, is later   |
| timestamp, clock       | the last event that is no `received`; the last of all while the class  |
|                        | that gives the state is one of `TIMED_BY_ANY`                          |
| worker, client         | the sender of the last event that is no `sent`; that of the last `sent`|
| extra                  | the last event with fields that are not in the tables                  |

Some fields belong to one event only and are not kept for the task (`wire.event_fields`): how large
its message was, what it took to run. Records have them, for the event log; the fold leaves them.

A field that is missing is not a field that is null: the former leaves the word to another class.
A value of the wrong type counts as missing. The last event of a class speaks for its class: what
only an earlier one said is gone, so that a class is one row, here and in the pipeline.

An event is custom by its type alone: `task-success` says SUCCESS, with the strength of custom.

`fold` sorts and replays. `umbel.cluster.task_summary` has the fast form, which takes events one by
one in any order and can be merged; a property test holds the two equal.

Everything that is kept is bounded: texts are cut, numbers have 64 bits, and of unknown fields the
first ones by name are kept while they are small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Final, cast

import msgspec

from umbel.cluster.clock import Order, order
from umbel.wire.event_fields import details_of
from umbel.wire.events import encode

# -- tables ------------------------------------------------------------------------------------

CUSTOM: Final = "custom"

# Strongest first; `custom` stands for every state that is not in the list.
PRECEDENCE: Final = (
    "SUCCESS",
    "FAILURE",
    CUSTOM,
    "REVOKED",
    "STARTED",
    "RECEIVED",
    "REJECTED",
    "RETRY",
    "PENDING",
)
READY_STATES: Final = frozenset({"SUCCESS", "FAILURE", "REVOKED"})

EVENT_STATE: Final = {
    "task-sent": "PENDING",
    "task-received": "RECEIVED",
    "task-started": "STARTED",
    "task-succeeded": "SUCCESS",
    "task-failed": "FAILURE",
    "task-retried": "RETRY",
    "task-revoked": "REVOKED",
    "task-rejected": "REJECTED",
}
EVENT_CLASS: Final = {kind: kind.removeprefix("task-") for kind in EVENT_STATE}
CLASSES: Final = (*EVENT_CLASS.values(), CUSTOM)
CLASS_STATE: Final = {EVENT_CLASS[kind]: state for kind, state in EVENT_STATE.items()}

# The classes in the order in which they are asked for the state, and what each answers.
STATE_CLASSES: Final = tuple(
    next((name for name, answer in CLASS_STATE.items() if answer == state), CUSTOM)
    for state in PRECEDENCE
    if state != "RETRY"
)
# While one of these gives the state, `received` has its say about the time of the task.
TIMED_BY_ANY: Final = frozenset({"received", "rejected", "retried", "sent"})

_CALL: Final = ("name", "args", "kwargs", "root_id", "parent_id", "retries", "eta", "expires")
CLASS_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "sent": (*_CALL, "queue", "exchange", "routing_key"),
    "received": _CALL,
    "started": (),
    "succeeded": ("result", "runtime"),
    "failed": ("exception", "traceback"),
    "retried": ("exception", "traceback"),
    "revoked": ("terminated", "signum", "expired"),
    "rejected": ("requeue",),
    CUSTOM: (),
}
FIELD_KIND: Final = {
    "name": "text",
    "args": "text",
    "kwargs": "text",
    "root_id": "text",
    "parent_id": "text",
    "retries": "whole",
    "eta": "moment",
    "expires": "moment",
    "queue": "text",
    "exchange": "text",
    "routing_key": "text",
    "result": "text",
    "runtime": "number",
    "exception": "text",
    "traceback": "text",
    "terminated": "flag",
    "signum": "signal",
    "expired": "flag",
    "requeue": "flag",
}
# What an event says of itself, by its class.
CLASS_DETAILS: Final[dict[str, dict[str, str]]] = {
    name: details_of(f"task-{name}") for name in CLASSES
}
FIELD_CLASSES: Final = {
    field: tuple(name for name in CLASSES if field in CLASS_FIELDS[name]) for field in FIELD_KIND
}
# What a task is: the keys of what `fold` gives.
TASK_FIELDS: Final = (
    "uuid",
    "state",
    *CLASS_STATE,
    *FIELD_KIND,
    *("worker", "client", "timestamp", "clock", "extra"),
)

TEXT_CHARS_MAX: Final = 10_000
EXTRA_FIELDS_MAX: Final = 32
EXTRA_BYTES_MAX: Final = 16_384


# -- one event ---------------------------------------------------------------------------------

UNSET: Final = msgspec.UNSET
_Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
# What a field may be; null is always allowed.
KIND_TYPES: Final[dict[str, Any]] = {
    "text": _Text,
    "whole": _Whole,
    "number": _Number | _Whole,
    "moment": _Text | _Number | _Whole,
    "flag": bool,
    "signal": _Text | _Whole,
}


class Record(msgspec.Struct, gc=False, kw_only=True, forbid_unknown_fields=True):
    """What is kept of an event. Each class has a record of its own, with its fields.

    A field that the event does not have is UNSET. Nobody changes a record that is in use.
    """

    event_class: ClassVar[str]
    type: str
    uuid: str
    hostname: str
    timestamp: float
    clock: int = 0
    pid: int | None = None
    inc: int | None = None
    seq: int | None = None
    umbel_series: int | None = None
    utcoffset: _Number | _Whole | None = None
    local_received: _Number | _Whole | None = None
    sync: bool | None = None
    # Unknown fields, as JSON: put in by `read`, never taken from an event.
    extra: Annotated[bytes, msgspec.Meta(max_length=0)] = msgspec.field(default=b"", name="(extra)")


def _define(name: str) -> type[Record]:
    kinds = {field: FIELD_KIND[field] for field in CLASS_FIELDS[name]} | CLASS_DETAILS[name]
    fields = [
        (field, KIND_TYPES[kind] | None | msgspec.UnsetType, UNSET) for field, kind in kinds.items()
    ]
    made = msgspec.defstruct(
        name.capitalize(),
        fields,
        bases=(Record,),
        namespace={"event_class": name},
        gc=False,
        kw_only=True,
        forbid_unknown_fields=True,
    )
    return cast("type[Record]", made)


RECORDS: Final = {name: _define(name) for name in CLASSES}
_BY_TYPE: Final = {kind: RECORDS[name] for kind, name in EVENT_CLASS.items()}


def read(event: Mapping[str, Any]) -> Record:
    """What is kept of a well-formed event of a task; never raises on its other fields."""
    try:
        return msgspec.convert(event, _BY_TYPE[event["type"]])
    except (KeyError, msgspec.ValidationError):
        return _read_closely(event)


def _read_closely(event: Mapping[str, Any]) -> Record:
    """Leave out what makes no sense, and put aside what is unknown."""
    kind = RECORDS[class_of(event["type"])]
    known, unknown = {}, {}
    for key, value in event.items():
        if key not in _TYPES[kind]:
            unknown[str(key)] = value
        elif (sane := _sane(value, _TYPES[kind][key])) is not UNSET:
            known[key] = sane
    one = msgspec.convert(known, kind)
    one.extra = _as_json(unknown)
    return one


_TYPES: Final = {
    kind: {
        field.name: field.type for field in msgspec.structs.fields(kind) if field.name != "extra"
    }
    for kind in RECORDS.values()
}


def _sane(value: Any, wanted: Any) -> Any:
    if isinstance(value, str):
        value = str(value[:TEXT_CHARS_MAX])
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError:
        return UNSET


def _as_json(unknown: dict[str, Any]) -> bytes:
    if not unknown:
        return b""
    kept = {key: unknown[key] for key in sorted(unknown)[:EXTRA_FIELDS_MAX]}
    text = _encoder.encode(msgspec.json.decode(encode(kept)))
    return text if len(text) <= EXTRA_BYTES_MAX else b""


_encoder: Final = msgspec.json.Encoder(order="deterministic")


def class_of(kind: str) -> str:
    """The class of a type of event; types that nobody knows are custom."""
    return EVENT_CLASS.get(kind, CUSTOM)


def state_of(one: Record) -> str:
    """The state that an event speaks of."""
    return state_of_type(one.type)


def state_of_type(kind: str) -> str:
    """The state that a type of event speaks of; `task-in-progress` speaks of IN-PROGRESS."""
    return EVENT_STATE.get(kind) or kind.removeprefix("task-").upper()


def is_later(one: Record, other: Record) -> bool:
    """Whether one record comes after the other, be they of the same class or not."""
    return one.clock > other.clock if one.clock != other.clock else place(one) > place(other)


def place(one: Record) -> tuple[Any, ...]:
    """A key that puts records of any class in their one order."""
    return (*position(one), one.type, tie(one))


def tie(one: Record) -> int:
    """What decides between events that are equal in place and type: a number of their content.

    Sixty-four bits with a sign, so that it fits a column of the event log as it is.
    """
    values = [one.hostname, *(getattr(one, field) for field in CLASS_FIELDS[one.event_class])]
    content = [None if value is UNSET else [value] for value in values]
    try:
        told = _encoder.encode(content) + one.extra
    except UnicodeEncodeError:  # half of a surrogate pair
        told = repr(content).encode("ascii", "backslashreplace") + one.extra
    return int.from_bytes(blake2b(told, digest_size=8).digest(), "big", signed=True)


def position(one: Record) -> Order:
    """Where `umbel.cluster.clock.order` puts the event of a record."""
    return order(
        {"clock": one.clock, "timestamp": one.timestamp, "hostname": one.hostname, "pid": one.pid}
    )


# -- slow and obvious --------------------------------------------------------------------------


def fold(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The task that is told by its events, given in any order and any number of times."""
    records = sorted(map(read, events), key=place)
    assert records, "a task has at least one event"
    task: dict[str, Any] = dict.fromkeys(TASK_FIELDS)
    task.update(uuid=records[0].uuid, state="PENDING")
    holder = "sent"  # the class that gave the state
    last: dict[str, Record] = {}
    for one in records:
        name = one.event_class
        last.pop(name, None)
        last[name] = one  # the classes are in the order of their last events
        advances = "retried" in {name, holder} or _RANK[name] <= _RANK[holder]
        if advances:
            holder, task["state"] = name, state_of(one)
        if advances or name != "received":
            task.update(timestamp=one.timestamp, clock=one.clock)
        if name != CUSTOM:
            task[name] = one.timestamp
        task["client" if name == "sent" else "worker"] = one.hostname
    for name, one in last.items():
        told = {field: getattr(one, field) for field in CLASS_FIELDS[name]}
        task.update({field: value for field, value in told.items() if value is not UNSET})
        if one.extra:
            task["extra"] = msgspec.json.decode(one.extra)
    return task


_RANK: Final = {name: PRECEDENCE.index(CLASS_STATE.get(name, CUSTOM)) for name in CLASSES}
