"""huey, with processes."""

from __future__ import annotations

import os

from huey import RedisHuey

from benchmarks.peers.work import BODIES, arguments

PACKAGE = LABEL = "huey"
BROKERS = ("redis",)
ACKS = "none: what a dying process has is lost"
ROUGH_PER_S = 1500
VARIANTS = ("processes",)
EVENTS = None

huey = RedisHuey("bench", url=os.environ["BENCH_BROKER"], results=False)
tasks = {kind: huey.task(name=kind)(body) for kind, body in BODIES.items()}


def send(kind: str, count: int) -> None:
    """A call of the task."""
    task = tasks[kind]
    for _ in range(count):
        task(*arguments(kind))


send_batch = None


def workers(variant: str, processes: int) -> list[list[str]]:
    """One consumer, and its scheduler beside the processes."""
    start = ["-m", "huey.bin.huey_consumer", "benchmarks.peers.huey.huey", "-q", "-n"]
    return [[*start, "-k", "process", "-w", str(processes)]]
