"""What sending costs: Umbel's `apply_async` and `send_many` against Celery's `apply_async`.

Private brokers, one client process, which all take turns in; nobody consumes. What counts is the
ratio of messages per second; the ratio of the processor time that the client spends is shown too,
as it does not mind what else the machine does. Celery sends its messages one by one in all rows: it
has no way to send many at once. `send_many` gets 1,000 at a time, as in `make bench`.

On RabbitMQ a call returns when the server has confirmed its message, which it has on disk then.
That is compared with a Celery that waits for confirms as well (`confirm_publish`, which is off
there unless it is asked for). `unconfirmed` is `confirm_publish=False`, compared with Celery as it
is. The price of confirms is the ratio of the two. `send_many` waits for the server too, so its rate
is that of the server, and what is promised is the client's own part, its processor time.

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
from typing import Any, NamedTuple

import celery
import redis
from kombu import Connection

from benchmarks.stage import MemoryRedis
from tests.servers import RabbitMQServer
from umbel import Umbel

BROKERS = ("redis", "rabbitmq")


class Promise(NamedTuple):
    """A figure of one way to send, as a multiple of what Celery gets."""

    figure: str
    at_least: float
    over: str = "celery"


# `make bench` holds `send_many` on Redis to 20, with calls without arguments and for longer; here
# two numbers are passed, in short rounds.
PROMISES = {
    "redis": {"one": Promise("ratio", 2.0), "many": Promise("ratio", 15.0)},
    "rabbitmq": {
        "one": Promise("ratio", 1.0, "celery-confirmed"),
        "unconfirmed": Promise("ratio", 2.0),
        "many": Promise("cpu_ratio", 8.0),
    },
}
QUEUE = "celery"
BATCH = 1_000  # messages per call of `send_many`

Send = Callable[[int], object]


def add(x: int, y: int) -> None:
    """Is never run."""


def one_by_one(app: Any) -> Send:
    """Sends with one call per message."""
    own = {"shared": False} if isinstance(app, celery.Celery) else {}
    task = app.task(name="bench.add", ignore_result=True, **own)(add)

    def send(count: int) -> None:
        for number in range(count):
            task.apply_async((number, number))

    return send


def in_batches(app: Umbel) -> Send:
    """Sends with one call per `BATCH` messages."""

    def send(count: int) -> None:
        for start in range(0, count, BATCH):
            numbers = range(start, min(start + BATCH, count))
            app.send_many(app.signature("bench.add", (n, n)) for n in numbers)

    return send


def senders(url: str) -> tuple[dict[str, Send], Callable[[], None]]:
    """The ways to send that many messages, and how to hang up."""
    made: list[Any] = []

    def ours(**settings: Any) -> Umbel:
        made.append(
            Umbel("bench", broker=url, backend="disabled://", set_as_current=False, **settings)
        )
        return made[-1]

    def theirs(**settings: Any) -> Any:
        made.append(celery.Celery("bench", broker=url, set_as_current=False, **settings))
        return made[-1]

    def close() -> None:
        for app in made:
            app.close()

    app = ours()
    ways = {"celery": one_by_one(theirs()), "one": one_by_one(app), "many": in_batches(app)}
    if not url.startswith("redis"):
        confirmed, not_confirmed = ({"confirm_publish": confirm} for confirm in (True, False))
        ways["celery-confirmed"] = one_by_one(theirs(broker_transport_options=confirmed))
        ways["unconfirmed"] = one_by_one(ours(broker_transport_options=not_confirmed))
    return ways, close


def waiting(url: str) -> int:
    """How many messages are in the queue; they are taken away."""
    if url.startswith("redis"):
        with redis.Redis.from_url(url) as client:
            count = int(client.llen(QUEUE))
            client.delete(QUEUE)
            return count
    with Connection(url) as connection:
        return int(connection.channel().queue_purge(QUEUE))


def measure(broker: str, url: str, count: int, rounds: int) -> dict[str, float]:
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
    for way, promise in PROMISES[broker].items():
        found[f"ratio.{way}"] = found[f"{way}_per_s"] / found[f"{promise.over}_per_s"]
        found[f"cpu_ratio.{way}"] = found[f"{promise.over}_cpu_us"] / found[f"{way}_cpu_us"]
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
                results[broker] = measure(broker, made.url, count, rounds)
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
        promises = PROMISES[broker]
        for way in [name.removesuffix("_per_s") for name in found if name.endswith("_per_s")]:
            rate, cost = found[f"{way}_per_s"], found[f"{way}_cpu_us"]
            line = f"{f'{broker} {way}':26} {rate:11.0f} {cost:10.1f}"
            promise = promises.get(way)
            if promise is not None:
                missed = missed or found[f"{promise.figure}.{way}"] < promise.at_least
                name = promise.figure.replace("_", " ")
                line += f" {found[f'ratio.{way}']:7.1f} {found[f'cpu_ratio.{way}']:10.1f}"
                line += f"  ({name} over {promise.over}: at least {promise.at_least:g})"
            print(line)
        if "unconfirmed_per_s" in found:
            price = found["unconfirmed_per_s"] / found["one_per_s"]
            print(f"{broker}: apply_async with confirms takes {price:.1f} times as long as without")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
