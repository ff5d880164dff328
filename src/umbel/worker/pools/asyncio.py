"""An event loop in a thread: `async def` tasks are awaited natively, `size` at a time.

The pool cannot tell from an order what kind of task it is, so `options.is_async` says it; orders
of plain functions run in an inner threads pool of the same size, with that pool's rules.

A coroutine is driven by hand (`steered`), so that an interrupt can be thrown into it at its await
point as the exception we choose: `SoftTimeLimitExceeded` for the soft limit, cancellation for the
hard limit and for `cancel`. These two free the slot at once; a coroutine that swallows its
cancellation goes on as an abandoned one and its outcome is dropped. A coroutine that blocks
the loop without awaiting blocks every other one and all limits: plain functions that wait should
be plain tasks.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, ClassVar

from umbel.exceptions import SoftTimeLimitExceeded
from umbel.worker.orders import Order
from umbel.worker.pools.base import (
    Pool,
    PoolClosed,
    PoolOptions,
    Watcher,
    failure_of,
    soft_limit_disarmer,
)
from umbel.worker.pools.steering import steered
from umbel.worker.pools.threads import ThreadsPool

_STOP_WAIT_S = 1.0


class _Job:
    """One order and the asyncio task that runs it."""

    def __init__(
        self, order: Order, watcher: Watcher, soft_s: float | None, hard_s: float | None
    ) -> None:
        self.order = order
        self.watcher = watcher
        self.soft_s = soft_s
        self.hard_s = hard_s
        self.task: asyncio.Task[None] | None = None
        self.settled = False
        self.soft_armed = True
        self.interrupt: BaseException | None = None  # to throw at the next await point
        self.timers: list[asyncio.TimerHandle] = []

    def disarm_soft(self) -> None:
        """No soft limit from here on."""
        self.soft_armed = False
        self.interrupt = None


class AsyncioPool(Pool):
    """Runs coroutine tasks on one event loop and plain ones in threads."""

    name: ClassVar[str] = "asyncio"

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        self._threads = ThreadsPool(options)
        self._target = options.concurrency
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="umbel-asyncio", daemon=True)
        self._changed = threading.Condition()
        self._jobs: dict[_Job, None] = {}  # taken and not settled, in order
        self._waiting: deque[_Job] = deque()
        self._running = 0
        self._leftover = 0  # coroutines that swallowed their cancellation
        self._closed = False
        self._terminated = False
        self._pid = os.getpid()

    @property
    def size(self) -> int:
        """How many coroutines, and how many plain functions, may run at once."""
        return self._target

    def start(self) -> None:
        """Start the loop's thread and the threads for plain functions."""
        self._threads.start()
        self._thread.start()

    def submit(
        self,
        order: Order,
        watcher: Watcher,
        soft_s: float | None,
        hard_s: float | None,
        expected_s: float | None = None,
    ) -> None:
        """Queue the order for the loop, or for a thread."""
        is_async = self.options.is_async
        if self.options.run_async is None or is_async is None or not is_async(order):
            self._threads.submit(order, watcher, soft_s, hard_s)
            return
        job = _Job(order, watcher, soft_s, hard_s)
        with self._changed:
            if self._closed:
                raise PoolClosed(f"order {order.id} came after the asyncio pool was closed")
            self._jobs[job] = None
            self._waiting.append(job)
            self._loop.call_soon_threadsafe(self._pump)

    def has_room(self) -> bool:
        """Whether one more coroutine, or plain function, would begin at once."""
        taken_count = self._running + len(self._waiting) + self._threads.taken_count
        return not self._closed and taken_count < self._target

    def close_and_join(self, timeout_s: float | None) -> bool:
        """Take no more orders and wait for those taken, then stop the loop."""
        ends = None if timeout_s is None else monotonic() + timeout_s
        with self._changed:
            self._closed = True
            done = self._changed.wait_for(lambda: not self._jobs or self._terminated, timeout_s)
        rest_s = None if ends is None else max(0.0, ends - monotonic())
        if not self._threads.close_and_join(rest_s) or not done:
            return False
        self._stop_loop()
        return True

    def terminate(self) -> None:
        """Forget every order and stop the loop; a loop that is blocked is left to itself."""
        with self._changed:
            self._closed = self._terminated = True
            for job in self._jobs:
                job.settled = True
            self._jobs.clear()
            self._waiting.clear()
            self._changed.notify_all()
        self._threads.terminate()
        self._stop_loop()

    def cancel(self, order_id: str, signum: int) -> bool:
        """Cancel the order's coroutine, or drop the order from the queue."""
        if self._threads.cancel(order_id, signum):
            return True
        with self._changed:
            jobs = [job for job in self._jobs if job.order.id == order_id]
            for job in jobs:
                self._loop.call_soon_threadsafe(self._end, job, job.watcher.terminated, signum)
        return bool(jobs)

    def grow(self, n: int) -> None:
        """Run `n` more orders at a time."""
        self._threads.grow(n)
        self._target += n
        self._loop.call_soon_threadsafe(self._pump)

    def shrink(self, n: int) -> None:
        """Run `n` fewer at a time; those above the new size end first."""
        self._target = self._checked_shrink(n)
        self._threads.shrink(n)

    def restart(self) -> None:
        """Replace the threads; the loop stays."""
        self._threads.restart()

    def info(self) -> dict[str, Any]:
        """The `pool` part of the `stats` reply."""
        inner = self._threads.info()
        return self._described(
            threads=inner["threads"] + 1,
            coroutines=self._running,
            abandoned=inner["abandoned"] + self._leftover,
        )

    def _main(self) -> None:
        """The life of the loop's thread."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=_STOP_WAIT_S / 2))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _stop_loop(self) -> None:
        if not self._thread.is_alive():
            if not self._loop.is_running() and not self._loop.is_closed():
                self._loop.close()
            return
        try:
            self._loop.call_soon_threadsafe(self._loop.stop)
        except RuntimeError:  # somebody else stopped it: the loop is closed
            return
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_WAIT_S)

    def _pump(self) -> None:
        """On the loop: start what there is room for."""
        with self._changed:
            begin = []
            while self._waiting and self._running < self._target:
                job = self._waiting.popleft()
                if not job.settled:
                    self._running += 1
                    begin.append(job)
        for job in begin:
            job.task = self._loop.create_task(self._serve(job), name=f"order {job.order.id}")

    async def _serve(self, job: _Job) -> None:
        if job.settled:
            return
        began = monotonic()
        self._report(job.watcher.accepted, self._pid, began)
        self._start_timers(job)
        soft_limit_disarmer.set(job.disarm_soft)  # this task has a context of its own
        assert self.options.run_async is not None
        try:
            outcome = await steered(self.options.run_async(job.order), job)
        except BaseException as exc:  # noqa: BLE001 - becomes the outcome
            outcome = failure_of(exc, monotonic() - began)
        self._settle(job, job.watcher.finished, outcome)

    def _start_timers(self, job: _Job) -> None:
        if job.soft_s is not None:
            job.timers.append(self._loop.call_later(job.soft_s, self._soft, job, job.soft_s))
        if job.hard_s is not None:
            call = job.watcher.hard_limit
            job.timers.append(self._loop.call_later(job.hard_s, self._end, job, call, job.hard_s))

    def _soft(self, job: _Job, limit_s: float) -> None:
        if job.settled or not job.soft_armed or job.task is None:
            return
        job.interrupt = SoftTimeLimitExceeded()
        job.task.cancel()
        self._report(job.watcher.soft_limit, limit_s)

    def _end(self, job: _Job, call: Callable[..., None], arg: float) -> None:
        """On the loop: end an order from outside and report it."""
        if job.settled:
            return
        job.interrupt = None
        if job.task is not None:
            self._leftover += 1
            job.task.add_done_callback(self._came_back)
            job.task.cancel()
        self._settle(job, call, arg)

    def _came_back(self, task: asyncio.Task[None]) -> None:
        self._leftover -= 1

    def _settle(self, job: _Job, call: Callable[..., None], *args: Any) -> None:
        """On the loop: make the final call, and let the next order begin."""
        for timer in job.timers:
            timer.cancel()
        with self._changed:
            if job.settled:
                return
            job.settled = True
            if job.task is not None:
                self._running -= 1
        self._ended(call, *args)
        with self._changed:
            self._jobs.pop(job, None)
            if not self._jobs:
                self._changed.notify_all()
        self._pump()
