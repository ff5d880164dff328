"""Listening to what is broadcast: queues of one's own, each of another exchange, on one channel.

A `Listener` is open when its maker returns: whatever is published from then on is heard. On Redis
that takes a confirmation, as a subscription begins when the server has read it; and a channel that
nobody else uses, as kombu keeps one queue per exchange and channel there.

`listen` waits for messages and hands on those that have come, until whoever takes them has enough.
kombu alone would go on for as long as there are more, while nobody works on them.

What can not be made a message is told to `on_rubbish`, and the next one is unharmed. On Redis kombu
would leave behind what arrived together with a bad one, until more comes. So the words of the
subscription are read here.

All that means a lost connection is raised as `ConnectionError`. A subscription whose server is
gone without a word says nothing for ever: `check` asks, and is to be called about once a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from kombu import Connection, Consumer, Queue
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

from umbel.broker.sessions.connections import hang_up
from umbel.broker.tasks.messages import Unreadable
from umbel.broker.tasks.task_channel import task_channel

# Messages that are waiting already are handed on together, up to so many.
BURST = 64
# The rest of a message whose beginning is there is waited for; so is a confirmation.
ANSWER_S = 10.0
# What Redis wraps around a message, and the message, in base64.
ENVELOPE_BYTES_MAX = 16 * 2**20
# So many questions in a row without an answer; kombu's setting health_check_interval apart.
UNANSWERED_MAX = 2
# So many failures in a row, and no message: the connection is beyond repair.
RUBBISH_MAX = 1_000

# Gets a message, says whether it could do with another one.
OnMessage = Callable[[Any], bool]
OnRubbish = Callable[[Exception], None]


class Listener:
    """Hears queues of an open connection, which it closes in the end; for one thread."""

    def __init__(
        self,
        connection: Connection,
        queues: Sequence[Queue],
        on_message: OnMessage,
        on_rubbish: OnRubbish,
    ) -> None:
        self.connection = connection
        self._on_message, self._on_rubbish = on_message, on_rubbish
        self._rubbish = 0
        self._wants_more = True
        self._confirmed_count = 0
        errors = (*connection.connection_errors, *connection.channel_errors, OSError)
        self._errors: tuple[type[BaseException], ...] = errors
        self._channel = channel = connection.channel()
        task_channel(channel).leave_compressed()
        self._consumer = Consumer(channel, queues, on_message=self._take, no_ack=True, accept=None)
        self._queues: list[Queue] = list(self._consumer.queues)
        self._consumer.consume()
        self._subscribes = self._queues[0].name in getattr(channel, "active_fanout_queues", ())
        if self._subscribes:
            channel.handlers["LISTEN"] = self._read_subscription
            self._await_confirmation()

    def listen(self, timeout_s: float) -> None:
        """Wait so long for messages and hand them on; raises `ConnectionError` when it is lost."""
        self._wants_more = True
        drain = self.connection.drain_events
        try:
            if self._subscribes:
                # What was read together with the last message makes nothing readable any more.
                if self._is_readable():
                    self._read_subscription()
                else:
                    drain(timeout=timeout_s)
                return
            drain(timeout=timeout_s)
            for _ in range(BURST):
                if not self._wants_more:
                    return
                drain(timeout=0)
        except TimeoutError:
            pass
        except Unreadable as exc:
            self._drop(exc)
        except self._errors as exc:
            raise _lost(exc) from exc
        except Exception as exc:  # noqa: BLE001 - nothing that is sent to us ends this
            self._drop(exc)

    def check(self) -> None:
        """Send a heartbeat when it is time, and notice a server that is gone."""
        try:
            if self.connection.supports_heartbeats and self.connection.heartbeat:
                self.connection.heartbeat_check()
            if self._subscribes:
                subscription = self._channel.subclient
                if subscription.health_check_response_counter >= UNANSWERED_MAX:
                    raise ConnectionError("the subscription does not answer")
                subscription.check_health()
        except Exception as exc:  # a connection that has just gone raises anything
            raise _lost(exc) from exc

    def close(self, *, lost: bool = False) -> None:
        """Hang up; the queues go too, unless they are durable."""
        if not lost:
            with contextlib.suppress(Exception):
                self._consumer.cancel()
            for queue in self._queues:
                if not queue.durable and self.connection.transport.driver_type != "amqp":
                    self._delete(queue)
        hang_up(self.connection, lost=lost)

    def _delete(self, queue: Queue) -> None:
        """Where no server does it."""
        with contextlib.suppress(Exception):
            queue.delete()
        # In memory the exchange would go on filling it.
        with contextlib.suppress(Exception):
            queue.unbind_from(queue.exchange, queue.routing_key)

    # -- messages ----------------------------------------------------------------------

    def _take(self, message: Any) -> None:
        self._rubbish = 0
        self._wants_more = self._on_message(message)

    def _drop(self, exc: Exception) -> None:
        self._rubbish += 1
        if self._rubbish > RUBBISH_MAX:
            raise _lost(exc) from exc
        self._on_rubbish(exc)

    # -- the subscription, on Redis ----------------------------------------------------

    def _await_confirmation(self) -> None:
        deadline = time.monotonic() + ANSWER_S
        while self._confirmed_count < len(self._queues):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ConnectionError(f"the subscription was not confirmed within {ANSWER_S:g} s")
            self.listen(left_s)

    def _is_readable(self) -> bool:
        established = self._channel.subclient.connection
        return established is not None and bool(established.can_read(timeout=0))

    def _read_subscription(self) -> bool:
        channel = self._channel
        for _ in range(BURST):
            try:
                words = channel.subclient.parse_response(block=False, timeout=ANSWER_S)
            except channel.connection_errors:
                channel._in_listen = None
                raise
            if words:
                self._read(words)
            if not self._wants_more or not self._is_readable():
                break
        return True

    def _read(self, words: Any) -> None:
        heard = self._channel._handle_message(self._channel.subclient, words)
        kind = bytes_to_str(heard["type"])
        if kind == "psubscribe":
            self._confirmed_count += 1
        if not kind.endswith("message"):
            return
        try:
            data = heard["data"]
            if len(data) > ENVELOPE_BYTES_MAX:
                raise Unreadable(f"{len(data)} bytes, more than {ENVELOPE_BYTES_MAX}")
            exchange = self._exchange_of(bytes_to_str(heard["pattern"]))
            self._channel._deliver_fanout_message(loads(bytes_to_str(data)), exchange)
        except Exception as exc:  # noqa: BLE001 - nothing that is sent to us ends this
            self._drop(exc)

    def _exchange_of(self, pattern: str) -> str:
        """Whose subscription it is that a message came by."""
        topic_of = self._channel._get_subscribe_topic
        # Where keys have a prefix, so has the pattern.
        found = (one for one in self._queues if pattern.endswith(topic_of(one.name)))
        return str(next(found, self._queues[0]).exchange.name)


def _lost(exc: BaseException) -> ConnectionError:
    return ConnectionError(f"{type(exc).__name__}: {exc}")
