"""Waiting for the ends of tasks: for threads and greenlets, and for coroutines.

Both give documents in the order in which tasks end. Nothing is polled: a watch of the backend
fills a queue. The time-out is one deadline for the whole wait.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncGenerator, Collection, Generator
from typing import TYPE_CHECKING, Any

from umbel import exceptions
from umbel.wire.results import READY_STATES

if TYPE_CHECKING:
    from umbel.app.results.backend import Backend


def arrivals(
    backend: Backend, task_ids: Collection[str], timeout: float | None, *, every: bool = False
) -> Generator[dict[str, Any], None, None]:
    """The documents of these tasks as they end; raises `TimeoutError` at the deadline."""
    deadline = None if timeout is None else time.monotonic() + timeout
    waiting = set(task_ids)
    arrived: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    watch = backend.watch(waiting, arrived.put, every=every)
    try:
        while waiting:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                meta = arrived.get(timeout=left_s)
            except queue.Empty:
                raise late(waiting, timeout) from None
            if meta["status"] in READY_STATES:
                waiting.discard(meta["task_id"])
            yield meta
    finally:
        watch.close()


async def arrivals_async(
    backend: Backend, task_ids: Collection[str]
) -> AsyncGenerator[dict[str, Any], None]:
    """The documents of these tasks as they end; a time-out is the caller's `asyncio.timeout`."""
    loop = asyncio.get_running_loop()
    waiting = set(task_ids)
    arrived: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def receive(meta: dict[str, Any]) -> None:
        # A loop that is closed has nobody left to tell.
        if not loop.is_closed():
            loop.call_soon_threadsafe(arrived.put_nowait, meta)

    watch = backend.watch(waiting, receive)
    try:
        while waiting:
            meta = await arrived.get()
            waiting.discard(meta["task_id"])
            yield meta
    finally:
        watch.close()


def late(waiting: Collection[str], timeout: float | None) -> exceptions.TimeoutError:
    """The error for results that are not there in time."""
    some = ", ".join(sorted(waiting)[:3]) + (", ..." if len(waiting) > 3 else "")
    return exceptions.TimeoutError(
        f"no result of {len(waiting)} task(s) within {timeout} s ({some}); they may still end: "
        "wait longer, or look at their state"
    )
