"""The tasks of the demo: quick ones, slow ones, and ones that go wrong on purpose."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from umbel import Task, Umbel

app = Umbel("demo", result_extended=True, result_expires=600)


class OutOfStock(Exception):
    """What a failing order of the demo raises."""


@app.task
def add(x: int, y: int) -> int:
    """Something quick."""
    return x + y


@app.task
async def wait_for(seconds: float, value: int) -> int:
    """Something that mostly waits, without holding a thread where the pool is asyncio."""
    await asyncio.sleep(seconds)
    return value


@app.task
def work_for(seconds: float, value: int) -> int:
    """Something that blocks."""
    time.sleep(seconds)
    return value


@app.task
def order(number: int) -> None:
    """Something that fails."""
    raise OutOfStock(number)


@app.task(bind=True, max_retries=5, default_retry_delay=0.2)
def unsteady(self: Task, failures: int) -> int:
    """Something that works in the end."""
    tried = self.request.retries
    if tried < failures:
        raise self.retry(exc=OutOfStock(tried))
    return tried


@app.task(bind=True)
def lead(self: Task) -> str:
    """What a cluster is to do once: tells where it was done."""
    return str(self.request.hostname)


@app.task
def total(numbers: list[Any]) -> int:
    """The body of a chord."""
    return sum(numbers)
