"""The way back to their queues for messages that this worker will not run.

They go behind all others (`umbel.broker.tasks.tail`), in the order in which they came. They are
gathered while the loop turns and sent together: on Redis by the loop itself, on RabbitMQ by the
side thread, which publishes copies; the originals are acknowledged on the loop when those are
confirmed.

What cannot go to the tail is rejected: it goes to the head on RabbitMQ. Nothing is lost when the
connection is: RabbitMQ delivers again what was not acknowledged, and on Redis it is given back on
the next connection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from umbel.broker.sessions.connections import driver
from umbel.broker.tasks.tail import Copier, Copy, copy_of, sibling
from umbel.broker.tasks.task_channel import task_channel

if TYPE_CHECKING:
    from umbel.worker.runtime.consumer import Consumer
    from umbel.worker.runtime.delivery_driver import TaskDelivery

logger = logging.getLogger("umbel.consumer")

# Sent together: when a connection breaks, at most this many messages are there twice.
CHUNK = 100
# Seconds until a broker that did not take copies is asked again.
MISTRUST_S = 60.0


class Returns:
    """Takes messages of one consumer back, over all of its connections. On the loop thread."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._worker = consumer.worker
        self._deliveries = consumer.worker.deliveries
        self._gathered: list[TaskDelivery] = []
        self._copying_count = 0
        self._copier: Copier | None = None
        self._mistrusted_until = 0.0

    @property
    def pending(self) -> int:
        """How many are on their way."""
        return len(self._gathered) + self._copying_count

    def add(self, delivery: TaskDelivery) -> None:
        """The message of this delivery goes back, when the loop turns next."""
        if not self._gathered:
            self._worker.timer.call_after(0, self.flush, ())
        self._gathered.append(delivery)

    def flush(self) -> None:
        """Send what was gathered."""
        deliveries, self._gathered = self._gathered, []
        for start in range(0, len(deliveries), CHUNK):
            self._send(deliveries[start : start + CHUNK])

    def connection_lost(self) -> None:
        """The connection is lost; `worker.delivery` sees to what was on its way."""
        self._gathered = []
        self.close()

    def close(self) -> None:
        """The consumer stops, or begins anew."""
        copier, self._copier = self._copier, None
        if copier is not None:
            copier.close()

    def _send(self, deliveries: list[TaskDelivery]) -> None:
        consumer = self._consumer
        known = [(r, queue) for r in deliveries if (queue := consumer.queue_of(r.message))]
        if task_channel(consumer.channel).can_move:
            self._move(known)
        elif self._may_copy():
            self._copy(known)
        else:
            known = []
        sent = {id(delivery) for delivery, _ in known}
        for delivery in deliveries:
            if id(delivery) not in sent:
                self._deliveries.not_returned(delivery)

    def _move(self, known: Sequence[tuple[TaskDelivery, str]]) -> None:
        try:
            messages = [delivery.message for delivery, _ in known]
            moved = task_channel(self._consumer.channel).move(messages)
        except self._worker.connection_errors as exc:
            self._worker.driver.connection_broken(exc, known[0][0].message)
            return
        for (delivery, _), done in zip(known, moved, strict=True):
            if done:
                self._deliveries.returned(delivery)
            else:
                self._deliveries.not_returned(delivery)

    def _may_copy(self) -> bool:
        connection = self._consumer.connection
        if connection is None or driver(connection) != "amqp":
            return False
        return time.monotonic() >= self._mistrusted_until

    def _copy(self, known: Sequence[tuple[TaskDelivery, str]]) -> None:
        connection = self._consumer.connection
        assert connection is not None
        copies: list[tuple[TaskDelivery, Copy]] = []
        for delivery, queue in known:
            copy = copy_of(delivery.message, queue)
            if copy is None:
                self._deliveries.not_returned(delivery)
            else:
                copies.append((delivery, copy))
        if not copies:
            return
        copier = self._copier
        if copier is None:
            copier = self._copier = Copier(partial(sibling, connection))
        self._copying_count += len(copies)
        answers: list[tuple[list[bool], Exception | None]] = []
        self._worker.aside(
            lambda: answers.append(copier.publish([copy for _, copy in copies])),
            lambda: self._copied([delivery for delivery, _ in copies], *answers[0]),
        )

    def _copied(
        self, deliveries: Sequence[TaskDelivery], confirmed: list[bool], failure: Exception | None
    ) -> None:
        self._copying_count -= len(deliveries)
        if failure is not None:
            logger.warning(
                "Cannot return tasks to the end of their queue (%s: %s). Retrying in %.0f s",
                type(failure).__name__, failure, MISTRUST_S,
            )  # fmt: skip
            self._mistrusted_until = time.monotonic() + MISTRUST_S
        for delivery, done in zip(deliveries, confirmed, strict=True):
            if done:
                self._deliveries.copied(delivery)
            else:
                self._deliveries.not_returned(delivery)
