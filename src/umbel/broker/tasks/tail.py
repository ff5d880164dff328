"""Giving a message back behind all others of its queue.

What is rejected goes to the head of a RabbitMQ queue and is delivered next, again and again, so
that nobody sees what lies behind it; a quorum queue counts that and drops the message in the end.
So there it is published once more, as it came, to the queue that it came from, and the delivered
one is acknowledged when the broker has confirmed the copy. Who is cut off in between leaves two,
never none. On Redis one script moves the message, which is always in one place
(`TaskChannel.move`). Everywhere else a rejected message goes behind the others by itself.

The broker sees a copy as new: its time to live begins again, and it comes by the default exchange.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from amqp.basic_message import Message as Content
from kombu import Connection

from umbel.broker.sessions.connections import hang_up
from umbel.broker.sessions.session import opened

# How long copies are waited for. A broker that is short of memory or disk takes none.
CONFIRM_TIMEOUT_S = 10.0
# Written by the broker, and wrong on a copy.
BROKERS_HEADERS = frozenset({"x-delivery-count"})


class Copy(NamedTuple):
    """A message as it came, for the queue that it came from."""

    body: Any
    properties: dict[str, Any]
    queue: str


def copy_of(message: Any, queue: str) -> Copy | None:
    """A copy of an AMQP message; None where it would not be the same, or not go there alone."""
    headers = message.headers
    if "user_id" in message.properties or "CC" in headers or "BCC" in headers:
        return None
    properties = dict(message.properties)
    if BROKERS_HEADERS & headers.keys():
        kept = {key: value for key, value in headers.items() if key not in BROKERS_HEADERS}
        properties["application_headers"] = kept
    return Copy(message.body, properties, queue)


def sibling(connection: Connection) -> Connection:
    """A new, unopened connection to the very broker that an open one goes to.

    Nobody beats for it, and it writes for a bounded time.
    """
    options = {"write_timeout": CONFIRM_TIMEOUT_S, **(connection.transport_options or {})}
    made = connection.clone(alternates=[], heartbeat=0, transport_options=options)
    made.answer_timeout_s = CONFIRM_TIMEOUT_S
    return made


class Copier:
    """Publishes copies, on a connection of its own, from any one thread at a time.

    The connection of the consumer must not publish: a broker that is short of memory stops
    reading from connections that do, and acknowledgements would be stuck behind that.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._busy = threading.Lock()
        self._closed = False
        self._connection: Connection | None = None
        self._channel: Any = None
        self._number = 0
        self._open: dict[int, str] = {}  # published on this channel, not confirmed; their queues
        self._refused: set[int] = set()

    def publish(self, copies: Sequence[Copy]) -> tuple[list[bool], Exception | None]:
        """Publish; which of them the broker has for certain, and why not all."""
        done: list[bool] = []
        failure: Exception | None = None
        with self._busy:
            try:
                # One first: if the broker takes none, at most one copy too many comes of it.
                for part in (copies[:1], copies[1:]):
                    done += self._publish(part)
            except Exception as exc:  # noqa: BLE001 - every transport has its own errors
                failure = exc
                self._hang_up(lost=True)
            if self._closed:
                self._hang_up()
        return done + [False] * (len(copies) - len(done)), failure

    def close(self) -> None:
        """Let the connection go, now or when what is being published is."""
        self._closed = True
        if self._busy.acquire(blocking=False):
            try:
                self._hang_up()
            finally:
                self._busy.release()

    def _publish(self, copies: Sequence[Copy]) -> list[bool]:
        channel = self._channel or self._begin()
        first = self._number + 1
        for copy in copies:
            self._number += 1
            self._open[self._number] = copy.queue
            content = Content(copy.body, **copy.properties)
            # Not the method that may wait for each one, as options of the transport say.
            channel._basic_publish(content, exchange="", routing_key=copy.queue, mandatory=True)
        self._wait()
        returned, self._refused = self._refused, set()
        return [number not in returned for number in range(first, self._number + 1)]

    def _begin(self) -> Any:
        self._connection = connection = opened(self._connect())
        self._channel = channel = connection.channel()
        channel.confirm_select()
        channel.events["basic_ack"].add(self._on_ack)
        channel.events["basic_nack"].add(self._on_nack)
        channel.events["basic_return"].add(self._on_return)
        self._number = 0
        return channel

    def _wait(self) -> None:
        deadline = time.monotonic() + CONFIRM_TIMEOUT_S
        while self._open:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"copies were not confirmed within {CONFIRM_TIMEOUT_S:g} s")
            assert self._connection is not None
            self._connection.drain_events(timeout=left_s)

    def _on_ack(self, number: int, multiple: bool) -> None:
        self._settled(number, multiple)

    def _on_nack(self, number: int, multiple: bool) -> None:
        self._refused |= self._settled(number, multiple)

    def _on_return(self, exc: Exception, exchange: str, queue: str, content: Any) -> None:
        # The queue is gone. This comes before the confirmation of what could not be put there.
        self._refused |= {number for number, name in self._open.items() if name == queue}

    def _settled(self, number: int, multiple: bool) -> set[int]:
        settled = {n for n in self._open if n <= number} if multiple else {number}
        for one in settled:
            self._open.pop(one, None)
        return settled

    def _hang_up(self, *, lost: bool = False) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        self._open.clear()
        self._refused.clear()
        if connection is not None:
            hang_up(connection, lost=lost)
