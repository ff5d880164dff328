"""What a task costs in the worker itself: receive, execute a no-op, acknowledge.

A solo pool over the in-process memory transport, so that neither a network nor another process
is part of it. The contestants take turns, each in a fresh process: the raw transport (consume
and acknowledge, nothing else), Celery, and Umbel, the latter two without and with task events
(`-E`). What counts are the ratio of Umbel's median to Celery's, and what events leave of Umbel's
own rate. That is told in two ways, and both have to hold: as the ratio of the medians, and as the
median of what events left in each pair of runs, which follow each other. Where the two differ much
the machine was not quiet. As the difference is small, a round has three such pairs. Run it on an
otherwise idle machine.

    python benchmarks/overhead.py [--tasks 10000] [--rounds 11] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

REQUIRED_RATIO = 2.5
REQUIRED_WITH_EVENTS = 0.8
CONTESTANTS = ("raw", "celery", "celery -E", "umbel", "umbel -E")
PAIRS = 3  # of the last two, in a round
ROUND = (*CONTESTANTS[:-2], *CONTESTANTS[-2:] * PAIRS)


def finish(tasks: int, started: float) -> None:
    """Report the rate and leave: what a worker does on its way out is not measured."""
    rate = json.dumps({"per_s": tasks / (time.perf_counter() - started)})
    os.write(1, f"{rate}\n".encode())  # workers take print() over
    os._exit(0)


def counter(tasks: int) -> Callable[[], None]:
    """A no-op body that notices its first and its last call."""
    state = {"left": tasks, "started": 0.0}

    def noop() -> None:
        if state["left"] == tasks:
            state["started"] = time.perf_counter()
        state["left"] -= 1
        if state["left"] == 0:
            finish(tasks - 1, state["started"])

    return noop


def run_raw(tasks: int) -> None:
    """The floor: kombu's memory transport with messages like those of a task."""
    from kombu import Connection, Consumer, Exchange, Producer, Queue

    connection = Connection("memory://", transport_options={"polling_interval": 0.01})
    queue = Queue("celery", Exchange("celery"), routing_key="celery")
    channel = connection.channel()
    queue(channel).declare()
    producer = Producer(channel)
    for number in range(tasks):
        producer.publish(
            [[], {}, {}],
            routing_key="celery",
            headers={"task": "noop", "id": str(number)},
            serializer="json",
        )
    seen = counter(tasks)

    def on_message(message: object) -> None:
        message.ack()  # type: ignore[attr-defined]
        seen()

    with Consumer(connection.channel(), [queue], on_message=on_message, accept=["json"]):
        while True:
            connection.drain_events(timeout=1)


def run_celery(tasks: int, *, events: bool) -> None:
    """Celery's own worker, with everything that is optional switched off."""
    from celery import Celery

    app = Celery("bench", broker="memory://", backend=None, set_as_current=True)
    app.conf.update(
        worker_hijack_root_logger=False,
        worker_enable_remote_control=False,
        broker_transport_options={"polling_interval": 0.01},
        broker_connection_retry_on_startup=True,
    )
    task = app.task(name="noop", ignore_result=True)(counter(tasks))
    for _ in range(tasks):
        task.apply_async()
    app.Worker(
        pool="solo",
        loglevel="ERROR",
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        task_events=events,
        quiet=True,
    ).start()


def run_umbel(tasks: int, *, events: bool) -> None:
    """Umbel's worker."""
    from umbel import Umbel
    from umbel.worker.runtime.options import WorkerOptions
    from umbel.worker.runtime.worker import Worker

    app = Umbel("bench", broker="memory://", backend="disabled://")
    task = app.task(name="noop", ignore_result=True)(counter(tasks))
    for _ in range(tasks):
        task.apply_async()
    Worker(app, WorkerOptions(pool="solo", task_events=events)).run()


def run(contestant: str, tasks: int) -> None:
    """Be one contestant; ends with the process."""
    name, _, option = contestant.partition(" ")
    if name == "raw":
        run_raw(tasks)
    elif name == "celery":
        run_celery(tasks, events=bool(option))
    else:
        run_umbel(tasks, events=bool(option))


def measure(contestant: str, tasks: int) -> float:
    """One round in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--run", contestant, "--tasks", str(tasks)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{contestant} did not finish:\n{done.stdout}\n{done.stderr}")
    return float(json.loads(lines[-1])["per_s"])


def main() -> int:
    """Run all rounds and print the table; exit 1 when the ratio is below what is promised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.run, options.tasks)
        return 0
    rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(options.rounds):
        for name in ROUND if number % 2 else reversed(ROUND):
            rates[name].append(measure(name, options.tasks))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["umbel"] / medians["celery"]
    told = medians["umbel -E"] / medians["umbel"]
    by_pair = statistics.median(map(operator.truediv, rates["umbel -E"], rates["umbel"]))
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, {options.tasks} tasks, median of {options.rounds} rounds"
    )
    print(f"{'':10} {'tasks/s':>10} {'us/task':>10} {'over raw':>10}")
    for name, rate in medians.items():
        cost_us, raw_us = 1e6 / rate, 1e6 / medians["raw"]
        print(f"{name:10} {rate:10.0f} {cost_us:10.1f} {cost_us - raw_us:10.1f}")
    print(f"umbel / celery = {ratio:.2f} (at least {REQUIRED_RATIO})")
    print(
        f"umbel -E / umbel = {told:.2f} of the medians, {by_pair:.2f} by pairs "
        f"(at least {REQUIRED_WITH_EVENTS})"
    )
    if options.json:
        result = {
            "rates": rates,
            "medians": medians,
            "ratio": ratio,
            "with_events": told,
            "with_events_by_pair": by_pair,
        }
        options.json.write_text(json.dumps(result, indent=2))
    with_events = min(told, by_pair)
    return 0 if ratio >= REQUIRED_RATIO and with_events >= REQUIRED_WITH_EVENTS else 1


if __name__ == "__main__":
    sys.exit(main())
