"""Threads: cheap, shared memory, for tasks that wait on the network.

Each thread takes the next job from one queue and runs it. Idle threads block on the queue; a
thread for deadlines exists only once a job with a limit came.

The soft limit raises `SoftTimeLimitExceeded` in the thread. A thread cannot be killed, so at the
hard limit, and on `cancel`, the job is reported as ended, an exception is raised in its thread,
the thread is *abandoned* (counted in `info`) and a fresh one takes its seat; whatever an abandoned
thread still produces is dropped, and it exits as soon as its job lets it. Threads are daemons:
a cold stop does not wait for them.

`max_tasks_per_child` and `max_memory_per_child_kib` do not apply: threads share one memory.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, ClassVar

from umbel.exceptions import SoftTimeLimitExceeded
from umbel.worker.execution.jobs import Job
from umbel.worker.execution.pools.base import (
    JobEnded,
    Pool,
    PoolClosed,
    PoolOptions,
    Watcher,
    WorkItem,
)
from umbel.worker.execution.pools.deadlines import Deadline, Deadlines
from umbel.worker.execution.pools.interrupts import Guard, run_guarded


@dataclass(slots=True, eq=False)
class _WorkItem(WorkItem):
    """One job on its way; `settled` once its final call belongs to somebody."""

    guard: Guard = field(default_factory=Guard)
    thread: threading.Thread | None = None  # that runs it


class ThreadsPool(Pool):
    """Runs each job in one of `size` threads of this process."""

    name: ClassVar[str] = "threads"

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        self._queue: SimpleQueue[_WorkItem | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._items: set[_WorkItem] = set()  # taken and not settled
        self._threads: set[threading.Thread] = set()  # those with a seat, not the abandoned
        self._abandoned = 0
        self._restarts = 0  # seats to be given to a fresh thread
        self._closed = False
        self._terminated = False
        self._numbers = itertools.count(1)
        self._deadlines = Deadlines("umbel-deadlines")
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the threads."""
        with self._changed:
            self._fill_seats()

    def submit(
        self, job: Job, watcher: Watcher, soft_s: float | None, hard_s: float | None
    ) -> None:
        """Queue the job for the next free thread."""
        item = _WorkItem(job, watcher, soft_s, hard_s)
        with self._changed:
            if self._closed:
                raise PoolClosed(f"job {job.id} came after the threads pool was closed")
            self._items.add(item)
        self._queue.put(item)

    @property
    def taken_count(self) -> int:
        """Jobs that wait or run."""
        return len(self._items)

    def has_room(self) -> bool:
        """Whether there is an idle thread."""
        return not self._closed and self.taken_count < self._target

    def close_and_join(self, timeout_s: float | None) -> bool:
        """Take no more jobs and wait for those taken."""
        with self._changed:
            self._closed = True
            done = self._changed.wait_for(lambda: not self._items or self._terminated, timeout_s)
            if not done:
                return False
            self._target = 0
            self._wake(len(self._threads))
            threads = list(self._threads)
        self._deadlines.stop(wait_s=timeout_s)
        # A thread leaves `_items` before its watcher's last call: closed means that returned too.
        ends = None if timeout_s is None else monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(None if ends is None else max(0.0, ends - monotonic()))
        return not any(t.is_alive() for t in threads if t is not threading.current_thread())

    def terminate(self) -> None:
        """Forget every job; threads that run one are interrupted and left to themselves."""
        with self._changed:
            self._closed = self._terminated = True
            items, self._items = self._items, set()
            for item in items:
                item.settled = True
            self._target = 0
            self._wake(len(self._threads))
            self._changed.notify_all()
        self._deadlines.stop(wait_s=0)
        for item in items:
            item.guard.interrupt(JobEnded)

    def cancel(self, job_id: str, signum: int) -> bool:
        """Report the job as terminated; its thread is interrupted and abandoned."""
        with self._changed:
            items = [item for item in self._items if item.job.id == job_id]
        ended = [self._end(item, item.watcher.terminated, signum) for item in items]
        return any(ended)

    def grow(self, n: int) -> None:
        """Add `n` threads."""
        with self._changed:
            self._target += n
            self._fill_seats()

    def shrink(self, n: int) -> None:
        """Let `n` threads go, as they become idle."""
        with self._changed:
            self._target = self._checked_shrink(n)
            self._wake(n)

    def restart(self) -> None:
        """Replace every thread once its present job has ended."""
        with self._changed:
            self._restarts = len(self._threads)
            self._wake(self._restarts)

    def info(self) -> dict[str, Any]:
        """The `pool` part of the `stats` reply."""
        return self._described(threads=len(self._threads), abandoned=self._abandoned)

    def _fill_seats(self) -> None:
        """With the lock held."""
        while len(self._threads) < self._target:
            name = f"umbel-thread-{next(self._numbers)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def _wake(self, count: int) -> None:
        """Make idle threads look whether they should leave; a wake too many does no harm."""
        for _ in range(count):
            self._queue.put(None)

    def _work(self) -> None:
        """The life of one thread."""
        while True:
            item = self._queue.get()
            if item is not None and not self._serve(item):
                return  # abandoned: the seat is somebody else's by now
            del item  # an idle thread keeps no job alive
            if self._leaves():
                return

    def _leaves(self) -> bool:
        if not self._restarts and len(self._threads) <= self._target:
            return False
        with self._changed:
            if self._restarts:
                self._restarts -= 1
            elif len(self._threads) <= self._target:
                return False
            self._threads.discard(threading.current_thread())
            self._fill_seats()
            return True

    def _serve(self, item: _WorkItem) -> bool:
        """Run one job and report it; False when it was ended from outside meanwhile."""
        with self._changed:
            if item.settled:  # cancelled while it waited
                return True
            item.thread = threading.current_thread()
        began = monotonic()
        self._report(item.watcher.accepted, self._pid, began)
        deadlines = self._limits(item, began)
        result = run_guarded(self.options.run, item.job, item.guard, item.soft_s is not None)
        for deadline in deadlines:
            deadline.cancel()
        if not self._settle(item):
            return False
        self._ended(item.watcher.finished, result)
        return True

    def _limits(self, item: _WorkItem, began: float) -> list[Deadline]:
        limits = ((item.soft_s, self._soft), (item.hard_s, self._hard))
        return [
            self._deadlines.call_at(began + limit_s, partial(call, item, limit_s))
            for limit_s, call in limits
            if limit_s is not None
        ]

    def _soft(self, item: _WorkItem, limit_s: float) -> None:
        if item.guard.interrupt(SoftTimeLimitExceeded):
            self._report(item.watcher.soft_limit, limit_s)

    def _hard(self, item: _WorkItem, limit_s: float) -> None:
        self._end(item, item.watcher.hard_limit, limit_s)

    def _end(self, item: _WorkItem, call: Callable[..., None], arg: float) -> bool:
        """End a job from outside, reporting it by `call(arg)`; False when it has ended."""
        if not self._settle(item, abandon=True):
            return False
        item.guard.interrupt(JobEnded)
        self._ended(call, arg)
        return True

    def _settle(self, item: _WorkItem, abandon: bool = False) -> bool:
        """Claim the final call of the job: true for the first to ask."""
        with self._changed:
            if item.settled:
                return False
            item.settled = True
            self._items.discard(item)
            if abandon and item.thread is not None:
                self._abandoned += 1
                self._threads.discard(item.thread)
                self._fill_seats()
            if not self._items:
                self._changed.notify_all()
            return True
