"""Which queues a worker consumes, changed while it runs. On the loop's thread.

A *paused* queue is still this worker's: messages stay in it until it is resumed, here or after a
lost connection alike. What was taken before goes on.

| a pause that is told            | holds for                                                   |
| ------------------------------- | ----------------------------------------------------------- |
| with a stamp, to everybody      | the cluster: nodes tell it to each other (`cluster.pauses`) |
| without one, to some            | this worker, until it ends                                  |

A queue that the broker *refuses*, because it is there with other arguments, the user lacks a
permission or another connection has it for itself, is left out, so that it does not stop the
others. It is tried again once a minute, and on every connection unless it was a consumer that was
refused. RabbitMQ closes the channel of a refusal: so all but the first try of a connection is made
apart (`trial`), and costs the tasks that run nothing. What may pass by itself ends no worker: one
that has no other queue connects again.

The last command holds here, whichever it was. What holds in the cluster is kept by the machine of
this node (`cluster.node`), and what other nodes tell is heard on other threads. A worker that may
not be paused, or not be resumed (`control_allow`), knows it, and passes it on, but does not obey.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kombu import Exchange, Queue

from umbel.broker.sessions.permanent import ASK_AGAIN_S, Refused
from umbel.broker.tasks.declarations import declare_each, trial
from umbel.cluster.node import PauseCommanded
from umbel.cluster.pauses import Pauses

if TYPE_CHECKING:
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.consumer")


class Consumption:
    """The queues of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.paused: set[str] = set()  # here, for whatever reason, consumed or not
        self._lock = threading.Lock()
        self.refused_queues: dict[str, str] = {}  # by the broker, and why
        self._unreadable: set[str] = set()  # those of them that could be declared, not consumed
        self._logged: dict[str, str] = {}
        self._timer: Any = None  # while queues are refused on this connection

    @property
    def queues(self) -> list[Queue]:
        """What is to be consumed now."""
        consumed, left_out = (
            self._worker.app.queues.consumed,
            self.paused | self.refused_queues.keys(),
        )
        return [queue for name, queue in consumed.items() if name not in left_out]

    @property
    def _pauses(self) -> Pauses:
        """Those of the cluster."""
        return self._worker.gossip.node.pauses

    # -- queues that the broker refuses --------------------------------------------------

    def declare(self) -> None:
        """Declare what is to be consumed; a worker that gets none of it may end."""
        for name in self.refused_queues.keys() - self._unreadable:
            del self.refused_queues[name]
        wanted = self.queues
        causes = self._declare(wanted)
        if wanted and not self.queues:
            for cause in causes:
                if cause.may_pass:  # sooner than in a minute: there is nothing else to do
                    raise ConnectionError(cause.text)
            reasons = "; ".join(f"{name}: {why}" for name, why in self.refused_queues.items())
            url = self._worker.consumer.url
            self._worker.consumer.give_up(f"{url} refuses every queue of this worker: {reasons}")
        if self.refused_queues:
            self._ask_later()

    def end(self) -> None:
        """The connection ends: nothing is asked on it any more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def leave_out(self, cause: Refused) -> bool:
        """Leave out the queue that an answer of the broker names; False when none would be left.

        If that may pass, all of them are tried with the next connection instead.
        """
        for queue in self.queues:
            if f"queue '{queue.name}'" not in cause.text:
                continue
            if "NOT_FOUND" in cause.text and not queue.no_declare:
                return True  # it was deleted just now, and is declared with the next connection
            self._unreadable.add(queue.name)
            self._refused(queue.name, cause)
            if not self.queues and cause.may_pass:
                for name in list(self._unreadable):
                    self._forget_refusal(name)
            return bool(self.queues)
        return False

    def report_consumed(self) -> None:
        """Log which queues that were left out are consumed now."""
        for name in self._logged.keys() - self.refused_queues.keys() - self.paused:
            del self._logged[name]
            if name in self._worker.app.queues.consumed:
                logger.info("Queue %s is consumed now", name)

    def _declare(self, queues: Iterable[Queue]) -> list[Refused]:
        consumer = self._worker.consumer
        if consumer.connection is None:
            return []
        found = declare_each(consumer.connection, consumer.channel, queues)
        for name, cause in found.items():
            self._refused(name, cause)
        return list(found.values())

    def _refused(self, name: str, cause: Refused) -> None:
        self.refused_queues[name] = str(cause)
        if self._logged.get(name) != str(cause):
            logger.error("Queue %s is left out: %s", name, cause)
            self._logged[name] = str(cause)

    def _ask_later(self) -> None:
        if self._timer is None:
            self._timer = self._worker.timer.call_repeatedly(ASK_AGAIN_S, self._ask_again)

    def _ask_again(self) -> None:
        consumed = self._worker.app.queues.consumed
        for name in list(self.refused_queues):
            reason = self.refused_queues.pop(name)
            if name in consumed and name not in self.paused:
                self._begin(consumed[name])
            elif name in consumed:
                self.refused_queues[name] = reason

    def _forget_refusal(self, name: str) -> None:
        self.refused_queues.pop(name, None)
        self._unreadable.discard(name)

    def add(
        self, name: str, *, exchange: str, exchange_type: str, routing_key: str, **options: Any
    ) -> None:
        """Consume one more queue; one that is known by its name is taken as it is known."""
        queues = self._worker.app.queues
        queue = queues.get(name)
        if queue is None:
            kind = Exchange(exchange, type=exchange_type, durable=options.get("durable", True))
            queue = Queue(name, kind, routing_key=routing_key, **options)
        rests = self._pauses.is_paused(name)  # in the cluster: that is kept
        self._forget_refusal(name)
        before = queues.consume_from
        is_new = name not in queues.consumed
        if is_new:  # before its first message comes
            queues.consume_from = {**queues.consumed, name: queue}
        try:
            self._declare([queue]) if rests else self._begin(queue)
            if name in self.refused_queues:
                reason = self.refused_queues[name]
                raise ValueError(f"queue {name} cannot be consumed: {reason}")
        except BaseException:
            if is_new:
                queues.consume_from = before
                self._forget_refusal(name)
            raise
        queues.add(queue)
        if not rests:
            self.paused.discard(name)

    def drop(self, name: str) -> None:
        """Consume a queue no longer, also after a lost connection."""
        self._worker.app.queues.deselect([name])
        self._forget_refusal(name)
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
            holds = bool(self._worker.gossip.step(PauseCommanded(name, stamp, paused)))
            if holds and paused:
                self.paused.add(name)  # whether it is consumed here or will be
        return holds

    def heed(self, queues: Iterable[str]) -> None:
        """Other nodes told of these queues what holds now; the loop obeys when it turns."""
        panel = self._worker.panel
        with self._lock:
            may = {True: self._worker.may("pause"), False: self._worker.may("resume")}
            holding = {name: self._pauses.is_paused(name) for name in queues}
            changed = {name: paused for name, paused in holding.items() if may[paused]}
            if not changed or panel is None:
                return
            self.paused.difference_update(changed)
            self.paused.update(name for name, paused in changed.items() if paused)
        panel.soon(lambda: self._obey(changed))

    def _obey(self, names: Iterable[str]) -> None:
        """Consume what is to be consumed now; on the loop's thread, and maybe late."""
        for name in names:
            queue = self._worker.app.queues.consumed.get(name)
            if name in self.paused:
                self._end(name)
            elif queue is not None:
                self._begin(queue)

    # -- on the connection ---------------------------------------------------------------

    def _begin(self, queue: Queue) -> None:
        connection, tasks = self._worker.consumer.connection, self._worker.consumer.tasks
        if tasks is None or tasks.consuming_from(queue):
            return
        self._forget_refusal(queue.name)
        self._declare([queue])
        if queue.name in self.refused_queues:
            self._ask_later()
            return
        with contextlib.nullcontext() if connection is None else trial(connection, queue) as cause:
            if cause is None:
                tasks.add_queue(queue)
                tasks.consume()
            else:
                self._unreadable.add(queue.name)
                self._refused(queue.name, cause)
                self._ask_later()
        self.report_consumed()

    def _end(self, name: str) -> None:
        tasks = self._worker.consumer.tasks
        if tasks is not None and tasks.consuming_from(name):
            tasks.cancel_by_queue(name)
