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
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from umbel import files
from umbel.app.declaring import annotate
from umbel.app.events.stamper import Life
from umbel.app.routes import direct_queue
from umbel.app.trust import signing_key
from umbel.cluster.agreed_time import AgreedTime
from umbel.cluster.revocations import HEADER, Revocation, Revocations
from umbel.worker.blueprint import Blueprint
from umbel.worker.control.commands import BUILTIN
from umbel.worker.execution.pools.base import Pool
from umbel.worker.execution.runner import Runner
from umbel.worker.membership.gossip import Gossip
from umbel.worker.membership.mingling import Mingling
from umbel.worker.membership.revocation_events import tell_revoked
from umbel.worker.observe.task_events import TaskEvents
from umbel.worker.runtime.consumer_timeout import ConsumerTimeout
from umbel.worker.runtime.consumption import Consumption
from umbel.worker.runtime.counters import Counters
from umbel.worker.runtime.delivery_driver import DeliveryDriver
from umbel.worker.runtime.errors import BrokerUnreachable
from umbel.worker.runtime.inbox import Inbox
from umbel.worker.runtime.options import Plan, WorkerOptions, plan_for
from umbel.worker.runtime.revoked_messages import RevokedMessages, keep_as_long
from umbel.worker.runtime.steps import WORKER_STEPS
from umbel.worker.runtime.strategy import Receiver

if TYPE_CHECKING:
    from kombu.asynchronous import Hub
    from kombu.asynchronous.timer import Timer

    from umbel.app.events.dispatcher import Dispatcher
    from umbel.app.umbel import Umbel
    from umbel.worker.control.panel import Panel
    from umbel.worker.observe.metrics import Metrics
    from umbel.worker.runtime.autoscale import Autoscaler
    from umbel.worker.runtime.consumer import Consumer
    from umbel.worker.runtime.queue_watch import QueueWatch
    from umbel.worker.runtime.statedb import StateDB

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
        self.counters = Counters()
        self.inbox = Inbox()
        self.stop_wanted = threading.Event()
        self.wall = AgreedTime(time.time)
        self.revocations = Revocations(self.wall, lock=threading.Lock())
        self.driver = DeliveryDriver(self)
        self.deliveries = self.driver.machine
        # Before the pool forks: whoever sends events in a pool process does so for this worker.
        self.life = app.events.life = Life(self.plan.hostname)
        self.events: Dispatcher | None = None
        self.task_events = TaskEvents(self)
        self.queue_watch: QueueWatch | None = None
        self.metrics: Metrics | None = None  # where they are asked for
        self.runner = Runner(app, self.plan.hostname, self.plan.pool)
        self.receiver = Receiver(self)
        signing_key(app)  # refused now, not by the first message
        self.consumption = Consumption(self)
        self.revoked_messages = RevokedMessages(self)
        self.statedb: StateDB | None = None
        self.panel: Panel | None = None
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
        self.cold = False
        self.soft_until: float | None = None
        self.pid = os.getpid()
        self._aside_count = 0
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
        self.deliveries.resize(self.pool.size)

    def shrink(self, n: int = 1) -> None:
        """Run `n` fewer tasks at a time, without ending one."""
        self.pool.shrink(n)
        self.deliveries.resize(self.pool.size)

    # -- revocations -------------------------------------------------------------------

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
        held = self.deliveries.held_of(tasks, headers=headers)
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

    @property
    def busy(self) -> bool:
        """Whether something is under way that ends in a message being settled."""
        return self.deliveries.in_pool > 0 or self._aside_count > 0

    @property
    def saturated(self) -> bool:
        """Whether nothing new can begin before something ends."""
        if self.deliveries.ready:
            return True
        return self.deliveries.in_pool >= self.pool.size and not self.pool.has_room()

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

    @property
    def connection_errors(self) -> tuple[type[BaseException], ...]:
        """What a lost connection looks like on this transport."""
        return self.consumer.connection_errors

    # -- what health checks ask --------------------------------------------------------

    def is_live(self, patience_s: float) -> bool:
        """Whether the loop turns; a solo worker that runs a task counts as turning."""
        if self.pool.blocks_loop and self.deliveries.active:
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
