"""Throwing an exception of our choice into a coroutine that waits.

asyncio can only cancel. `steered` wraps a coroutine so that a cancellation arrives in it as the
exception that was put into `interrupt` before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from types import coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Steered(Protocol):
    """What is steered: its asyncio task, and what it is to raise at its next await."""

    task: asyncio.Task[Any] | None
    interrupt: BaseException | None


@coroutine
def steered(awaitable: Awaitable[T], item: Steered) -> Generator[Any, Any, T]:
    """Await, but throw `item.interrupt` in place of the cancellation that woke us for it."""
    steps = awaitable.__await__()
    error: BaseException | None = None
    value: Any = None
    while True:
        try:
            waited_for = steps.send(value) if error is None else steps.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        error = value = None
        try:
            value = yield waited_for
        except GeneratorExit:  # nobody waits for it any more; it may have been closed before
            steps.close()
            raise
        except BaseException as exc:  # noqa: BLE001 - handed on to the coroutine
            error = exc
        if item.interrupt is not None:
            error, item.interrupt = item.interrupt, None
            if item.task is not None:
                item.task.uncancel()  # else timeouts inside the task would take it for theirs
