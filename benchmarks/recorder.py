"""How many events a second go from the broker to the disk, flushed, with the memory it takes.

For each broker, in turn, on private servers: a publisher sends events as dispatchers do, in
messages of 100, and a recorder writes them to a log. *Live* both run at the same time and share
the machine; *backlog* the events are there when the recorder starts. *Raw* is live too, but the
messages are only taken and acknowledged: what a publisher gets through the broker at best. Each is
a process of its own. Time runs from the first message that is taken to the last segment that is
flushed; memory is the greatest that the process ever had, and processor time all that it took,
its start included. Run it on an otherwise idle machine.

    python benchmarks/recorder.py [--events 300000] [--rounds 3] [--broker redis|amqp] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

REQUIRED_PER_S = 20_000
REQUIRED_MEMORY_MB = 700
BATCH = 100  # a message has so many events
ROLES = ("live", "backlog", "raw")


# -- the parts, each in its own process ------------------------------------------------------


def new_app(url: str) -> Any:
    """An application on that broker; nothing may be dropped on the way."""
    from umbel import Umbel

    return Umbel("bench", broker=url, backend="disabled://", event_stream_max=1_000_000)


def run_publisher(url: str, events: int) -> None:
    """Send events of tasks, batch by batch, each when the broker has the last one."""
    from umbel.app.events.publisher import Publisher
    from umbel.app.events.stamper import Stamper

    app = new_app(url)
    stamper = Stamper("worker1@shop.example.org", app.clock)
    publisher = Publisher(app)
    publisher.open()
    started = time.perf_counter()
    batch: list[dict[str, Any]] = []
    for number in range(events):
        if number % 3 == 0:
            id_ = str(uuid.uuid4())
            fields = {
                "uuid": id_, "name": "shop.order.add", "args": f"({number}, 'abc')",
                "kwargs": "{'order': 1}", "root_id": id_, "parent_id": None, "retries": 0,
                "eta": None, "expires": None,
            }  # fmt: skip
            batch.append(stamper.make("task-received", fields))
        elif number % 3 == 1:
            batch.append(stamper.make("task-started", {"uuid": id_}))
        else:
            fields = {"uuid": id_, "result": "'stored'", "runtime": 0.0123}
            batch.append(stamper.make("task-succeeded", fields))
        if len(batch) == BATCH:
            publisher.publish(batch)
            batch = []
    if batch:
        publisher.publish(batch)
    publisher.close()
    report(events, started)


def run_recorder(url: str, events: int, log: str) -> None:
    """Record so many events, then stop."""
    from umbel.recorder.log import Log
    from umbel.recorder.run import Recorder

    recorder = Recorder(new_app(url), Log(log).open())
    stop = threading.Event()
    thread = threading.Thread(target=recorder.run, args=(stop,))
    thread.start()
    assert recorder.ready.wait(30)
    say({"ready": True})
    while not recorder.counts.messages:
        time.sleep(0.001)
    started = time.perf_counter()
    while recorder.counts.received < events:
        time.sleep(0.005)
    stop.set()  # what is left is written now
    thread.join()
    assert recorder.counts.recorded == events, recorder.counts
    report(events, started, segments=recorder.counts.segments)


def run_raw(url: str, events: int) -> None:
    """Take the messages and acknowledge them, as the recorder's source does."""
    from umbel.recorder.sources import source_for

    source = source_for(new_app(url), "raw")
    source.open()
    say({"ready": True})
    left = (events + BATCH - 1) // BATCH
    started = 0.0
    while left > 0:
        found = source.poll(0.5)
        if found and not started:
            started = time.perf_counter()
        left -= len(found)
        source.acknowledge([message.token for message in found])
    report(events, started)
    source.close()


def say(told: dict[str, Any]) -> None:
    """One line for the process that started this one."""
    print(json.dumps(told), flush=True)


def report(events: int, started: float, **more: Any) -> None:
    """How fast it was, and how big."""
    took_s = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_us = (used.ru_utime + used.ru_stime) / events * 1e6
    told = {"per_s": events / took_s, "took_s": took_s, "peak_mb": used.ru_maxrss / 1024}
    say({**told, "cpu_us": cpu_us, **more})


# -- a round ---------------------------------------------------------------------------------


class Part:
    """One of the parts, running."""

    def __init__(self, role: str, url: str, events: int, log: str = "") -> None:
        command = [sys.executable, __file__, "--part", role, "--url", url, "--log", log]
        self._process = subprocess.Popen(
            [*command, "--events", str(events)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def line(self) -> dict[str, Any]:
        """The next thing that it says."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise SystemExit(f"a part ended early, with {self._process.wait()}")
        found: dict[str, Any] = json.loads(text)
        return found

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait(60)


def run_round(role: str, url: str, events: int) -> dict[str, Any]:
    """One measurement."""
    with tempfile.TemporaryDirectory() as directory:
        if role == "backlog":  # somebody has to make what keeps the events
            make_source(url)
            sent = finished(Part("publisher", url, events))
        taker = Part("raw" if role == "raw" else "recorder", url, events, f"{directory}/log")
        taker.line()
        if role != "backlog":
            sent = finished(Part("publisher", url, events))
        found = finished(taker)
    return {**found, "sent_per_s": sent["per_s"]}


def finished(part: Part) -> dict[str, Any]:
    """What a part reports at its end."""
    told = part.line()
    part.wait()
    return told


def make_source(url: str) -> None:
    """The stream or the queue, with nothing in it."""
    from umbel.recorder.sources import source_for

    source = source_for(new_app(url), "maker")
    source.open()
    source.close()


@contextmanager
def servers(kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Private servers of these kinds."""
    from tests.servers import RabbitMQServer, RedisServer

    made = {}
    with tempfile.TemporaryDirectory() as directory:
        try:
            for kind in kinds:
                place = Path(directory) / kind
                place.mkdir()
                made[kind] = (RedisServer if kind == "redis" else RabbitMQServer)(place)
                made[kind].start()
            yield made
        finally:
            for server in made.values():
                server.close()


def fresh_url(kind: str, server: Any, number: int) -> str:
    """A database or virtual host that is empty."""
    if kind == "redis":
        server.flush()
        return str(server.url_of(number % 16))
    return str(server.add_vhost(f"bench-{number}"))


def measure(kind: str, server: Any, events: int, rounds: int) -> dict[str, Any]:
    """The medians of the rounds, role by role."""
    found: dict[str, list[dict[str, Any]]] = {role: [] for role in ROLES}
    number = 0
    for _ in range(rounds):
        for role in ROLES:
            number += 1
            found[role].append(run_round(role, fresh_url(kind, server, number), events))
            last = found[role][-1]
            print(
                f"  {kind} {role}: {last['per_s']:,.0f} events/s, {last['peak_mb']:.0f} MB, "
                f"{last['cpu_us']:.0f} us of CPU an event, sent at {last['sent_per_s']:,.0f}/s",
                flush=True,
            )
    table = {
        role: {
            "per_s": statistics.median(one["per_s"] for one in ones),
            "peak_mb": max(one["peak_mb"] for one in ones),
            "cpu_us": statistics.median(one["cpu_us"] for one in ones),
        }
        for role, ones in found.items()
    }
    return {**table, "live_of_raw": table["live"]["per_s"] / table["raw"]["per_s"]}


def main() -> int:
    """Measure, show, and say whether it is enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--broker", choices=("redis", "amqp"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=("publisher", "recorder", "raw"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part == "publisher":
        run_publisher(given.url, given.events)
    elif given.part == "recorder":
        run_recorder(given.url, given.events, given.log)
    elif given.part == "raw":
        run_raw(given.url, given.events)
    else:
        return compare(given)
    return 0


def compare(given: argparse.Namespace) -> int:
    """All rounds on all brokers."""
    kinds = [given.broker] if given.broker else ["redis", "amqp"]
    found: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "events": given.events,
        "rounds": given.rounds,
    }
    enough = True
    with servers(kinds) as running:
        for kind in kinds:
            found[kind] = one = measure(kind, running[kind], given.events, given.rounds)
            fast = one["live"]["per_s"] >= REQUIRED_PER_S
            small = max(one[role]["peak_mb"] for role in ROLES) <= REQUIRED_MEMORY_MB
            enough = enough and fast and small
            print(
                f"{kind}: live {one['live']['per_s']:,.0f} events/s "
                f"(at least {REQUIRED_PER_S:,} wanted), "
                f"backlog {one['backlog']['per_s']:,.0f}, raw {one['raw']['per_s']:,.0f}, "
                f"live/raw {one['live_of_raw']:.2f}, "
                f"at most {max(one[role]['peak_mb'] for role in ROLES):.0f} MB",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
