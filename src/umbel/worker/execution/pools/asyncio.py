"""An event loop in a thread: `async def` tasks are awaited natively, `size` at a time.

The pool cannot tell from a job what kind of task it is, so `options.is_async` says it; jobs
of plain functions run in an inner threads pool of the same size, with that pool's rules.

A coroutine is driven by hand (`steered`), so that an interrupt can be thrown into it at its await
point as the exception we choose: `SoftTimeLimitExceeded` for the soft limit, cancellation for the
hard limit and for `cancel`. These two free the slot at once; a coroutine that swallows its
cancellation goes on as an abandoned one and its result is dropped. A coroutine that blocks
the loop without awaiting blocks every other one and all limits: plain functions that wait should
be plain tasks.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, ClassVar

from umbel.exceptions import SoftTimeLimitExceeded
from umbel.worker.execution.jobs import Job
from umbel.worker.execution.pools.base import (
    Pool,
    PoolClosed,
    PoolOptions,
    Watcher,
    WorkItem,
    failure_of,
    soft_limit_disarmer,
)
from umbel.worker.execution.pools.steering import steered
from umbel.worker.execution.pools.threads import ThreadsPool

_STOP_WAIT_S = 1.0


@dataclass(slots=True, eq=False)
class _WorkItem(WorkItem):
    """One job and the asyncio task that runs it."""

    task: asyncio.Task[None] | None = None
    soft_armed: bool = True
    interrupt: BaseException | None = None  # to throw at the next await point
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="umbel-asyncio", daemon=True)
        self._changed = threading.Condition()
        self._items: dict[_WorkItem, None] = {}  # taken and not settled, in order
        self._waiting: deque[_WorkItem] = deque()
        self._running = 0
        self._leftover = 0  # coroutines that swallowed their cancellation
        self._closed = False
        self._terminated = False
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the loop's thread and the threads for plain functions."""
        self._threads.start()
        self._thread.start()

    def submit(
        self, job: Job, watcher: Watcher, soft_s: float | None, hard_s: float | None
    ) -> None:
        """Queue the job for the loop, or for a thread."""
        is_async = self.options.is_async
        if self.options.run_async is None or is_async is None or not is_async(job):
            self._threads.submit(job, watcher, soft_s, hard_s)
            return
        item = _WorkItem(job, watcher, soft_s, hard_s)
        with self._changed:
            if self._closed:
                raise PoolClosed(f"job {job.id} came after the asyncio pool was closed")
            self._items[item] = None
            self._waiting.append(item)
            self._loop.call_soon_threadsafe(self._pump)

    def has_room(self) -> bool:
        """Whether one more coroutine, or plain function, would begin at once."""
        taken_count = self._running + len(self._waiting) + self._threads.taken_count
        return not self._closed and taken_count < self._target

    def close_and_join(self, timeout_s: float | None) -> bool:
        """Take no more jobs and wait for those taken, then stop the loop."""
        ends = None if timeout_s is None else monotonic() + timeout_s
        with self._changed:
            self._closed = True
            done = self._changed.wait_for(lambda: not self._items or self._terminated, timeout_s)
        rest_s = None if ends is None else max(0.0, ends - monotonic())
        if not self._threads.close_and_join(rest_s) or not done:
            return False
        self._stop_loop()
        return True

    def terminate(self) -> None:
        """Forget every job and stop the loop; a loop that is blocked is left to itself."""
        with self._changed:
            self._closed = self._terminated = True
            for item in self._items:
                item.settled = True
            self._items.clear()
            self._waiting.clear()
            self._changed.notify_all()
        self._threads.terminate()
        self._stop_loop()

    def cancel(self, job_id: str, signum: int) -> bool:
        """Cancel the job's coroutine, or drop the job from the queue."""
        if self._threads.cancel(job_id, signum):
            return True
        with self._changed:
            items = [item for item in self._items if item.job.id == job_id]
            for item in items:
                self._loop.call_soon_threadsafe(self._end, item, item.watcher.terminated, signum)
        return bool(items)

    def grow(self, n: int) -> None:
        """Run `n` more jobs at a time."""
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
                item = self._waiting.popleft()
                if not item.settled:
                    self._running += 1
                    begin.append(item)
        for item in begin:
            item.task = self._loop.create_task(self._serve(item), name=f"job {item.job.id}")

    async def _serve(self, item: _WorkItem) -> None:
        if item.settled:
            return
        began = monotonic()
        self._report(item.watcher.accepted, self._pid, began)
        self._start_timers(item)
        soft_limit_disarmer.set(item.disarm_soft)  # this task has a context of its own
        assert self.options.run_async is not None
        try:
            result = await steered(self.options.run_async(item.job), item)
        except BaseException as exc:  # noqa: BLE001 - becomes the result
            result = failure_of(exc, monotonic() - began)
        self._settle(item, item.watcher.finished, result)

    def _start_timers(self, item: _WorkItem) -> None:
        for limit_s, call in ((item.soft_s, self._soft), (item.hard_s, self._hard)):
            if limit_s is not None:
                item.timers.append(self._loop.call_later(limit_s, call, item, limit_s))

    def _soft(self, item: _WorkItem, limit_s: float) -> None:
        if item.settled or not item.soft_armed or item.task is None:
            return
        item.interrupt = SoftTimeLimitExceeded()
        item.task.cancel()
        self._report(item.watcher.soft_limit, limit_s)

    def _hard(self, item: _WorkItem, limit_s: float) -> None:
        self._end(item, item.watcher.hard_limit, limit_s)

    def _end(self, item: _WorkItem, call: Callable[..., None], arg: float) -> None:
        """On the loop: end a job from outside and report it."""
        if item.settled:
            return
        item.interrupt = None
        if item.task is not None:
            self._leftover += 1
            item.task.add_done_callback(self._came_back)
            item.task.cancel()
        self._settle(item, call, arg)

    def _came_back(self, task: asyncio.Task[None]) -> None:
        self._leftover -= 1

    def _settle(self, item: _WorkItem, call: Callable[..., None], *args: Any) -> None:
        """On the loop: make the final call, and let the next job begin."""
        for timer in item.timers:
            timer.cancel()
        with self._changed:
            if item.settled:
                return
            item.settled = True
            if item.task is not None:
                self._running -= 1
        self._ended(call, *args)
        with self._changed:
            self._items.pop(item, None)
            if not self._items:
                self._changed.notify_all()
        self._pump()
