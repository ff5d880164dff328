"""Task messages, written for any peer.

Every field that peers expect is always there. A `TaskWriter` is made for calls that have the same
name, limits and serializer: what their messages have in common is put together once, as a
`Letterhead`, of which whoever encodes headers may keep an encoded form. `write_task_v1` writes
messages for workers that know the older protocol only.

The caller's own headers can not replace the protocol's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from umbel.wire.compression import compress
from umbel.wire.content import JSON, check_size, encode, serializer_type
from umbel.wire.jsontext import dumps_json
from umbel.wire.limits import DEFAULT_LIMITS, Limits
from umbel.wire.reprs import safe_repr

_NO_EMBED: Final = dict.fromkeys(("callbacks", "errbacks", "chain", "chord"))
_NO_EMBED_JSON: Final = dumps_json(_NO_EMBED)


class Letterhead:
    """The header fields that many messages share, and their encoded forms by name of the format.

    Never changed once it is made; the forms are added by whoever writes the format.
    """

    __slots__ = ("forms", "headers")

    def __init__(self, headers: dict[str, Any]) -> None:
        self.headers = headers
        self.forms: dict[str, bytes] = {}


class Parcel(NamedTuple):
    """A message and its address; `properties` are those of the message itself."""

    body: bytes
    own: dict[str, Any]  # headers that are not in the letterhead
    properties: dict[str, Any]
    content_type: str
    content_encoding: str
    exchange: str = ""
    routing_key: str = ""
    letterhead: Letterhead | None = None  # has no name in common with `own`

    @property
    def headers(self) -> dict[str, Any]:
        """All headers."""
        return self.own if self.letterhead is None else {**self.letterhead.headers, **self.own}


class TaskWriter:
    """Writes protocol 2 messages of calls that have all this in common; threads may share it."""

    __slots__ = (
        "_common", "_compression", "_content_type", "_inner", "_letterheads", "_limits", "_name",
        "address",
    )  # fmt: skip

    def __init__(
        self,
        *,
        name: str,
        serializer: str = "json",
        compression: str | None = None,
        time_limit: float | None = None,
        soft_time_limit: float | None = None,
        shadow: str | None = None,
        origin: str | None = None,
        ignore_result: bool | None = None,
        address: tuple[str, str] = ("", ""),
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """`address` is where the messages go: exchange and routing key; `limits` hold there."""
        self._name = name
        self._limits = limits
        self._inner = msgspec.structs.replace(limits, depth=limits.depth - 1)  # within the body
        self.address = address
        self._content_type = serializer_type(serializer)
        self._compression = compression
        self._common: dict[str, Any] = {
            "lang": "py",
            "task": name,
            "shadow": shadow,
            "eta": None,
            "expires": None,
            "group": None,
            "group_index": None,
            "retries": 0,
            "timelimit": [time_limit, soft_time_limit],
            "parent_id": None,
            "origin": origin,
            "ignore_result": ignore_result,
            "replaced_task_nesting": 0,
            "stamped_headers": None,
            "stamps": {},
        }
        self._letterheads: dict[tuple[str, ...], Letterhead] = {}

    def write(
        self,
        own: dict[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        properties: dict[str, Any],
        embed: Mapping[str, Any] | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> Parcel:
        """The message of one call.

        `own` are the header fields of this call: `id`, `root_id`, `argsrepr`, `kwargsrepr`, and
        whatever differs from what most calls say. It belongs to the message from here on.
        `headers` are the caller's.
        """
        if type(kwargs) is not dict or not isinstance(args, (list, tuple)):
            check_arguments(self._name, args, kwargs)
        if embed is None and self._content_type == JSON:
            inner = self._inner
            placed = dumps_json(args, inner) if args else b"[]"
            named = dumps_json(kwargs, inner) if kwargs else b"{}"
            body = b"[%b,%b,%b]" % (placed, named, _NO_EMBED_JSON)
            content_type, content_encoding = JSON, "utf-8"
            if len(body) > self._limits.body_bytes:
                check_size(body, JSON, self._limits)
        else:
            whole = (args, kwargs, _NO_EMBED if embed is None else embed)
            body, content_type, content_encoding = encode(whole, self._content_type, self._limits)
        if self._compression:
            body, own["compression"] = compress(body, self._compression)
        shape = tuple(own)
        letterhead = self._letterheads.get(shape) or self._make_letterhead(shape)
        if headers:
            own = {**{n: headers[n] for n in headers if n not in letterhead.headers}, **own}
        return Parcel(
            body, own, properties, content_type, content_encoding, *self.address, letterhead
        )

    def _make_letterhead(self, shape: tuple[str, ...]) -> Letterhead:
        # There are few: the names are the protocol's, in an order that the code gives.
        common = {name: value for name, value in self._common.items() if name not in shape}
        made = self._letterheads[shape] = Letterhead(common)
        return made


def properties_of(
    task_id: str,
    reply_to: str | None,
    priority: int,
    delivery_mode: int,
    expires_in_s: float | None = None,
) -> dict[str, Any]:
    """The properties of a task message."""
    properties: dict[str, Any] = {
        "correlation_id": task_id,
        "reply_to": reply_to or "",
        "delivery_mode": delivery_mode,
        "priority": priority,
    }
    if expires_in_s is not None:
        # RabbitMQ wants milliseconds as text, and drops at once what has no time left.
        properties["expiration"] = str(max(0, int(expires_in_s * 1000)))
    return properties


def write_task_v1(
    *,
    name: str,
    id: str,  # noqa: A002 - the name on the wire
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    serializer: str = "json",
    compression: str | None = None,
    eta: str | None = None,
    expires: str | None = None,
    expires_in_s: float | None = None,
    group_id: str | None = None,
    group_index: int | None = None,
    retries: int = 0,
    time_limit: float | None = None,
    soft_time_limit: float | None = None,
    reply_to: str | None = None,
    priority: int = 0,
    delivery_mode: int = 2,
    callbacks: Sequence[Mapping[str, Any]] | None = None,
    errbacks: Sequence[Mapping[str, Any]] | None = None,
    chord: Mapping[str, Any] | None = None,
    utc: bool = True,
    headers: Mapping[str, Any] | None = None,
) -> Parcel:
    """A protocol 1 message, for workers that know nothing newer; it cannot carry a chain."""
    if kwargs is None:
        kwargs = {}
    check_arguments(name, args, kwargs)
    fields = {
        "task": name,
        "id": id,
        "args": args,
        "kwargs": kwargs,
        "group": group_id,
        "group_index": group_index,
        "retries": retries,
        "eta": eta,
        "expires": expires,
        "utc": utc,
        "callbacks": callbacks,
        "errbacks": errbacks,
        "timelimit": [time_limit, soft_time_limit],
        "taskset": group_id,
        "chord": chord,
    }
    own = dict(headers or {})
    # A `task` header is what tells protocol 2 from 1, so it must not slip in.
    own.pop("task", None)
    body, content_type, content_encoding = encode(fields, serializer)
    if compression:
        body, own["compression"] = compress(body, compression)
    properties = properties_of(id, reply_to, priority, delivery_mode, expires_in_s)
    return Parcel(body, own, properties, content_type, content_encoding)


def check_arguments(name: str, args: Any, kwargs: Any) -> None:
    """Refuse what no peer could read as arguments."""
    if not isinstance(args, (list, tuple)):
        raise TypeError(f"args of task {name!r} must be a list or tuple, got {safe_repr(args, 80)}")
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs of task {name!r} must be a mapping, got {safe_repr(kwargs, 80)}")
