"""What happens to messages whose connection is gone, and to the tasks that run on.

Where messages outlive connections (`TaskChannel.lease_s`) they are settled on the next channel.
Where they belong to a connection, as on RabbitMQ, the broker delivers them again, marked as
redelivered, and what this worker holds of them is void. Then a message that comes again is
recognised by `Key`:

| what this worker knows of its task        | the message                                         |
| ----------------------------------------- | --------------------------------------------------- |
| it runs, and is acknowledged late         | is *adopted*: settled when the task ends            |
| it runs, and was acknowledged early       | is acknowledged: the acknowledgement was lost       |
| it has ended since, or just before        | is settled in the same way as before, and not run   |
| it was put back, or cancelled             | runs                                                |
| nothing                                   | runs                                                |

Acknowledgements that were written just before a connection is lost may not have been read, so the
last `RECENT_MAX` of them are kept (`recent`); those of the last `RECENT_S` count. What was settled
is remembered for `REMEMBERED_S` after the loss. Only messages that are marked as redelivered are
looked up: two messages with one id which a client has sent both run.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from umbel.broker.task_channel import task_channel

if TYPE_CHECKING:
    from umbel.wire.tasks import TaskHeader
    from umbel.worker.request import Request
    from umbel.worker.worker import Worker

logger = logging.getLogger("umbel.worker")

RECENT_MAX: Final = 1024
RECENT_S: Final = 120.0
SETTLED_MAX: Final = 10_000
REMEMBERED_S: Final = 3600.0
# How a message was settled for good; after anything else it is to run again.
ACK, REJECT = "ack", "reject"
FINAL: Final = frozenset({ACK, REJECT})


class Key(NamedTuple):
    """What a message is recognised by; a retry, or a replacement, of the same id is another one.

    So is one that was sent at another moment, where the sender tells it.
    """

    id: str
    task: str
    retries: int | None
    nesting: int | None
    eta: str | None
    clock: int | None
    sent_ms: int | None

    @classmethod
    def of(cls, header: TaskHeader) -> Key:
        """The key of a message with this header."""
        return cls(
            header.id,
            header.task,
            header.retries,
            header.replaced_task_nesting,
            header.eta,
            _number(header.umbel_clock),
            _number(header.umbel_sent),
        )


def _number(value: Any) -> int | None:
    return value if type(value) is int else None


Recent = tuple[str, "TaskHeader", float]  # how a message was settled, its header, and when


class Settled(NamedTuple):
    """How a message was settled that may come again, and until when it is remembered."""

    how: str
    until: float


class Salvage:
    """Of one worker; everything happens on the loop thread."""

    def __init__(self, worker: Worker, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._clock = clock
        self._orphans: list[Any] = []  # messages of a lost connection that nobody works on
        self._unsettled: list[tuple[Any, Callable[[], None]]] = []  # how that failed with it
        self._lasting: list[Any] = []  # timers
        self._running: dict[Key, Request] = {}  # whose messages come again
        self._settled: OrderedDict[Key, Settled] = OrderedDict()
        self.adopted: set[int] = set()  # requests, by their identity
        # Settled on this connection: where messages are tied to it, else nothing is kept.
        self.recent: deque[Recent] | None = None

    def failed(self, exc: BaseException, message: Any, call: Callable[[], None]) -> None:
        """`call`, which settles a message, found the connection broken: rebuild it."""
        self._unsettled.append((message, call))
        if message.channel is self._worker.consumer.channel:
            self._worker.consumer.failure = exc

    def deliveries_void(self) -> None:
        """The connection is gone: what it brought will be delivered again by the broker.

        Running tasks go on; their messages are settled on another channel only where that has a
        meaning, see `reclaim` and `adopt`.
        """
        worker, tally = self._worker, self._worker.tally
        lost = task_channel(worker.consumer.channel)
        lost.disown()
        waiting = {id(request) for request in worker.take_unbegun()}
        # Where messages outlive connections nothing will be delivered again.
        tied = lost.lease_s is None
        cancel = tied and worker.app.conf.worker_cancel_long_running_tasks_on_connection_loss
        self.adopted.clear()
        worker.prefetch.adopted = 0
        for key, request in list(tally.reserved.items()):
            known, request.void = request.void, True
            if request.timer is not None or key in waiting:
                worker.unhold(request)
                tally.release(request)
                self._orphans.append(request.message)
            else:
                # In the pool, even if the word that it has begun is still in the inbox.
                self._owe(request, cancel and not known)
                if tied and not request.dropped:
                    self._expect(request)
        if tied:
            self._doubt_recent()
        self._drop_timers()
        worker.prefetch.forget_sent()

    def reclaim(self, channel: Any) -> None:
        """There is a new channel: where messages outlive connections, see to the old ones.

        Those of running tasks are settled here when the tasks end; those of ended ones, if that
        failed with the old channel, are now. All others go back at once.
        """
        new = task_channel(channel)
        if new.lease_s is None:
            self._orphans.clear()
            self._unsettled.clear()
            self.recent = deque(maxlen=RECENT_MAX)
            return
        while self._unsettled:  # tried once more; if it was no matter of the connection, no more
            message, settle = self._unsettled.pop(0)
            new.adopt(message)
            settle()
        while self._orphans:  # newest first; one that fails to go back is tried again later
            new.put_back(self._orphans[-1])
            self._orphans.pop()
        for request in self._worker.tally.reserved.values():
            if request.void and not request.settled and not request.dropped:
                request.void = False
                if request.owed:
                    self.owe_no_more(request)
                new.adopt(request.message)

    # -- messages that come again ----------------------------------------------------------

    def adopt(self, message: Any, header: TaskHeader) -> bool:
        """A message was delivered again: settle it, now or later, if its task is known here."""
        key = Key.of(header)
        settled, request = self._settled.pop(key, None), self._running.pop(key, None)
        if request is not None and not request.settled:
            self._take_over(request, message)
            return True
        if settled is None or settled.until < self._clock():
            return False
        logger.info(
            "Task %s[%s] was delivered again and is not run again: its message is settled (%s)",
            header.task, header.id, settled.how,
        )  # fmt: skip
        self._worker.settle(message, settled.how)
        if self.recent is not None:  # this, too, may not reach the broker
            self.recent.append((settled.how, header, self._clock()))
        return True

    def _take_over(self, request: Request, message: Any) -> None:
        """The task goes on, and settles this message when it ends."""
        logger.info(
            "Task %s[%s] was delivered again and goes on: its message is adopted",
            request.name, request.id,
        )  # fmt: skip
        request.message = message
        request.void = False
        self.adopted.add(id(request))
        self._worker.prefetch.adopted = len(self.adopted)

    def remember(self, header: TaskHeader, how: str) -> None:
        """A message was settled, and the broker may not know: if it comes again, it is not run.

        Unless it was put back.
        """
        key = Key.of(header)
        if how not in FINAL:
            self._running.pop(key, None)
            self._settled.pop(key, None)
            return
        self._settled[key] = Settled(how, self._clock() + REMEMBERED_S)
        self._settled.move_to_end(key)
        while len(self._settled) > SETTLED_MAX:
            self._settled.popitem(last=False)

    def ended(self, request: Request) -> None:
        """The pool is done with a request whose message was to come again, or has."""
        if id(request) in self.adopted:
            self.adopted.discard(id(request))
            self._worker.prefetch.adopted = len(self.adopted)
        key = Key.of(request.header)
        if self._running.get(key) is request:
            del self._running[key]

    def _expect(self, request: Request) -> None:
        """The message of a running task comes again."""
        self._running[Key.of(request.header)] = request
        if request.settled:  # early, and the broker may not have heard of it
            self.remember(request.header, ACK)

    def _doubt_recent(self) -> None:
        """The broker may not have read what was written last."""
        since = self._clock() - RECENT_S
        for how, header, when in self.recent or ():
            if when >= since:
                self.remember(header, how)
        self.recent = None

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
        if cancel and late and not worker.pool.blocks_loop:
            logger.warning(
                "Task %s[%s] is cancelled: its message will be delivered again",
                request.name, request.id,
            )  # fmt: skip
            request.dropped = True
            if worker.task_events.on:
                worker.task_events.cancelled(request)
            worker.pool.cancel(request.id, signal.SIGTERM)
