"""The AMQP transport against py-amqp under the same API of kombu, on a private RabbitMQ.

Consuming: messages like those of tasks are taken and acknowledged, one process, at two windows.
Publishing: one by one, and in batches with confirms. The two take turns; medians of the rounds are
compared. The broker works on the same processors, so the ratio of the processor time of this
process per message is the figure that does not depend on what else they do.

    python -m benchmarks.transport_amqp [--count 10000] [--rounds 5] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from kombu import Connection, Consumer, Producer, Queue

from tests.servers import RabbitMQServer
from umbel.broker.amqp.batches import publish, publish_one
from umbel.broker.sessions import connections
from umbel.broker.tasks.batches import Parcel

WINDOWS = (64, 256)
KINDS = ("umbel", "pyamqp")
REPLY_TO = str(uuid.uuid4())  # one client sends all of them
# Processor time per message, py-amqp's over ours.
REQUIRED = {"consume, window 64": 2.5, "consume, window 256": 2.5, "publish": 1.5, "batch": 4.0}


def parcel(number: int) -> Parcel:
    """A message like that of a task."""
    id_ = str(uuid.uuid4())
    headers = {
        "lang": "py", "task": "benchmark.add", "id": id_, "shadow": None, "eta": None,
        "expires": None, "group": None, "group_index": None, "retries": 0,
        "timelimit": [None, None], "root_id": id_, "parent_id": None, "argsrepr": f"({number},)",
        "kwargsrepr": "{}", "origin": "1@host", "ignore_result": False,
        "replaced_task_nesting": 0, "stamped_headers": None, "stamps": {},
    }  # fmt: skip
    body = (
        b'[[%d], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]' % number
    )
    properties = {"correlation_id": id_, "reply_to": REPLY_TO, "delivery_mode": 1, "priority": 0}
    return Parcel(body, headers, properties, "application/json", "utf-8", "", "bench")


class Figure:
    """One measurement: per second, and processor time of this process."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> Self:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.per_s = self._count / (time.perf_counter() - self._wall)
        self.cpu_us = (time.process_time() - self._cpu) / self._count * 1e6


def consume(connection: Connection, window: int, count: int) -> Figure:
    """Take and acknowledge all."""
    channel: Any = connection.channel()
    done = 0

    def take(message: Any) -> None:
        nonlocal done
        done += 1
        message.ack()

    consumer = Consumer(channel, [Queue("bench")], on_message=take)
    consumer.qos(prefetch_count=window)
    if hasattr(channel, "gather_acks"):
        channel.gather_acks()
    with Figure(count) as figure:
        consumer.consume()
        while done < count:
            connection.drain_events(timeout=30)
    channel.close()
    return figure


def send_each(connection: Connection, parcels: list[Parcel], kind: str) -> Figure:
    """One by one: kombu's producer, or ours."""
    channel = connection.channel()
    producer = Producer(channel, auto_declare=False)
    with Figure(len(parcels)) as figure:
        for one in parcels:
            if kind == "umbel":
                publish_one(channel, one)
            else:
                producer.publish(
                    one.body, exchange="", routing_key=one.routing_key, headers=one.headers,
                    content_type=one.content_type, content_encoding=one.content_encoding,
                    **one.properties,
                )  # fmt: skip
        _arrived(channel)
    return figure


def send_batch(connection: Connection, parcels: list[Parcel], kind: str) -> Figure:
    """In batches with confirms: as one by one with kombu, which has nothing else, without them."""
    if kind != "umbel":
        return send_each(connection, parcels, kind)
    channel = connection.channel()
    with Figure(len(parcels)) as figure:
        for _ in publish(channel, parcels):
            pass
    channel.close()
    return figure


def _arrived(channel: Any) -> None:
    channel.queue_declare("bench", passive=True)
    channel.close()


def measure(url: str, count: int, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by what is measured and by kind."""
    parcels = [parcel(number) for number in range(count)]
    works: dict[str, Callable[[Connection, str], Figure]] = {
        f"consume, window {window}": lambda c, kind, window=window: consume(c, window, count)  # type: ignore[misc]
        for window in WINDOWS
    }
    works["publish"] = lambda c, kind: send_each(c, parcels, kind)
    works["batch"] = lambda c, kind: send_batch(c, parcels, kind)
    found: dict[str, dict[str, list[Figure]]] = {
        what: {kind: [] for kind in KINDS} for what in works
    }
    for _ in range(rounds):
        for what, work in works.items():
            for kind in KINDS:
                found[what][kind].append(_one(url, kind, work, parcels, what))
    return {
        what: {
            kind: {
                "per_s": statistics.median(figure.per_s for figure in figures),
                "cpu_us": statistics.median(figure.cpu_us for figure in figures),
            }
            for kind, figures in by_kind.items()
        }
        for what, by_kind in found.items()
    }


def _one(url: str, kind: str, work: Any, parcels: list[Parcel], what: str) -> Figure:
    with connections.connect(url) as filler:
        channel = filler.channel()
        Queue("bench")(channel).declare()
        channel.queue_purge("bench")
        if what.startswith("consume"):
            list(publish(channel, parcels))
    with connections.connect(url, amqp_transport=kind) as connection:
        connection.connect()
        figure: Figure = work(connection, kind)
        return figure


def main() -> int:
    """Measure, print a table, and fail when a promise is not kept."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=10_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--quick", action="store_true", help="fewer messages, three rounds")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    count, rounds = (2_000, 3) if given.quick else (given.count, given.rounds)
    with tempfile.TemporaryDirectory() as directory:
        server = RabbitMQServer(Path(directory))
        server.start()
        try:
            found = measure(server.url, count, rounds)
        finally:
            server.close()
    print("| | umbel | pyamqp | ratio | µs | µs | ratio |")
    print("|---|---|---|---|---|---|---|")
    missed = []
    for what, by_kind in found.items():
        ours, theirs = by_kind["umbel"], by_kind["pyamqp"]
        ratio = theirs["cpu_us"] / ours["cpu_us"]
        print(
            f"| {what} | {ours['per_s']:,.0f}/s | {theirs['per_s']:,.0f}/s "
            f"| {ours['per_s'] / theirs['per_s']:.1f} "
            f"| {ours['cpu_us']:.1f} | {theirs['cpu_us']:.1f} | {ratio:.1f} |"
        )
        if ratio < REQUIRED[what]:
            missed.append(f"{what}: {ratio:.2f} < {REQUIRED[what]}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
