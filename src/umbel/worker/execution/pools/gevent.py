"""Greenlets: thousands of waiting tasks in one thread.

One greenlet per job, `size` at a time; further jobs wait in a queue. The process must have
been patched before anything else was imported: the entry point calls `patch()` first thing.

Limits are timers of the hub, which throw into the greenlet right there, so an interrupt cannot
arrive after the job has ended. The soft limit throws `SoftTimeLimitExceeded`; the hard limit and
`cancel` throw `GreenletExit` and free the slot at once; a greenlet that swallows it is counted
as abandoned and its result dropped. A task that computes without ever waiting blocks the hub,
and with it its own limits: such tasks belong in prefork.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, ClassVar

import gevent
import gevent.event
import gevent.monkey

from umbel.exceptions import SoftTimeLimitExceeded
from umbel.worker.execution.jobs import Job, JobResult
from umbel.worker.execution.pools.base import (
    Pool,
    PoolClosed,
    PoolOptions,
    Watcher,
    WorkItem,
    failure_of,
    soft_limit_disarmer,
)


def patch() -> None:
    """Make the standard library cooperative; to be called before other imports. Idempotent."""
    if not gevent.monkey.is_module_patched("socket"):
        gevent.monkey.patch_all()


@dataclass(slots=True, eq=False)
class _WorkItem(WorkItem):
    """One job and the greenlet that runs it."""

    greenlet: Any = None
    interruptible: bool = False  # true while `run` runs
    soft_armed: bool = True
    timers: list[Any] = field(default_factory=list)

    def disarm_soft(self) -> None:
        """No soft limit from here on."""
        self.soft_armed = False

    def stop_timers(self) -> None:
        """Let go of the hub's timers."""
        for timer in self.timers:
            timer.stop()
            timer.close()
        self.timers.clear()


class GeventPool(Pool):
    """Runs each job in a greenlet of its own."""

    name: ClassVar[str] = "gevent"
    green: ClassVar[bool] = True

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        self._waiting: deque[_WorkItem] = deque()
        self._running: set[_WorkItem] = set()
        self._leftover = 0  # greenlets that swallowed their end
        self._reports = 0  # final calls under way
        self._idle = gevent.event.Event()
        self._idle.set()
        self._closed = False
        self._terminated = False
        self._pid = os.getpid()

    def start(self) -> None:
        """Nothing to start: greenlets come with jobs."""
        self._pid = os.getpid()

    def submit(
        self, job: Job, watcher: Watcher, soft_s: float | None, hard_s: float | None
    ) -> None:
        """Spawn a greenlet for the job, or queue it."""
        if self._closed:
            raise PoolClosed(f"job {job.id} came after the gevent pool was closed")
        self._waiting.append(_WorkItem(job, watcher, soft_s, hard_s))
        self._idle.clear()
        self._pump()

    def has_room(self) -> bool:
        """Whether one more greenlet would begin at once."""
        return not self._closed and len(self._running) + len(self._waiting) < self._target

    def close_and_join(self, timeout_s: float | None) -> bool:
        """Take no more jobs and wait for those taken."""
        self._closed = True
        return bool(self._idle.wait(timeout_s))

    def terminate(self) -> None:
        """Forget every job; running greenlets are killed without waiting for them."""
        self._closed = self._terminated = True
        items, self._running = self._running, set()
        self._waiting.clear()
        for item in items:
            item.settled = True
            item.stop_timers()
            if item.greenlet is not gevent.getcurrent():
                item.greenlet.kill(block=False)
        self._idle.set()

    def cancel(self, job_id: str, signum: int) -> bool:
        """Kill the job's greenlet, or drop the job from the queue."""
        found = False
        for item in [*self._running, *self._waiting]:
            if item.job.id == job_id:
                found = self._end(item, item.watcher.terminated, signum) or found
        return found

    def grow(self, n: int) -> None:
        """Run `n` more jobs at a time."""
        self._target += n
        self._pump()

    def shrink(self, n: int) -> None:
        """Run `n` fewer at a time; those above the new size end first."""
        self._target = self._checked_shrink(n)

    def restart(self) -> None:
        """Nothing to replace: every job has a fresh greenlet."""

    def info(self) -> dict[str, Any]:
        """The `pool` part of the `stats` reply."""
        return self._described(greenlets=len(self._running), abandoned=self._leftover)

    def _pump(self) -> None:
        while self._waiting and len(self._running) < self._target:
            item = self._waiting.popleft()
            if item.settled:
                continue
            self._running.add(item)
            item.greenlet = gevent.spawn(self._serve, item)
        if not self._running and not self._waiting and not self._reports:
            self._idle.set()

    def _serve(self, item: _WorkItem) -> None:
        """The life of one greenlet."""
        if item.settled:  # cancelled before it began
            return
        began = monotonic()
        self._report(item.watcher.accepted, self._pid, began)
        self._start_timers(item)
        self._settle(item, item.watcher.finished, self._run(item, began))

    def _run(self, item: _WorkItem, began: float) -> JobResult:
        token = soft_limit_disarmer.set(item.disarm_soft)
        item.interruptible = True
        try:
            return self.options.run(item.job)
        except BaseException as exc:  # noqa: BLE001 - becomes the result
            return failure_of(exc, monotonic() - began)
        finally:
            item.interruptible = False
            item.stop_timers()
            soft_limit_disarmer.reset(token)

    def _start_timers(self, item: _WorkItem) -> None:
        loop = gevent.get_hub().loop
        for limit_s, call in ((item.soft_s, self._soft), (item.hard_s, self._hard)):
            if limit_s is not None:
                timer = loop.timer(limit_s)
                timer.start(call, item, limit_s)
                item.timers.append(timer)

    def _soft(self, item: _WorkItem, limit_s: float) -> None:
        """In the hub: a throw here reaches the greenlet before anything else runs."""
        if item.interruptible and item.soft_armed and not item.settled:
            gevent.spawn(self._report, item.watcher.soft_limit, limit_s)
            item.greenlet.throw(SoftTimeLimitExceeded())

    def _hard(self, item: _WorkItem, limit_s: float) -> None:
        """In the hub, where watchers must not run: they may wait."""
        gevent.spawn(self._end, item, item.watcher.hard_limit, limit_s)

    def _end(self, item: _WorkItem, call: Callable[..., None], arg: float) -> bool:
        """End a job from outside and report it; False when it has ended already."""
        if item.settled:
            return False
        if item.greenlet is not None:
            self._leftover += 1
            item.greenlet.rawlink(self._came_back)
            item.greenlet.kill(block=False)
        self._settle(item, call, arg)
        return True

    def _came_back(self, greenlet: Any) -> None:
        self._leftover -= 1

    def _settle(self, item: _WorkItem, call: Callable[..., None], *args: Any) -> None:
        """Make the final call unless it was made, and let the next job begin."""
        if item.settled:
            return
        item.settled = True
        item.stop_timers()
        self._running.discard(item)
        if self._terminated:
            return
        self._reports += 1
        try:
            self._pump()
            self._ended(call, *args)
        finally:
            self._reports -= 1
            self._pump()
