"""Umbel, as a user gets it; the window, and whether processes are bound to CPUs, as is fastest."""

from __future__ import annotations

import os

from benchmarks.peers.work import BODIES, arguments
from umbel import Umbel

PACKAGE = "umbel"
LABEL = "Umbel"
BROKERS = ("redis", "amqp")
ACKS = "before the task, after it with `acks_late`"
ROUGH_PER_S = 9000
BOUND = ", CPU affinity"
VARIANTS = (
    "prefetch 64", "prefetch 256", f"prefetch 64{BOUND}", f"prefetch 256{BOUND}", "defaults",
)  # fmt: skip
EVENTS = ["-E"]

app = Umbel("bench", broker=os.environ["BENCH_BROKER"])
tasks = {kind: app.task(name=kind, ignore_result=True)(body) for kind, body in BODIES.items()}


def send(kind: str, count: int) -> None:
    """`apply_async`."""
    task = tasks[kind]
    for _ in range(count):
        task.apply_async(arguments(kind))


def send_batch(kind: str, count: int) -> None:
    """`send_many`."""
    task = tasks[kind]
    app.send_many([task.s(*arguments(kind)) for _ in range(count)])


def spread(kind: str, count: int, queues: list[str]) -> None:
    """Fill several queues in turn, also for a worker of Celery's."""
    signatures = [tasks[kind].s(*arguments(kind)).set(queue=name) for name in queues]
    app.send_many([signatures[number % len(queues)] for number in range(count)])


def workers(variant: str, processes: int) -> list[list[str]]:
    """One worker, prefork."""
    command = ["-m", "umbel", "-A", "benchmarks.peers.umbel", "worker", "-c", str(processes)]
    if variant.endswith(BOUND):
        command.append("--cpu-affinity")
    prefetch = variant.removesuffix(BOUND).removeprefix("prefetch ")
    return [command if variant == "defaults" else [*command, "--prefetch-multiplier", prefetch]]
