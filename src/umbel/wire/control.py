"""Control messages: a request to all nodes or some, and the reply of each.

A request goes to every node; each decides by itself whether it is meant (`is_for`). Who wants
replies puts a *ticket* into the request and says where replies go; every reply carries the ticket
back, and that alone makes it belong to the request. Replies that come late, or twice, or from
somebody who made them up, have no ticket that anybody waits for.

Requests come from anybody who can reach the broker. `read_request` raises nothing but `Refusal`,
and what it returns can be used without another look: the types are right, the names have bounds,
the pattern can be matched, the address can be written to. `expires` is the moment after which
nobody waits any more, in unix seconds of the sender's clock; 0 or nothing means that it never
passes.

Clocks of hosts differ, so Umbel's clients also write when they sent the request (`umbel_sent_at`).
A node knows for how long a message can have waited unread at most: since it last looked for
messages. If the send time lies in that span, the two clocks agree. If not, the sender's clock is
off by the difference, and the message is as old as the node's own clock allows:

| send time                   | age of the message        | a time of the sender is  |
| --------------------------- | ------------------------- | ------------------------ |
| none (Celery's clients)     | judged by `expires` alone | taken as it is           |
| within the span             | now - send time           | taken as it is           |
| before or after it          | at most the span          | moved by the difference  |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeGuard

import msgspec

from umbel.wire.compression import decompress
from umbel.wire.content import EncodeError, as_bytes, decode, encode
from umbel.wire.limits import UNKNOWN_MESSAGE, Limits, Refusal
from umbel.wire.patterns import check_pattern, matches
from umbel.wire.reprs import safe_repr
from umbel.wire.signing import CHALLENGE, SENT_AT

# A list of 50,000 revoked ids takes two megabytes; nothing is much bigger.
CONTROL_LIMITS: Final = Limits(body_bytes=16 * 2**20)
METHOD_CHARS_MAX: Final = 200
NAME_BYTES_MAX: Final = 255  # of an exchange, a routing key or a ticket
HOSTNAME_CHARS_MAX: Final = 1_000
DESTINATIONS_MAX: Final = 20_000
_CLOCK_MAX: Final = 2**53 - 1


# -- names on the broker ---------------------------------------------------------------------


def exchange_name(prefix: str) -> str:
    """Where requests go."""
    return f"{prefix}.pidbox"


def reply_exchange_name(prefix: str) -> str:
    """Where replies go."""
    return f"reply.{prefix}.pidbox"


def leased_exchange_name(prefix: str) -> str:
    """Where replies to Umbel's clients go on Redis; see `umbel.broker.broadcast.reply_lists`."""
    return f"umbel.reply.{prefix}.pidbox"


def node_queue_name(hostname: str, prefix: str) -> str:
    """The queue of one node."""
    return f"{hostname}.{exchange_name(prefix)}"


def reply_queue_name(routing_key: str, prefix: str) -> str:
    """The queue of one client."""
    return f"{routing_key}.{reply_exchange_name(prefix)}"


# -- requests --------------------------------------------------------------------------------


class ReplyTo(msgspec.Struct, frozen=True):
    """Where the replies to a request go."""

    exchange: str
    routing_key: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One command to nodes; `clock`, `expires` and `sent_at` are from its headers.

    `challenge` is a node's challenge that this request answers (`umbel.wire.signing`).
    """

    method: str
    arguments: dict[str, Any] = {}
    destination: tuple[str, ...] | None = None
    pattern: str | None = None
    matcher: str | None = None
    ticket: str | None = None
    reply_to: ReplyTo | None = None
    clock: int | None = None
    expires: float | None = None
    sent_at: float | None = None
    challenge: str | None = None


class Written(NamedTuple):
    """A message that is ready to be published."""

    body: bytes
    headers: dict[str, Any]
    content_type: str
    content_encoding: str


def write_request(request: Request, serializer: str = "json") -> Written:
    """The request as peers read it; raises `EncodeError` for arguments that have no such form."""
    message: dict[str, Any] = {
        "method": request.method,
        "arguments": request.arguments,
        "destination": None if request.destination is None else list(request.destination),
        "pattern": request.pattern,
        "matcher": request.matcher,
    }
    if request.ticket is not None and request.reply_to is not None:
        message["ticket"] = request.ticket
        message["reply_to"] = msgspec.to_builtins(request.reply_to)
    encoded = encode(message, serializer)
    headers: dict[str, Any] = {"clock": request.clock or 0, "expires": request.expires or 0}
    if request.sent_at is not None:
        headers[SENT_AT] = request.sent_at
    if request.challenge is not None:
        headers[CHALLENGE] = request.challenge
    return Written(encoded.body, headers, encoded.content_type, encoded.content_encoding)


def read_request(
    body: Any,
    content_type: Any,
    content_encoding: Any,
    headers: Any,
    *,
    accept: frozenset[str],
    limits: Limits = CONTROL_LIMITS,
) -> Request:
    """The request in a message; raises `Refusal` for everything that is none."""
    known = headers if isinstance(headers, Mapping) else {}
    content = _content(body, content_type, content_encoding, known, accept, limits)
    if type(content) is not dict:
        raise _refusal("the message", content, "a mapping")
    pattern, matcher = (
        _text(content, name, HOSTNAME_CHARS_MAX, optional=True) for name in ("pattern", "matcher")
    )
    if pattern and matcher:
        check_pattern(pattern, matcher)
    return Request(
        method=_text(content, "method", METHOD_CHARS_MAX) or "",
        arguments=_arguments(content.get("arguments")),
        destination=_destination(content.get("destination")),
        pattern=pattern or None,
        matcher=matcher or None,
        ticket=_ticket(content.get("ticket")),
        reply_to=_reply_to(content.get("reply_to")),
        clock=_clock(known.get("clock")),
        expires=_expires(known.get("expires")),
        sent_at=_sent_at(known.get(SENT_AT)),
    )


def is_for(request: Request, hostname: str) -> bool:
    """Whether this node is meant."""
    if request.destination:
        return hostname in request.destination
    if request.pattern and request.matcher:
        return matches(hostname, request.pattern, request.matcher)
    return True


def is_expired(
    request: Request, now: float, grace_s: float = 0.0, *, waited_s: float | None = None
) -> bool:
    """Whether nobody waits for the reply any more; `grace_s` is by how much clocks may differ.

    `waited_s` is how long the message can have waited unread; None if that is unknown.
    """
    if not request.expires:
        return False
    moved_s = clock_difference_s(request, now, waited_s, grace_s)
    if not moved_s or request.sent_at is None or waited_s is None:
        return now > request.expires + grace_s
    return waited_s > request.expires - request.sent_at + grace_s


def clock_difference_s(
    request: Request, now: float, waited_s: float | None, tolerance_s: float
) -> float:
    """What to add to a time of the sender's clock to get one of ours; 0 while the two can agree."""
    if request.sent_at is None or waited_s is None:
        return 0.0
    apart_s = now - request.sent_at
    return 0.0 if -tolerance_s <= apart_s <= waited_s + tolerance_s else apart_s


# -- replies ---------------------------------------------------------------------------------


class Reply(NamedTuple):
    """What one node answers."""

    hostname: str
    value: Any
    ticket: str | None
    clock: int | None = None


def write_reply(
    hostname: str, value: Any, *, ticket: str | None, clock: int = 0, serializer: str = "json"
) -> Written:
    """A reply. A value that can not be written becomes an error that says so."""
    try:
        encoded = encode({hostname: value}, serializer)
    except EncodeError as exc:
        encoded = encode({hostname: {"error": str(exc)}}, serializer)
    headers = {"ticket": ticket, "clock": clock}
    return Written(encoded.body, headers, encoded.content_type, encoded.content_encoding)


def read_reply(
    body: Any,
    content_type: Any,
    content_encoding: Any,
    headers: Any,
    *,
    accept: frozenset[str],
    limits: Limits = CONTROL_LIMITS,
) -> Reply:
    """The reply in a message; raises `Refusal` for everything that is none."""
    known = headers if isinstance(headers, Mapping) else {}
    content = _content(body, content_type, content_encoding, known, accept, limits)
    if type(content) is not dict or len(content) != 1:
        raise _refusal("the reply", content, "a mapping of one node's name to its answer")
    ((hostname, value),) = content.items()
    if type(hostname) is not str or not 0 < len(hostname) <= HOSTNAME_CHARS_MAX:
        raise _refusal("the node's name", hostname, "text")
    ticket = known.get("ticket")
    ticket = ticket if _is_address(ticket) else None
    return Reply(hostname, value, ticket, _clock(known.get("clock")))


# -- checking --------------------------------------------------------------------------------


def _content(
    body: Any,
    content_type: Any,
    content_encoding: Any,
    headers: Mapping[Any, Any],
    accept: frozenset[str],
    limits: Limits,
) -> Any:
    compression = headers.get("compression")
    if compression is not None:
        body = decompress(as_bytes(body, limits), compression, limits.body_bytes)
    encoding = content_encoding if isinstance(content_encoding, str) else "utf-8"
    return decode(body, content_type, encoding, accept=accept, limits=limits)


def _refusal(what: str, value: Any, wanted: str) -> Refusal:
    return Refusal(
        UNKNOWN_MESSAGE,
        f"no control message: {what} is {safe_repr(value, 80)} and must be {wanted}",
    )


def _text(
    content: Mapping[Any, Any], name: str, chars_max: int, *, optional: bool = False
) -> str | None:
    value = content.get(name)
    if value is None and optional:
        return None
    if type(value) is not str or len(value) > chars_max or not (value or optional):
        raise _refusal(name, value, f"text of at most {chars_max} characters")
    return value


def _arguments(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if type(value) is not dict or not all(type(name) is str for name in value):
        raise _refusal("arguments", value, "a mapping of names to values")
    return value


def _destination(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if type(value) not in (list, tuple) or not all(type(name) is str for name in value):
        raise _refusal("destination", value, "a list of node names")
    if len(value) > DESTINATIONS_MAX:
        raise _refusal("destination", value, f"at most {DESTINATIONS_MAX} node names")
    return tuple(value)


def _ticket(value: Any) -> str | None:
    if value is None or _is_address(value):
        return value
    raise _refusal("ticket", value, f"text of at most {NAME_BYTES_MAX} bytes")


def _reply_to(value: Any) -> ReplyTo | None:
    if value is None:
        return None
    if type(value) is not dict:
        raise _refusal("reply_to", value, "a mapping")
    exchange, routing_key = value.get("exchange"), value.get("routing_key")
    if not _is_address(exchange) or not _is_address(routing_key):
        raise _refusal("reply_to", value, "an exchange and a routing key")
    return ReplyTo(exchange, routing_key)


def _is_address(value: Any) -> TypeGuard[str]:
    """Whether a message can be sent with this as exchange, routing key or header."""
    try:
        return type(value) is str and 0 < len(value.encode("utf-8")) <= NAME_BYTES_MAX
    except UnicodeEncodeError:
        return False


def _clock(value: Any) -> int | None:
    """A clock that is none is a missing one: the command itself is none the worse for it."""
    return value if type(value) is int and 0 <= value <= _CLOCK_MAX else None


def _expires(value: Any) -> float | None:
    if value is None:
        return None
    if not _is_time(value):
        raise _refusal("expires", value, "a time in seconds")
    return float(value) if value else None


def _sent_at(value: Any) -> float | None:
    """A send time that is not a time is a missing one, as in the messages of Celery's clients."""
    return float(value) if _is_time(value) else None


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and -_CLOCK_MAX <= value <= _CLOCK_MAX
