"""The frames of messages that are published.

The first frame says where a message goes, and is the same for all that go there; the second has
the properties; then comes the body, in frames of at most what was agreed on.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

from umbel.broker.amqp import tables
from umbel.broker.amqp.frames import BODY, END, HEADER, METHOD, OVERHEAD

_FRAME: Final = Struct(">BHI")
_CONTENT: Final = Struct(">BHIHHQ")
_PUBLISH: Final = Struct(">HHH")
_MARK: Final = bytes((END,))
ADDRESSES_MAX: Final = 256


class Writer:
    """Writes the frames of one channel."""

    def __init__(self, channel_id: int) -> None:
        self._channel_id = channel_id
        self._addresses: dict[tuple[str, str, bool, bool], bytes] = {}

    def content(
        self,
        message: Any,
        exchange: str,
        routing_key: str,
        mandatory: bool,
        immediate: bool,
        frame_max: int,
    ) -> bytes:
        """All frames of a message of py-amqp."""
        body = message.body
        if isinstance(body, str):
            # As py-amqp does, which lets the message say so.
            body = body.encode(message.properties.setdefault("content_encoding", "utf-8"))
        frames = [self.address(exchange, routing_key, mandatory, immediate)]
        self.add(frames, tables.properties(message.properties), body, frame_max)
        return b"".join(frames)

    def address(
        self, exchange: str, routing_key: str, mandatory: bool = False, immediate: bool = False
    ) -> bytes:
        """The first frame."""
        key = (exchange, routing_key, mandatory, immediate)
        found = self._addresses.get(key)
        if found is None:
            bits = bool(mandatory) | bool(immediate) << 1
            payload = b"".join(
                (
                    _PUBLISH.pack(60, 40, 0),
                    tables.short_text(exchange),
                    tables.short_text(routing_key),
                    bytes((bits,)),
                )
            )
            found = _FRAME.pack(METHOD, self._channel_id, len(payload)) + payload + _MARK
            if len(self._addresses) >= ADDRESSES_MAX:
                self._addresses.clear()
            self._addresses[key] = found
        return found

    def add(self, frames: list[bytes], properties: bytes, body: bytes, frame_max: int) -> None:
        """The other frames, behind those that are there."""
        channel_id, size = self._channel_id, len(body)
        header = _CONTENT.pack(HEADER, channel_id, 12 + len(properties), 60, 0, size)
        frames += (header, properties, _MARK)
        if size <= frame_max - OVERHEAD:
            if size:
                frames += (_FRAME.pack(BODY, channel_id, size), body, _MARK)
            return
        step = frame_max - OVERHEAD
        for start in range(0, size, step):
            part = body[start : start + step]
            frames += (_FRAME.pack(BODY, channel_id, len(part)), part, _MARK)
