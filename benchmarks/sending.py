"""What sending costs: Umbel's `apply_async` and `send_many` against Celery's `apply_async`.

Private brokers, one client process, which both take turns in; nobody consumes. What counts is the
ratio of messages per second; the ratio of the processor time that the client spends is shown too,
as it does not mind what else the machine does. Celery sends its messages one by one in both
columns: it has no way to send many at once. `send_many` gets 1,000 at a time, as in `make bench`.

On RabbitMQ `send_many` waits until the server has every message on its disk, and Celery does not:
its rate is that of the server. What is promised there is the client's own part, its processor time.

    python -m benchmarks.sending [--count 5000] [--rounds 3] [--json FILE] [--broker redis]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import celery
import redis
from kombu import Connection

from benchmarks.stage import MemoryRedis
from tests.servers import RabbitMQServer
from umbel import Umbel

BROKERS = ("redis", "rabbitmq")
WAYS = ("one", "many")
# Which ratio to Celery's is held to at least so much. `make bench` holds `send_many` on Redis to
# 20, with calls without arguments and for longer; here two numbers are passed, in short rounds.
REQUIRED = {
    "redis": {"one": ("ratio", 2.0), "many": ("ratio", 15.0)},
    "rabbitmq": {"one": ("ratio", 2.0), "many": ("cpu_ratio", 8.0)},
}
QUEUE = "celery"
BATCH = 1_000  # messages per call of `send_many`

Send = Callable[[int], object]


def senders(url: str) -> tuple[dict[str, Send], Callable[[], None]]:
    """The ways to send that many messages, and how to hang up."""
    ours = Umbel("bench", broker=url, backend="disabled://", set_as_current=False)
    theirs = celery.Celery("bench", broker=url, set_as_current=False)

    def add(x: int, y: int) -> None:
        """Is never run."""

    our_add = ours.task(name="bench.add", ignore_result=True)(add)
    their_add = theirs.task(name="bench.add", ignore_result=True, shared=False)(add)

    def one_by_one(task: Any, count: int) -> None:
        for number in range(count):
            task.apply_async((number, number))

    def in_batches(count: int) -> None:
        for start in range(0, count, BATCH):
            ours.send_many(our_add.s(n, n) for n in range(start, min(start + BATCH, count)))

    def close() -> None:
        ours.close()
        theirs.close()

    return {
        "celery": lambda count: one_by_one(their_add, count),
        "one": lambda count: one_by_one(our_add, count),
        "many": in_batches,
    }, close


def waiting(url: str) -> int:
    """How many messages are in the queue; they are taken away."""
    if url.startswith("redis"):
        with redis.Redis.from_url(url) as client:
            count = int(client.llen(QUEUE))
            client.delete(QUEUE)
            return count
    with Connection(url) as connection:
        return int(connection.channel().queue_purge(QUEUE))


def measure(url: str, count: int, rounds: int) -> dict[str, float]:
    """Medians per second, CPU time per message in microseconds, and ratios to Celery's."""
    ways, close = senders(url)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    costs: dict[str, list[float]] = {way: [] for way in ways}
    try:
        for send in ways.values():
            send(10)  # connected, declared, imported
        waiting(url)
        for _ in range(rounds):
            for way, send in ways.items():
                sent = count * 4 if way == "many" else count
                began, used = time.perf_counter(), time.process_time()
                send(sent)
                rates[way].append(sent / (time.perf_counter() - began))
                costs[way].append((time.process_time() - used) / sent * 1e6)
                found = settled(url, sent)
                if found != sent:
                    raise SystemExit(f"{way}: {found} of {sent} messages are there")
    finally:
        close()
    found = {f"{way}_per_s": statistics.median(rates[way]) for way in ways}
    found |= {f"{way}_cpu_us": statistics.median(costs[way]) for way in ways}
    for way in WAYS:
        found[f"ratio.{way}"] = found[f"{way}_per_s"] / found["celery_per_s"]
        found[f"cpu_ratio.{way}"] = found["celery_cpu_us"] / found[f"{way}_cpu_us"]
    return found


def settled(url: str, expected: int, within_s: float = 30) -> int:
    """What is in the queue once everything has arrived: RabbitMQ may be behind."""
    found, deadline = waiting(url), time.monotonic() + within_s
    while found < expected and time.monotonic() < deadline:
        time.sleep(0.05)
        found += waiting(url)
    return found


def run(brokers: list[str], count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measure on servers of our own."""
    results = {}
    for broker in brokers:
        with tempfile.TemporaryDirectory() as directory:
            made = (MemoryRedis if broker == "redis" else RabbitMQServer)(Path(directory))
            made.start()
            try:
                results[broker] = measure(made.url, count, rounds)
            finally:
                made.close()
    return results


def main() -> int:
    """Print the table; exit 1 when a ratio is below what is promised."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--broker", choices=BROKERS, action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = run(options.broker or list(BROKERS), options.count, options.rounds)
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, "
        f"{options.count} messages, median of {options.rounds} rounds"
    )
    print(f"{'':26} {'messages/s':>11} {'us of CPU':>10} {'ratio':>7} {'CPU ratio':>10}")
    missed = False
    for broker, found in results.items():
        print(
            f"{broker + ' celery':26} {found['celery_per_s']:11.0f} {found['celery_cpu_us']:10.1f}"
        )
        for way, (figure, required) in REQUIRED[broker].items():
            missed = missed or found[f"{figure}.{way}"] < required
            print(
                f"{f'{broker} umbel {way}':26} {found[f'{way}_per_s']:11.0f} "
                f"{found[f'{way}_cpu_us']:10.1f} {found[f'ratio.{way}']:7.1f} "
                f"{found[f'cpu_ratio.{way}']:10.1f}"
                f"  ({'CPU ratio ' * (figure == 'cpu_ratio')}at least {required:g})"
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
