"""py-amqp's channel: deliveries without its dispatch, gathered acks, publishing.

*Acks* are written one by one, unless somebody says that the loop will flush them (`gather_acks`):
then they wait for `flush_acks`, at most `ACKS_MAX` of them, and the oldest for `ACK_S` if others
follow it. Everything else that is said on the channel is said after them. Those that were not
written when the channel ends are forgotten: the broker delivers their messages again.

*Publishing* writes the frames of a message at once. What the broker has said meanwhile is looked at
before, one event as with py-amqp, so that a closed channel is known with the next message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from amqp import spec
from amqp.exceptions import RecoverableConnectionError
from kombu.exceptions import DecodeError
from kombu.transport import pyamqp

from umbel.broker.amqp.bounded import BoundedChannel
from umbel.broker.amqp.frames import Event
from umbel.broker.amqp.publishing import Writer
from umbel.broker.amqp.settling import Ledger, ack

logger = logging.getLogger("umbel.broker")

ACKS_MAX: Final = 128
ACK_S: Final = 0.05


class BufferedMessage(pyamqp.Message):
    """kombu's message, made in less time."""

    errors: Any

    def __init__(self, raw: Any, channel: Any = None, **options: Any) -> None:
        properties = raw.properties
        headers = properties.get("application_headers")
        unreadable = getattr(raw, "unreadable", None)
        inflated = headers and "compression" in headers and channel.inflates
        if options or unreadable is not None or inflated:
            super().__init__(raw, channel=channel, **options)
            if unreadable is not None:
                self.errors.append(_as_raised(unreadable))
            return
        info = raw.delivery_info
        self.errors = []
        self.channel = channel
        self.delivery_tag = info["delivery_tag"]
        self.content_type = properties.get("content_type")
        self.content_encoding = properties.get("content_encoding")
        self.delivery_info = info
        self.headers = headers or {}
        self.properties = properties
        self._decoded_cache = None
        self._state = "RECEIVED"
        self.accept = None
        self.body = raw.body


class BufferedChannel(BoundedChannel):
    """A channel of a `BufferedConnection`."""

    Message = BufferedMessage
    inflates = True  # compressed bodies, as kombu does
    receiver: Callable[[Any], None] | None = None  # of messages, past kombu's consumers

    def __init__(self, connection: Any, *args: Any, **options: Any) -> None:
        self._ledger = Ledger()
        self._gathers = False
        self._oldest_at = 0.0
        self._without_acks: set[str] = set()  # consumers
        super().__init__(connection, *args, **options)
        self.writer = Writer(self.channel_id)
        self._callbacks[spec.Basic.RecoverOk] = self._ledger.clear

    # -- deliveries ----------------------------------------------------------------------

    def deliver(self, event: Event) -> None:
        """A message has come for a consumer."""
        message = event.message
        assert message is not None
        info: Any = message.delivery_info
        consumer_tag = info["consumer_tag"]
        if consumer_tag not in self._without_acks:
            self._ledger.delivered(info["delivery_tag"])
        if self.is_closing:
            return  # it goes back to its queue
        message.channel = self
        if self.auto_decode:
            _decode(message)
        callback = self.callbacks.get(consumer_tag)
        if callback is None:
            logger.warning("a message for consumer %s, which is gone, goes back", consumer_tag)
            self.basic_reject(info["delivery_tag"], requeue=True)
        elif self.receiver is not None and message.unreadable is None:
            self.receiver(BufferedMessage(message, self))
        else:
            callback(message)

    def basic_consume(
        self, queue: str = "", consumer_tag: str = "", *args: Any, **options: Any
    ) -> Any:
        """Whether its messages want an answer is known before the first of them comes."""
        without = bool(options.get("no_ack", args[1] if len(args) > 1 else False))
        if consumer_tag:
            (self._without_acks.add if without else self._without_acks.discard)(consumer_tag)
        given = super().basic_consume(queue, consumer_tag, *args, **options)
        if without:
            self._without_acks.add(given)
        return given

    def _on_basic_cancel_ok(self, consumer_tag: str) -> None:
        super()._on_basic_cancel_ok(consumer_tag)
        self._without_acks.discard(consumer_tag)

    def basic_get(self, queue: str = "", no_ack: bool = False, **options: Any) -> Any:
        """One message, or None."""
        message = super().basic_get(queue, no_ack, **options)
        if message is not None and not no_ack:
            self._ledger.delivered(message.delivery_tag)
        return message

    # -- answers -------------------------------------------------------------------------

    def take_tasks(
        self, receiver: Callable[[Any], None], ledger: Any, *, acks_at_once: bool
    ) -> None:
        """Give messages to `receiver`; unless `acks_at_once`, the loop flushes before it waits."""
        super().take_tasks(receiver, ledger, acks_at_once=acks_at_once)
        self.receiver = receiver
        if not acks_at_once:
            self.gather_acks()

    def leave_compressed(self) -> None:
        """Hand out messages whose bodies are still compressed."""
        self.inflates = False

    def gather_acks(self) -> None:
        """From now on somebody flushes before the loop waits."""
        self._gathers = True

    def basic_ack(self, delivery_tag: int, multiple: bool = False, **options: Any) -> None:
        """Acknowledge a message, or all up to it; now, or with the others."""
        if not multiple and self._gathers and self._ledger.gather(delivery_tag):
            self._gathered()
            return
        self.flush_acks()
        self.live().write_frames(ack(self.channel_id, delivery_tag, multiple))
        self._ledger.answered(delivery_tag, multiple)

    def _gathered(self) -> None:
        now, count = time.monotonic(), len(self._ledger)
        if count == 1:
            self._oldest_at = now
            self.live().gathering.add(self)
        elif count >= ACKS_MAX or now - self._oldest_at >= ACK_S:
            self.flush_acks()

    def flush_acks(self) -> None:
        """Write what was gathered. Raises connection errors."""
        if not len(self._ledger):
            return
        connection = self.live()
        connection.gathering.discard(self)
        connection.write_frames(self._ledger.frames(self.channel_id))

    def basic_reject(self, delivery_tag: int, requeue: bool, **options: Any) -> Any:
        """Refuse a message."""
        done = super().basic_reject(delivery_tag, requeue, **options)
        self._ledger.answered(delivery_tag)
        return done

    def send_method(self, *args: Any, **options: Any) -> Any:
        """Everything is said after the acks."""
        if self.connection is not None:
            self.flush_acks()
        return super().send_method(*args, **options)

    # -- publishing ----------------------------------------------------------------------

    def _basic_publish(
        self,
        msg: Any,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        immediate: bool = False,
        timeout: float | None = None,
        confirm_timeout: float | None = None,
    ) -> None:
        """Publish a message, without waiting for its confirm."""
        connection = self.live("basic_publish: connection closed")
        self.look()
        frames = self.writer.content(
            msg, exchange, routing_key, mandatory, immediate, connection.frame_max
        )
        self.confirms.published()
        try:
            if timeout is None:
                connection.write_frames(frames)
            else:
                with connection.transport.having_timeout(timeout):
                    connection.write_frames(frames)
        except TimeoutError:
            raise RecoverableConnectionError("basic_publish: timed out") from None

    basic_publish = _basic_publish

    def look(self) -> None:
        """Handle one event that has come meanwhile: the channel may be closed, say."""
        connection = self.live("basic_publish: connection closed")
        if connection.has_input():
            try:
                connection.drain_events(timeout=0)
            except TimeoutError:
                return
            if self.connection is None:
                raise RecoverableConnectionError("basic_publish: connection closed")

    # -- the end -------------------------------------------------------------------------

    def _forget(self) -> None:
        self._ledger.clear()
        self._without_acks.clear()
        if self.connection is not None:
            self.connection.gathering.discard(self)

    def _on_close(self, *args: Any) -> None:
        self._forget()
        super()._on_close(*args)

    def collect(self) -> None:
        """Let everything go."""
        self._forget()
        super().collect()


def _decode(message: Any) -> None:
    encoding = message.properties.get("content_encoding")
    if encoding is not None:
        try:
            message.body = message.body.decode(encoding)
        except Exception:  # noqa: BLE001 - whatever a codec may raise: the body stays as it is
            return


def _as_raised(exc: BaseException) -> tuple[Any, Any, Any]:
    """As kombu keeps it: not one of the errors that mean a lost connection."""
    error = DecodeError(f"its properties can not be read: {type(exc).__name__}: {exc}")
    return DecodeError, error, None
