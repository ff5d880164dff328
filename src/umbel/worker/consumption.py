"""Which queues a worker consumes, changed while it runs. On the loop's thread.

A *paused* queue is still this worker's: messages stay in it until it is resumed, here or after a
lost connection alike. What was taken before goes on.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from kombu import Exchange, Queue

if TYPE_CHECKING:
    from umbel.worker.worker import Worker


class Consumption:
    """The queues of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.paused: set[str] = set()

    @property
    def queues(self) -> list[Queue]:
        """What is to be consumed now."""
        consumed = self._worker.app.queues.consumed
        return [queue for name, queue in consumed.items() if name not in self.paused]

    def add(
        self, name: str, *, exchange: str, exchange_type: str, routing_key: str, **options: Any
    ) -> None:
        """Consume one more queue; one that is known by its name is taken as it is known."""
        queues = self._worker.app.queues
        queue = queues.get(name)
        if queue is None:
            kind = Exchange(exchange, type=exchange_type, durable=options.get("durable", True))
            queue = Queue(name, kind, routing_key=routing_key, **options)
        self._declare(queue)
        if name not in queues.consumed:
            queues.consume_from = {**queues.consumed, name: queue}
        queues.add(queue)
        self.paused.discard(name)
        self._begin(queue)

    def drop(self, name: str) -> None:
        """Consume a queue no longer, also after a lost connection."""
        self._worker.app.queues.deselect([name])
        self.paused.discard(name)
        self._end(name)

    def pause(self, name: str) -> bool:
        """Leave messages in a queue for now; False when it is not one of ours."""
        if name not in self._worker.app.queues.consumed:
            return False
        self.paused.add(name)
        self._end(name)
        return True

    def resume(self, name: str) -> bool:
        """Take messages from a paused queue again; False when it was not paused."""
        if name not in self.paused:
            return False
        self.paused.discard(name)
        self._begin(self._worker.app.queues.consumed[name])
        return True

    def _declare(self, queue: Queue) -> None:
        """See whether the broker takes it, before anything depends on it.

        On a channel of its own: a refusal closes the channel, and must not end the consumer.
        """
        connection = self._worker.consumer.connection
        if connection is not None:
            with contextlib.closing(connection.channel()) as channel:
                queue(channel).declare()

    def _begin(self, queue: Queue) -> None:
        consumer = self._worker.consumer
        tasks = consumer.tasks
        if tasks is not None and not tasks.consuming_from(queue):
            tasks.add_queue(queue)
            tasks.consume()
            if consumer.taker is not None:
                consumer.taker.look_again()  # or it would wait for news of the other queues

    def _end(self, name: str) -> None:
        tasks = self._worker.consumer.tasks
        if tasks is not None and tasks.consuming_from(name):
            tasks.cancel_by_queue(name)
