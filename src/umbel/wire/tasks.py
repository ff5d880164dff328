"""Task messages, read into typed values; `wire.outgoing` writes them.

Protocol 2 keeps what a worker needs before running a task in the headers, and the arguments in
a body `[args, kwargs, embed]` that can be decoded later, in another process. Protocol 1 has no
headers: everything is one mapping in the body. A hybrid has the headers of 2 and the body of 1;
then the body fills in what the headers leave out.

Reading checks every field that we act on. A null stands for an absent value wherever there is a
default, as clients in other languages send it. A message that does not fit is a `Refusal` that
names the field and its value; nothing is guessed and nothing is half read.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Annotated, Any, Final

import msgspec

from umbel.wire.compression import decompress
from umbel.wire.content import JSON, as_bytes, decode, ensure_accepted
from umbel.wire.limits import DEFAULT_LIMITS, INVALID_TASK, UNKNOWN_MESSAGE, Limits, Refusal
from umbel.wire.redaction import redacted_repr
from umbel.wire.reprs import safe_repr
from umbel.wire.signatures import check_signature, field_refusal
from umbel.wire.times import format_time, parse_time

_EXACT: Final = 2**53  # beyond it other languages lose digits
_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=_EXACT)]
_Seconds = (
    Annotated[int, msgspec.Meta(ge=0, lt=_EXACT)] | Annotated[float, msgspec.Meta(ge=0, lt=_EXACT)]
)
TimeLimit = tuple[_Seconds | None, _Seconds | None]


class TaskHeader(msgspec.Struct, omit_defaults=True, gc=False):
    """What the headers of a task message say; only `task` and `id` are required."""

    task: _Name
    id: _Name
    lang: str | None = None
    shadow: str | None = None
    eta: str | None = None
    expires: str | None = None
    group: str | None = None
    group_index: _Count | None = None
    retries: _Count | None = 0  # never None after reading
    timelimit: TimeLimit | None = None  # (hard, soft): hard first
    root_id: str | None = None
    parent_id: str | None = None
    argsrepr: str | None = None
    kwargsrepr: str | None = None
    origin: str | None = None
    ignore_result: bool | None = None  # None: as the task itself says
    replaced_task_nesting: _Count | None = 0  # never None after reading
    stamped_headers: list[str] | None = None
    stamps: dict[str, Any] | None = None
    compression: str | None = None
    umbel_clock: Any = None  # the sender's clock; whoever acts on it judges it
    umbel_sent: Any = None  # unix time in milliseconds; likewise


class TaskBody(msgspec.Struct):
    """The arguments of a task, and what is to happen after it."""

    args: list[Any]
    kwargs: dict[str, Any]
    callbacks: list[dict[str, Any]] | None = None
    errbacks: list[dict[str, Any]] | None = None
    chain: list[dict[str, Any]] | None = None  # reversed: the next step is last
    chord: dict[str, Any] | None = None
    hybrid: dict[str, Any] | None = None  # the whole mapping, for `hybrid_header`


class _Nothing(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """What follows most tasks."""

    callbacks: None = None
    errbacks: None = None
    chain: None = None
    chord: None = None


_decode_short: Final = msgspec.json.Decoder(tuple[list[Any], dict[str, Any], _Nothing]).decode

HEADER_FIELDS: Final[frozenset[str]] = frozenset(TaskHeader.__struct_fields__)
"""Header names that belong to the protocol; all others are the caller's own."""

# Added by brokers and by kombu on the way. Sent back with a retry, the record of earlier
# deaths would make RabbitMQ believe in a dead-letter cycle.
DELIVERY_COUNT: Final = "x-delivery-count"
_TRANSPORT_HEADERS: Final = frozenset({"redelivered", "x-death", DELIVERY_COUNT})
_TRANSPORT_PREFIXES: Final = ("x-first-death-", "x-last-death-")
_KEYED: Final = ("task", "id", "group", "root_id", "parent_id")  # become names of keys and logs

_convert: Final = msgspec.convert


def read_header(headers: Mapping[str, Any]) -> TaskHeader:
    """The typed headers of a protocol 2 message."""
    try:
        header = _convert(headers, TaskHeader)
    except (msgspec.ValidationError, RecursionError) as exc:
        raise _header_refusal(headers, exc) from None
    if not (
        header.id.isascii()
        and header.task.isascii()
        and (header.root_id or "").isascii()
        and (header.parent_id or "").isascii()
        and (header.group or "").isascii()
    ):
        _check_encodable(header)
    return completed(header)


def completed(header: TaskHeader) -> TaskHeader:
    """A header as it was read, with the values that a null stands for."""
    if header.retries is None:
        header.retries = 0
    if header.replaced_task_nesting is None:
        header.replaced_task_nesting = 0
    return header


def user_headers(headers: Mapping[Any, Any]) -> dict[str, Any]:
    """The headers that the caller added, without the protocol's and the transport's."""
    return {
        name: value
        for name, value in headers.items()
        if name not in HEADER_FIELDS
        and name not in _TRANSPORT_HEADERS
        and not (isinstance(name, str) and name.startswith(_TRANSPORT_PREFIXES))
    }


def read_body(
    body: bytes | str | memoryview | bytearray,
    content_type: str,
    content_encoding: str | None,
    *,
    compression: str | None = None,
    accept: frozenset[str],
    limits: Limits = DEFAULT_LIMITS,
) -> TaskBody:
    """The arguments and follow-ups of a message that has a `task` header."""
    if content_type == JSON and not compression and len(body) <= limits.depth:
        found = _read_short(body, accept, limits)
        if found is not None:
            return found
    if compression:
        ensure_accepted(content_type, accept)
        body = decompress(as_bytes(body, limits), compression, limits.body_bytes)
    decoded = decode(body, content_type, content_encoding, accept=accept, limits=limits)
    if type(decoded) is list and len(decoded) == 3:
        args, kwargs, embed = decoded
        if embed is None:
            embed = {}
        elif type(embed) is not dict:
            raise _invalid("body", "embed", "a mapping", embed)
        return _task_body(args, kwargs, embed)
    if isinstance(decoded, dict) and "args" in decoded:
        found = _task_body(decoded["args"], decoded.get("kwargs", {}), decoded)
        found.hybrid = decoded
        return found
    raise Refusal(
        INVALID_TASK,
        f"the task body must be [args, kwargs, embed], got {redacted_repr(decoded, 80)}",
    )


def _read_short(body: Any, accept: frozenset[str], limits: Limits) -> TaskBody | None:
    """A body that has nothing in it but arguments, and is too short to exceed a limit."""
    shortest = min(limits.integer_digits, limits.body_bytes)
    if type(body) is not bytes or JSON not in accept or len(body) > shortest:
        return None
    if b"__type__" in body:
        return None
    try:
        args, kwargs, _ = _decode_short(body)
    except (ValueError, RecursionError):
        return None
    return TaskBody(args, kwargs)


def hybrid_header(headers: Mapping[str, Any], hybrid: Mapping[str, Any]) -> TaskHeader:
    """The typed headers of a hybrid message: the body fills in what the headers leave out."""
    fields = {name: hybrid[name] for name in HEADER_FIELDS & hybrid.keys()}
    if hybrid.get("utc", True):
        _make_utc(fields)
    fields.update((name, headers[name]) for name in HEADER_FIELDS & headers.keys())
    return read_header(fields)


def read_v1(decoded: Any) -> tuple[TaskHeader, TaskBody]:
    """A protocol 1 message from its decoded body; anything else is an unknown message."""
    if not isinstance(decoded, dict) or "task" not in decoded:
        raise Refusal(
            UNKNOWN_MESSAGE,
            f"not a task message: no 'task' header and none in {redacted_repr(decoded, 80)}",
        )
    body = _task_body(decoded.get("args", []), decoded.get("kwargs", {}), decoded)
    fields = {name: decoded[name] for name in HEADER_FIELDS & decoded.keys()}
    if decoded.get("taskset") is not None:
        fields["group"] = decoded["taskset"]
    if decoded.get("utc", True):
        _make_utc(fields)
    fields["argsrepr"] = safe_repr(body.args)
    fields["kwargsrepr"] = safe_repr(body.kwargs)
    return read_header(fields), body


def _task_body(args: Any, kwargs: Any, embed: Mapping[str, Any]) -> TaskBody:
    if type(args) is not list:
        raise _invalid("body", "args", "a list", args)
    if type(kwargs) is not dict:
        raise _invalid("body", "kwargs", "a mapping", kwargs)
    for key in kwargs:
        if type(key) is not str:
            raise _invalid("body", "kwargs", "names as text", key)
    get = embed.get
    callbacks, errbacks, chain, chord = (
        get("callbacks"),
        get("errbacks"),
        get("chain"),
        get("chord"),
    )
    return TaskBody(
        args,
        kwargs,
        None if callbacks is None else _signatures("callbacks", callbacks),
        None if errbacks is None else _signatures("errbacks", errbacks),
        None if chain is None else _signatures("chain", chain),
        None if chord is None else check_signature(chord),
    )


def _signatures(name: str, value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [check_signature(value)]
    if not isinstance(value, list):
        raise _invalid("body", name, "a list of signatures", value)
    return [check_signature(item) for item in value]


def _invalid(where: str, name: str, expected: str, value: Any) -> Refusal:
    return Refusal(
        INVALID_TASK, f"task {where} {name!r}: expected {expected}, got {redacted_repr(value, 80)}"
    )


def _header_refusal(headers: Any, error: Exception) -> Refusal:
    if not isinstance(headers, Mapping):
        return _invalid("message", "headers", "a mapping", headers)
    return field_refusal("task header", headers, error)


def _check_encodable(header: TaskHeader) -> None:
    """Refuse ids and names that cannot become keys: half of a surrogate pair has no encoding."""
    for name in _KEYED:
        value = getattr(header, name)
        if value is not None and not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise _invalid("header", name, "text that has a UTF-8 form", value) from None


def _make_utc(fields: dict[str, Any]) -> None:
    """Give times without an offset the one that protocol 1 means by `utc: true`."""
    for name in ("eta", "expires"):
        if isinstance(fields.get(name), str):
            fields[name] = format_time(parse_time(fields[name], UTC))
