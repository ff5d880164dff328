"""A worker: takes task messages from the broker and runs them in a pool.

The worker is a blueprint (Timer, Hub, Pool, Consumer); its consumer is another (Connection,
Tasks, Evloop, ...), which is restarted alone when the connection is lost. Everything that
touches the broker or the tables of requests happens on one thread, the loop's. Pool threads,
signal handlers and the side thread reach it through the inbox.

Stopping is *warm* (running tasks end, held messages go back at once) or *cold* (running tasks
are killed; all unacknowledged messages go back). A cold request overtakes a warm one.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from umbel import files
from umbel.app.declaring import annotate
from umbel.app.events.stamper import Life
from umbel.app.routes import direct_queue
from umbel.app.trust import signing_key
from umbel.cluster.agreed_time import AgreedTime
from umbel.cluster.revocations import HEADER, Revocation, Revocations
from umbel.worker.blueprint import Blueprint
from umbel.worker.commands import BUILTIN
from umbel.worker.consumer_timeout import ConsumerTimeout
from umbel.worker.consumption import Consumption
from umbel.worker.errors import BrokerUnreachable
from umbel.worker.gossip import Gossip
from umbel.worker.inbox import Inbox
from umbel.worker.mingling import Mingling
from umbel.worker.options import Plan, WorkerOptions, plan_for
from umbel.worker.pools.base import Pool, Submission
from umbel.worker.prefetch import Prefetch
from umbel.worker.rates import RateLimits
from umbel.worker.request import Request, logs_results
from umbel.worker.revocation_events import tell_revoked
from umbel.worker.revoked_messages import RevokedMessages, keep_as_long
from umbel.worker.runner import Runner
from umbel.worker.salvage import Salvage
from umbel.worker.steps import WORKER_STEPS
from umbel.worker.stored_states import StoredStates
from umbel.worker.strategy import Receiver
from umbel.worker.tally import Tally
from umbel.worker.task_events import TaskEvents

if TYPE_CHECKING:
    from kombu.asynchronous import Hub
    from kombu.asynchronous.timer import Timer

    from umbel.app.events.dispatcher import Dispatcher
    from umbel.app.umbel import Umbel
    from umbel.worker.autoscale import Autoscaler
    from umbel.worker.consumer import Consumer
    from umbel.worker.metrics import Metrics
    from umbel.worker.panel import Panel
    from umbel.worker.queue_watch import QueueWatch
    from umbel.worker.statedb import StateDB

logger = logging.getLogger("umbel.worker")

EXIT_OK, EXIT_COLD = 0, 1


class Worker:
    """One worker process (and its pool)."""

    timer: Timer
    hub: Hub
    pool: Pool
    consumer: Consumer

    def __init__(self, app: Umbel, options: WorkerOptions | None = None) -> None:
        self.app = app
        self.options = options or WorkerOptions()
        app.set_current()
        app.load_modules()
        files.set_umask(files.read_umask(app.conf.file_umask))
        annotate(app)
        self.plan: Plan = plan_for(app, self.options)
        self._select_queues()
        self.tally = Tally()
        self.inbox = Inbox()
        self.prefetch = Prefetch(
            self.plan.concurrency,
            self.plan.prefetch_multiplier,
            app.conf.worker_eta_task_limit,
            self.tally.reserved.__len__,
        )
        self.rates = RateLimits(self, app.conf.worker_parked_task_limit)
        # Before the pool forks: whoever sends events in a pool process does so for this worker.
        self.life = app.events.life = Life(self.plan.hostname)
        self.events: Dispatcher | None = None
        self.task_events = TaskEvents(self)
        self.queue_watch: QueueWatch | None = None
        self.metrics: Metrics | None = None  # where they are asked for
        self.runner = Runner(app, self.plan.hostname, self.plan.pool)
        self.receiver = Receiver(self)
        signing_key(app)  # refused now, not by the first message
        self.wall = AgreedTime(time.time)
        self.consumption = Consumption(self)
        self.revocations = Revocations(self.wall, lock=threading.Lock())
        self.revoked_messages = RevokedMessages(self)
        self.stored_states = StoredStates(self)
        self.statedb: StateDB | None = None
        self.panel: Panel | None = None
        self.salvage = Salvage(self)
        self.consumer_timeout = ConsumerTimeout(self)
        self.mingling = Mingling(self)
        self.gossip = Gossip(self)  # also where it is switched off
        self.autoscaler: Autoscaler | None = None
        self.memory_samples: deque[float] = deque(maxlen=1_000)
        self.on_ready: list[Callable[[Worker], None]] = []
        self.on_task_message: list[Callable[[Any], None]] = []
        self.started_at = time.time()
        self.ready_now = False
        self.last_turn = self.turn_before = time.monotonic()  # when the last two began
        self.stop_wanted = threading.Event()
        self.cold = False
        self.soft_until: float | None = None
        self.pid = os.getpid()
        self._ready: deque[Request] = deque()
        self._in_pool = 0
        self._aside_count = 0
        self._dispatching = False
        self._aside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="umbel-aside")
        self.blueprint = Blueprint("worker", [*WORKER_STEPS, *app.steps["worker"]])
        self.blueprint.create(self)

    def _select_queues(self) -> None:
        queues = self.app.queues
        if self.options.queues:
            queues.select(self.options.queues)
        if self.options.exclude_queues:
            queues.deselect(self.options.exclude_queues)
        if self.app.conf.worker_direct:
            queues.add(direct_queue(self.plan.hostname))

    # -- life --------------------------------------------------------------------------

    def run(self) -> int:
        """Work until asked to stop; returns the exit code."""
        # What is loaded now stays: the collector need not look at it again, and children share it.
        gc.collect()
        gc.freeze()
        try:
            self.blueprint.start(self)
        except BrokerUnreachable as exc:
            # What runs may end: nobody would run it again if it was acknowledged early.
            if self.busy:
                logger.error("%s; the worker ends when its running tasks have", exc)
            raise
        except BaseException:
            self.cold = True
            raise
        finally:
            self.ready_now = False
            self.blueprint.stop(self, terminate=self.cold)
            self._aside.shutdown(wait=not self.cold, cancel_futures=self.cold)
            self.inbox.close()
            self.app.close()
        return EXIT_COLD if self.cold else EXIT_OK

    def stop(self, *, cold: bool = False) -> None:
        """Ask the worker to stop, from any thread; a signal handler needs a thread for it."""
        patience_s = self.app.conf.worker_soft_shutdown_timeout
        if cold and patience_s and self.soft_until is None:
            # A soft stop: warm for a while, then cold. The next request is cold at once.
            self.soft_until = time.monotonic() + patience_s
        elif cold:
            self.cold = True
        consumer: Consumer | None = getattr(self, "consumer", None)  # none yet at the very start
        if consumer is not None and not self.busy:
            consumer.leaving.begin()  # the loop may be waiting for an answer right now
        self.stop_wanted.set()
        self.inbox.wake()
        if self.cold and self.pool.blocks_loop:
            self.pool.terminate()  # the loop is inside of the task, and looks at nothing

    def check_patience(self) -> None:
        """The time that a soft stop gives running tasks may be over."""
        if self.soft_until is not None and time.monotonic() >= self.soft_until and self.busy:
            self.cold = True

    def became_ready(self) -> None:
        """The consumer takes messages now."""
        self.ready_now = True
        for call in self.on_ready:
            call(self)
        logger.info("%s ready.", self.plan.hostname)

    def grow(self, n: int = 1) -> None:
        """Run `n` more tasks at a time; the prefetch window follows. On the loop thread."""
        self.pool.grow(n)
        self.prefetch.concurrency = self.pool.size
        self.dispatch()

    def shrink(self, n: int = 1) -> None:
        """Run `n` fewer tasks at a time, without ending one."""
        self.pool.shrink(n)
        self.prefetch.concurrency = self.pool.size

    # -- requests: ready, held, running, released --------------------------------------

    def ready(self, request: Request) -> None:
        """The request, which waits for nothing else, may run as soon as the pool has room.

        A pool that is busy gets it with others, before the loop waits.
        """
        self._ready.append(request)
        if self._in_pool < self.pool.size:
            self.dispatch()

    def dispatch(self) -> None:
        """Fill the pool from what is ready."""
        if self._dispatching or not self._ready:
            return  # a pool that blocks the loop comes back here from within `fill`
        self._dispatching = True
        refused: list[tuple[Request, str]] = []
        try:
            self.pool.fill(self._jobs(refused))
        finally:
            self._dispatching = False
            for request, why in refused:
                request.strategy.discard(request, why)

    def _jobs(self, refused: list[tuple[Request, str]]) -> Iterator[Submission]:
        """What is ready, one after the other as the pool asks for it.

        What was revoked, or has expired, while it waited is not among it: to be answered later.
        """
        ready, revocations, forward = self._ready, self.revocations, self.app.clock.forward
        measured = self.task_events.on
        told = measured or logs_results()
        while ready and not self.stop_wanted.is_set():
            request = ready.popleft()
            strategy, header, job = request.strategy, request.header, request.job
            if revocations.any or request.expires is not None:
                why = strategy.objection(request)
                if why is not None:
                    refused.append((request, why))
                    continue
            job.clock = forward()
            job.told = told
            if measured:
                job.measured = strategy.tells
            self._in_pool += 1
            self.tally.by_task[header.task] += 1
            soft_s, hard_s = strategy.limits(header)
            yield job, request, soft_s, hard_s, strategy.typical_s

    def released(self, request: Request) -> None:
        """The pool is done with the request."""
        key = id(request)
        self.tally.active.pop(key, None)
        self.tally.release(request)
        self.tally.finished += 1
        self._in_pool -= 1
        if request.owed:
            self.salvage.owe_no_more(request)
        if request.void or self.salvage.adopted:
            self.salvage.ended(request)

    def recall(self) -> None:
        """What the pool has taken and not begun is ready again, before all others."""
        requests = cast("list[Request]", self.pool.recall())
        self._in_pool -= len(requests)
        self._ready.extendleft(reversed(requests))

    def take_unbegun(self) -> list[Request]:
        """What waits for nothing but the pool or a rate limit; it does so no longer."""
        self.recall()
        waiting = [*self._ready, *self.rates.clear()]
        self._ready.clear()
        return waiting

    def reconsider(self) -> None:
        """Something has changed for tasks that the pool may have in hand: decide once more."""
        if self._in_pool > self.pool.size:
            self.recall()
            self.dispatch()

    def hold(self, request: Request, wait_s: float, then: Callable[[Request], None]) -> None:
        """Keep a request until its time has come; it does not count against the window."""
        if request.timer is None:
            self.prefetch.hold(request)
        else:
            _cancel(request.timer)
        request.timer = self.timer.call_after(wait_s, then, (request,))

    def unhold(self, request: Request) -> None:
        """The request waits no longer."""
        if request.timer is not None:
            _cancel(request.timer)
            request.timer = None
            self.prefetch.unhold(request)

    def keep_revoked(self, changed: Sequence[Revocation]) -> None:
        """Write revocations through to the state file, if there is one."""
        if changed and self.statedb is not None:
            self.statedb.save_revoked(changed)

    def learn_revoked(
        self, changed: Sequence[Revocation], method: str, ids: Collection[str] | None = None
    ) -> None:
        """Others have told of these: settle their messages, keep them, tell that we know them.

        `ids` are all that were named, also those that are known or that there is no room for.
        """
        tasks = [one.key for one in changed if one.kind != HEADER] if ids is None else ids
        headers = any(one.kind == HEADER for one in changed)
        held = self.revoked_messages.held(tasks, headers=headers)
        self.revoked_messages.add(tasks, headers=headers)
        self.keep_revoked(changed)
        keep_as_long(self, held)
        tell_revoked(self, changed, method)

    def may(self, name: str) -> bool:
        """Whether `control_allow` lets this worker do what the command of that name does.

        It holds for every way in: what others tell in greetings and events as well.
        """
        if self.panel is not None:
            return self.panel.may(name)
        command = BUILTIN.get(name)
        return command is not None and command.is_allowed(self.app.conf.control_allow)

    def take_waiting(self, requests: Sequence[Request]) -> list[Request]:
        """Those of these requests that nothing works on; but for timers they wait no longer.

        The others are in the pool, or their result is being stored.
        """
        active = self.tally.active
        chosen = {id(one): one for one in requests if id(one) not in active and not one.void}
        rest = {key for key, one in chosen.items() if one.timer is None}
        if rest:
            rest.difference_update(self.rates.take_out(rest))
        if rest and not self._take_ready(rest):
            self.recall()  # some are in the pool, and may not have begun
            self._take_ready(rest)
        return [one for key, one in chosen.items() if key not in rest]

    def _take_ready(self, wanted: set[int]) -> bool:
        """Take what is ready out of its queue, and out of `wanted`; whether that was all."""
        found = wanted.intersection(map(id, self._ready))
        if found:
            self._ready = deque(one for one in self._ready if id(one) not in found)
            wanted -= found
        return not wanted

    def return_waiting(self, requests: Sequence[Request]) -> None:
        """Of these requests, return those that nothing works on to the tails of their queues."""
        for request in self.take_waiting(requests):
            self.return_to_queue(request)
        self.dispatch()

    def return_to_queue(self, request: Request) -> None:
        """This worker will not run it: somebody may, later. It goes behind all others."""
        self.unhold(request)
        self.tally.release(request)
        self.consumer.returns.add(request)

    @property
    def busy(self) -> bool:
        """Whether something is under way that ends in a message being settled."""
        return self._in_pool > 0 or self._aside_count > 0

    @property
    def saturated(self) -> bool:
        """Whether nothing new can begin before something ends."""
        if self._ready:
            return True
        return self._in_pool >= self.pool.size and not self.pool.has_room()

    def give_back(self) -> None:
        """Return every message that is not being executed to its queue, newest first."""
        self.recall()
        running = self.tally.active
        waiting = [r for key, r in self.tally.reserved.items() if key not in running]
        submitted = {id(r) for r in self._ready} | {id(r) for r in waiting if r.timer is not None}
        submitted |= {id(r) for r in self.rates.clear()}
        for request in reversed(waiting):
            if id(request) in submitted:
                self.unhold(request)
                self.tally.release(request)
                request.give_back()
        self._ready.clear()

    # -- the ways to the loop thread ---------------------------------------------------

    def aside(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Do something that may block away from the loop, then `then` on the loop thread.

        What fails is logged; the message is settled all the same, so that no bad backend makes
        a message go round for ever.
        """

        def run() -> None:
            _attempt(work)
            self.inbox.post(done)

        def done() -> None:
            self._aside_count -= 1
            then()

        self._aside_count += 1
        self._aside.submit(run)

    def store_aside(self, work: Callable[[], None]) -> None:
        """Store something away from the caller's thread, whichever that is; nothing follows."""
        self._aside.submit(_attempt, work)

    def settle(self, message: Any, how: str) -> None:
        """Acknowledge or reject (without requeue) a message that became no request."""
        call = message.ack if how == "ack" else partial(message.reject, requeue=False)
        try:
            call()
        except self.connection_errors as exc:
            self.salvage.failed(exc, message, call)

    @property
    def connection_errors(self) -> tuple[type[BaseException], ...]:
        """What a lost connection looks like on this transport."""
        return self.consumer.connection_errors

    # -- what health checks ask --------------------------------------------------------

    def is_live(self, patience_s: float) -> bool:
        """Whether the loop turns; a solo worker that runs a task counts as turning."""
        if self.pool.blocks_loop and self.tally.active:
            return True
        return time.monotonic() - self.last_turn < patience_s

    def is_ready(self) -> bool:
        """Whether the worker takes messages from all of its queues."""
        return self.ready_now and not self.stop_wanted.is_set() and not self.refused_queues

    @property
    def refused_queues(self) -> dict[str, str]:
        """Queues that the broker does not let this worker consume, and why."""
        return self.consumption.refused_queues


def _attempt(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        logger.exception("a result could not be stored")


def _cancel(timer: Any) -> None:
    """Cancel a timer of a request. Its entry stays in the schedule until its time has come."""
    timer.cancel()
    timer.args = ()  # without the request and its message
