"""Messages that were taken from a list: the envelope decoded once, nothing done twice."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import msgspec
from kombu.compression import decompress
from kombu.message import Message

from umbel.broker import base64text
from umbel.broker.tasks.envelopes import TaskEnvelope, read_task
from umbel.broker.tasks.messages import Unreadable
from umbel.wire.tasks import DELIVERY_COUNT

_decode = msgspec.json.Decoder().decode
# What needs no decoding is a string of the envelope itself.
_PLAIN_ENCODINGS = frozenset({None, "", "utf-8"})


class _Told:
    """What kombu's messages have as mappings; of a task it is read when somebody asks for it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, message: ListMessage | None, owner: type | None = None) -> Any:
        if message is None:
            return self
        if message.told is None:
            message.told = _mappings(_decode(message.raw))
        return message.told[self._name]


class ListMessage(Message):
    """A message from a list: kombu's, with its own place on the server.

    `raw` is the envelope as it lay in the list `key` of `queue`; `delivery_tag` is the name of its
    note. The tag inside of the envelope is its sender's and means nothing here. `task` is what
    was read of it, where it is a plain task message.
    """

    if not TYPE_CHECKING:  # which knows nothing of the slots of kombu's class
        __slots__ = ("key", "queue", "raw", "task", "told")
    errors: Any = ()
    accept = None
    headers = _Told()
    properties = _Told()
    delivery_info = _Told()

    def __init__(self, raw: bytes, tag: str, queue: str, key: str, channel: Any) -> None:
        self.raw, self.queue, self.key = raw, queue, key
        self.channel = channel
        self.delivery_tag = tag
        self._decoded_cache = None
        self._state = "RECEIVED"
        self.task: TaskEnvelope | None = read_task(raw)
        self.told: dict[str, Any] | None = None
        if self.task is not None:
            self.content_type = self.task.content_type
            self.content_encoding = self.task.content_encoding
            self.body = self.task.body
            compression = self.task.headers.compression
        else:
            compression = self._read(raw)
        if compression is not None and channel.inflates:
            self._inflate(compression)

    def _read(self, raw: bytes) -> Any:
        """Whatever is in the envelope; the method that its body was compressed with."""
        try:
            envelope = _decode(raw)
        except (ValueError, RecursionError):
            envelope = _decoded_leniently(raw)
        try:
            self.told = _mappings(envelope)
            self.content_type = envelope.get("content-type")
            self.content_encoding = envelope.get("content-encoding")
            body, encoding = envelope.get("body"), self.properties.get("body_encoding")
            if encoding == "base64" and body:
                body = base64text.decode(body)
            elif encoding not in _PLAIN_ENCODINGS and body:
                body = self.channel.decode_body(body, encoding)
            self.body = body.encode() if isinstance(body, str) else body
            return self.headers.get("compression")
        except Exception as exc:
            raise Unreadable(f"{type(exc).__name__}: {exc}") from exc

    def ack(self, multiple: bool = False) -> None:
        """The message is done with."""
        channel = self.channel
        if self._state != "RECEIVED" or channel is None:
            super().ack(multiple)  # which says what is wrong
        channel.settle(self.delivery_tag)
        self._state = "ACK"

    def _inflate(self, method: Any) -> None:
        try:
            self.body = decompress(self.body, method)
        except Exception:  # noqa: BLE001 - told by whoever reads the message, as kombu's are
            self.errors = [sys.exc_info()]


def _mappings(envelope: Any) -> dict[str, Any]:
    properties = envelope["properties"]
    info = properties["delivery_info"]
    info["exchange"], info["routing_key"]  # whoever settles it asks for them
    return {
        "headers": envelope.get("headers") or {},
        "properties": properties,
        "delivery_info": info,
    }


def _decoded_leniently(raw: bytes) -> Any:
    """What Python's own encoder writes and others do not read, such as NaN."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise Unreadable(f"{type(exc).__name__}: {exc}") from exc


def redelivered(raw: bytes) -> bytes:
    """The envelope as it goes back after somebody had it."""
    try:
        envelope = json.loads(raw)
        mark(envelope)
    except (ValueError, TypeError, KeyError, RecursionError):
        return raw
    return json.dumps(envelope).encode()


def mark(envelope: Any) -> None:
    """Say in an envelope that somebody had it, where other programs look for that."""
    headers = envelope["headers"]
    headers["redelivered"] = True
    before = headers.get(DELIVERY_COUNT)  # RabbitMQ's quorum queues count there
    headers[DELIVERY_COUNT] = (before if type(before) is int and before >= 0 else 0) + 1
    envelope["properties"]["delivery_info"]["redelivered"] = True
