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

    def __init__(self, directory: Path, count: int = 0) -> None:
        self.directory, self.count = directory, count
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


# -- a cluster with everything -----------------------------------------------------------------


def busy(task_count: int, seed: int = 1) -> list[Event]:
    """A cluster in which everything happens that a table tells of.

    Umbel's and Celery's workers, some of which restart, end or are lost; queues, etas, retries,
    rejections, revocations, elections, states of one's own, second deliveries, families, events
    without a clock, clocks that go back or jump, and events that never arrive.
    """
    return _Busy(random.Random(seed)).run(task_count)


class _Node:
    """One life of a worker or client; Celery's have no `inc`, and number nothing."""

    def __init__(self, hostname: str, pid: int, inc: int | None, series: int | None = None) -> None:
        self.hostname, self.pid, self.inc, self.series = hostname, pid, inc, series
        self.seq = self.processed = self.lost = 0


class _Busy:
    """Time goes on by a second or so with each event; clocks are those of one history."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.clock, self.now = dice, 100, START
        self.events: list[Event] = []
        self.families: list[tuple[str, str]] = []
        self.count = 0
        self.client = _Node("gen9@web", 9, 77)
        self.workers = [self.born(number) for number in range(5)]

    def born(self, number: int) -> _Node:
        """The next life of a worker: 0 to 2 are Umbel's, 3 and 4 Celery's, always process 1."""
        is_umbel = number < 3
        inc = int(self.now) + number if is_umbel else None
        node = _Node(f"w{number}@shop", self.dice.randrange(2, 99) if is_umbel else 1, inc)
        self.tell(node, "worker-online", freq=2.0, active=0, processed=0, **self.software(node))
        return node

    def software(self, node: _Node) -> Event:
        """What a worker says it is."""
        return {"sw_ident": "py-celery" if node.inc is None else "umbel", "sw_ver": "5.7.0"}

    def tell(self, node: _Node, kind: str, uuid: str | None = None, **fields: Any) -> None:
        """One event, which may not arrive."""
        dice = self.dice
        self.clock += dice.choice([1, 1, 1, 2])
        self.now += dice.expovariate(2)
        made: Event = {"type": kind, "hostname": node.hostname, "pid": node.pid}
        made |= {"clock": self.clock, "timestamp": round(self.now, 6)}
        if node.inc is not None:
            node.seq += 1
            made |= {"inc": node.inc, "seq": node.seq}
        if node.series is not None:
            made["umbel_series"] = node.series
        if uuid is not None:
            made["uuid"] = uuid
        chance = dice.random()
        if chance < 0.01:
            del made["clock"]
        elif chance < 0.03:
            made["clock"] -= dice.choice([1, 5, 40])
        elif chance < 0.032:
            made["clock"] += 2**41
        made |= fields
        assert check(made) == "", made
        if dice.random() < 0.97:
            self.events.append(made)
        else:
            node.lost += dice.choice([0, 1])

    def run(self, task_count: int) -> list[Event]:
        """So many tasks, and what happens beside them."""
        for _ in range(task_count):
            dice = self.dice
            chance = dice.random()
            if chance < 0.05:
                self.elect()
            elif chance < 0.08:
                self.replace(dice.randrange(len(self.workers)))
            elif chance < 0.09:
                self.now += dice.choice([50, 400, 4_000])
            self.task()
            self.beat(dice.choice(self.workers))
        for node in self.workers[1:4]:  # the others are lost
            self.beat(node)
        return self.events

    def beat(self, node: _Node) -> None:
        """A heartbeat; some are answers to `inspect`, which say little."""
        told = {"freq": 2.0, "active": self.dice.randrange(3), "processed": node.processed}
        if node.inc is not None:
            told["lost"] = node.lost
        if self.dice.random() < 0.1:
            told = {"freq": self.dice.choice([5, 0.0, 90_000.0])}
        self.tell(node, "worker-heartbeat", **told, **self.software(node))

    def replace(self, number: int) -> None:
        """A worker ends, or is gone, or reconnects."""
        node = self.workers[number]
        chance = self.dice.random()
        if chance < 0.6:
            self.tell(node, "worker-offline", freq=2.0, processed=node.processed)
        if chance < 0.3 and node.inc is None:
            self.tell(node, "worker-online", freq=2.0, processed=node.processed)
        else:
            self.workers[number] = self.born(number)

    def elect(self) -> None:
        """Workers stand for an election, mostly of a task."""
        dice, name = self.dice, f"e{len(self.events)}"
        topic = dice.choice(["task", "task", "rotate"])
        action = {"task": "shop.add", "options": dice.choice([{}, {"task_id": f"own {name}"}])}
        for node in dice.sample(self.workers, 3):
            told = {"id": name, "topic": topic, "action": action, "cver": 2}
            if dice.random() < 0.3:
                told["stands"] = dice.choice([True, False])
            self.tell(node, "worker-elect", **told)
            self.tell(node, "worker-elect-ack", id=name)
        winner = dice.choice(self.workers)
        for node in self.workers[: dice.randrange(4)]:
            chosen = winner if dice.random() < 0.9 else node
            self.tell(node, "worker-elected", id=name, winner=chosen.hostname)
        if topic == "task" and dice.random() < 0.7:
            uuid = action["options"].get("task_id", name)
            for node in [winner, *self.workers[: dice.choice([0, 0, 1])]]:
                self.execute(uuid, node, {"name": "shop.add"}, 0)

    def task(self) -> None:
        """A task from its sending to its end, by one worker or by two."""
        dice = self.dice
        self.count += 1
        uuid = f"t{self.count:05}"
        parent, root = None, uuid
        if self.families and dice.random() < 0.5:
            parent, root = dice.choice(self.families[-20:])
        self.families.append((uuid, root))
        call: Event = {"name": dice.choice(["shop.add", "shop.mail", "shop.pay"]), "args": "(1,)"}
        call |= {"root_id": root, "parent_id": parent, "eta": self.eta()}
        queue = dice.choice(["fast", "slow", "celery"])
        if dice.random() < 0.9:
            sync = dice.choice([True, True, False])
            self.tell(
                self.client, "task-sent", uuid, **call, sync=sync, retries=0, queue=queue
            )  # fmt: skip
        if dice.random() < 0.08:
            self.revoke(uuid)
        if dice.random() < 0.05:
            return  # it waits
        for _ in range(dice.choice([1, 1, 1, 1, 2])):
            self.attempts(uuid, call)

    def eta(self) -> str | float | None:
        """Of most tasks none; else a number or a text, sooner or later."""
        at = self.now + self.dice.choice([-10, 3, 90, 100_000])
        text = datetime.fromtimestamp(at, UTC).isoformat()
        none: list[str | float | None] = [None] * 12
        return self.dice.choice([*none, at, text, text[:19], text[:10], "soon", int(at)])

    def attempts(self, uuid: str, call: Event) -> None:
        """Retries send the task again, which nobody may see."""
        for retries in range(3):
            if not self.execute(uuid, self.dice.choice(self.workers), call, retries):
                return
            if self.dice.random() < 0.5:
                sent = {**call, "retries": retries + 1, "sync": True, "queue": "slow"}
                self.tell(self.dice.choice(self.workers), "task-sent", uuid, **sent)

    def revoke(self, uuid: str) -> None:
        """Some workers learn of it."""
        for node in self.dice.sample(self.workers[:3], self.dice.randrange(3)):
            told: Event = {"ids": [uuid, "t00001"], "stamp": self.now - 1, "method": "revoke"}
            if self.dice.random() < 0.4:
                told |= {"method": "mingle", "stamps": [self.now - 2, self.now - 3]}
            self.tell(node, "worker-revocation", **told)
        if self.dice.random() < 0.6:
            self.tell(
                self.dice.choice(self.workers), "task-revoked", uuid,
                terminated=self.dice.choice([True, False, None]), signum=15,
                expired=self.dice.random() < 0.3,
            )  # fmt: skip

    def execute(self, uuid: str, node: _Node, call: Event, retries: int) -> bool:
        """One execution; whether the task will be retried."""
        dice = self.dice
        queue = self.dice.choice([{}, {"queue": "fast"}, {"queue": "slow"}])
        self.tell(node, "task-received", uuid, **call, **queue, retries=retries)
        if dice.random() < 0.04:
            self.tell(node, "task-rejected", uuid, requeue=dice.choice([True, False]))
            return False
        if dice.random() < 0.03:
            return False
        node.processed += 1
        self.tell(node, "task-started", uuid)
        if dice.random() < 0.15:
            pool = _Node(node.hostname, node.pid if node.inc else 1_000, node.inc, 5)
            pool.seq = self.count
            self.tell(pool, dice.choice(["task-progress", "task-half"]), uuid, done=40)
        error = {"exception": dice.choice(ERRORS), "traceback": "Traceback\n"}
        chance = dice.random()
        if chance < 0.65:
            timed = {"runtime": round(dice.random(), 3)} if dice.random() < 0.8 else {}
            self.tell(node, "task-succeeded", uuid, result="42", **timed)
        elif chance < 0.75:
            self.tell(node, "task-failed", uuid, **error)
            if dice.random() < 0.3:
                self.tell(node, "task-rejected", uuid, requeue=False)
        elif chance < 0.78:
            self.tell(node, "task-revoked", uuid, terminated=True, signum="TERM")
        elif chance < 0.8:
            self.tell(node, "task-cancelled", uuid)
        elif chance < 0.95:
            self.tell(node, "task-retried", uuid, **error)
            return True
        return False


ERRORS = (
    "OSError()", "WorkerLostError('gone')", "TimeLimitExceeded(5)", "SoftTimeLimitExceeded()",
    "NotRegistered('x')",
)  # fmt: skip


def recorded(events: Sequence[Event], seed: int) -> list[pa.Table]:
    """The rows of two recorders and an import: sooner or later, and some of them twice."""
    dice = random.Random(seed)
    rows: dict[str, list[Event]] = {"r1": [], "r2": [], "import": []}
    for event in events:
        for _ in range(2 if dice.random() < 0.05 else 1):
            recorder = dice.choice(["r1"] * 6 + ["r2"] * 3 + ["import"])
            late = 90_000.0 if recorder == "import" else dice.choice([0.001, 0.1, 0.5, 2.0])
            rows[recorder].append(row(event, event["timestamp"] + late, recorder))
    return [pa.Table.from_pylist(told, ARROW_SCHEMA) for told in rows.values() if told]


# -- worlds that make no sense -----------------------------------------------------------------

HOSTS = ("w1", "w2", "w1.7", "é")
NODE_TYPES = (
    "worker-online", "worker-online", "worker-heartbeat", "worker-heartbeat", "worker-offline",
    "worker-elect", "worker-elected", "worker-elect-ack", "worker-revocation", "worker-odd", "odd",
)  # fmt: skip


def hostile(seed: int, event_count: int, since: float = START) -> list[Event]:
    """Events of tasks and nodes that do not fit together, with few values, so that they meet."""
    dice = random.Random(seed)
    uuids = [f"t{number}" for number in range(max(2, event_count // 8))]
    moments = [since + 30 * number for number in range(8)] + [since - 86_400.5, since + 7.000_001]
    events = []
    for _ in range(event_count):
        uuid = dice.choice(uuids)
        event = any_event(dice, uuid) if dice.random() < 0.75 else _node_event(dice, uuids)
        event["timestamp"] = dice.choice(moments)
        if event["type"] in {"task-sent", "task-received"}:
            event |= _relations(dice, uuids, uuid)
        if "seq" in event and dice.random() < 0.2:
            event["umbel_series"] = dice.choice([3, 4])
        assert check(event) == "", event
        events.append(event)
    return [*events, *dice.sample(events, event_count // 20)]


def _relations(dice: random.Random, uuids: Sequence[str], uuid: str) -> Event:
    """A root and a parent, which may be the task itself, in a circle or unknown."""
    made: Event = {"retries": dice.choice([0, 0, 1, 2])}
    if dice.random() < 0.8:
        made["root_id"] = dice.choice([uuid, *uuids[:4]])
    if dice.random() < 0.7:
        made["parent_id"] = dice.choice([uuid, dice.choice(uuids), "nobody"])
    if dice.random() < 0.3:
        made["eta"] = dice.choice([START + 45, START - 9.5, "2026-11-06T20:01:00.25+01:00", "x"])
    return made


def _node_event(dice: random.Random, uuids: Sequence[str]) -> Event:
    """Whatever a node says of itself, of elections and of revocations."""
    made: Event = {"type": dice.choice(NODE_TYPES), "hostname": dice.choice(HOSTS)}
    made |= {"timestamp": START, "clock": dice.choice([1, 2, 3, 50, 2**42])}
    if dice.random() < 0.1:
        del made["clock"]
    if dice.random() < 0.8:
        made["pid"] = dice.choice([7, 8])
    if dice.random() < 0.5:
        made |= {"inc": dice.choice([1, 2, 7]), "seq": dice.choice([1, 2, 5, 9, 4_095, 4_097])}
    for name, values in {
        "freq": [2.0, 5, 0, -1.0, 7_200.0], "active": [0, 3], "processed": [0, 1, 9],
        "lost": [0, 2, 7], "sw_ident": ["umbel", "py-celery"], "sw_ver": ["1", "2"],
        "id": [*uuids[:2], "e1", "e2"], "topic": ["task", "rotate"], "winner": HOSTS[:2],
        "action": [{"options": {"task_id": uuids[-1]}}, {}, "nothing"], "stands": [True, False],
        "ids": [[uuids[0]], [*uuids[:3]], []], "stamp": [START - 1, START + 1],
        "stamps": [[START], [START + 3, START - 3]], "method": ["revoke", "mingle"],
    }.items():  # fmt: skip
        if dice.random() < 0.7:
            made[name] = dice.choice(values)
    return made
