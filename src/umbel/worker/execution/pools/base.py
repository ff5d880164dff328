"""The contract between the consumer and whatever runs its jobs.

`Pool.submit` hands over one job together with its watcher; `Pool.fill` as many as there is room
for. The watcher hears `accepted` when the job begins to run, then exactly one final call:
`finished`, `hard_limit`, `lost` or `terminated`. `accepted` precedes every final call, except
`terminated` and `lost` of a job that never began. A pool that learns of beginning and end at
once says both with one call, `ran`. A job that `fill` cannot hand over ends with `unfit`.
Watchers are called on the thread of the worker's loop, which every pool gets to by itself.
When `terminate` has returned nothing more is reported: those messages belong to the broker again.
A watcher that raises is logged and does not disturb the pool.

Limits count from `accepted`. The soft limit raises `SoftTimeLimitExceeded` inside `run`; what runs
there may call `disarm_soft_limit()` once the task's own code has ended, so that a late soft limit
does not interrupt the storing of a result.

`run` is expected to turn every error of a task into a result; whatever escapes it all the same
(SystemExit and MemoryError included) becomes a FAILURE result here and never ends a pool.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

from umbel.app.trace import last_lines, traceback_text
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.redaction import redacted_text
from umbel.wire.reprs import safe_repr
from umbel.worker.execution.jobs import Job, JobResult
from umbel.worker.runtime.inbox import Inbox

logger = logging.getLogger("umbel.pool")

_CLASSES = {
    "prefork": "umbel.worker.execution.pools.prefork.pool:PreforkPool",
    "threads": "umbel.worker.execution.pools.threads:ThreadsPool",
    "gevent": "umbel.worker.execution.pools.gevent:GeventPool",
    "asyncio": "umbel.worker.execution.pools.asyncio:AsyncioPool",
    "solo": "umbel.worker.execution.pools.solo:SoloPool",
}
POOL_NAMES = tuple(_CLASSES)


class Watcher(Protocol):
    """Hears what happens to one job: on the loop's thread, or without a loop on the pool's."""

    def accepted(self, pid: int, when: float) -> None:
        """Execution begins; `when` is monotonic time."""

    def soft_limit(self, limit_s: float) -> None:
        """The soft limit has passed; the job still runs."""

    def finished(self, result: JobResult) -> None:
        """Final: the job ended by itself."""

    def ran(self, pid: int, when: float, result: JobResult) -> None:
        """Final: `accepted` and `finished` in one."""

    def unfit(self, exc: Exception) -> None:
        """Final: the job cannot be handed to where it would run."""

    def hard_limit(self, limit_s: float) -> None:
        """Final: the hard limit has passed and the job was ended."""

    def lost(self, reason: str) -> None:
        """Final: the process that ran it died, as in "signal 9 (SIGKILL)" or "exit code 3"."""

    def terminated(self, signum: int) -> None:
        """Final: it was ended because `cancel` was called."""


# A job, its watcher, soft and hard limit, and how long such jobs take, where that is known:
# prefork sends several short ones to a child at once.
Submission = tuple[Job, Watcher, float | None, float | None, float | None]


@dataclass(slots=True, eq=False)
class WorkItem:
    """A job on its way through a pool, with its limits; `settled` once its end is reported."""

    job: Job
    watcher: Watcher
    soft_s: float | None
    hard_s: float | None
    settled: bool = field(default=False, init=False)


def _nothing() -> None:
    """The default of what `PoolOptions` has called."""


@dataclass(slots=True, kw_only=True)
class PoolOptions:
    """How a pool is built; what does not apply to a pool is ignored by it."""

    concurrency: int
    run: Callable[[Job], JobResult]
    run_async: Callable[[Job], Awaitable[JobResult]] | None = None
    """asyncio only: awaited for the jobs of which `is_async` is true."""
    is_async: Callable[[Job], bool] | None = None
    cpus: Sequence[int] = ()
    """prefork only: each child is bound to one of these CPUs, the one with the fewest children."""
    max_tasks_per_child: int | None = None
    """prefork only: a child is replaced after this many jobs; caps leaks, costs a fork each."""
    max_memory_per_child_kib: int | None = None
    """prefork only: a child whose resident memory is above this after a job is replaced."""
    child_started: Callable[[], None] = _nothing
    """prefork only: runs first in each new child, after inherited files were let go."""
    child_ending: Callable[[], None] = _nothing
    """prefork only: runs last in each child that ends in order."""
    loop: Inbox | None = None
    """Watchers are called on the thread of this loop. Solo calls them where `fill` was called."""
    on_room: Callable[[], None] = _nothing
    """Called where watchers are, when there may be room for more jobs after one has ended."""
    overdue: Callable[[], None] = _nothing
    """prefork only: called on a thread of the pool when jobs wait in a child behind one that
    takes longer than was expected; `recall` gets them out of there."""
    proc_alive_timeout_s: float = 4.0
    """prefork only: a child that does not report in this time is killed and tried again."""


class Pool(ABC):
    """Runs jobs, `size` at a time; further ones wait inside, first in, first out."""

    name: ClassVar[str]
    green: ClassVar[bool] = False
    blocks_loop: ClassVar[bool] = False  # `fill` returns when the jobs have ended

    def __init__(self, options: PoolOptions) -> None:
        if options.concurrency < 1:
            raise ImproperlyConfigured(
                f"concurrency {options.concurrency} of the {self.name} pool: must be at least 1"
            )
        self.options = options
        self._target = options.concurrency

    @abstractmethod
    def start(self) -> None:
        """Begin to serve; called once."""

    @abstractmethod
    def submit(
        self, job: Job, watcher: Watcher, soft_s: float | None, hard_s: float | None
    ) -> None:
        """Take one job; raises `PoolClosed` after close or terminate, and then keeps nothing."""

    def fill(self, jobs: Iterator[Submission]) -> None:
        """Take as many of these as would begin soon; what there is no room for is not asked for.

        `jobs` may be asked with a lock of the pool's held. One that a closed pool was given is
        dropped.
        """
        while self.has_room() and (submission := next(jobs, None)) is not None:
            job, watcher, soft_s, hard_s, _ = submission
            try:
                self.submit(job, watcher, soft_s, hard_s)
            except PoolClosed:
                return
            except Exception as exc:  # noqa: BLE001 - the watcher hears it
                self._ended(watcher.unfit, exc)

    @abstractmethod
    def has_room(self) -> bool:
        """Whether one more job would begin soon."""

    def recall(self) -> list[Watcher]:
        """Give up jobs that have not begun, oldest first: their watchers hear nothing more.

        A pool may have none to give up: whoever submits no more than `size` has them himself.
        """
        return []

    @abstractmethod
    def close_and_join(self, timeout_s: float | None) -> bool:
        """Warm stop: no new jobs, those taken end. False: they had not when time was up."""

    @abstractmethod
    def terminate(self) -> None:
        """Cold stop, at once; watchers of unfinished jobs are not called. Idempotent."""

    @abstractmethod
    def cancel(self, job_id: str, signum: int) -> bool:
        """End one job, running or waiting; False when it is not here (any more)."""

    @abstractmethod
    def grow(self, n: int) -> None:
        """Run `n` more jobs at a time."""

    @abstractmethod
    def shrink(self, n: int) -> None:
        """Run `n` fewer at a time, without ending one; ValueError when none would be left."""

    @abstractmethod
    def restart(self) -> None:
        """Replace what runs jobs, each part when its present job has ended."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """The `pool` part of the `stats` reply."""

    @property
    def size(self) -> int:
        """How many jobs may run at once."""
        return self._target

    def _report(self, call: Callable[..., object], *args: Any) -> None:
        """Call a watcher, or have the loop do it."""
        loop = self.options.loop
        if loop is None:
            notify(call, *args)
        else:
            loop.post(partial(notify, call, *args))

    def _ended(self, call: Callable[..., object], *args: Any) -> None:
        """The same for the final call of a job, which leaves room for another one."""

        def end() -> None:
            notify(call, *args)
            self.options.on_room()

        loop = self.options.loop
        if loop is None:
            notify(end)
        else:
            loop.post(end)  # which logs what fails

    def _described(self, **more: Any) -> dict[str, Any]:
        cls = type(self)
        return {
            "implementation": f"{cls.__module__}:{cls.__qualname__}",
            "max-concurrency": self.size,
            "max-tasks-per-child": "N/A",
            "put-guarded-by-semaphore": False,
            "timeouts": [0, 0],
            **more,
        }

    def _checked_shrink(self, n: int) -> int:
        """The size after shrinking by `n`."""
        if n < 0 or self.size - n < 1:
            raise ValueError(f"cannot shrink a pool of {self.size} by {n}: at least one must stay")
        return self.size - n


class JobEnded(BaseException):
    """Raised inside a job that the pool has ended and reported; nothing of it counts any more.

    Not an Exception, so that tasks let it pass, and nobody mistakes it for an error of theirs.
    """


class PoolClosed(RuntimeError):
    """A job was submitted to a pool that has been closed."""


def pool_class(name: str) -> type[Pool]:
    """The pool of that name, imported now; ImproperlyConfigured says what to choose or install."""
    try:
        module, _, attribute = _CLASSES[name].partition(":")
    except KeyError:
        choices = ", ".join(POOL_NAMES)
        raise ImproperlyConfigured(f"unknown pool {name!r}: choose one of {choices}") from None
    try:
        found: type[Pool] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != name:
            raise
        raise ImproperlyConfigured(
            f"pool {name!r} needs the package {name}: pip install 'umbel[{name}]'"
        ) from None
    return found


def failure_of(exc: BaseException, runtime_s: float) -> JobResult:
    """The result of a job whose `run` raised; never raises itself."""
    trace = redacted_text(last_lines(traceback_text(exc)))
    return JobResult("FAILURE", runtime_s, redacted_text(safe_repr(exc)), trace)


def notify(call: Callable[..., object], *args: Any) -> None:
    """Call a watcher: its errors are logged, since the pool must go on."""
    try:
        call(*args)
    except Exception as exc:  # noqa: BLE001 - logged
        watcher_failed(call, exc)


def watcher_failed(call: Callable[..., object], exc: Exception) -> None:
    """Log what a watcher raised."""
    name = getattr(call, "__name__", call)
    logger.error("the watcher of a job failed in %s", name, exc_info=exc)


soft_limit_disarmer: ContextVar[Callable[[], None] | None] = ContextVar(
    "soft_limit_disarmer", default=None
)
"""Set by a pool around a job with a soft limit."""


def disarm_soft_limit() -> None:
    """Say from inside `run` that the task's own code has ended: no soft limit from here on."""
    disarm = soft_limit_disarmer.get()
    if disarm is not None:
        disarm()
