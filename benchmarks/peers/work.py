"""What the tasks do, the same for every contestant, and the log that tells when it was done.

A task ends with one record appended to a file in memory: its kind, when it was sent (`stamp`
only) and the time, on the clock that all processes of a machine share. An append of a few bytes
is atomic, whatever mixture of processes, threads and forks a worker is, and costs about a
microsecond. So nobody has to ask the broker whether the work is done.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis

RECORD = struct.Struct("<qqq")  # number of the kind, sent at or 0, done at: nanoseconds
KINDS = ("noop", "incr", "sleep", "1k", "100k", "stamp")
COUNTER = "bench:count"
SLEEP_S = 0.001

_NOOP, _INCR, _SLEEP, _1K, _100K, _STAMP = range(len(KINDS))
_now = time.monotonic_ns


def _text(size: int) -> str:
    """Text that does not compress to nothing: some contestants do compress."""
    return base64.b64encode(random.Random(size).randbytes(size)).decode()[:size]


_ARGUMENTS: dict[str, tuple[Any, ...]] = {"1k": (_text(1024),), "100k": (_text(100 * 1024),)}


def arguments(kind: str) -> tuple[Any, ...]:
    """What a task of this kind is called with; for `stamp` that is the time of the call."""
    return (_now(),) if kind == "stamp" else _ARGUMENTS.get(kind, ())


_log = -1
_clients: dict[str, Any] = {}


def _note(kind: int, sent: int = 0) -> None:
    global _log
    if _log < 0:  # opened late: whoever only sends has no log
        _log = os.open(os.environ["BENCH_LOG"], os.O_WRONLY | os.O_APPEND)
    os.write(_log, RECORD.pack(kind, sent, _now()))


def _client(make: Callable[..., Any]) -> Any:
    # One per process: a connection does not survive a fork.
    key = f"{make.__module__}.{os.getpid()}"
    if key not in _clients:
        _clients[key] = make(os.environ["BENCH_REDIS"])
    return _clients[key]


def noop() -> None:
    """Nothing."""
    _note(_NOOP)


def incr() -> None:
    """One round trip to Redis."""
    _client(redis.Redis.from_url).incr(COUNTER)
    _note(_INCR)


def sleep() -> None:
    """Wait for a millisecond, as a call of another service does."""
    time.sleep(SLEEP_S)
    _note(_SLEEP)


def take_1k(text: str) -> None:
    """An argument of 1 KiB."""
    assert len(text) == 1024
    _note(_1K)


def take_100k(text: str) -> None:
    """An argument of 100 KiB."""
    assert len(text) == 100 * 1024
    _note(_100K)


def stamp(sent: int) -> None:
    """Tell when it started, and when it was sent."""
    _note(_STAMP, sent)


BODIES: dict[str, Callable[..., None]] = {
    "noop": noop,
    "incr": incr,
    "sleep": sleep,
    "1k": take_1k,
    "100k": take_100k,
    "stamp": stamp,
}


def coroutines() -> dict[str, Callable[..., Awaitable[None]]]:
    """The same bodies for a library of coroutines, which waits without blocking."""
    from redis import asyncio as aredis

    async def incr_async() -> None:
        await _client(aredis.Redis.from_url).incr(COUNTER)
        _note(_INCR)

    async def sleep_async() -> None:
        await asyncio.sleep(SLEEP_S)
        _note(_SLEEP)

    def wrapped(body: Callable[..., None]) -> Callable[..., Awaitable[None]]:
        async def call(*args: Any) -> None:
            body(*args)

        return call

    bodies = {kind: wrapped(body) for kind, body in BODIES.items()}
    return bodies | {"incr": incr_async, "sleep": sleep_async}
