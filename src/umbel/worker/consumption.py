"""Which queues a worker consumes, changed while it runs. On the loop's thread.

A *paused* queue is still this worker's: messages stay in it until it is resumed, here or after a
lost connection alike. What was taken before goes on.

| a pause that is told            | holds for                                                   |
| ------------------------------- | ----------------------------------------------------------- |
| with a stamp, to everybody      | the cluster: nodes tell it to each other (`cluster.pauses`) |
| without one, to some            | this worker, until it ends                                  |

The last command holds here, whichever it was. What other nodes tell is heard on other threads. A
worker that may not be paused (`control_allow`) knows it, and passes it on, but does not obey.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kombu import Exchange, Queue

from umbel.cluster.pauses import Pauses

if TYPE_CHECKING:
    from umbel.worker.worker import Worker


class Consumption:
    """The queues of one worker."""

    def __init__(self, worker: Worker, clock: Callable[[], float] = time.time) -> None:
        self._worker = worker
        self._clock = clock
        self.paused: set[str] = set()  # here, for whatever reason, consumed or not
        self._lock = threading.Lock()
        self._pauses = Pauses()  # of the cluster

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
        if not self._pauses.is_paused(name):  # in the cluster: that is kept
            self.paused.discard(name)
        if name not in self.paused:
            self._begin(queue)

    def drop(self, name: str) -> None:
        """Consume a queue no longer, also after a lost connection."""
        self._worker.app.queues.deselect([name])
        if not self._pauses.is_paused(name):
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
        queue = self._worker.app.queues.consumed.get(name)
        if queue is None:
            return False
        self._begin(queue)
        return True

    # -- the cluster: any thread ---------------------------------------------------------

    def say(self, name: str, stamp: float, paused: bool) -> bool:
        """A queue is paused or resumed everywhere; False when a later word about it holds."""
        with self._lock:
            holds = self._pauses.say(name, stamp, paused, self._clock())
            if holds and paused:
                self.paused.add(name)  # whether it is consumed here or will be
        return holds

    def take_over(self, told: Any) -> None:
        """Another node tells which queues are paused; the loop obeys when it turns."""
        panel = self._worker.panel
        with self._lock:
            changed = self._pauses.merge(told, self._clock())
            if not changed or panel is None or not panel.may("pause"):
                return
            self.paused.difference_update(changed)
            self.paused.update(name for name, paused in changed.items() if paused)
        panel.soon(lambda: self._obey(changed))

    def told(self) -> dict[str, list[Any]]:
        """What this node tells of paused queues."""
        with self._lock:
            return self._pauses.told()

    @property
    def refused(self) -> dict[str, int]:
        """How many words of others about pauses were not taken as they came, by reason."""
        return dict(self._pauses.counts)

    def summary(self) -> str:
        """What heartbeats tell of paused queues: equal for equal knowledge, empty for none."""
        with self._lock:
            return self._pauses.summary()

    def _obey(self, names: Iterable[str]) -> None:
        """Consume what is to be consumed now; on the loop's thread, and maybe late."""
        for name in names:
            queue = self._worker.app.queues.consumed.get(name)
            if name in self.paused:
                self._end(name)
            elif queue is not None:
                self._begin(queue)

    # -- on the connection ---------------------------------------------------------------

    def _declare(self, queue: Queue) -> None:
        """See whether the broker takes it, before anything depends on it.

        On a channel of its own: a refusal closes the channel, and must not end the consumer.
        """
        connection = self._worker.consumer.connection
        if connection is not None:
            with contextlib.closing(connection.channel()) as channel:
                queue(channel).declare()

    def _begin(self, queue: Queue) -> None:
        tasks = self._worker.consumer.tasks
        if tasks is not None and not tasks.consuming_from(queue):
            tasks.add_queue(queue)
            tasks.consume()

    def _end(self, name: str) -> None:
        tasks = self._worker.consumer.tasks
        if tasks is not None and tasks.consuming_from(name):
            tasks.cancel_by_queue(name)
