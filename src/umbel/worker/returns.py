"""The way back to their queues for messages that this worker will not run.

They go behind all others (`umbel.broker.tail`), in the order in which they came. They are gathered
while the loop turns and sent together: on Redis by the loop itself, on RabbitMQ by the side thread,
which publishes copies; the originals are acknowledged on the loop when those are confirmed.

What can not go to the tail is rejected: it goes to the head on RabbitMQ. Nothing is lost when the
connection is: RabbitMQ delivers again what was not acknowledged, and on Redis it is given back on
the next connection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from umbel.broker.connections import driver
from umbel.broker.tail import Copier, Copy, copy_of, sibling
from umbel.broker.task_channel import task_channel

if TYPE_CHECKING:
    from umbel.worker.consumer import Consumer
    from umbel.worker.request import Request

logger = logging.getLogger("umbel.consumer")

# So many are sent together; when a connection breaks, at most so many are there twice.
CHUNK = 100
# A broker that did not take copies is asked again after so long.
MISTRUST_S = 60.0


class Returns:
    """Takes messages of one consumer back, over all of its connections. On the loop thread."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._worker = consumer.worker
        self._gathered: list[Request] = []
        self._copying_count = 0
        self._copier: Copier | None = None
        self._mistrusted_until = 0.0

    @property
    def pending(self) -> int:
        """How many are on their way."""
        return len(self._gathered) + self._copying_count

    def add(self, request: Request) -> None:
        """The message of this request goes back, when the loop turns next."""
        if not self._gathered:
            self._worker.timer.call_after(0, self.flush, ())
        self._gathered.append(request)

    def flush(self) -> None:
        """Send what was gathered."""
        requests, self._gathered = self._gathered, []
        for start in range(0, len(requests), CHUNK):
            self._send(requests[start : start + CHUNK])

    def void(self, exc: BaseException) -> None:
        """The connection is lost, and with it what was on its way."""
        requests, self._gathered = self._gathered, []
        self._postpone(requests, exc)
        self.close()

    def close(self) -> None:
        """The consumer stops, or begins anew."""
        copier, self._copier = self._copier, None
        if copier is not None:
            copier.close()

    def _send(self, requests: list[Request]) -> None:
        consumer = self._consumer
        known = [(r, queue) for r in requests if (queue := consumer.queue_of(r.message))]
        if task_channel(consumer.channel).can_move:
            self._move(known)
        elif self._may_copy():
            self._copy(known)
        else:
            known = []
        sent = {id(request) for request, _ in known}
        for request in requests:
            if id(request) not in sent:
                request.reject(requeue=True)

    def _move(self, known: Sequence[tuple[Request, str]]) -> None:
        try:
            messages = [request.message for request, _ in known]
            moved = task_channel(self._consumer.channel).move(messages)
        except self._worker.connection_errors as exc:
            self._postpone([request for request, _ in known], exc)
            return
        for (request, _), done in zip(known, moved, strict=True):
            if done:
                request.settled = True
            else:
                request.reject(requeue=True)

    def _postpone(self, requests: Sequence[Request], exc: BaseException) -> None:
        for request in requests:
            request.settled = request.void = True
            again = partial(request.message.reject, requeue=True)
            self._worker.salvage.failed(exc, request.message, again)

    def _may_copy(self) -> bool:
        connection = self._consumer.connection
        if connection is None or driver(connection) != "amqp":
            return False
        return time.monotonic() >= self._mistrusted_until

    def _copy(self, known: Sequence[tuple[Request, str]]) -> None:
        connection = self._consumer.connection
        assert connection is not None
        copies: list[tuple[Request, Copy]] = []
        for request, queue in known:
            copy = copy_of(request.message, queue)
            if copy is None:
                request.reject(requeue=True)
            else:
                copies.append((request, copy))
        if not copies:
            return
        copier = self._copier
        if copier is None:
            copier = self._copier = Copier(partial(sibling, connection))
        self._copying_count += len(copies)
        answers: list[tuple[list[bool], Exception | None]] = []
        self._worker.aside(
            lambda: answers.append(copier.publish([copy for _, copy in copies])),
            lambda: self._copied([request for request, _ in copies], *answers[0]),
        )

    def _copied(
        self, requests: Sequence[Request], confirmed: list[bool], failure: Exception | None
    ) -> None:
        self._copying_count -= len(requests)
        if failure is not None:
            logger.warning(
                "tasks can not go behind the others of their queue for %.0f s: %s: %s",
                MISTRUST_S, type(failure).__name__, failure,
            )  # fmt: skip
            self._mistrusted_until = time.monotonic() + MISTRUST_S
        channel = self._consumer.channel
        for request, done in zip(requests, confirmed, strict=True):
            if request.message.channel is not channel:
                # The broker has taken it back. It has not run, so it is not known to `salvage`:
                # its copy, which looks the same, would be taken for it.
                request.settled = request.void = True
            elif done:
                request.ack_copied()
            else:
                request.reject(requeue=True)
