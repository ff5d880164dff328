"""RQ, with a fork for each task as is its way, and without."""

from __future__ import annotations

import os

import redis
from rq import Queue

from benchmarks.peers.work import BODIES, arguments

PACKAGE = "rq"
LABEL = "RQ"
BROKERS = ("redis",)
ACKS = "none: what a dying process has counts as failed"
ROUGH_PER_S = 400
VARIANTS = ("SimpleWorker", "fork per task")
EVENTS = None

_CLASSES = {"fork per task": "rq.worker.Worker", "SimpleWorker": "rq.worker.SimpleWorker"}
_url = os.environ["BENCH_BROKER"]
queue = Queue("bench", connection=redis.Redis.from_url(_url))


def send(kind: str, count: int) -> None:
    """`enqueue`."""
    body = BODIES[kind]
    for _ in range(count):
        queue.enqueue(body, *arguments(kind), result_ttl=0)


def send_batch(kind: str, count: int) -> None:
    """`enqueue_many`."""
    one = Queue.prepare_data(BODIES[kind], arguments(kind), result_ttl=0)
    queue.enqueue_many([one] * count)


def workers(variant: str, processes: int) -> list[list[str]]:
    """A pool of workers."""
    start = ["-m", "rq.cli", "worker-pool", "bench", "-u", _url, "-q", "-l", "ERROR"]
    return [[*start, "-n", str(processes), "-w", _CLASSES[variant]]]
