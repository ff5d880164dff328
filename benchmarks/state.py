"""What an event costs a monitor: Umbel's `State` next to Celery's, on the same events.

The events are those of several workers that run tasks: sent, received, started and ended, some
retried, some revoked, heartbeats in between, a little out of order as brokers and networks have
it. Both take turns in one process, each with events that were just decoded, as a receiver has
them. Within the measured time every task of the table is read once, since Umbel works fields out
on reading. Time is that of the processor, and the medians of the rounds are compared. Memory is
what the tables hold afterwards, by `tracemalloc`, per task.

    python benchmarks/state.py [--tasks 10000] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

REQUIRED_RATIO = 3.0
BATCH = 100  # a message has so many events, or fewer
WORKERS = tuple(f"worker{number}@shop.example.org" for number in range(8))
NAMES = tuple(
    f"shop.{kind}.{verb}" for kind in ("order", "mail", "stock") for verb in ("add", "do")
)
READ = ("state", "name", "timestamp", "clock", "result", "worker")

Event = dict[str, Any]


class Stream:
    """Events of a cluster that works; the seed makes them the same each time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock, self.now = 1, 1.8e9

    def event(self, kind: str, hostname: str, **fields: Any) -> Event:
        """One event, with what every event has."""
        self.clock += 1
        self.now += self.random.expovariate(2_000)
        number = int.from_bytes(hostname.encode()[-24:], "big") % 30_000
        common = {"type": kind, "hostname": hostname, "pid": number, "clock": self.clock}
        times = {"timestamp": self.now, "utcoffset": 0.0, "local_received": self.now + 0.004}
        return common | times | fields

    def task(self, parent: str | None) -> Iterator[Event]:
        """One task from its sending to its end."""
        dice = self.random
        id_, worker = str(uuid.UUID(int=dice.getrandbits(128), version=4)), dice.choice(WORKERS)
        call: Event = {"uuid": id_, "root_id": parent or id_, "parent_id": parent}
        call |= {"name": dice.choice(NAMES), "args": f"({dice.randrange(10**6)}, 'abc')"}
        call |= {"kwargs": f"{{'order': {dice.randrange(10**6)}}}", "eta": None, "expires": None}
        where = {"queue": "celery", "exchange": "", "routing_key": "celery"}
        for retries in range(3):
            yield self.event("task-sent", "gen77@web.example.org", **call, **where, retries=retries)
            yield self.event("task-received", worker, **call, retries=retries)
            if dice.random() < 0.02:
                yield self.event(
                    "task-revoked", worker, uuid=id_, terminated=False, signum=None, expired=False
                )
                return
            yield self.event("task-started", worker, uuid=id_)
            error = {"exception": f"OSError('{dice.random()}')", "traceback": "Traceback\n" * 20}
            if dice.random() < 0.06:
                yield self.event("task-retried", worker, uuid=id_, **error)
                continue
            if dice.random() < 0.05:
                yield self.event("task-failed", worker, uuid=id_, **error)
            else:
                done = {"result": str(dice.random()), "runtime": dice.random()}
                yield self.event("task-succeeded", worker, uuid=id_, **done)
            return

    def heartbeat(self, hostname: str) -> Event:
        """One sign of life."""
        figures = {"freq": 2.0, "active": 4, "processed": self.clock, "loadavg": [0.5, 0.4, 0.3]}
        software = {"sw_ident": "py-celery", "sw_ver": "5.7.0", "sw_sys": "Linux"}
        return self.event("worker-heartbeat", hostname, **figures, **software)

    def all(self, tasks: int) -> list[bytes]:
        """The events of so many tasks as they arrive, fifty tasks at a time."""
        running: list[Iterator[Event]] = []
        arrived: list[Event] = [self.heartbeat(worker) for worker in WORKERS]
        started, parent = 0, None
        while started < tasks or running:
            while started < tasks and len(running) < 50:
                running.append(self.task(parent if self.random.random() < 0.3 else None))
                started += 1
            chosen = self.random.choice(running)
            event = next(chosen, None)
            if event is None:
                running.remove(chosen)
                continue
            parent = event["uuid"]
            # Some come late, past the next few.
            late = self.random.randrange(1, 6) if self.random.random() < 0.05 else 0
            arrived.insert(max(len(arrived) - late, 0), event)
            if len(arrived) % 200 == 0:
                arrived.append(self.heartbeat(self.random.choice(WORKERS)))
        return [msgspec.json.encode(event) for event in arrived]


def celery_state(tasks: int) -> Any:
    """Celery's."""
    from celery.events.state import State

    return State(max_tasks_in_memory=tasks)


def umbel_state(tasks: int) -> Any:
    """Umbel's."""
    from umbel.app.events.state import State

    return State(max_tasks=tasks)


CONTESTANTS: dict[str, Callable[[int], Any]] = {"celery": celery_state, "umbel": umbel_state}


def read_all(state: Any) -> int:
    """Look at every task once."""
    return sum(1 for task in state.tasks.values() for name in READ if getattr(task, name, 0))


def speed(make: Callable[[int], Any], lines: list[bytes], tasks: int) -> float:
    """Events per second of one round, reading included, decoding not."""
    state = make(tasks)
    take, now = state.event, time.process_time  # nothing waits: other programs are left out
    gc.collect()
    spent_s = 0.0
    for start in range(0, len(lines), BATCH):
        events = [msgspec.json.decode(line) for line in lines[start : start + BATCH]]
        started = now()
        for event in events:
            take(event)
        spent_s += now() - started
    started = now()
    read_all(state)
    spent_s += now() - started
    return len(lines) / spent_s


def memory(make: Callable[[int], Any], lines: list[bytes], tasks: int) -> float:
    """Bytes that the table holds per task."""
    gc.collect()
    tracemalloc.start()
    state = make(tasks)
    for line in lines:
        state.event(msgspec.json.decode(line))
    read_all(state)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(state.tasks) == tasks
    return held / tasks


def main() -> int:
    """Run all rounds and print the table; exit 1 when less is reached than is promised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines = Stream(seed=4).all(options.tasks)
    rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(options.rounds):
        for name, make in CONTESTANTS.items():
            rates[name].append(speed(make, lines, options.tasks))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    held = {name: memory(make, lines, options.tasks) for name, make in CONTESTANTS.items()}
    ratio = medians["umbel"] / medians["celery"]
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.tasks} tasks, "
        f"{len(lines)} events, median of {options.rounds} rounds"
    )
    print(f"{'':10} {'events/s':>10} {'us/event':>10} {'bytes/task':>11}")
    for name, rate in medians.items():
        print(f"{name:10} {rate:10.0f} {1e6 / rate:10.2f} {held[name]:11.0f}")
    print(
        f"umbel / celery = {ratio:.2f} in speed (at least {REQUIRED_RATIO}), "
        f"{held['umbel'] / held['celery']:.2f} in memory (at most 1)"
    )
    if options.json:
        result = {"rates": rates, "medians": medians, "ratio": ratio, "bytes_per_task": held}
        options.json.write_text(json.dumps(result, indent=2))
    return 0 if ratio >= REQUIRED_RATIO and held["umbel"] <= held["celery"] else 1


if __name__ == "__main__":
    sys.exit(main())
