"""Worlds of events for the tests of the pipeline: made up, written as a log, and folded in Python.

What the tables must say comes from `task_states.fold`, fed with the events as a receiver has them.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from umbel.cluster.event_rows import COLUMNS, row
from umbel.cluster.task_states import (
    CLASS_FIELDS,
    EVENT_CLASS,
    FIELD_KIND,
    TASK_FIELDS,
    class_of,
    fold,
)
from umbel.wire.events import check

Event = dict[str, Any]
START = 1_794_000_000.0
CUSTOM_TYPES = ("task-progress", "task-in-progress", "task-success", "task-", "task-straße")
_ARROW = {"text": pa.string(), "whole": pa.int64(), "number": pa.float64(), "flag": pa.bool_()}
ARROW_SCHEMA = pa.schema([(name, _ARROW[kind]) for name, kind in COLUMNS.items()])
JSON_FIELDS = tuple(field for field, kind in FIELD_KIND.items() if kind in {"moment", "signal"})


# -- a log -------------------------------------------------------------------------------------


class LogWriter:
    """Writes segments as a recorder does, but where and when a test says."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.count = directory, 0
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "_umbel-log.json").write_text('{"format": 1}')

    def add(
        self, events: Iterable[Event], received: float | None = None, recorder: str = "r1"
    ) -> Path:
        """One segment of these events; whole events, as they were sent."""
        return self.add_table(as_table(events, received, recorder))

    def add_table(self, table: pa.Table, day: str = "2026-11-16") -> Path:
        """One segment of these rows."""
        self.count += 1
        folder = self.directory / "events" / f"day={day}"
        folder.mkdir(parents=True, exist_ok=True)
        ms = int(START * 1_000) + self.count
        path = folder / f"{ms}-r1-{self.count}.parquet"
        pq.write_table(table, folder / f".{path.name}", compression="zstd")
        return (folder / f".{path.name}").rename(path)

    def add_quarantined(self, count: int) -> None:
        """One segment of events that were refused."""
        folder = self.directory / "quarantine" / "day=2026-11-16"
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"reason": "bad-clock", "received": START, "recorder": "r1", "raw": "{}"}] * count
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{int(START * 1_000)}-r1-1.parquet")


def day_of(moment: float) -> str:
    """The folder of a moment."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d")


def as_table(
    events: Iterable[Event], received: float | None = None, recorder: str = "r1"
) -> pa.Table:
    """The rows of events, as the recorder makes them: received soon after they were sent."""
    rows = [row(event, received or event["timestamp"] + 0.1, recorder) for event in events]
    return pa.Table.from_pylist(rows, ARROW_SCHEMA)


# -- what must come out ------------------------------------------------------------------------


def folded(events: Iterable[Event]) -> dict[str, Event]:
    """The tasks of some events by Python's fold, by id, in the form of `comparable`."""
    by_task: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        assert check(event) == "", event
        if event["type"].startswith("task-"):
            by_task[event["uuid"]].append(as_received(event))
    return {uuid: _of_fold(fold(told)) for uuid, told in by_task.items()}


def as_received(event: Event) -> Event:
    """A receiver trusts the clock of a `task-sent` only where it is in step."""
    if event["type"] == "task-sent" and event.get("sync") is not True:
        return {**event, "clock": 0}
    return event


def _of_fold(task: Mapping[str, Any]) -> Event:
    made = dict(task)
    for name, kind in (("timestamp", "number"), *FIELD_KIND.items()):
        if kind == "number" and made[name] is not None:
            made[name] = float(made[name])
    return made


def comparable(task: Mapping[str, Any]) -> Event:
    """A row of the table `tasks` with the values of Python's fold."""
    made = {field: task[field] for field in TASK_FIELDS}
    for field in (*JSON_FIELDS, "extra"):
        made[field] = None if made[field] is None else json.loads(made[field])
    return made


def differences(tables: Sequence[Mapping[str, Any]], wanted: Mapping[str, Event]) -> list[Any]:
    """The tasks that are not what they must be; at most ten of them, with both values."""
    found = {one["uuid"]: comparable(one) for one in tables}
    assert len(found) == len(tables), "a task has one row"
    wrong = []
    for uuid in sorted(found.keys() | wanted.keys()):
        mine, theirs = found.get(uuid, {}), wanted.get(uuid, {})
        if mine != theirs:
            keys = mine.keys() | theirs.keys()
            wrong.append(
                (
                    uuid,
                    {k: (mine.get(k), theirs.get(k)) for k in keys if mine.get(k) != theirs.get(k)},
                )
            )
    return wrong[:10]


# -- small worlds ------------------------------------------------------------------------------


def any_event(dice: random.Random, uuid: str) -> Event:
    """Whatever the wire lets through of a task: ties, fields that are missing, null or wrong."""
    kind = dice.choice([*EVENT_CLASS, *EVENT_CLASS, *CUSTOM_TYPES])
    event: Event = {
        "type": kind,
        "uuid": uuid,
        "hostname": dice.choice(["w1", "w2", "w1.7", "é"]),
        "timestamp": dice.choice([1.0, 2, 2.0, 3.5]),
    }
    if dice.random() < 0.9:
        event["clock"] = dice.choice([0, 1, 2, 3, 4, None])
    if dice.random() < 0.6:
        event["pid"] = dice.choice([7, 8, None])
    if dice.random() < 0.3:
        event |= {"inc": dice.choice([1, 2]), "seq": dice.randrange(9)}
    if dice.random() < 0.3:
        event["sync"] = dice.choice([True, False, None, "yes"])
    if dice.random() < 0.2:
        event[dice.choice(["progress", "total"])] = dice.choice([1, "half", None, [1, {"a": "é"}]])
    for field in CLASS_FIELDS[class_of(kind)]:
        if dice.random() < 0.7:
            event[field] = _value(dice, FIELD_KIND[field])
    assert check(event) == "", event
    return event


_CHOICES: dict[str, list[Any]] = {
    "text": ["", "a", "b", "é", None],
    "whole": [0, 1, 2**63 - 1, -1, None],
    "number": [0, 1, 0.5, None],
    "moment": ["2026-01-01T00:00:00+00:00", 5.0, 7, None],
    "flag": [True, False, None],
    "signal": [9, "TERM", None],
}
_WRONG: list[Any] = [[], {"a": 1}, True, "x", 5, 2**70, 1e301]


def _value(dice: random.Random, kind: str) -> Any:
    return dice.choice(_WRONG) if dice.random() < 0.08 else dice.choice(_CHOICES[kind])


def small_world(seed: int, task_count: int, events_max: int = 9) -> list[Event]:
    """Many tasks with a few events each, from the seed alone."""
    dice = random.Random(seed)
    events = [
        any_event(dice, f"t{number}")
        for number in range(task_count)
        for _ in range(dice.randint(1, events_max))
    ]
    events += [
        {"type": "worker-heartbeat", "hostname": "w1", "timestamp": float(n), "clock": n, "pid": 7}
        for n in range(5)
    ]
    dice.shuffle(events)
    return events


# -- a cluster that works ----------------------------------------------------------------------


def cluster(event_count: int, seed: int = 1) -> list[Event]:
    """About so many events of a cluster: workers, clients, chains of tasks, retries, failures."""
    dice = random.Random(seed)
    events: list[Event] = []
    stream = _Cluster(dice)
    while len(events) < event_count:
        events += stream.task()
    return events[:event_count]


class _Cluster:
    """Keeps the clocks, and the tasks that others can be children of."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.clock, self.now = dice, 10, START
        self.sequences: dict[str, int] = defaultdict(int)
        self.parents: list[tuple[str, str]] = []

    def task(self) -> Iterator[Event]:
        """One task from its sending to its end."""
        dice = self.dice
        uuid = f"{dice.getrandbits(64):016x}"
        parent, root = dice.choice(self.parents) if self.parents else (None, uuid)
        if parent is None or dice.random() < 0.6:
            parent, root = None, uuid
        self.parents = [*self.parents[-40:], (uuid, root)]
        call = {"uuid": uuid, "name": dice.choice(["shop.add", "shop.mail"]), "args": "(1,)"}
        call |= {"kwargs": "{}", "root_id": root, "parent_id": parent, "eta": None}
        worker = f"worker{dice.randrange(4)}@shop"
        yield self.event("task-sent", "gen1@web", sync=dice.random() < 0.5, **call, retries=0)
        if dice.random() < 0.05:
            yield self.event("worker-heartbeat", worker, freq=2.0, active=1, processed=7)
        for retries in range(4):
            yield self.event("task-received", worker, **call, retries=retries)
            if dice.random() < 0.02:
                yield self.event("task-revoked", worker, uuid=uuid, terminated=True, signum="TERM")
                return
            yield self.event("task-started", worker, uuid=uuid)
            if dice.random() < 0.1:
                yield self.event("task-progress", worker, uuid=uuid, percent=50)
            error = {"exception": "OSError()", "traceback": "Traceback\n"}
            if dice.random() < 0.85:
                yield self.event("task-succeeded", worker, uuid=uuid, result="42", runtime=0.1)
                return
            if dice.random() < 0.5:
                yield self.event("task-failed", worker, uuid=uuid, **error)
                return
            yield self.event("task-retried", worker, uuid=uuid, **error)

    def event(self, kind: str, hostname: str, **fields: Any) -> Event:
        """One event, with what every event has."""
        self.clock += 1
        self.now += self.dice.expovariate(500)
        self.sequences[hostname] += 1
        clock = self.clock if self.dice.random() < 0.99 else self.clock - 1
        made = {"type": kind, "hostname": hostname, "pid": 77, "clock": clock, "inc": 5}
        return {**made, "seq": self.sequences[hostname], "timestamp": self.now, **fields}


def stretched(events: Sequence[Event], factor: float) -> list[Event]:
    """The events over a longer time: so that they are in several cells."""
    return [
        {**event, "timestamp": START + (event["timestamp"] - START) * factor} for event in events
    ]


def disturbed(events: Sequence[Event], seed: int, again: float = 0.1) -> list[Event]:
    """The events in no order, some of them more than once."""
    dice = random.Random(seed)
    made = [*events, *dice.sample(list(events), int(len(events) * again))]
    dice.shuffle(made)
    return made
