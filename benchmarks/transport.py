"""Messages consumed and acknowledged per second on Redis: our transport against kombu's.

Nothing but the transport: a consumer whose callback acknowledges. Both take turns on one private
server, with the same envelopes waiting, through the same `connect` and kombu's API; the medians
of the rounds are compared. What counts is the ratio at a window of 64 messages.

    python -m benchmarks.transport [--count 20000] [--rounds 3] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import redis
from kombu import Connection, Consumer, Queue

from tests.servers import RedisServer
from umbel.broker.sessions.connections import connect

REQUIRED_RATIO = 20.0
WINDOWS = (4, 16, 64, 256)
COMPARED = 64
# kombu's own needs so many times as long that it gets so many fewer messages.
SHARE = {"umbel": 1, "kombu": 20}
BODY = [[7], {"key": "value"}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
HEADERS = {"lang": "py", "task": "shop.charge", "id": "d9ab7b0e-9c31-4b52-8a0c-3c7e6a2f8d11"}


class Rate(NamedTuple):
    """What one run showed."""

    per_s: float
    cpu_us: float  # of this process, per message


class MemoryRedis(RedisServer):
    """A Redis without files: the disk is not what is measured."""

    def command(self) -> list[str]:
        return [*super().command(), "--appendonly", "no"]


def run(url: str, transport: str, window: int, count: int) -> Rate:
    """Consume and acknowledge so many messages."""
    with redis.Redis.from_url(url) as client, connect(url, redis_transport=transport) as connection:
        client.flushdb()
        _fill(client, connection, count)
        left = count

        def on_message(message: object) -> None:
            nonlocal left
            left -= 1
            message.ack()  # type: ignore[attr-defined]

        channel = connection.channel()
        consumer = Consumer(channel, [Queue("jobs")], on_message=on_message)
        consumer.qos(prefetch_count=window)
        consumer.consume()
        began, cpu = time.perf_counter(), time.process_time()
        while left:
            connection.drain_events(timeout=10)
        channel.close()
        rate = Rate(
            count / (time.perf_counter() - began), (time.process_time() - cpu) / count * 1e6
        )
        assert client.hlen("unacked") == client.llen("jobs") == 0
        return rate


def _fill(client: redis.Redis, connection: Connection, count: int) -> None:
    with connection.Producer() as producer:
        producer.publish(BODY, routing_key="jobs", headers=HEADERS)
    envelope = client.rpop("jobs")
    for start in range(0, count, 1_000):
        client.lpush("jobs", *[envelope] * min(1_000, count - start))


def measure(url: str, count: int = 20_000, rounds: int = 3) -> dict[str, Rate]:
    """The medians, by `<transport>.<window>`."""
    found: dict[str, list[Rate]] = {}
    for _ in range(rounds):
        for window in WINDOWS:
            for transport, share in SHARE.items():
                key = f"{transport}.{window}"
                found.setdefault(key, []).append(run(url, transport, window, count // share))
    return {
        key: Rate(*(statistics.median(column) for column in zip(*rates, strict=True)))
        for key, rates in found.items()
    }


def main() -> int:
    """Print a table; 1 when the transport is not as fast as promised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer messages")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    count = 10_000 if chosen.quick else chosen.count
    with tempfile.TemporaryDirectory() as directory:
        server = MemoryRedis(Path(directory))
        try:
            server.start()
            rates = measure(server.url, count, chosen.rounds)
        finally:
            server.close()
    print("window    umbel/s   kombu/s   ratio   CPU µs   CPU µs   ratio")
    for window in WINDOWS:
        ours, theirs = rates[f"umbel.{window}"], rates[f"kombu.{window}"]
        print(
            f"{window:6} {ours.per_s:10,.0f} {theirs.per_s:9,.0f} {ours.per_s / theirs.per_s:7.1f}"
            f" {ours.cpu_us:8.1f} {theirs.cpu_us:8.1f} {theirs.cpu_us / ours.cpu_us:7.1f}"
        )
    ratio = rates[f"umbel.{COMPARED}"].per_s / rates[f"kombu.{COMPARED}"].per_s
    if chosen.json:
        figures = {f"{key}.{name}": value for key, rate in rates.items() for name, value in
                   rate._asdict().items()}  # fmt: skip
        chosen.json.write_text(json.dumps({**figures, "ratio": ratio}, indent=1) + "\n")
    if ratio < REQUIRED_RATIO:
        print(f"the ratio at {COMPARED} is {ratio:.1f}, and {REQUIRED_RATIO:g} is promised")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
