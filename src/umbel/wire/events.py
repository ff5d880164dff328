"""Events on the broker: one mapping, or a list of them, as JSON.

Everybody who can reach the broker can publish here, and every node reads it. `read` therefore
never raises: it gives the events that are well formed, in their order, and the reasons for which
others were refused. A well-formed event has a type, a sender and a finite time; its clock, if it
has one, is a clock; its sequence number and incarnation, if it has them, are numbers; an event of a
task has its id. A null clock is a missing one. Fields that nobody knows are kept: they belong to
users and to other versions.

Umbel adds `inc`, which names one life of a worker or client (its *incarnation*), and `seq`, which
numbers the events of one sender. Senders that speak for a life which is not their own, such as the
tasks of a pool process, name their series of numbers: `umbel_series`. Gaps in a series make every
lost event visible. Celery's monitors ignore all three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from umbel.wire.compression import decompress
from umbel.wire.content import as_bytes, decode
from umbel.wire.event_forms import TaskForm, as_event
from umbel.wire.jsontext import EncodeError, dumps_json
from umbel.wire.limits import Limits, Refusal
from umbel.wire.reprs import safe_repr

EVENT_EXCHANGE: Final = "celeryev"
MULTI_KEY: Final = "task.multi"
# Events that only Umbel's own nodes and monitors are to hear, on an exchange of their own.
OWN_EXCHANGE: Final = "umbelev"
OWN_TYPES: Final = frozenset({"worker-elected", "worker-revocation"})
CONTENT_TYPE: Final = "application/json"
CONTENT_ENCODING: Final = "utf-8"

# A batch of ours has at most some hundred events; nothing bigger is worth reading.
EVENT_LIMITS: Final = Limits(body_bytes=8 * 2**20, depth=32, integer_digits=308)
BATCH_MAX: Final = 20_000
TEXT_CHARS_MAX: Final = 1_000
_EXACT: Final = 2**53

# Why an event is refused; what `Receiver.counts` and the metrics count by.
NOT_AN_EVENT: Final = "not-an-event"
BAD_TYPE: Final = "bad-type"
BAD_HOSTNAME: Final = "bad-hostname"
BAD_TIMESTAMP: Final = "bad-timestamp"
BAD_CLOCK: Final = "bad-clock"
BAD_NUMBER: Final = "bad-number"
BAD_UUID: Final = "bad-uuid"
TOO_MANY: Final = "too-many"

Event = dict[str, Any]


class Reading(NamedTuple):
    """What was in one message: the events, and a reason for each that was refused."""

    events: list[Event]
    refused: list[str]


def routing_key(kind: str) -> str:
    """`worker-heartbeat` is published under `worker.heartbeat`."""
    return kind.replace("-", ".")


def encode(events: Event | TaskForm | Sequence[Event | TaskForm]) -> bytes:
    """One event or a list of them; what JSON cannot hold is replaced, never refused.

    The action of an election is what will be carried out, so it is written as it is.
    """
    if type(events) is dict and events.get("type") == "worker-elect":
        events = {**events, "action": _exactly(events.get("action"))}
    try:
        return _encoder.encode(events)
    except (UnicodeEncodeError, TypeError, ValueError, OverflowError, RecursionError):
        return _encoder.encode(_plain(events, 16))


def read(
    body: Any,
    content_type: Any,
    content_encoding: Any,
    *,
    accept: frozenset[str],
    compression: Any = None,
    limits: Limits = EVENT_LIMITS,
) -> Reading:
    """The events of one message; see the module's text."""
    if not isinstance(content_type, str):
        return Reading([], [NOT_AN_EVENT])
    try:
        content = open_body(
            body,
            content_type,
            content_encoding,
            accept=accept,
            compression=compression,
            limits=limits,
        )
    except Refusal as refusal:
        return Reading([], [refusal.reason])
    return sort_out(content)


def refused_sample(
    reason: str,
    body: Any,
    content_type: Any,
    content_encoding: Any,
    *,
    accept: frozenset[str],
    compression: Any = None,
    limits: Limits = EVENT_LIMITS,
) -> Any:
    """What `read` refuses in this message for that reason: an event, or all of the message."""
    if not isinstance(content_type, str):
        return body
    try:
        content = open_body(
            body,
            content_type,
            content_encoding,
            accept=accept,
            compression=compression,
            limits=limits,
        )
    except Refusal:
        return body
    several = content if type(content) is list else [content]
    return next((one for one in several if check(one) == reason), content)


def open_body(
    body: Any,
    content_type: str,
    content_encoding: Any,
    *,
    accept: frozenset[str],
    compression: Any = None,
    limits: Limits = EVENT_LIMITS,
) -> Any:
    """What is in a message, whatever it is; raises `Refusal`."""
    if compression is not None:
        body = decompress(as_bytes(body, limits), compression, limits.body_bytes)
    encoding = content_encoding if isinstance(content_encoding, str) else CONTENT_ENCODING
    return decode(body, content_type, encoding, accept=accept, limits=limits)


def sort_out(content: Any) -> Reading:
    """Tell the events in a decoded body from what is none."""
    if type(content) is dict:
        reason = check(content)
        return Reading([], [reason]) if reason else Reading([content], [])
    if type(content) is not list:
        return Reading([], [NOT_AN_EVENT])
    if len(content) > BATCH_MAX:
        return Reading([], [TOO_MANY])
    events: list[Event] = []
    refused: list[str] = []
    for one in content:
        reason = check(one)
        if reason:
            refused.append(reason)
        else:
            events.append(one)
    return Reading(events, refused)


def check(event: Any) -> str:
    """Why this is no event; empty when it is one. A null clock is taken out."""
    if type(event) is not dict:
        return NOT_AN_EVENT
    kind = event.get("type")
    if type(kind) is not str or not 0 < len(kind) <= TEXT_CHARS_MAX:
        return BAD_TYPE
    hostname = event.get("hostname")
    if type(hostname) is not str or not 0 < len(hostname) <= TEXT_CHARS_MAX:
        return BAD_HOSTNAME
    if not _is_time(event.get("timestamp")):
        return BAD_TIMESTAMP
    clock = event.get("clock", 0)
    if clock is None:
        del event["clock"]
    elif type(clock) is not int or not 0 <= clock < _EXACT:
        return BAD_CLOCK
    if kind.startswith("task-"):
        uuid = event.get("uuid")
        if type(uuid) is not str or not 0 < len(uuid) <= TEXT_CHARS_MAX:
            return BAD_UUID
    return _check_numbers(event)


def _check_numbers(event: Mapping[str, Any]) -> str:
    for name in ("pid", "seq", "inc", "umbel_series"):
        value = event.get(name, 0)
        if type(value) is not int or not 0 <= value < _EXACT:
            if name == "pid" and value is None:
                continue
            return BAD_NUMBER
    offset = event.get("utcoffset", 0)
    if type(offset) not in (int, float) or not -48 <= offset <= 48:
        return BAD_NUMBER
    return ""


def _is_time(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value) and abs(value) < _EXACT
    return type(value) is int and -_EXACT < value < _EXACT


def _plain(value: Any, depth: int) -> Any:
    """`value` with everything that JSON or UTF-8 lacks replaced by text."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else safe_repr(value, 64)
    if depth == 0:
        return "..."
    if isinstance(value, msgspec.Raw):
        return value
    if isinstance(value, TaskForm):
        value = as_event(value)
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth - 1) for item in value]
    return safe_repr(value)


def _exactly(action: Any) -> Any:
    try:
        return msgspec.Raw(dumps_json(action))
    except EncodeError:
        return action


def _key(key: Any) -> str:
    return str(_plain(key, 1)) if isinstance(key, str) else safe_repr(key, 64)


_encoder = msgspec.json.Encoder()
