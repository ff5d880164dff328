"""Messages as they lie in Redis: kombu's layout, written and read by us.

A message is pushed to the list of its queue and priority step, in an envelope of JSON with the
body in base64. What kombu's readers find in it is what kombu would have written. The delivery tag
is a new one for every envelope, also where a message goes to several queues.

Almost all that workers read are task messages with nothing in them that their protocol does not
know: those are read in one go, straight into what a worker uses (`TaskEnvelope`). All others are
for those to read who take anything (`redis.messages`).
"""

from __future__ import annotations

from binascii import b2a_base64
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from umbel.broker.ids import fresh_tag
from umbel.wire.jsontext import EncodeError, dumps_json
from umbel.wire.tasks import TaskHeader, completed

if TYPE_CHECKING:
    from umbel.broker.tasks.batches import Parcel

BODY_ENCODING: Final = "base64"
_FORM: Final = "json"  # of a letterhead: its fields without the closing brace
_COMMON: Final = frozenset({"reply_to", "delivery_mode", "priority"})
_USUAL: Final = _COMMON | {"correlation_id"}


def envelope(parcel: Parcel) -> bytes:
    """The text of a message, as it is pushed; raises `EncodeError` for what has no JSON form."""
    return b'{"body":"%b",%b,"headers":%b,"properties":%b}' % (
        b2a_base64(parcel.body, newline=False),
        _content(parcel.content_type, parcel.content_encoding),
        _headers(parcel),
        _properties(parcel),
    )


@lru_cache(maxsize=64)
def _content(content_type: str, content_encoding: str) -> bytes:
    said = {"content-encoding": content_encoding, "content-type": content_type}
    return dumps_json(said)[1:-1]


def _headers(parcel: Parcel) -> bytes:
    letterhead, own = parcel.letterhead, parcel.own
    if letterhead is None or not (own and letterhead.headers):
        return dumps_json(parcel.headers)
    common = letterhead.forms.get(_FORM)
    if common is None:
        common = letterhead.forms[_FORM] = dumps_json(letterhead.headers)[:-1]
    return b"%b,%b" % (common, dumps_json(own)[1:])


def _properties(parcel: Parcel) -> bytes:
    given = parcel.properties
    get = given.get
    try:
        common = _common_properties(
            parcel.exchange,
            parcel.routing_key,
            get("reply_to"),
            get("delivery_mode"),
            get("priority"),
        )
    except TypeError:  # something that is no key of a dictionary, and no property either
        raise EncodeError(f"cannot write the properties {given!r} as json") from None
    if given.keys() == _USUAL:  # the id alone is left
        own = b'"correlation_id":%b' % dumps_json(get("correlation_id"))
        return b'%b,%b,"delivery_tag":"%b"}' % (common, own, fresh_tag().encode())
    rest = {name: value for name, value in given.items() if name not in _COMMON}
    return b"%b,%b" % (common, dumps_json({**rest, "delivery_tag": fresh_tag()})[1:])


@lru_cache(maxsize=1024, typed=True)
def _common_properties(
    exchange: str, routing_key: str, reply_to: Any, delivery_mode: Any, priority: Any
) -> bytes:
    """What the properties of many messages have in common, without the closing brace."""
    said = {"reply_to": reply_to, "delivery_mode": delivery_mode}
    common = {
        **{name: value for name, value in said.items() if value is not None},
        "delivery_info": {"exchange": exchange, "routing_key": routing_key},
        "priority": priority or 0,
        "body_encoding": BODY_ENCODING,
    }
    return dumps_json(common)[:-1]


class _Header(TaskHeader, forbid_unknown_fields=True, gc=False):
    """The headers of a task, none of which is the caller's own."""


class _Address(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    exchange: str
    routing_key: str


class _Properties(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    delivery_info: _Address
    body_encoding: Literal["base64"]
    delivery_tag: Any = None
    delivery_mode: Any = None
    priority: Any = None
    correlation_id: Any = None
    reply_to: Any = None


class TaskEnvelope(
    msgspec.Struct,
    forbid_unknown_fields=True,
    gc=False,
    rename={"content_type": "content-type", "content_encoding": "content-encoding"},
):
    """A task message; texts in it have a UTF-8 form, and the body is out of its base64."""

    body: bytes
    headers: _Header
    properties: _Properties
    content_type: str
    content_encoding: str | None = None


_decode_task: Final = msgspec.json.Decoder(TaskEnvelope).decode


def read_task(raw: bytes) -> TaskEnvelope | None:
    """A task message and nothing else; None for what is better read by others."""
    try:
        task = _decode_task(raw)
    except (ValueError, RecursionError):
        return None
    completed(task.headers)
    return task
