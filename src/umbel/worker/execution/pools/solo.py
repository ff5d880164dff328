"""Solo: the job runs inside `submit`, in the calling thread. One process, one job, no hand-off.

The way without limits is kept short, because it is the floor under every other cost: two calls of
the watcher, one read of the clock, two uncontended locks.

Limits in the main thread use SIGALRM, so a blocking system call is interrupted as well; the hard
limit fires again every second until the job has let go. In another thread limits come from a
deadline thread as asynchronous exceptions, which wait for C calls to return. While a job runs
the caller's loop stands still: heartbeats and control messages wait for it.

`terminate` may be called by a signal handler in the middle of a job: it raises
`SoloInterrupted` there, and `submit` returns without a final call.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any, ClassVar

from umbel.exceptions import SoftTimeLimitExceeded
from umbel.worker.execution.jobs import Job, JobResult
from umbel.worker.execution.pools.base import (
    JobEnded,
    Pool,
    PoolClosed,
    PoolOptions,
    Watcher,
    notify,
    soft_limit_disarmer,
)
from umbel.worker.execution.pools.deadlines import Deadlines
from umbel.worker.execution.pools.interrupts import Guard, run_guarded

_HARD_AGAIN_S = 1.0


class SoloInterrupted(JobEnded):
    """Leaves the running job on a cold stop; no task should catch it."""


class _HardLimit(JobEnded):
    """Leaves the running job at its hard limit."""


class SoloPool(Pool):
    """Runs each job inside `submit`."""

    name: ClassVar[str] = "solo"
    blocks_loop: ClassVar[bool] = True

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        self._run = options.run
        self._pid = os.getpid()
        self._turn = threading.RLock()  # one job at a time; a watcher may submit the next
        self._guard: Guard | None = None  # of the running job
        self._running: Job | None = None
        self._runner = 0  # ident of the thread that runs it
        self._closed = False
        self._terminated = False
        self._signum = 0  # of the last `cancel`
        self._deadlines = Deadlines("umbel-deadlines")

    @property
    def size(self) -> int:
        """Always one."""
        return 1

    def start(self) -> None:
        """Nothing to start."""
        self._pid = os.getpid()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            # A handler of Python's, so that the signal makes this thread run Python: `terminate`.
            signal.signal(signal.SIGALRM, _wake)

    def submit(
        self, job: Job, watcher: Watcher, soft_s: float | None, hard_s: float | None
    ) -> None:
        """Run the job now; returns when it has ended and was reported."""
        self._refuse_if_closed(job)
        with self._turn:
            self._refuse_if_closed(job)
            notify(watcher.accepted, self._pid, monotonic())
            guard = Guard()
            try:
                self._runner = threading.get_ident()
                self._guard, self._running = guard, job
                if self._terminated:
                    return
                if soft_s is None and hard_s is None:
                    result = run_guarded(self._run, job, guard, False)
                else:
                    result = self._run_limited(job, guard, watcher, soft_s, hard_s)
            except SoloInterrupted:  # a signal that came just outside of `run`
                return
            finally:
                self._running = self._guard = None
            if guard.struck is None:
                if not self._terminated:  # else nothing is reported any more
                    notify(watcher.finished, result)
            else:
                self._report_struck(guard.struck, watcher, hard_s)

    def has_room(self) -> bool:
        """Whether nothing runs."""
        return self._running is None and not self._closed

    def close_and_join(self, timeout_s: float | None) -> bool:
        """Wait for the job that runs in another thread, if any."""
        self._closed = True
        if not self._turn.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        self._turn.release()
        self._deadlines.stop(wait_s=timeout_s)
        return True

    def terminate(self) -> None:
        """Leave the running job, from a signal handler or from another thread."""
        self._closed = self._terminated = True
        self._deadlines.stop(wait_s=0)
        if self._running is None or self._guard is None:
            return
        if threading.get_ident() == self._runner:
            raise SoloInterrupted  # we are inside the job: this leaves it
        self._guard.interrupt(SoloInterrupted)
        self._end_system_call()

    def cancel(self, job_id: str, signum: int) -> bool:
        """Interrupt the job that runs in another thread."""
        guard, running = self._guard, self._running
        if guard is None or running is None or running.id != job_id:
            return False
        if threading.get_ident() == self._runner:
            return False
        self._signum = signum
        struck = guard.interrupt(JobEnded)
        if struck:
            self._end_system_call()
        return struck

    def _end_system_call(self) -> None:
        """The job may wait in a system call, which only a signal ends, in the main thread."""
        in_main = self._runner == threading.main_thread().ident
        if in_main and callable(signal.getsignal(signal.SIGALRM)):
            signal.pthread_kill(self._runner, signal.SIGALRM)

    def grow(self, n: int) -> None:
        """Refused: solo is one by nature."""
        raise ValueError(f"cannot grow the solo pool by {n}: choose another pool")

    def shrink(self, n: int) -> None:
        """Refused: solo is one by nature."""
        self._checked_shrink(n)

    def restart(self) -> None:
        """Nothing to replace."""

    def info(self) -> dict[str, Any]:
        """The `pool` part of the `stats` reply."""
        return self._described(processes=[self._pid])

    def _run_limited(
        self,
        job: Job,
        guard: Guard,
        watcher: Watcher,
        soft_s: float | None,
        hard_s: float | None,
    ) -> JobResult:
        if threading.current_thread() is threading.main_thread():
            alarm = _Alarm(self._run, guard, watcher, soft_s, hard_s)
            return run_guarded(alarm.run, job, guard, False)

        def soften(limit_s: float) -> None:
            if guard.interrupt(SoftTimeLimitExceeded):
                notify(watcher.soft_limit, limit_s)

        began = monotonic()
        pending = []
        if soft_s is not None:
            limit_s = soft_s
            pending.append(self._deadlines.call_at(began + limit_s, lambda: soften(limit_s)))
        if hard_s is not None:
            harden = partial(guard.interrupt, _HardLimit)
            pending.append(self._deadlines.call_at(began + hard_s, harden))
        result = run_guarded(self._run, job, guard, soft_s is not None)
        for deadline in pending:
            deadline.cancel()
        return result

    def _report_struck(
        self, exc: type[BaseException], watcher: Watcher, hard_s: float | None
    ) -> None:
        """The final call of a job that was interrupted."""
        if self._terminated:
            return
        if exc is _HardLimit and hard_s is not None:
            notify(watcher.hard_limit, hard_s)
        else:
            notify(watcher.terminated, self._signum)

    def _refuse_if_closed(self, job: Job) -> None:
        if self._closed:
            raise PoolClosed(f"job {job.id} came after the solo pool was closed")


def _wake(signum: int, frame: FrameType | None) -> None:
    """Does nothing; what was raised in the thread is seen here at the latest."""


class _Alarm:
    """The limits of one job by SIGALRM; for the main thread, where signal handlers run."""

    def __init__(
        self,
        run: Callable[[Job], JobResult],
        guard: Guard,
        watcher: Watcher,
        soft_s: float | None,
        hard_s: float | None,
    ) -> None:
        self._run = run
        self._guard = guard
        self._watcher = watcher
        self._soft_s = soft_s if hard_s is None or soft_s is None or soft_s < hard_s else None
        self._hard_s = hard_s
        self._armed = False
        self._soft_armed = True

    def run(self, job: Job) -> JobResult:
        """Run the job under the alarm; the handler and timer of before are put back."""
        ended: list[JobResult] = []
        error: BaseException | None = None
        token = soft_limit_disarmer.set(self._disarm_soft)
        before = signal.signal(signal.SIGALRM, self._ring)
        try:
            try:
                self._armed = True
                self._wind()
                ended.extend(map(self._run, (job,)))  # see interrupts.run_guarded
            except BaseException as exc:  # noqa: BLE001 - raised again below
                error = exc
            self._armed = False
        except BaseException as exc:  # noqa: BLE001 - it rang as the job was ending
            self._armed = False
            error = error or exc
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)
        soft_limit_disarmer.reset(token)
        if ended:
            return ended[0]
        assert error is not None
        raise error

    def _wind(self) -> None:
        if self._soft_s is not None:
            signal.setitimer(signal.ITIMER_REAL, max(self._soft_s, 1e-6))
        elif self._hard_s is not None:
            signal.setitimer(signal.ITIMER_REAL, max(self._hard_s, 1e-6), _HARD_AGAIN_S)

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        if not self._armed:
            return
        if self._soft_s is None:
            self._guard.struck = _HardLimit
            raise _HardLimit
        limit_s, self._soft_s = self._soft_s, None
        if self._hard_s is not None:
            rest_s = max(self._hard_s - limit_s, 1e-6)
            signal.setitimer(signal.ITIMER_REAL, rest_s, _HARD_AGAIN_S)
        if self._soft_armed:
            notify(self._watcher.soft_limit, limit_s)
            raise SoftTimeLimitExceeded

    def _disarm_soft(self) -> None:
        self._soft_armed = False
