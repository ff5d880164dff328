"""Bytes in, methods and messages out.

A frame is a type, a channel, a length, the payload and an end mark. A message is three or more of
them: the method, the header with the properties, and the body, in parts of at most a frame; frames
of other channels may come in between. Most are deliveries that lie in the buffer as a whole, and
those are read in one go; everything else takes the way frame by frame, which is also the one that
finds what is wrong.

What breaks the rules of framing raises the error of py-amqp for it, a connection error, and from
then on nothing else is raised: where the next frame begins can not be known. A message whose
framing is right and whose properties can not be read is delivered as `unreadable`, because a
broker would deliver it again and again to a consumer that hangs up on it.

Nothing is reserved for what is only announced. What is kept is at most one frame and what was read
behind it, and the parts of unfinished bodies, of at most `BODY_BYTES_MAX` each.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, error
from typing import Any, Final, NamedTuple

from amqp.basic_message import Message
from amqp.exceptions import AMQPError, FrameError, FrameSyntaxError, UnexpectedFrame

from umbel.broker.amqp.shapes import Shapes

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
END: Final = 0xCE
OVERHEAD: Final = 8
# The most that RabbitMQ can be told to take.
BODY_BYTES_MAX: Final = 2**29
NAMES_MAX: Final = 1024

DELIVER, RETURN, GET_OK = (60, 60), (60, 50), (60, 71)
_DELIVER: Final = b"\x00\x3c\x00\x3c"
_HAS_CONTENT: Final = {_DELIVER, b"\x00\x3c\x00\x32", b"\x00\x3c\x00\x47"}

_frame: Final = Struct(">BHI").unpack_from
_signature: Final = Struct(">HH").unpack_from
_content: Final = Struct(">HxxQ").unpack_from
_tag: Final = Struct(">QB").unpack_from


class Received(Message):
    """A message as py-amqp has it; `unreadable` is why its properties are missing."""

    unreadable: Exception | None = None

    def __init__(self, body: Any, properties: dict[str, Any]) -> None:  # much less than there
        self.body = body
        self.properties = properties
        self.channel: Any = None
        self.delivery_info: Any = None


class Event(NamedTuple):
    """A method, with its message where it has one."""

    channel_id: int
    signature: tuple[int, int]
    payload: bytes
    message: Received | None


class _Unfinished:
    """A message of which parts are missing."""

    __slots__ = ("header", "left", "method", "parts")

    def __init__(self, method: bytes) -> None:
        self.method = method
        self.header: bytes | None = None
        self.left = 0
        self.parts: list[bytes] = []


class Reader:
    """Reads the frames of one connection."""

    def __init__(self, frame_max: int) -> None:
        self.frame_max = frame_max  # as it was agreed on: may change
        self.frames_count = 0
        self._buffer = b""
        self._offset = 0
        self._later: list[bytes] = []  # read when the frame that is cut off may be whole
        self._missing = 1
        self._unfinished: dict[int, _Unfinished] = {}
        self._failure: AMQPError | None = None
        self._shapes = Shapes()
        self._tags: dict[bytes, str] = {}
        self._addresses: dict[bytes, tuple[str, str]] = {}

    def feed(self, data: bytes) -> None:
        """More bytes have come."""
        self._later.append(data)
        self._missing -= len(data)
        if self._missing <= 0:
            if self._offset < len(self._buffer):
                self._later.insert(0, self._buffer[self._offset :])
            later, self._later = self._later, []
            self._buffer = later[0] if len(later) == 1 else b"".join(later)
            self._offset = 0

    @property
    def wanted(self) -> int:
        """So many bytes are missing at least, before there can be another frame."""
        return self._missing

    @property
    def ready(self) -> bool:
        """Whether there is a whole frame that was not read, or an error to be raised."""
        if self._failure is not None:
            return True
        left = len(self._buffer) - self._offset
        if left < OVERHEAD:
            return False
        return left >= _frame(self._buffer, self._offset)[2] + OVERHEAD

    def read(self) -> Event | None:
        """The next method, or None when it is not there as a whole."""
        if self._failure is not None:
            raise self._failure
        if self._later:
            return None
        buffer = self._buffer
        end = len(buffer)
        while True:
            start = self._offset
            left = end - start
            if left < OVERHEAD:
                self._missing = OVERHEAD - left if left else 1
                return None
            kind, channel_id, size = _frame(buffer, start)
            last = start + 7 + size
            if last >= end:
                self._check_announced(kind, size)
                self._missing = last + 1 - end
                return None
            if buffer[last] != END:
                raise self._broken(
                    UnexpectedFrame, f"Received frame_end {buffer[last]:#04x} while expecting 0xce"
                )
            payload = buffer[start + 7 : last]
            self._offset = last + 1
            self.frames_count += 1
            if kind == METHOD and payload.startswith(_DELIVER):
                event = self._whole(channel_id, payload, buffer, end)
                if event is not None:
                    return event
            event = self._frame(kind, channel_id, payload)
            if event is not None:
                return event

    # -- deliveries as they usually come -------------------------------------------------

    def _whole(self, channel_id: int, method: bytes, buffer: bytes, end: int) -> Event | None:
        """The delivery, if all of it is in the buffer; nothing is consumed if not."""
        if channel_id in self._unfinished:
            return None
        start = self._offset
        if end - start < OVERHEAD + 14:
            return None
        kind, same, size = _frame(buffer, start)
        last = start + 7 + size
        if kind != HEADER or same != channel_id or last >= end or buffer[last] != END or size < 14:
            return None
        class_id, body_size = _content(buffer, start + 7)
        if class_id != 60:
            return None
        header, stop = buffer[start + 7 : last], last + 1
        body: bytes | str = ""
        if body_size:
            if end - stop < OVERHEAD:
                return None
            kind, same, size = _frame(buffer, stop)
            last = stop + 7 + size
            if kind != BODY or same != channel_id or size != body_size or last >= end:
                return None
            if buffer[last] != END:
                return None
            body, stop = buffer[stop + 7 : last], last + 1
        self._offset = stop
        self.frames_count += 2
        return self._delivery(channel_id, method, header, body)

    def _delivery(self, channel_id: int, method: bytes, header: bytes, body: Any) -> Event:
        message = self._message(header, body)
        try:
            split = 5 + method[4]
            tag, bits = _tag(method, split)
            consumer_tag = self._tags.get(method[5:split]) or self._consumer_tag(method[5:split])
            address = method[split + 9 :]
            exchange, routing_key = self._addresses.get(address) or self._address(address)
        except (IndexError, error) as exc:
            raise self._broken(FrameSyntaxError, f"a delivery can not be read: {exc}") from None
        message.delivery_info = {
            "consumer_tag": consumer_tag,
            "delivery_tag": tag,
            "redelivered": bool(bits & 1),
            "exchange": exchange,
            "routing_key": routing_key,
        }
        return Event(channel_id, DELIVER, method, message)

    def _consumer_tag(self, raw: bytes) -> str:
        return _kept(self._tags, raw, _text)

    def _address(self, raw: bytes) -> tuple[str, str]:
        return _kept(self._addresses, raw, _two_texts)

    def _message(self, header: bytes, body: Any) -> Received:
        try:
            return Received(body, self._shapes.read(header))
        except Exception as exc:  # noqa: BLE001 - whatever reading rubbish may raise
            message = Received(body, {})
            message.unreadable = exc
            return message

    # -- frame by frame ------------------------------------------------------------------

    def _frame(self, kind: int, channel_id: int, payload: bytes) -> Event | None:
        if kind == HEARTBEAT:
            return None
        unfinished = self._unfinished.get(channel_id)
        expected = METHOD if unfinished is None else HEADER if unfinished.header is None else BODY
        if kind != expected:
            raise self._broken(
                UnexpectedFrame, f"Received frame {kind} while expecting type: {expected}"
            )
        if unfinished is None:
            return self._on_method(channel_id, payload)
        if kind == HEADER:
            return self._on_header(channel_id, unfinished, payload)
        return self._on_body(channel_id, unfinished, payload)

    def _on_method(self, channel_id: int, payload: bytes) -> Event | None:
        if len(payload) < 4:
            raise self._broken(FrameSyntaxError, f"a method of {len(payload)} bytes")
        if payload[:4] in _HAS_CONTENT:
            self._unfinished[channel_id] = _Unfinished(payload)
            return None
        return Event(channel_id, _signature(payload), payload, None)

    def _on_header(self, channel_id: int, message: _Unfinished, payload: bytes) -> Event | None:
        if len(payload) < 14:
            raise self._broken(FrameSyntaxError, f"a content header of {len(payload)} bytes")
        class_id, size = _content(payload)
        if class_id != 60 or size > BODY_BYTES_MAX:
            raise self._broken(
                FrameSyntaxError, f"a content header of class {class_id} announces {size} bytes"
            )
        message.header, message.left = payload, size
        return None if size else self._finish(channel_id, message, "")

    def _on_body(self, channel_id: int, message: _Unfinished, payload: bytes) -> Event | None:
        message.left -= len(payload)
        if message.left < 0:
            raise self._broken(UnexpectedFrame, "a body is longer than was announced")
        if payload:
            message.parts.append(payload)
        if message.left:
            return None
        return self._finish(channel_id, message, b"".join(message.parts))

    def _finish(self, channel_id: int, whole: _Unfinished, body: Any) -> Event:
        del self._unfinished[channel_id]
        assert whole.header is not None
        signature = _signature(whole.method)
        if signature == DELIVER:
            return self._delivery(channel_id, whole.method, whole.header, body)
        return Event(channel_id, signature, whole.method, self._message(whole.header, body))

    # -- rules ---------------------------------------------------------------------------

    def _check_announced(self, kind: int, size: int) -> None:
        """A frame that is not there yet is not waited for if it never may come."""
        if kind not in {METHOD, HEADER, BODY, HEARTBEAT}:
            raise self._broken(UnexpectedFrame, f"Received frame {kind} while expecting type: 1")
        if self.frame_max and size > self.frame_max:
            raise self._broken(
                FrameError, f"a frame of {size} bytes, where {self.frame_max} were agreed on"
            )

    def _broken(self, kind: type[AMQPError], text: str) -> AMQPError:
        self._failure = kind(text)
        self._buffer, self._offset = b"", 0
        self._later.clear()
        self._unfinished.clear()
        return self._failure


def _kept(cache: dict[bytes, Any], raw: bytes, read: Callable[[bytes], Any]) -> Any:
    found = read(raw)
    if len(cache) >= NAMES_MAX:
        cache.clear()
    cache[raw] = found
    return found


def _text(raw: bytes) -> str:
    # Any bytes may be the name of something; nothing here depends on what it looks like.
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "backslashreplace")


def _two_texts(raw: bytes) -> tuple[str, str]:
    split = 1 + raw[0]
    last = split + 1 + raw[split]
    return _text(raw[1:split]), _text(raw[split + 1 : last])
