"""Greenlets: thousands of waiting tasks in one thread.

One greenlet per order, `size` at a time; further orders wait in a queue. The process must have
been patched before anything else was imported: the entry point calls `patch()` first thing.

Limits are timers of the hub, which throw into the greenlet right there, so an interrupt cannot
arrive after the order has ended. The soft limit throws `SoftTimeLimitExceeded`; the hard limit and
`cancel` throw `GreenletExit` and free the slot at once; a greenlet that swallows it is counted
as abandoned and its outcome dropped. A task that computes without ever waiting blocks the hub,
and with it its own limits: such tasks belong in prefork.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, ClassVar

import gevent
import gevent.event
import gevent.monkey

from umbel.exceptions import SoftTimeLimitExceeded
from umbel.worker.orders import Order, Outcome
from umbel.worker.pools.base import (
    Pool,
    PoolClosed,
    PoolOptions,
    Watcher,
    failure_of,
    soft_limit_disarmer,
)


def patch() -> None:
    """Make the standard library cooperative; to be called before other imports. Idempotent."""
    if not gevent.monkey.is_module_patched("socket"):
        gevent.monkey.patch_all()


class _Job:
    """One order and the greenlet that runs it."""

    def __init__(
        self, order: Order, watcher: Watcher, soft_s: float | None, hard_s: float | None
    ) -> None:
        self.order = order
        self.watcher = watcher
        self.soft_s = soft_s
        self.hard_s = hard_s
        self.greenlet: Any = None
        self.settled = False
        self.interruptible = False  # true while `run` runs
        self.soft_armed = True
        self.timers: list[Any] = []

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
    """Runs each order in a greenlet of its own."""

    name: ClassVar[str] = "gevent"
    green: ClassVar[bool] = True

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        self._target = options.concurrency
        self._waiting: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._leftover = 0  # greenlets that swallowed their end
        self._reports = 0  # final calls under way
        self._idle = gevent.event.Event()
        self._idle.set()
        self._closed = False
        self._terminated = False
        self._pid = os.getpid()

    @property
    def size(self) -> int:
        """How many orders may run at once."""
        return self._target

    def start(self) -> None:
        """Nothing to start: greenlets come with orders."""
        self._pid = os.getpid()

    def submit(
        self,
        order: Order,
        watcher: Watcher,
        soft_s: float | None,
        hard_s: float | None,
        expected_s: float | None = None,
    ) -> None:
        """Spawn a greenlet for the order, or queue it."""
        if self._closed:
            raise PoolClosed(f"order {order.id} came after the gevent pool was closed")
        self._waiting.append(_Job(order, watcher, soft_s, hard_s))
        self._idle.clear()
        self._pump()

    def has_room(self) -> bool:
        """Whether one more greenlet would begin at once."""
        return not self._closed and len(self._running) + len(self._waiting) < self._target

    def close_and_join(self, timeout_s: float | None) -> bool:
        """Take no more orders and wait for those taken."""
        self._closed = True
        return bool(self._idle.wait(timeout_s))

    def terminate(self) -> None:
        """Forget every order; running greenlets are killed without waiting for them."""
        self._closed = self._terminated = True
        jobs, self._running = self._running, set()
        self._waiting.clear()
        for job in jobs:
            job.settled = True
            job.stop_timers()
            if job.greenlet is not gevent.getcurrent():
                job.greenlet.kill(block=False)
        self._idle.set()

    def cancel(self, order_id: str, signum: int) -> bool:
        """Kill the order's greenlet, or drop the order from the queue."""
        found = False
        for job in [*self._running, *self._waiting]:
            if job.order.id == order_id:
                found = self._end(job, job.watcher.terminated, signum) or found
        return found

    def grow(self, n: int) -> None:
        """Run `n` more orders at a time."""
        self._target += n
        self._pump()

    def shrink(self, n: int) -> None:
        """Run `n` fewer at a time; those above the new size end first."""
        self._target = self._checked_shrink(n)

    def restart(self) -> None:
        """Nothing to replace: every order has a fresh greenlet."""

    def info(self) -> dict[str, Any]:
        """The `pool` part of the `stats` reply."""
        return self._described(greenlets=len(self._running), abandoned=self._leftover)

    def _pump(self) -> None:
        while self._waiting and len(self._running) < self._target:
            job = self._waiting.popleft()
            if job.settled:
                continue
            self._running.add(job)
            job.greenlet = gevent.spawn(self._serve, job)
        if not self._running and not self._waiting and not self._reports:
            self._idle.set()

    def _serve(self, job: _Job) -> None:
        """The life of one greenlet."""
        if job.settled:  # cancelled before it began
            return
        began = monotonic()
        self._report(job.watcher.accepted, self._pid, began)
        self._start_timers(job)
        self._settle(job, job.watcher.finished, self._run(job, began))

    def _run(self, job: _Job, began: float) -> Outcome:
        token = soft_limit_disarmer.set(job.disarm_soft)
        job.interruptible = True
        try:
            return self.options.run(job.order)
        except BaseException as exc:  # noqa: BLE001 - becomes the outcome
            return failure_of(exc, monotonic() - began)
        finally:
            job.interruptible = False
            job.stop_timers()
            soft_limit_disarmer.reset(token)

    def _start_timers(self, job: _Job) -> None:
        loop = gevent.get_hub().loop
        for limit_s, call in ((job.soft_s, self._soft), (job.hard_s, self._hard)):
            if limit_s is not None:
                timer = loop.timer(limit_s)
                timer.start(call, job, limit_s)
                job.timers.append(timer)

    def _soft(self, job: _Job, limit_s: float) -> None:
        """In the hub: a throw here reaches the greenlet before anything else runs."""
        if job.interruptible and job.soft_armed and not job.settled:
            gevent.spawn(self._report, job.watcher.soft_limit, limit_s)
            job.greenlet.throw(SoftTimeLimitExceeded())

    def _hard(self, job: _Job, limit_s: float) -> None:
        """In the hub, where watchers must not run: they may wait."""
        gevent.spawn(self._end, job, job.watcher.hard_limit, limit_s)

    def _end(self, job: _Job, call: Callable[..., None], arg: float) -> bool:
        """End an order from outside and report it; False when it has ended already."""
        if job.settled:
            return False
        if job.greenlet is not None:
            self._leftover += 1
            job.greenlet.rawlink(self._came_back)
            job.greenlet.kill(block=False)
        self._settle(job, call, arg)
        return True

    def _came_back(self, greenlet: Any) -> None:
        self._leftover -= 1

    def _settle(self, job: _Job, call: Callable[..., None], *args: Any) -> None:
        """Make the final call unless it was made, and let the next order begin."""
        if job.settled:
            return
        job.settled = True
        job.stop_timers()
        self._running.discard(job)
        if self._terminated:
            return
        self._reports += 1
        try:
            self._pump()
            self._ended(call, *args)
        finally:
            self._reports -= 1
            self._pump()
