"""Interrupting a thread from outside, only while it runs a job.

CPython can make another thread raise an exception at its next bytecode. Used bare, that exception
may land after the job has ended and hit the next one, or the pool itself. A `Guard` closes the
gap: interrupts are sent under its lock and only while it is armed; disarming, by the thread
itself, takes back one that was sent and has not been raised yet.

A thread inside a C call (a lock, a socket without time-out) sees the interrupt when the call
returns, not before.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from time import monotonic

from umbel.exceptions import SoftTimeLimitExceeded
from umbel.worker.execution.jobs import Job, JobResult
from umbel.worker.execution.pools.base import failure_of, soft_limit_disarmer


class _TakenBack(BaseException):
    """In the place of an interrupt that came too late."""


class Guard:
    """The right to interrupt one thread during one job."""

    __slots__ = ("_armed", "_early", "_ident", "_lock", "_sent", "_soft", "struck")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ident = 0
        self._armed = False
        self._soft = True
        self._early: type[BaseException] | None = None  # came before the job began
        self._sent: type[BaseException] | None = None
        self.struck: type[BaseException] | None = None  # the last one sent in time, not soft

    def arm(self) -> None:
        """From here on the calling thread may be interrupted; raises what came before."""
        with self._lock:
            self._ident = threading.get_ident()
            self._armed = True
            if self._early is not None:
                self.struck = self._early
                raise self._early

    def interrupt(self, exc: type[BaseException]) -> bool:
        """Make the thread raise `exc`; False when its job has already ended."""
        with self._lock:
            if exc is SoftTimeLimitExceeded and not (self._armed and self._soft):
                return False
            if not self._armed:
                self._early = exc  # without effect when the job has ended
                return False
            self._sent = exc
            if exc is not SoftTimeLimitExceeded:
                self.struck = exc
            _raise_in(self._ident, exc)
            return True

    def disarm_soft(self) -> None:
        """Soft limits no longer interrupt; the rest still does."""
        with self._lock:
            self._soft = False
            if self._sent is SoftTimeLimitExceeded:
                self._take_back()

    def disarm(self) -> None:
        """No interrupt after this, not even one that is under way; idempotent."""
        with self._lock:
            self._armed = False
            if self._sent is not None:
                self._take_back()

    def _take_back(self) -> None:
        """Undo what was sent, raised or not.

        Merely cleared, CPython 3.11 goes on looking for it: every function begins slower, and one
        that is traced not at all. So something else takes its place, and is raised here.
        """
        self._sent = None
        if threading.get_ident() != self._ident:
            _raise_in(self._ident, None)
            return
        try:
            _raise_in(self._ident, _TakenBack)
            for _ in range(10):  # it is raised at a jump
                pass
        except _TakenBack:
            pass


def run_guarded(run: Callable[[Job], JobResult], job: Job, guard: Guard, soft: bool) -> JobResult:
    """Run the job in this thread, open to interrupts meanwhile and only meanwhile.

    `soft` says that it has a soft limit, so that `disarm_soft_limit` has something to disarm.
    """
    began = monotonic()
    ended: list[JobResult] = []
    error: BaseException | None = None
    token = soft_limit_disarmer.set(guard.disarm_soft) if soft else None
    try:
        try:
            guard.arm()
            # `extend(map(...))` stores the result before control returns to bytecode, where an
            # interrupt that came too late would otherwise throw a finished result away.
            ended.extend(map(run, (job,)))
        except BaseException as exc:  # noqa: BLE001 - becomes the result
            error = exc
        guard.disarm()
    except BaseException as exc:  # noqa: BLE001 - an interrupt landed as the job ended
        error = error or exc
        guard.disarm()
    if token is not None:
        soft_limit_disarmer.reset(token)
    if ended:
        return ended[0]
    assert error is not None
    return failure_of(error, monotonic() - began)


def _raise_in(ident: int, exc: type[BaseException] | None) -> None:
    """Set or clear (None) the exception that a thread is about to raise."""
    target = ctypes.c_ulong(ident)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(target, ctypes.py_object(exc) if exc else None)
