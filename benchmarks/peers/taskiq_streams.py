"""taskiq on Redis streams."""

from __future__ import annotations

import os

from taskiq_redis import RedisStreamBroker

from benchmarks.peers import taskiq_app

PACKAGE = "taskiq"
LABEL = "taskiq (streams)"
BROKERS = ("redis",)
ACKS = "after the task"
ROUGH_PER_S = 2800
VARIANTS = taskiq_app.VARIANTS
EVENTS = None

broker = RedisStreamBroker(os.environ["BENCH_BROKER"])
_application = taskiq_app.Application(broker)


def send(kind: str, count: int) -> None:
    """`kiq`, each awaited."""
    _application.send(kind, count)


send_batch = None


def workers(variant: str, processes: int) -> list[list[str]]:
    """One program that starts the processes."""
    return [taskiq_app.command(__name__, variant, processes)]
