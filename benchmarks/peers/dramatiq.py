"""dramatiq, with one and with its own number of threads per process."""

from __future__ import annotations

import os

import dramatiq
from dramatiq.broker import Broker

from benchmarks.peers.work import BODIES, arguments

PACKAGE = LABEL = "dramatiq"
BROKERS = ("redis", "amqp")
ACKS = "after the task"
ROUGH_PER_S = 2000
VARIANTS = ("8 threads", "4 threads", "1 thread")
EVENTS = None


def _broker(url: str) -> Broker:
    if url.startswith("redis"):
        from dramatiq.brokers.redis import RedisBroker

        return RedisBroker(url=url)
    from dramatiq.brokers.rabbitmq import RabbitmqBroker

    return RabbitmqBroker(url=url)


broker = _broker(os.environ["BENCH_BROKER"])
dramatiq.set_broker(broker)
actors = {kind: dramatiq.actor(body, actor_name=kind) for kind, body in BODIES.items()}


def send(kind: str, count: int) -> None:
    """`send`."""
    actor = actors[kind]
    for _ in range(count):
        actor.send(*arguments(kind))


send_batch = None


def workers(variant: str, processes: int) -> list[list[str]]:
    """One program that forks."""
    threads = variant.split(maxsplit=1)[0]
    command = ["-m", "dramatiq", "benchmarks.peers.dramatiq"]
    return [[*command, "-p", str(processes), "-t", threads]]
