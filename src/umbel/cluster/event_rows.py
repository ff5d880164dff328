"""An event as a row of the event log: the columns, and how an event fills them.

The recorder writes these rows, the pipeline reads them; both know the columns from here. Common
fields have columns of their own. The fields of a task are exactly what `task_states.read` keeps, so
that the live view and the pipeline fold the same values. The whole event is kept as JSON in `raw`:
nothing that a sender said is lost, whatever the columns hold. What Umbel's events say beyond
Celery's has columns too (`wire.event_fields`). Characters that UTF-8 lacks (halves
of surrogate pairs) are in the columns as escapes: `\\ud800`.

Three columns serve the fold. `present` has a bit for each field of the task that the event has,
null or not, in the order of `FIELD_KIND`: a missing field is not a null one. `tie` decides
between events that are equal in clock, timestamp, origin and type. `extra` has the fields that no
table knows. Moments and signals are numbers or texts; their columns have them as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from umbel.cluster.task_states import (
    CLASS_DETAILS,
    CLASS_FIELDS,
    FIELD_KIND,
    UNSET,
    Record,
    read,
    tie,
)
from umbel.wire.event_fields import QUEUE_LENGTHS_MAX, TASK_DETAILS, WORKER_DETAILS
from umbel.wire.events import Event, encode

_WHOLE_MAX: Final = 2**63 - 1

# Columns of any event, of events of tasks, of heartbeats, and of elections; by kind.
COMMON: Final = {
    "type": "text",
    "hostname": "text",
    "pid": "whole",
    "inc": "whole",
    "seq": "whole",
    "series": "whole",  # `umbel_series`: of those who send events for a worker
    "clock": "whole",  # as it was sent; null when it was not
    "timestamp": "number",
    "sync": "flag",
}
TASK: Final = {
    "uuid": "text",
    **{
        field: "text" if kind in {"moment", "signal"} else kind
        for field, kind in FIELD_KIND.items()
    },
    "present": "whole",
    "tie": "whole",
    "extra": "text",
}
NODE: Final = {
    "freq": "number",
    "active": "whole",
    "processed": "whole",
    "lost": "whole",
    "sw_ident": "text",
    "sw_ver": "text",
}
ELECTION: Final = {"id": "text", "topic": "text", "winner": "text"}
DETAILS: Final = {
    name: "text" if field.kind == "json" else field.kind
    for name, field in (TASK_DETAILS | WORKER_DETAILS).items()
    if name not in TASK
}
RECEIPT: Final = {
    "received": "number",  # Unix time, by the recorder's wall clock
    "recorder": "text",
    "raw": "text",
}
COLUMNS: Final = {**COMMON, **TASK, **NODE, **ELECTION, **DETAILS, **RECEIPT}
# Columns that segments of older recorders do not have; null there.
ADDED: Final = frozenset({"series", *DETAILS})

PRESENT_BIT: Final = {field: 1 << number for number, field in enumerate(FIELD_KIND)}
# Whoever has all of these in common is one event.
IDENTITY: Final = ("hostname", "inc", "pid", "clock", "timestamp", "type", "uuid")

_AS_JSON: Final = frozenset(
    field for field, kind in FIELD_KIND.items() if kind in {"moment", "signal"}
)
_FIELDS: Final = {
    name: [(field, PRESENT_BIT[field], field in _AS_JSON) for field in fields]
    for name, fields in CLASS_FIELDS.items()
}
_DETAILS: Final = {name: tuple(kinds) for name, kinds in CLASS_DETAILS.items()}
_NODE_DETAILS: Final = {
    name: field.kind for name, field in WORKER_DETAILS.items() if field.kind != "json"
}
_UNFIT: Final = (UnicodeEncodeError, TypeError, ValueError, OverflowError, RecursionError)
_TYPES: Final = {"text": (str,), "whole": (int,), "number": (int, float), "flag": (bool,)}


def row(event: Event, received: float, recorder: str) -> dict[str, Any]:
    """The row of a well-formed event (`wire.events.check`); null columns may be left out."""
    try:
        raw = _encode(event).decode()
    except _UNFIT:
        raw = raw_json(event)
        event = {_utf8(key): _utf8(value) for key, value in event.items()}
    get = event.get
    made: dict[str, Any] = {  # written out, as this is done for every event
        "type": event["type"],
        "hostname": event["hostname"],
        "pid": get("pid"),
        "inc": get("inc"),
        "seq": get("seq"),
        "series": get("umbel_series"),
        "clock": get("clock"),
        "timestamp": float(event["timestamp"]),
        "received": received,
        "recorder": recorder,
        "raw": raw,
    }
    if type(sync := get("sync")) is bool:
        made["sync"] = sync
    if event["type"].startswith("task-"):
        _add_task(made, read(event))
    else:
        _add_known(made, event, NODE)
        _add_known(made, event, _NODE_DETAILS)
        _add_known(made, event, ELECTION)
        if type(lengths := get("queue_lengths")) is dict and len(lengths) <= QUEUE_LENGTHS_MAX:
            made["queue_lengths"] = raw_json(lengths)
    return made


def _add_task(made: dict[str, Any], one: Record) -> None:
    made["uuid"] = one.uuid
    present = 0
    for field, bit, is_json in _FIELDS[one.event_class]:
        value = getattr(one, field)
        if value is UNSET:
            continue
        present |= bit
        if value is not None:
            made[field] = _json(value) if is_json else value
    for field in _DETAILS[one.event_class]:
        value = getattr(one, field)
        if value is not UNSET and value is not None:
            made[field] = value
    made["present"] = present
    made["tie"] = tie(one)
    if one.extra:
        made["extra"] = one.extra.decode()


def _add_known(made: dict[str, Any], event: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    for name, kind in kinds.items():
        value: Any = event.get(name)
        if type(value) not in _TYPES[kind]:
            continue
        if kind == "whole" and not -_WHOLE_MAX <= value <= _WHOLE_MAX:
            continue
        made[name] = value


def _json(value: Any) -> str:
    return _encode(value).decode()


_encode: Final = msgspec.json.Encoder().encode


def raw_json(value: Any) -> str:
    """Any decoded value as the JSON that it was; what was none is replaced, never refused.

    The fast encoder refuses numbers of any size and halves of surrogate pairs, the slow one not.
    """
    try:
        return _encode(value).decode()
    except _UNFIT:
        pass
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except _UNFIT:
        return encode(value).decode()


def _utf8(value: Any) -> Any:
    if type(value) is not str:
        return value
    return value.encode("utf-8", "backslashreplace").decode()
