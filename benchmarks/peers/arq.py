"""arq: one program per process; it looks for work at intervals, so a shorter one is tried too."""

from __future__ import annotations

import asyncio
import os

from arq import create_pool, func
from arq.connections import ArqRedis, RedisSettings

from benchmarks.peers.work import arguments, coroutines

PACKAGE = LABEL = "arq"
BROKERS = ("redis",)
ACKS = "none: runs again after a time-out"
ROUGH_PER_S = 500
VARIANTS = ("100 at a time, polled every 10 ms", "defaults")
EVENTS = None

QUIET = {"version": 1, "disable_existing_loggers": True}
_settings = RedisSettings.from_dsn(os.environ["BENCH_BROKER"])
_runner: asyncio.Runner | None = None
_pool: ArqRedis | None = None


def _with_context(body):  # type: ignore[no-untyped-def]
    async def call(context, *args):  # type: ignore[no-untyped-def]
        await body(*args)

    return call


class Defaults:
    """The worker's settings but for results, which are not kept."""

    functions = [func(_with_context(body), name=kind) for kind, body in coroutines().items()]
    redis_settings = _settings
    keep_result = 0


class Quick:
    """More at a time, looked for more often; arq sees nothing that a class inherits."""

    functions = Defaults.functions
    redis_settings = _settings
    keep_result = 0
    max_jobs = 100
    poll_delay = 0.01


_CLASSES = {VARIANTS[0]: "Quick", VARIANTS[1]: "Defaults"}


def send(kind: str, count: int) -> None:
    """`enqueue_job`, each awaited."""
    global _runner, _pool
    if _runner is None:
        _runner = asyncio.Runner()
        _pool = _runner.run(create_pool(_settings))
    _runner.run(_send(kind, count))


async def _send(kind: str, count: int) -> None:
    assert _pool is not None
    for _ in range(count):
        await _pool.enqueue_job(kind, *arguments(kind))


send_batch = None


def workers(variant: str, processes: int) -> list[list[str]]:
    """It has one process, so it is started that often."""
    command = ["-m", "arq", f"benchmarks.peers.arq.{_CLASSES[variant]}"]
    return [[*command, "--custom-log-dict", "benchmarks.peers.arq.QUIET"]] * processes
