"""Running `async def` tasks in pools that are not asyncio's.

Each coroutine gets an event loop of its own, in the thread or greenlet that runs the job. The
loop turns at least every `TURN_S`, since what a pool raises in a thread is seen only when the
thread runs Python. A soft time limit that strikes while the coroutine waits is thrown into the
coroutine, where the task can catch it; anything else that strikes ends it.

asyncio knows one running loop per thread, and all greenlets share a thread. So while coroutines
run under gevent, the running loop changes with the greenlet.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from umbel.exceptions import SoftTimeLimitExceeded
from umbel.worker.execution.pools.steering import steered

T = TypeVar("T")
Make = Callable[[], Coroutine[Any, Any, T]]

TURN_S = 0.1


class _Interruptible:
    """A coroutine that can be interrupted."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.interrupt: BaseException | None = None


def drive(make: Make[T]) -> T:
    """Run a coroutine to its end in this thread or greenlet."""
    with _loop_of_greenlet(), asyncio.Runner() as runner:
        loop, target = runner.get_loop(), _Interruptible()
        task = target.task = loop.create_task(_awaited(make, target))
        _keep_turning(loop)
        while True:
            try:
                return loop.run_until_complete(task)
            except SoftTimeLimitExceeded as exc:
                if task.done():
                    raise
                target.interrupt = exc
                task.cancel()


async def _awaited(make: Make[T], target: _Interruptible) -> T:
    return await steered(make(), target)


def _keep_turning(loop: asyncio.AbstractEventLoop) -> None:
    loop.call_later(TURN_S, _keep_turning, loop)


# -- gevent --------------------------------------------------------------------------------


def _loop_of_greenlet() -> contextlib.AbstractContextManager[Any]:
    monkey = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("threading"):
        return contextlib.nullcontext()
    return _green


class _RunningLoops:
    """Keeps asyncio's running loop per greenlet, as long as anybody is inside."""

    def __init__(self) -> None:
        self._inside = 0
        self._loops: dict[Any, asyncio.AbstractEventLoop] = {}
        self._tracer: Callable[[str, Any], None] | None = None  # somebody else's

    def __enter__(self) -> None:
        import greenlet

        self._inside += 1
        if self._inside == 1:
            self._tracer = greenlet.settrace(self._switched)

    def __exit__(self, *_: object) -> None:
        import greenlet

        self._inside -= 1
        if self._inside == 0:
            greenlet.settrace(self._tracer)
            self._loops.clear()

    def _switched(self, event: str, args: Any) -> None:
        if event in {"switch", "throw"}:
            origin, target = args
            running = asyncio._get_running_loop()
            if running is None:
                self._loops.pop(origin, None)
            else:
                self._loops[origin] = running
            asyncio._set_running_loop(self._loops.get(target))
        if self._tracer is not None:
            self._tracer(event, args)


_green = _RunningLoops()
