"""Transports under test: one row each, and a consumer that keeps what it gets.

Every test that asks for `row` runs on all of them. A row is a kind of connection: where its broker
is, what `connect` is told, and what is peculiar to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kombu import Connection, Consumer, Queue

from tests.servers import wait_until
from umbel.broker.sessions.connections import connect
from umbel.broker.tasks.lengths import lengths_of

# As long as nothing in a test takes; several seconds where it is to be waited for.
WAIT_S = 20.0


@dataclass(frozen=True)
class Row:
    """A transport, on a broker that is there for one test."""

    name: str
    broker: str  # the fixture that gives its address
    options: dict[str, Any] = field(default_factory=dict)  # of `connect`

    def __str__(self) -> str:
        return self.name

    @property
    def urgent(self) -> int:
        """The priority that goes before all others."""
        return 0 if self.broker == "redis_url" else 9


REDIS_UMBEL = Row("redis-umbel", "redis_url")
REDIS_KOMBU = Row("redis-kombu", "redis_url", {"redis_transport": "kombu"})
REDIS_ROWS = [REDIS_UMBEL, REDIS_KOMBU]
ROWS = [*REDIS_ROWS]


class Desk:
    """A connection that sends and consumes; nothing is acknowledged by itself."""

    def __init__(self, url: str, row: Row, **transport_options: Any) -> None:
        options = {"socket_timeout": 5.0, **transport_options}
        if row.broker != "redis_url":
            options = transport_options
        self.connection: Connection = connect(url, transport_options=options, **row.options)
        self.channel: Any = self.connection.channel()
        self.producer = self.connection.Producer(self.connection.channel())
        self.seen: list[Any] = []
        self.on_message: Callable[[Any], Any] | None = None

    def consume(self, *queues: str | Queue, prefetch: int = 0, **options: Any) -> Consumer:
        wanted = [Queue(one) if isinstance(one, str) else one for one in queues]
        consumer = Consumer(self.channel, wanted, on_message=self._on_message, **options)
        if prefetch:
            consumer.qos(prefetch_count=prefetch, apply_global=True)
        consumer.consume()
        return consumer

    def _on_message(self, message: Any) -> None:
        self.seen.append(message)
        if self.on_message is not None:
            self.on_message(message)

    def ack_all(self, message: Any) -> None:
        """As `on_message`: nothing stays."""
        message.ack()

    def send(self, body: Any, queue: str = "jobs", **options: Any) -> None:
        self.producer.publish(body, exchange="", routing_key=queue, **options)

    def declare(self, *queues: str) -> None:
        for name in queues:
            Queue(name)(self.channel).declare()

    def take(self, count: int, timeout_s: float = WAIT_S) -> list[Any]:
        """Wait until so many messages have come, in all; all of them."""

        def enough() -> bool:
            if len(self.seen) < count:
                self.drain(0.1)
            return len(self.seen) >= count

        wait_until(enough, timeout_s, f"{count} messages (there are {len(self.seen)})")
        return self.seen

    def drain(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            self.connection.drain_events(timeout=timeout_s)

    def bodies(self) -> list[Any]:
        return [message.payload for message in self.seen]

    def size(self, queue: str = "jobs") -> int:
        return int(lengths_of(self.connection, [Queue(queue)])[queue] or 0)

    def close(self) -> None:
        self.connection.close()
