"""What becomes of messages whose connection is gone, and of the tasks that run on.

Where messages belong to a connection the broker delivers them again, and what is still known of
them is void. Where they outlive it (`broker.leases`) they are settled on the next channel.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from umbel.broker import leases

if TYPE_CHECKING:
    from umbel.worker.request import Request
    from umbel.worker.worker import Worker

logger = logging.getLogger("umbel.worker")


class Salvage:
    """Of one worker; everything happens on the loop thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._orphans: list[Any] = []  # messages of a lost connection that nobody works on
        self._unsettled: list[tuple[Any, Callable[[], None]]] = []  # how that failed with it
        self._lasting: list[Any] = []  # timers

    def failed(self, exc: BaseException, message: Any, call: Callable[[], None]) -> None:
        """`call`, which settles a message, found the connection broken: rebuild it."""
        self._unsettled.append((message, call))
        if message.channel is self._worker.consumer.channel:
            self._worker.consumer.failure = exc

    def deliveries_void(self) -> None:
        """The connection is gone: what it brought will be delivered again by the broker.

        Running tasks go on; their messages are settled on another channel only where that has a
        meaning, see `reclaim`.
        """
        worker, tally = self._worker, self._worker.tally
        leases.disown(worker.consumer.channel)
        waiting = {id(request) for request in worker.take_unbegun()}
        # Where messages outlive connections nothing will be delivered again.
        tied = leases.lease_s(worker.consumer.channel) is None
        cancel = tied and worker.app.conf.worker_cancel_long_running_tasks_on_connection_loss
        for key, request in list(tally.reserved.items()):
            known, request.void = request.void, True
            if request.timer is not None or key in waiting:
                worker.unhold(request)
                del tally.reserved[key]
                self._orphans.append(request.message)
            else:
                # In the pool, even if the word that it has begun is still in the inbox.
                self._owe(request, cancel and not known)
        self._drop_timers()
        worker.prefetch.forget_sent()

    def reclaim(self, channel: Any) -> None:
        """There is a new channel: where messages outlive connections, see to the old ones.

        Those of running tasks are settled here when the tasks end; those of ended ones, if that
        failed with the old channel, are now. All others go back at once.
        """
        if leases.lease_s(channel) is None:
            self._orphans.clear()
            self._unsettled.clear()
            return
        while self._unsettled:  # tried once more; if it was no matter of the connection, no more
            message, settle = self._unsettled.pop(0)
            leases.adopt(channel, message)
            settle()
        while self._orphans:  # newest first; one that fails to go back is tried again later
            leases.put_back(channel, self._orphans[-1])
            self._orphans.pop()
        for request in self._worker.tally.reserved.values():
            if request.void and not request.settled and not request.dropped:
                request.void = False
                if request.owed:
                    self.owe_no_more(request)
                leases.adopt(channel, request.message)

    # -- timers ------------------------------------------------------------------------

    def keep_timers(self) -> None:
        """What is set before the first connection, by steps of users say, outlives it."""
        self._lasting = [scheduled[2] for scheduled in self._worker.timer.queue]

    def _drop_timers(self) -> None:
        """The lost transport and what it brought set timers; a new one sets its own."""
        timer = self._worker.timer
        kept = [
            (eta, priority, entry)
            for eta, priority, entry in timer.queue
            if any(entry is one for one in self._lasting)
        ]
        timer.clear()
        for eta, priority, entry in kept:
            timer.enter_at(entry, eta, priority)

    # -- tasks that run on -------------------------------------------------------------

    def owe_no_more(self, request: Request) -> None:
        """A task whose message was to come again has ended, or got its message back."""
        request.owed = False
        self._worker.prefetch.debtors -= 1

    def _owe(self, request: Request, cancel: bool) -> None:
        """A task runs on whose message the broker will deliver again."""
        worker = self._worker
        if worker.app.conf.worker_enable_prefetch_count_reduction and not request.owed:
            request.owed = True
            worker.prefetch.debtors += 1
        late = request.strategy.acks_late and not request.dropped
        if cancel and late and not worker.inline:
            logger.warning(
                "Task %s[%s] is cancelled: its message will be delivered again",
                request.name, request.id,
            )  # fmt: skip
            request.dropped = True
            if worker.task_events.on:
                worker.task_events.cancelled(request)
            worker.pool.cancel(request.id, signal.SIGTERM)
