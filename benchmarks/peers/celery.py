"""Celery, without gossip, mingle and heartbeats, which cost it some."""

from __future__ import annotations

import os

from celery import Celery

from benchmarks.peers.work import BODIES, arguments

PACKAGE = "celery"
LABEL = "Celery"
BROKERS = ("redis", "amqp")
ACKS = "before the task, after it with `acks_late`"
ROUGH_PER_S = 800
VARIANTS = ("prefetch 64", "prefetch 256", "prefetch 4")
EVENTS = ["-E"]

app = Celery("bench", broker=os.environ["BENCH_BROKER"], backend=None)
app.conf.update(broker_connection_retry_on_startup=True, task_ignore_result=True)
tasks = {kind: app.task(name=kind, ignore_result=True)(body) for kind, body in BODIES.items()}


def send(kind: str, count: int) -> None:
    """`apply_async`."""
    task = tasks[kind]
    for _ in range(count):
        task.apply_async(arguments(kind))


send_batch = None


def workers(variant: str, processes: int) -> list[list[str]]:
    """One worker, prefork."""
    command = ["-m", "celery", "-A", "benchmarks.peers.celery", "worker", "-c", str(processes)]
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "ERROR"]
    return [[*command, *quiet, "--prefetch-multiplier", variant.split()[1]]]
