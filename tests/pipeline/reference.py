"""The tables of a log by plain Python: slow, obvious, and written from `docs/pipeline.md` alone.

`tables_of` gives what a build must publish, table by table. It shares no code with the pipeline and
keeps everything in memory, so a disagreement is a mistake here, there, or in the page.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

Row = dict[str, Any]

CLASSES = (
    "sent", "received", "started", "succeeded", "failed", "retried", "revoked", "rejected",
)  # fmt: skip
STATE = dict(zip(CLASSES, (
    "PENDING", "RECEIVED", "STARTED", "SUCCESS", "FAILURE", "RETRY", "REVOKED", "REJECTED",
), strict=True))  # fmt: skip
# The first of these that is later than the last retry gives the state.
PRECEDENCE = (
    "succeeded", "failed", "custom", "revoked", "started", "received", "rejected", "sent",
)  # fmt: skip
FIELDS = (
    "name", "args", "kwargs", "root_id", "parent_id", "retries", "eta", "expires", "queue",
    "exchange", "routing_key", "result", "runtime", "exception", "traceback", "terminated",
    "signum", "expired", "requeue",
)  # fmt: skip
BIT = {field: 1 << number for number, field in enumerate(FIELDS)}
IDENTITY = ("hostname", "inc", "pid", "clock", "timestamp", "type", "uuid")
DAY_S = 86_400.0


def tables_of(log: Path) -> dict[str, list[Row]]:
    """All tables but `runs` of the log in a directory."""
    return Tables(rows_of(log)).all()


def rows_of(log: Path) -> list[Row]:
    """The rows of all segments."""
    files = [f for f in sorted(log.glob("events/*/*.parquet")) if not f.name.startswith(".")]
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


# -- events ------------------------------------------------------------------------------------


def nulls_first(value: Any) -> tuple[bool, Any]:
    """A key that sorts None before all values."""
    return (value is not None, value if value is not None else 0)


def event_of(row: Row) -> Row:
    """A row with what all tables work out: its class, clock, origin and places in the order."""
    kind = row["type"]
    event = dict(row)
    event["class"] = None
    if kind.startswith("task-"):
        name = kind.removeprefix("task-")
        event["class"] = name if name in CLASSES else "custom"
    event["sent_clock"] = row["clock"]
    event["clock"] = row["clock"] or 0
    if kind == "task-sent" and row["sync"] is not True:
        event["clock"] = 0
    event["origin"] = row["hostname"] + ("" if row["pid"] is None else f".{row['pid']}")
    event["incarnation"] = row["inc"] if row["inc"] is not None else row["pid"]
    event["series"] = row.get("series")
    event["ord"] = (event["clock"], row["timestamp"], event["origin"])
    event["place"] = (*event["ord"], kind, row["tie"] or 0)
    return event


def in_timeline(event: Row) -> tuple[Any, ...]:
    """The place of an event in the one order of the cluster."""
    others = ("uuid", "hostname", "pid", "inc", "sent_clock", "seq")
    return (*event["ord"], event["type"], *(nulls_first(event[name]) for name in others))


def unique(rows: Iterable[Row]) -> list[Row]:
    """Each event once, in the order of the cluster.

    It has the first receipt, and of all else the greatest value: copies are equal in that, unless
    a sender puts two contents under one identity.
    """
    kept: dict[Any, Row] = {}
    for row in rows:
        key = tuple(row[name] for name in IDENTITY)
        if key not in kept:
            kept[key] = dict(row)
            continue
        one = kept[key]
        for name, value in row.items():
            if value is not None:
                choose = min if name == "received" else max
                one[name] = value if one[name] is None else choose(one[name], value)
    return sorted(map(event_of, kept.values()), key=in_timeline)


def grouped(events: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Events by a key; those whose key is None are left out."""
    made: dict[Any, list[Row]] = defaultdict(list)
    for event in events:
        if (found := key(event)) is not None:
            made[found].append(event)
    return made


def log_end(rows: Iterable[Row]) -> float:
    """Where the log ends."""
    rows = list(rows)
    prompt = [row for row in rows if row["received"] - row["timestamp"] <= 300] or rows
    marks: dict[str, float] = {}
    for row in prompt:
        marks[row["recorder"]] = max(marks.get(row["recorder"], -math.inf), row["received"])
    newest = max(marks.values())
    return min(mark for mark in marks.values() if mark >= newest - 300)


# -- times -------------------------------------------------------------------------------------


def moment(eta: str | None) -> float | None:
    """Unix seconds of an `eta`, a JSON text."""
    if eta is None:
        return None
    value = json.loads(eta)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, str) or not re.match(r"....-..-..", value):
        return None
    try:
        read = datetime.fromisoformat(value)
    except ValueError:
        return None
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()


def due(queued: float | None, eta: float | None) -> float | None:
    """When an attempt was due that was sent, or received, at `queued`."""
    return queued if queued is None or eta is None else max(queued, eta)


def wait(queued: float | None, eta: float | None, started: float | None) -> float | None:
    """Seconds from when an attempt was due to its start."""
    if queued is None or started is None or started < queued:
        return None
    return max(0.0, started - (queued if eta is None else max(queued, eta)))


def percentile(values: list[float], share: float) -> float | None:
    """The least value that is not below this share of them."""
    values = sorted(value for value in values if value >= 0)
    return values[math.ceil(share * len(values)) - 1] if values else None


def to_whole(number: float) -> int:
    """The nearest whole number; a half is rounded away from zero."""
    return int(Decimal(number).to_integral_value(ROUND_HALF_UP))


class Tables:
    """All tables of some rows of a log. Each is made once, when it is first asked for."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.events = unique(rows)
        self.end = log_end(rows)
        self.of_task = grouped(self.events, lambda event: event["uuid"])
        copies = grouped(map(event_of, rows), lambda event: event["uuid"])
        self.folds = {uuid: folded(uuid, copies[uuid]) for uuid in self.of_task}

    def all(self) -> dict[str, list[Row]]:
        """The rows of every table, by its name."""
        return {
            "timeline": self.timeline(),
            "tasks": shown(self.tasks),
            "attempts": shown(self.attempts),
            "workers": shown(self.workers),
            "elections": self.elections(),
            "revocations": self.revocations(),
            "clock_audit": self.clock_audit(),
            "rates": self.rates("minute", 60),
            "rates_hourly": self.rates("hour", 3_600),
            "rates_daily": self.rates("day", 86_400),
            "queues": self.queues(),
            "lineage": self.lineage(),
            "gaps": self.gaps(),
        }

    # -- timeline ------------------------------------------------------------------------------

    def timeline(self) -> list[Row]:
        """All events in the order of the cluster."""
        made, of_task, of_node = [], {}, {}
        names = ("clock", "timestamp", "origin", "hostname", "incarnation", "type", "uuid", "seq")
        for position, event in enumerate(self.events):
            row = {"position": position, **{name: event[name] for name in names}}
            row["sent_clock"] = event["sent_clock"]
            row["previous_of_task"] = None
            if event["uuid"] is not None:
                row["previous_of_task"] = of_task.get(event["uuid"])
                of_task[event["uuid"]] = position
            row["previous_of_node"] = of_node.get(event["hostname"])
            of_node[event["hostname"]] = position
            made.append(row)
        return made

    # -- tasks ---------------------------------------------------------------------------------

    @cached_property
    def tasks(self) -> list[Row]:
        """One row a task."""
        made = {uuid: dict(task) for uuid, task in self.folds.items()}
        for uuid, task in made.items():
            task["queue_wait"] = wait(task["_queued"], moment(task["eta"]), task["started"])
            task["attempts"] = sum(event["class"] == "started" for event in self.of_task[uuid])
            task["root"] = task["root_id"] if task["root_id"] is not None else task["uuid"]
            own = task["parent_id"] == task["uuid"]
            task["parent"] = None if own else task["parent_id"]
        for task in made.values():
            task["depth"] = depth(task, made)
        return list(made.values())

    @cached_property
    def task_of(self) -> dict[str, Row]:
        """Tasks by their ids."""
        return {task["uuid"]: task for task in self.tasks}

    @cached_property
    def names(self) -> dict[str, str | None]:
        """Names of tasks, by id."""
        return {uuid: task["name"] for uuid, task in self.folds.items()}

    # -- attempts ------------------------------------------------------------------------------

    @cached_property
    def attempts(self) -> list[Row]:
        """One row an execution."""
        status = {(row["hostname"], row["incarnation"]): row["status"] for row in self.workers}
        made = []
        for uuid, events in self.of_task.items():
            for number, row in enumerate(executions_of(events, self.life_of), 1):
                made.append({"uuid": uuid, "attempt": number, "name": self.names[uuid], **row})
        for row in made:
            if row["ended"] is not None:
                continue
            of_worker = status.get((row["worker"], row["incarnation"]))
            row["outcome"] = "RUNNING"
            if of_worker in {"lost", "offline"}:
                row |= {"outcome": "LOST", "reason": f"worker {of_worker}", "missing": "end"}
            elif row["_ran_anew"]:
                row |= {"outcome": "LOST", "reason": "event lost", "missing": "end"}
        return made

    # -- workers -------------------------------------------------------------------------------

    @cached_property
    def births(self) -> dict[tuple[str, int | None], list[float]]:
        """When the lives of Celery's workers began, by hostname and process."""
        made: dict[Any, set[float]] = defaultdict(set)
        for event in self.events:
            is_first = event["processed"] is None or event["processed"] <= 0
            if event["type"] == "worker-online" and event["inc"] is None and is_first:
                made[event["hostname"], event["pid"]].add(event["timestamp"])
        return {key: sorted(times) for key, times in made.items()}

    def life_of(self, event: Row) -> int | None:
        """The incarnation of the worker that an event belongs to."""
        if event["inc"] is not None:
            return event["inc"]
        births = self.births.get((event["hostname"], event["pid"]), [])
        before = [time for time in births if time <= event["timestamp"]]
        return to_whole(before[-1] * 1e6) if before and event["pid"] is not None else event["pid"]

    @cached_property
    def workers(self) -> list[Row]:
        """One row a life of a worker."""
        told = {event["hostname"] for event in self.events if event["type"].startswith("worker-")}
        lives: dict[Any, list[Row]] = defaultdict(list)
        for event in self.events:
            lives[event["hostname"], self.life_of(event)].append(event)
        by_host: dict[str, list[Row]] = defaultdict(list)
        for (hostname, incarnation), events in lives.items():
            if hostname in told:
                makes = any(event["type"].startswith("worker-") for event in events)
            else:
                makes = any(event["class"] not in {"sent", "custom"} for event in events)
            if makes:
                by_host[hostname].append(self.life(hostname, incarnation, events))
        for rows in by_host.values():
            rows.sort(key=lambda row: (row["online"], nulls_first(row["incarnation"])))
            for row, after in zip(rows, [*rows[1:], None], strict=True):
                self.judge(row, after)
        return [row for rows in by_host.values() for row in rows]

    def life(self, hostname: str, incarnation: int | None, events: list[Row]) -> Row:
        """What a life says of itself."""

        def times(kind: str) -> list[float]:
            return [event["timestamp"] for event in events if event["type"] == kind]

        def greatest(name: str) -> Any:
            return max((e[name] for e in events if e[name] is not None), default=None)

        kinds = {"worker-online", "worker-heartbeat", "worker-offline"}
        names = ("freq", "active", "sw_ident", "sw_ver")
        signs = [event for event in events if event["type"] in kinds]
        last = max(
            signs,
            key=lambda e: (e["timestamp"], *(nulls_first(e[name]) for name in names)),
            default=dict.fromkeys(names),
        )
        own = [event for event in events if event["series"] is None]
        seen = [event["timestamp"] for event in events]
        online, beats, offline = map(times, ("worker-online", "worker-heartbeat", "worker-offline"))
        back = online if any(event["inc"] is not None for event in events) else online + beats
        drifts = sorted(to_whole((e["received"] - e["timestamp"]) * 1000) for e in events)
        numbers = [event for event in events if event["seq"] is not None]
        row = {
            "hostname": hostname,
            "incarnation": incarnation,
            "pid": greatest("pid"),
            "online": min(online or seen),
            "last_heartbeat": max(beats, default=None),
            "last_seen": max(seen),
            "offline": None,
            "processed": greatest("processed"),
            "active": last["active"],
            "freq": last["freq"],
            "drift": drifts[(len(drifts) - 1) // 2] / 1000,
            "sw_ident": last["sw_ident"],
            "sw_ver": last["sw_ver"],
            "events_seen": len(events),
            "events_missing": missing_numbers(numbers) if numbers else None,
            "events_lost": greatest("lost"),
        }
        if offline and not any(time > max(offline) for time in back):
            row["offline"] = max(offline)
        until = row["offline"] if row["offline"] is not None else row["last_seen"]
        row["uptime"] = max(0.0, until - row["online"])
        row["_last"] = max(((e["clock"], e["timestamp"], e["received"]) for e in own), default=None)
        freq = last["freq"]
        row["_interval"] = freq if freq is not None and 0 < freq <= 3_600 else 2.0
        return row

    def judge(self, row: Row, after: Row | None) -> None:
        """The status of a life, which may depend on the next one of the same hostname."""
        silent = row["_last"] is not None and self.end - row["_last"][2] > 2 * row["_interval"]
        row["lost"] = None
        if row["offline"] is not None:
            row["status"] = "offline"
        elif after is not None or (row["last_heartbeat"] is not None and silent):
            row["status"] = "lost"
            lost = row["last_seen"] + 2 * row["_interval"]
            if after is not None:
                lost = min(lost, after["online"])
            row["lost"] = max(lost, row["last_seen"])
        else:
            row["status"] = "online"

    # -- elections -----------------------------------------------------------------------------

    def elections(self) -> list[Row]:
        """One row an election."""
        kinds = {"worker-elect", "worker-elect-ack", "worker-elected"}
        of_id = grouped((e for e in self.events if e["type"] in kinds), lambda e: e["id"])
        return [self.election(key, events) for key, events in of_id.items()]

    def election(self, key: str, events: list[Row]) -> Row:
        """What became of one election."""
        asked = [event for event in events if event["type"] == "worker-elect"]
        stood = [event for event in asked if json.loads(event["raw"]).get("stands") is not False]
        told = [e for e in events if e["type"] == "worker-elected" and e["winner"] is not None]
        request = min(((e["timestamp"], e["clock"]) for e in stood), default=(None, None))
        decision = min(((e["timestamp"], e["clock"]) for e in told), default=(None, None))
        names = ("clock", "origin", "hostname", "incarnation")
        candidates = sorted(
            {tuple(event[name] for name in names) for event in stood},
            key=lambda one: [nulls_first(value) for value in one],
        )
        winners = sorted({event["winner"] for event in told})
        row = {
            "id": key,
            "topic": max((e["topic"] for e in asked if e["topic"] is not None), default=None),
            "requested": request[0],
            "requested_clock": request[1],
            "candidates": [
                {**dict(zip(names, one, strict=True)), "rank": rank}
                for rank, one in enumerate(candidates, 1)
            ],
            "decided": decision[0],
            "decided_clock": decision[1],
            "decided_after": minus(decision[0], request[0]),
            "winner": winners[0] if winners else None,
            "winners": winners,
            "disagreement": len(winners) > 1,
            "acks": sum(event["type"] == "worker-elect-ack" for event in events),
            "executions": None,
        }
        heard = [event["received"] for event in told]
        count, dropped = len(winners), False
        if row["topic"] == "task":
            ids = {key, *(elected_task(json.loads(event["raw"])) for event in asked)}
            of_task = [event for uuid in ids for event in self.of_task.get(uuid, [])]
            heard += [event["received"] for event in of_task]
            dropped = any(
                e["class"] == "revoked" or (e["class"] == "rejected" and not e["requeue"])
                for e in of_task
            )
            count = row["executions"] = executions_told(of_task)
        row["verdict"] = {0: "none", 1: "exactly once"}.get(count, "more")
        if count == 0 and not dropped:
            since = max(heard) if heard else min((e["received"] for e in asked), default=-math.inf)
            if self.end - since <= (3_600 if heard else 60):
                row["verdict"] = "open"
        return row

    # -- revocations ---------------------------------------------------------------------------

    def revocations(self) -> list[Row]:
        """One row a revoked task."""
        told: dict[str, list[tuple[Row, Row, int]]] = defaultdict(list)
        for event in self.events:
            if event["type"] == "worker-revocation":
                raw = json.loads(event["raw"])
                ids = raw.get("ids")
                for number, uuid in enumerate(ids if isinstance(ids, list) else ()):
                    if isinstance(uuid, str):
                        told[uuid].append((event, raw, number))
        stops: dict[str, list[Row]] = defaultdict(list)
        for event in self.events:
            if event["class"] == "revoked" and not event["expired"]:
                stops[event["uuid"]].append(event)
        return [self.revocation(u, told[u], stops[u]) for u in sorted({*told, *stops})]

    def revocation(self, uuid: str, told: list[tuple[Row, Row, int]], stops: list[Row]) -> Row:
        """What became of one revocation."""
        events = self.of_task.get(uuid, [])
        knew: dict[Any, int] = {}
        stamps = []
        for event, raw, number in told:
            who = (event["hostname"], event["incarnation"])
            knew[who] = min(event["clock"], knew.get(who, event["clock"]))
            each = raw.get("stamps")
            has_own = isinstance(each, list) and number < len(each)
            stamp = each[number] if has_own else raw.get("stamp")
            if isinstance(stamp, int | float):
                stamps.append(float(stamp))
        violations = [
            event
            for event in events
            if event["class"] == "started"
            and (who := (event["hostname"], event["incarnation"])) in knew
            and event["clock"] > knew[who]
        ]
        names = ("clock", "timestamp", "hostname")
        stop = max(
            stops, key=lambda e: (*(e[n] for n in names), bool(e["terminated"])), default=None
        )
        known = min((event["timestamp"] for event, _, _ in told), default=None)
        effective = None
        if violations:
            effective = False
        elif stop is not None:
            effective = True
        elif any(event["class"] in {"succeeded", "failed"} for event in events):
            effective = False
        firsts = [
            min(stamps, default=None),
            known,
            min((e["timestamp"] for e in stops), default=None),
        ]
        methods = {raw["method"] for _, raw, _ in told if isinstance(raw.get("method"), str)}
        return {
            "uuid": uuid,
            "name": self.names.get(uuid),
            "revoked": next((time for time in firsts if time is not None), None),
            "revoked_clock": min(knew.values(), default=None),
            "known": known,
            "methods": sorted(methods),
            "seen_by": sorted({hostname for hostname, _ in knew}),
            "stopped_by": stop["hostname"] if stop else None,
            "stopped": stop["timestamp"] if stop else None,
            "terminated": bool(stop["terminated"]) if stop else None,
            "effective": effective,
            "violations": len(violations),
            "violated_by": sorted({event["hostname"] for event in violations}),
        }

    # -- clock_audit ---------------------------------------------------------------------------

    def clock_audit(self) -> list[Row]:
        """One row a finding."""
        return [*self.of_senders(), *self.of_causes()]

    def of_senders(self) -> list[Row]:
        """Clocks of one sender that went back, jumped, or are not there."""
        made = []
        aside = {"task-sent", "task-started", "task-retried", "worker-elect"}
        for events in senders(self.events).values():
            names = ("seq", "sent_clock", "timestamp", "type", "uuid")
            clocked = sorted(
                (e for e in events if e["sent_clock"] is not None and e["type"] not in aside),
                key=lambda e: [nulls_first(e[name]) for name in names],
            )
            for before, event in pairwise(clocked):
                step = event["sent_clock"] - before["sent_clock"]
                if step < 0 or step > 2**40:
                    kind = "went back" if step < 0 else "jump"
                    row = finding(kind, event, before)
                    row |= {"clock": event["sent_clock"], "other_clock": before["sent_clock"]}
                    made.append(row)
        missing: dict[Any, list[Row]] = defaultdict(list)
        for event in self.events:
            if event["sent_clock"] is None:
                missing[event["hostname"], event["incarnation"], event["type"]].append(event)
        for events in missing.values():
            first = min(events, key=lambda e: (e["timestamp"], nulls_first(e["uuid"])))
            row = finding("missing", first, None)
            made.append(row | {"clock": None, "count": len(events)})
        return made

    def of_causes(self) -> list[Row]:
        """Effects before their causes."""
        pairs: list[tuple[Row | None, Row | None]] = []
        for uuid, events in self.of_task.items():
            pairs += in_a_task(events)
            parents = [e["parent_id"] for e in events if e["parent_id"] is not None]
            parent = max(parents, default=uuid)
            if parent != uuid and parent in self.of_task and self.root(parent) == self.root(uuid):
                starts = [e for e in self.of_task[parent] if e["class"] == "started"]
                pairs.append(
                    (first(e for e in starts if e["clock"]), first(e for e in events if e["clock"]))
                )
        return [
            finding("effect before cause", effect, cause)
            for cause, effect in pairs
            if cause is not None and effect is not None and 0 < effect["clock"] <= cause["clock"]
        ]

    def root(self, uuid: str) -> str:
        """The family of a task."""
        root = self.folds[uuid]["root_id"]
        return uuid if root is None else root

    # -- rates ---------------------------------------------------------------------------------

    def rates(self, column: str, seconds: int) -> list[Row]:
        """Counts and percentiles by span of time, name and worker."""
        counts: dict[Any, Counter[str]] = defaultdict(Counter)
        waits: dict[Any, list[float]] = defaultdict(list)
        runs: dict[Any, list[float]] = defaultdict(list)

        def span(time: float) -> float:
            return float(math.floor(time / seconds) * seconds)

        for event in self.events:
            if event["class"] is not None:
                worker = None if event["class"] == "sent" else event["hostname"]
                key = (span(event["timestamp"]), self.names[event["uuid"]], worker)
                counts[key][event["class"]] += 1
        for row in self.attempts:
            who = (row["name"], row["worker"])
            if row["started"] is not None and row["waited"] is not None:
                waits[span(row["started"]), *who].append(row["waited"])
            if row["outcome"] in {"SUCCESS", "FAILURE", "RETRY"} and row["runtime"] is not None:
                runs[span(row["ended"]), *who].append(row["runtime"])
        return [
            {
                column: key[0],
                "name": key[1],
                "worker": key[2],
                **{name: counts[key][name] for name in (*CLASSES, "custom")},
                **{f"wait_p{p}": percentile(waits[key], p / 100) for p in (50, 95, 99)},
                **{f"run_p{p}": percentile(runs[key], p / 100) for p in (50, 95, 99)},
            }
            for key in list({**counts, **waits, **runs})
        ]

    # -- queues --------------------------------------------------------------------------------

    def queues(self) -> list[Row]:
        """How many waited in each queue at the end of each minute."""
        spans: list[tuple[str | None, float, float, bool]] = []
        for row in self.attempts:
            if row["waited"] is not None:
                queue = self.queue_of(self.task_of[row["uuid"]])
                spans.append((queue, row["started"] - row["waited"], row["started"], True))
        for task in self.tasks:
            at = due(task["_queued"], moment(task["eta"]))
            if at is None:
                continue
            if task["state"] in {"PENDING", "RECEIVED"} and at <= self.end:
                spans.append((self.queue_of(task), at, self.end, False))
            if task["state"] in {"REVOKED", "REJECTED"} and task["started"] is None:
                until = task["finished"] if task["finished"] is not None else task["rejected"]
                if until is not None and at <= until:
                    spans.append((self.queue_of(task), at, until, False))
        arrivals, starts = Counter[Any](), Counter[Any]()
        waiting: dict[Any, list[float]] = defaultdict(list)
        for queue, at, until, did_start in spans:
            minute = float(math.floor(at / 60) * 60)
            arrivals[minute, queue] += 1
            if did_start:
                starts[float(math.floor(until / 60) * 60), queue] += 1
            while minute + 60 <= min(until, at + DAY_S):
                waiting[minute, queue].append(minute + 60 - at)
                minute += 60
        return [
            {
                "minute": key[0],
                "queue": key[1],
                "arrivals": arrivals[key],
                "starts": starts[key],
                "waiting": len(waiting.get(key, [])),
                "oldest": max(waiting.get(key, []), default=None),
            }
            for key in {*arrivals, *starts, *waiting}
        ]

    def queue_of(self, task: Row) -> str | None:
        """The queue that a worker took a task from, or that it was sent to."""
        taken = [
            (*event["ord"], event["type"], event["queue"])
            for event in self.of_task[task["uuid"]]
            if event["class"] in {"received", "started"} and event["queue"] is not None
        ]
        return max(taken)[-1] if taken else task["queue"]

    # -- lineage -------------------------------------------------------------------------------

    def lineage(self) -> list[Row]:
        """One row a family."""
        families = grouped(self.tasks, lambda task: task["root"])
        return [self.family(root, tasks) for root, tasks in families.items()]

    def beginning(self, uuid: str) -> float | None:
        """When a task was first sent, received or started."""
        kinds = {"sent", "received", "started"}
        times = [e["timestamp"] for e in self.of_task[uuid] if e["class"] in kinds]
        return min(times, default=None)

    def family(self, root: str, tasks: list[Row]) -> Row:
        """A root and all that came of it."""
        of_id = {task["uuid"]: task for task in tasks}
        first = of_id.get(root, {})
        begun = [at for task in tasks if (at := self.beginning(task["uuid"])) is not None]
        ended = [task for task in tasks if task["finished"] is not None]
        chain: list[Row] = []
        if ended:
            chain = [max(ended, key=lambda task: (task["finished"], task["uuid"]))]
            while len(tasks) <= 10_000 and len(chain) < 1_000:
                parent = of_id.get(chain[-1]["parent"])
                if parent is None or parent in chain:
                    break
                chain.append(parent)
            chain.reverse()
        failed = sum(task["state"] == "FAILURE" for task in tasks)
        end = max((task["finished"] for task in ended), default=None)
        row = {
            "root_id": root,
            "name": first.get("name"),
            "state": first.get("state"),
            "size": len(tasks),
            "depth": max((t["depth"] for t in tasks if t["depth"] is not None), default=None),
            "began": min(begun, default=None),
            "ended": end,
            "critical_path": None,
            "critical_tasks": [task["uuid"] for task in chain],
            "failed": failed,
            "failed_part": failed / len(tasks),
        }
        length = minus(row["ended"], row["began"])
        row["duration"] = None if length is None else max(0.0, length)
        spans = [
            (
                self.beginning(task["uuid"]),
                task["finished"] if task["finished"] is not None else end,
            )
            for task in chain
        ]
        if spans and all(begin is not None for begin, _ in spans):
            row["critical_path"] = covered(spans)
        return row

    # -- gaps ----------------------------------------------------------------------------------

    def gaps(self) -> list[Row]:
        """One row a hole in the numbers of a sender."""
        made = []
        for (hostname, incarnation, series), events in senders(self.events).items():
            of_number = grouped(events, lambda event: event["seq"])
            numbers = sorted(of_number)
            reports = [
                (number, max(lost))
                for number in numbers
                if (lost := [e["lost"] for e in of_number[number] if e["lost"] is not None])
            ]
            for before, after in pairwise([None, *numbers]):
                first = 1 if before is None else before + 1
                if after <= first:
                    continue
                lost_before = [lost for number, lost in reports if number < first]
                lost_after = [lost for number, lost in reports if number >= after]
                lost = lost_after and lost_after[0] - (lost_before[-1] if lost_before else 0)
                times = [e["timestamp"] for e in of_number[before]] if before is not None else []
                made.append(
                    {
                        "hostname": hostname,
                        "incarnation": incarnation,
                        "series": series,
                        "first": first,
                        "last": after - 1,
                        "missing": after - first,
                        "kind": "beginning" if before is None else "hole",
                        "before": max(times, default=None),
                        "after": min(e["timestamp"] for e in of_number[after]),
                        "events_lost": max(0, min(after - first, lost)) if lost_after else None,
                    }
                )
        return made


# -- one task ----------------------------------------------------------------------------------


def folded(uuid: str, events: list[Row]) -> Row:
    """What is known of a task: the greatest event of each class, and what follows from them."""
    last: dict[str, Row] = {}
    for event in events:
        kind = event["class"]
        if kind not in last or event["place"] > last[kind]["place"]:
            last[kind] = event
    in_order = sorted(last.values(), key=lambda event: event["place"])
    retried = last.get("retried")
    state, holder = "RETRY", retried
    for kind in PRECEDENCE:
        if kind in last and (retried is None or last[kind]["place"] > retried["place"]):
            holder = last[kind]
            custom = holder["type"].removeprefix("task-").upper()
            state = custom if kind == "custom" else STATE[kind]
            break
    task: Row = {"uuid": uuid, "state": state}
    for kind in CLASSES:
        task[kind] = last[kind]["timestamp"] if kind in last else None
    for field in FIELDS:
        task[field] = None
        for event in in_order:
            if event["present"] & BIT[field]:
                task[field] = event[field]
    others = [event for event in in_order if event["class"] != "sent"]
    task["worker"] = others[-1]["hostname"] if others else None
    task["client"] = last["sent"]["hostname"] if "sent" in last else None
    giving = in_order
    if holder["class"] not in {"received", "rejected", "retried", "sent"}:
        giving = [event for event in in_order if event["class"] != "received"]
    task["timestamp"], task["clock"] = giving[-1]["timestamp"], giving[-1]["clock"]
    task["extra"] = next((e["extra"] for e in reversed(in_order) if e["extra"] is not None), None)
    ended = state in {"SUCCESS", "FAILURE", "REVOKED"}
    task["finished"] = holder["timestamp"] if ended else None
    task["_queued"] = queued(last.get("sent"), last.get("received"))
    return task


def queued(sent: Row | None, received: Row | None) -> float | None:
    """When the last attempt of a task was sent; or received, where nobody saw that one sent."""
    if sent is None or received is None:
        return (sent or received or {}).get("timestamp")
    is_retry = (received["retries"] or 0) > (sent["retries"] or 0)
    return received["timestamp"] if is_retry else sent["timestamp"]


def depth(task: Row, tasks: dict[str, Row]) -> int | None:
    """Steps to the top of the family along parents."""
    steps, seen, at = 0, {task["uuid"]}, task
    while at["parent"] is not None:
        steps += 1
        above = tasks.get(at["parent"])
        if above is None or above["root"] != at["root"]:
            break
        if above["uuid"] in seen:
            return None
        seen.add(above["uuid"])
        at = above
    return steps if steps <= 1_023 else None


OUTCOMES = {
    "task-succeeded": "SUCCESS", "task-failed": "FAILURE", "task-revoked": "REVOKED",
    "task-retried": "RETRY", "task-rejected": "REJECTED", "task-cancelled": "CANCELLED",
}  # fmt: skip
# Another end right after one of these says the same again.
FINAL = {"task-succeeded", "task-failed", "task-revoked"}


def executions_of(events: list[Row], life_of: Callable[[Row], int | None]) -> list[Row]:
    """The executions of a task, in the order of their first events."""
    made: list[Row] = []
    by_time = sorted(events, key=lambda e: (e["timestamp"], e["clock"], e["type"], e["tie"]))
    for told in grouped(events, lambda event: event["hostname"]).values():
        here: list[Row] = []
        receipt = before = None
        for event in sorted(told, key=lambda event: event["place"]):
            kind = event["type"]
            if kind == "task-received":
                receipt = event
            elif kind == "task-started":
                here.append(execution(event, receipt, waited(event, receipt, by_time), life_of))
            elif kind not in OUTCOMES:
                continue
            elif before == "task-started":
                if here[-1]["incarnation"] is None:
                    here[-1]["incarnation"] = life_of(event)
                end(here[-1], event)
            elif before not in FINAL:
                here.append(execution(event, receipt, None, life_of))
                here[-1] |= {"missing": "start", "started": None, "started_clock": None}
                end(here[-1], event)
            before = kind
        for number, row in enumerate(here):
            row["_first"] = (*row["_first"], number, row["worker"])
        begun = [row for row in here if not row["_never_began"]]
        for row in begun[:-1]:
            row["_ran_anew"] = True
        made += begun
    return sorted(made, key=lambda row: row["_first"])


def waited(start: Row, receipt: Row | None, by_time: list[Row]) -> float | None:
    """How long an attempt waited, of its start and the receipt before it."""
    until = start if receipt is None else receipt
    before = by_time[: by_time.index(until)]
    sendings = [event for event in before if event["class"] == "sent"]
    if receipt is not None:
        same = [e for e in sendings if (e["retries"] or 0) == (receipt["retries"] or 0)]
        sent = same[-1] if same else receipt
        return wait(sent["timestamp"], moment(receipt["eta"]), start["timestamp"])
    if not sendings or any(event["class"] == "retried" for event in before):
        return None
    return wait(sendings[-1]["timestamp"], moment(sendings[-1]["eta"]), start["timestamp"])


def execution(
    event: Row, receipt: Row | None, waited: float | None, life_of: Callable[[Row], int | None]
) -> Row:
    """An execution that has begun."""
    return {
        "worker": event["hostname"],
        "incarnation": life_of(event),
        "received": receipt and receipt["timestamp"],
        "waited": waited,
        "started": event["timestamp"],
        "ended": None,
        "outcome": None,
        "runtime": None,
        "reason": None,
        "exception": None,
        "missing": None,
        "started_clock": event["clock"],
        "ended_clock": None,
        "_ran_anew": False,
        "_never_began": False,
        "_first": event["ord"],
    }


def end(row: Row, event: Row) -> None:
    """Write the end of an execution into its row."""
    outcome = OUTCOMES[event["type"]]
    row |= {"ended": event["timestamp"], "ended_clock": event["clock"], "outcome": outcome}
    row["runtime"] = event["runtime"]
    length = minus(event["timestamp"], row["started"])
    if row["runtime"] is None and length is not None and length >= 0:
        row["runtime"] = length
    row["exception"] = event["exception"]
    text = event["exception"] or ""
    if outcome == "FAILURE":
        lost, limit = "WorkerLost" in text, "TimeLimitExceeded" in text
        row["reason"] = "worker lost" if lost else "time limit" if limit else "exception"
    elif outcome == "REVOKED":
        kinds = ("expired", "terminated")
        row["reason"] = next((kind for kind in kinds if event[kind]), "revoked")
    elif outcome == "REJECTED":
        row["reason"] = "requeued" if event["requeue"] else "rejected"
    else:
        row["reason"] = {"RETRY": "retry", "CANCELLED": "cancelled"}.get(outcome)
    if row["missing"] == "start":
        row["_never_began"] = (
            outcome == "REJECTED"
            or (outcome == "REVOKED" and not event["terminated"])
            or (outcome == "FAILURE" and text.startswith("NotRegistered"))
        )


def in_a_task(events: list[Row]) -> list[tuple[Row | None, Row | None]]:
    """Causes and effects among the events of a task."""
    pairs: list[tuple[Row | None, Row | None]] = []
    sendings = [event for event in events if event["class"] == "sent"]
    receipts = [event for event in events if event["class"] == "received"]
    for told in grouped(receipts, lambda e: (e["retries"] or 0, *node(e))).values():
        retries = told[0]["retries"] or 0
        pairs.append((first(e for e in sendings if (e["retries"] or 0) == retries), first(told)))
    for told in grouped(events, node).values():
        received = [event for event in told if event["class"] == "received"]
        started = [event for event in told if event["class"] == "started"]
        ended = [e for e in told if e["class"] in ENDS and e["sent_clock"] is not None]
        if len(received) >= len(started):
            pairs.append((first(received), first(started)))
        if len(started) >= len(ended):
            pairs.append((first(started), first(ended)))
    return pairs


ENDS = {"succeeded", "failed", "retried", "revoked", "rejected"}


def node(event: Row) -> tuple[str, int | None]:
    """Who sent an event: the node and its life, as it names it."""
    return event["hostname"], event["incarnation"]


def first(events: Iterable[Row]) -> Row | None:
    """The first event by clock and time."""
    names = ("clock", "timestamp", "type", "hostname", "incarnation")
    return min(events, key=lambda e: [nulls_first(e[name]) for name in names], default=None)


def executions_told(events: list[Row]) -> int:
    """How often a task was run, by its starts or its ends, retries not counted."""
    count = Counter(event["class"] for event in events)
    terminated = sum(e["class"] == "revoked" and bool(e["terminated"]) for e in events)
    ends = count["succeeded"] + count["failed"] + count["retried"] + terminated
    return max(count["started"], ends) - count["retried"]


# -- small things ------------------------------------------------------------------------------


def shown(rows: Iterable[Row]) -> list[Row]:
    """Rows without what was only needed to make others."""
    return [{key: value for key, value in row.items() if key[0] != "_"} for row in rows]


def minus(later: float | None, sooner: float | None) -> float | None:
    """The difference of two times, if both are known."""
    return None if later is None or sooner is None else later - sooner


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long spans of time are together; overlapping time counts once."""
    total, reached = 0.0, -math.inf
    for begin, until in sorted(spans):
        total += max(0.0, until - max(begin, reached))
        reached = max(reached, until)
    return total


def senders(events: Iterable[Row]) -> dict[Any, list[Row]]:
    """Numbered events by who numbered them, in the order of the numbers."""
    made = grouped(
        (event for event in events if event["seq"] is not None),
        lambda event: (event["hostname"], event["incarnation"], event["series"]),
    )
    return {key: sorted(told, key=lambda event: event["seq"]) for key, told in made.items()}


def missing_numbers(events: list[Row]) -> int:
    """Numbers between the first and the last of each sender that are not there."""
    total = 0
    for told in senders(events).values():
        numbers = {event["seq"] for event in told}
        total += max(numbers) - min(numbers) + 1 - len(numbers)
    return total


def elected_task(raw: Row) -> str | None:
    """The id of the task that a `worker-elect` is about."""
    action = raw.get("action")
    options = action.get("options") if isinstance(action, dict) else None
    found = options.get("task_id") if isinstance(options, dict) else None
    return found if isinstance(found, str) else None


def finding(kind: str, event: Row, other: Row | None) -> Row:
    """A row of `clock_audit`."""
    return {
        **{name: event[name] for name in ("hostname", "incarnation")},
        "kind": kind,
        **{name: event[name] for name in ("uuid", "type", "clock", "timestamp")},
        **{
            f"other_{name}": other and other[name]
            for name in ("hostname", "type", "clock", "timestamp")
        },
        "count": 1,
    }
