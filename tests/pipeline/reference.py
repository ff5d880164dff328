"""The tables of a log by plain Python: slow, obvious, and written from `docs/pipeline.md` alone.

`tables_of` gives what a build must publish, table by table. It shares no code with the pipeline and
keeps everything in memory, so a disagreement is a mistake here, there, or in the page.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import cached_property
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
    event["order"] = (*event["ord"], kind, nulls_first(row["uuid"]))
    event["place"] = (*event["ord"], kind, row["tie"] or 0)
    return event


def unique(rows: Iterable[Row]) -> list[Row]:
    """Each event once, in the order of the cluster."""
    kept: dict[Any, Row] = {}
    for row in rows:
        key = tuple(row[name] for name in IDENTITY)
        before = kept.get(key)
        if before is None or (row["tie"] or 0, -row["received"]) > (
            before["tie"] or 0,
            -before["received"],
        ):
            kept[key] = row
    return sorted(map(event_of, kept.values()), key=lambda event: event["order"])


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
    if not isinstance(value, str):
        return None
    try:
        read = datetime.fromisoformat(value)
    except ValueError:
        return None
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()


def due(sent: float | None, received: float | None, eta: float | None) -> float | None:
    """When an attempt was due."""
    since = sent if sent is not None else received
    if since is None:
        return None
    return since if eta is None else max(since, eta)


def wait(
    sent: float | None, received: float | None, eta: float | None, started: float | None
) -> float | None:
    """Seconds from when an attempt was due to its start."""
    since = sent if sent is not None else received
    if since is None or started is None or started < since:
        return None
    return max(0.0, started - (since if eta is None else max(since, eta)))


def percentile(values: list[float], part: float) -> float | None:
    """Linear between the two nearest."""
    if not values:
        return None
    values = sorted(values)
    at = part * (len(values) - 1)
    low, high = math.floor(at), math.ceil(at)
    if low == high:
        return values[low]
    return (high - at) * values[low] + (at - low) * values[high]


class Tables:
    """All tables of some rows of a log. Each is made once, when it is first asked for."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.events = unique(rows)
        self.end = log_end(rows)
        self.of_task = grouped(self.events, lambda event: event["uuid"])

    def all(self) -> dict[str, list[Row]]:
        """The rows of every table, by its name."""
        return {
            "timeline": self.timeline(),
            "tasks": self.tasks,
            "attempts": [
                {key: value for key, value in row.items() if key[0] != "_"} for row in self.attempts
            ],
            "workers": self.workers,
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
        made = {uuid: folded(uuid, events) for uuid, events in self.of_task.items()}
        executions = Counter(row["uuid"] for row in self._executions if row["missing"] != "start")
        for task in made.values():
            ended = {"SUCCESS": "succeeded", "FAILURE": "failed", "REVOKED": "revoked"}
            task["finished"] = task[ended[task["state"]]] if task["state"] in ended else None
            task["queue_wait"] = wait(
                task["sent"], task["received"], moment(task["eta"]), task["started"]
            )
            task["attempts"] = executions[task["uuid"]]
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
        return {uuid: folded(uuid, events)["name"] for uuid, events in self.of_task.items()}

    # -- attempts ------------------------------------------------------------------------------

    @cached_property
    def _executions(self) -> list[Row]:
        made = []
        for uuid, events in self.of_task.items():
            for number, row in enumerate(executions_of(events, self.life_of), 1):
                made.append({"uuid": uuid, "attempt": number, "name": self.names[uuid], **row})
        return made

    @cached_property
    def attempts(self) -> list[Row]:
        """One row an execution."""
        status = {(row["hostname"], row["incarnation"]): row["status"] for row in self.workers}
        for row in self._executions:
            if row["outcome"] is None:
                of = status.get((row["worker"], row["incarnation"]))
                reasons = {"lost": "worker lost", "offline": "worker offline"}
                if of in reasons:
                    row |= {"outcome": "LOST", "reason": reasons[of], "missing": "end"}
                elif row["_superseded"]:
                    row |= {"outcome": "LOST", "reason": "event lost", "missing": "end"}
                else:
                    row["outcome"] = "RUNNING"
        return self._executions

    # -- workers -------------------------------------------------------------------------------

    @cached_property
    def births(self) -> dict[tuple[str, int | None], list[float]]:
        """When the lives of Celery's workers began, by hostname and process."""
        made: dict[Any, set[float]] = defaultdict(set)
        for event in self.events:
            if event["type"] == "worker-online" and event["inc"] is None and not event["processed"]:
                made[event["hostname"], event["pid"]].add(event["timestamp"])
        return {key: sorted(times) for key, times in made.items()}

    def life_of(self, event: Row) -> int | None:
        """The incarnation of the worker that an event belongs to."""
        if event["inc"] is not None:
            return event["inc"]
        births = self.births.get((event["hostname"], event["pid"]), [])
        before = [time for time in births if time <= event["timestamp"]]
        return int(before[-1] * 1_000_000) if before else event["pid"]

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
        return [
            {key: value for key, value in row.items() if key[0] != "_"}
            for rows in by_host.values()
            for row in rows
        ]

    def life(self, hostname: str, incarnation: int | None, events: list[Row]) -> Row:
        """What a life says of itself."""

        def times(kind: str) -> list[float]:
            return [event["timestamp"] for event in events if event["type"] == kind]

        def last(name: str) -> Any:
            return next((e[name] for e in reversed(beats) if e[name] is not None), None)

        kinds = {"worker-online", "worker-heartbeat", "worker-offline"}
        beats = [event for event in events if event["type"] in kinds]
        own = [event for event in events if event["series"] is None] or events
        seen = [event["timestamp"] for event in own]
        online, offline = times("worker-online"), times("worker-offline")
        came_back = set()
        if offline:
            last_off = max(e["ord"] for e in beats if e["type"] == "worker-offline")
            came_back = {e["type"] for e in beats if e["ord"] > last_off}
        is_celery = all(event["inc"] is None for event in events)
        back = "worker-online" in came_back or (is_celery and "worker-heartbeat" in came_back)
        drifts = sorted(round((e["received"] - e["timestamp"]) * 1000) for e in events)
        row = {
            "hostname": hostname,
            "incarnation": incarnation,
            "pid": own[-1]["pid"],
            "online": min(online) if online else min(seen),
            "last_heartbeat": max(times("worker-heartbeat"), default=None),
            "last_seen": max(seen),
            "offline": max(offline) if offline and not back else None,
            "processed": last("processed"),
            "active": last("active"),
            "freq": last("freq"),
            "drift": drifts[(len(drifts) - 1) // 2] / 1000,
            "sw_ident": last("sw_ident"),
            "sw_ver": last("sw_ver"),
            "events_seen": len(events),
            "events_missing": missing_numbers(events),
            "events_lost": max((e["lost"] for e in events if e["lost"] is not None), default=None),
        }
        until = row["offline"] if row["offline"] is not None else row["last_seen"]
        row["uptime"] = until - row["online"]
        row["_last"] = max(own, key=lambda event: (event["clock"], event["timestamp"]))["received"]
        freq = beats[-1]["freq"] if beats else None
        row["_interval"] = freq if freq is not None and 0 < freq <= 3_600 else 2.0
        return row

    def judge(self, row: Row, after: Row | None) -> None:
        """The status of a life, which may depend on the next one of the same hostname."""
        silent = self.end - row["_last"] > 2 * row["_interval"]
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
        elects = [event for event in events if event["type"] == "worker-elect"]
        raws = [json.loads(event["raw"]) for event in elects]
        standing = [
            e for e, raw in zip(elects, raws, strict=True) if raw.get("stands") is not False
        ]
        told = [event for event in events if event["type"] == "worker-elected"]
        topics = [event["topic"] for event in [*elects, *told] if event["topic"] is not None]
        topic = topics[0] if topics else None
        winners = sorted({event["winner"] for event in told if event["winner"] is not None})
        decided = [event for event in told if event["winner"] is not None]
        task = next((found for raw in raws if (found := elected_task(raw)) is not None), None)
        row = {
            "id": key,
            "topic": topic,
            "requested": standing[0]["timestamp"] if standing else None,
            "requested_clock": standing[0]["clock"] if standing else None,
            "candidates": [
                {**{n: e[n] for n in ("hostname", "origin", "incarnation", "clock")}, "rank": rank}
                for rank, e in enumerate(
                    sorted(standing, key=lambda e: (e["clock"], e["origin"])), 1
                )
            ],
            "decided": decided[0]["timestamp"] if decided else None,
            "decided_clock": decided[0]["clock"] if decided else None,
            "winner": decided[0]["winner"] if decided else None,
            "winners": winners,
            "disagreement": len(winners) > 1,
            "acks": sum(event["type"] == "worker-elect-ack" for event in events),
            "executions": None,
        }
        row["decided_after"] = minus(row["decided"], row["requested"])
        count, is_open = len(winners), False
        if row["requested"] is not None and not winners:
            is_open = self.end - row["requested"] < 60
        if topic == "task":
            started = [e for e in self.of_task.get(task, []) if e["class"] == "started"]
            retried = [e for e in self.of_task.get(task, []) if e["class"] == "retried"]
            count = row["executions"] = max(0, len(started) - len(retried))
            sent = [e["timestamp"] for e in self.of_task.get(task, []) if e["class"] == "sent"]
            is_open = count == 0 and (is_open or (bool(sent) and self.end - max(sent) < 3_600))
        verdicts = {0: "none", 1: "exactly once"}
        row["verdict"] = "open" if is_open else verdicts.get(count, "more")
        return row

    # -- revocations ---------------------------------------------------------------------------

    def revocations(self) -> list[Row]:
        """One row a revoked task."""
        told: dict[str, list[tuple[Row, Row]]] = defaultdict(list)
        for event in self.events:
            if event["type"] == "worker-revocation":
                raw = json.loads(event["raw"])
                ids = raw.get("ids")
                for uuid in set(ids) if isinstance(ids, list) else ():
                    told[uuid].append((event, raw))
        stops: dict[str, list[Row]] = defaultdict(list)
        for event in self.events:
            if event["class"] == "revoked" and not event["expired"]:
                stops[event["uuid"]].append(event)
        return [self.revocation(u, told[u], stops[u]) for u in sorted({*told, *stops})]

    def revocation(self, uuid: str, told: list[tuple[Row, Row]], stops: list[Row]) -> Row:
        """What became of one revocation."""
        events = self.of_task.get(uuid, [])
        knew: dict[str, int] = {}
        for event, _ in told:
            knew.setdefault(event["hostname"], event["clock"])
        starts = [e for e in events if e["class"] == "started"]
        violations = [
            e for e in starts if e["hostname"] in knew and e["clock"] > knew[e["hostname"]]
        ]
        stop = stops[0] if stops else None
        stamps = [raw["stamp"] for _, raw in told if isinstance(raw.get("stamp"), int | float)]
        known = min((event["timestamp"] for event, _ in told), default=None)
        ended = any(e["class"] in {"succeeded", "failed"} for e in events)
        effective = None
        if violations or (ended and stop is None):
            effective = False
        elif stop is not None:
            effective = True
        first = known if known is not None else stop["timestamp"] if stop else None
        return {
            "uuid": uuid,
            "name": self.names.get(uuid),
            "revoked": min(stamps) if stamps else first,
            "revoked_clock": min((event["clock"] for event, _ in told), default=None),
            "known": known,
            "methods": sorted({raw["method"] for _, raw in told if raw.get("method")}),
            "seen_by": sorted({event["hostname"] for event, _ in told}),
            "stopped_by": stop["hostname"] if stop else None,
            "stopped": stop["timestamp"] if stop else None,
            "terminated": any(bool(e["terminated"]) for e in stops),
            "effective": effective,
            "violations": len(violations),
            "violated_by": sorted({e["hostname"] for e in violations}),
        }

    # -- clock_audit ---------------------------------------------------------------------------

    def clock_audit(self) -> list[Row]:
        """One row a finding."""
        return [*self.of_senders(), *self.of_causes()]

    def of_senders(self) -> list[Row]:
        """Clocks of one sender that went back, jumped, or are not there."""
        made = []
        for events in senders(self.events).values():
            clocked = [event for event in events if event["sent_clock"] is not None]
            for before, event in zip(clocked, clocked[1:], strict=False):
                step = event["sent_clock"] - before["sent_clock"]
                if step <= 0:
                    made.append(finding("went back", event, before))
                elif step > 2**40:
                    made.append(finding("jump", event, before))
        missing: dict[Any, list[Row]] = defaultdict(list)
        for event in self.events:
            if event["sent_clock"] is None:
                missing[event["hostname"], event["incarnation"], event["type"]].append(event)
        for events in missing.values():
            made.append({**finding("missing", events[0], None), "count": len(events)})
        return made

    def of_causes(self) -> list[Row]:
        """Effects before their causes."""
        made = []
        for uuid, events in self.of_task.items():
            first = {kind: e for e in reversed(events) if (kind := e["class"])}
            for effect, cause in (("received", "sent"), ("started", "received")):
                a, b = first.get(effect), first.get(cause)
                if a and b and a["clock"] < b["clock"]:
                    made.append(finding("effect before cause", a, b))
            parent = self.task_of[uuid]["parent"]
            starts = [e for e in self.of_task.get(parent, []) if e["class"] == "started"]
            if starts and events[0]["clock"] <= starts[0]["clock"]:
                made.append(finding("effect before cause", events[0], starts[0]))
        return made

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
            if row["ended"] is not None and row["runtime"] is not None:
                if row["outcome"] in {"SUCCESS", "FAILURE", "RETRY"}:
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
                queue = self.task_of[row["uuid"]]["queue"]
                spans.append((queue, row["started"] - row["waited"], row["started"], True))
        for task in self.tasks:
            at = due(task["sent"], task["received"], moment(task["eta"]))
            if at is None:
                continue
            if task["state"] in {"PENDING", "RECEIVED"} and at <= self.end:
                spans.append((task["queue"], at, self.end, False))
            if task["state"] in {"REVOKED", "REJECTED"} and task["started"] is None:
                until = task["finished"] if task["state"] == "REVOKED" else task["rejected"]
                if until is not None and at < until:
                    spans.append((task["queue"], at, until, False))
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
        first = self.task_of.get(root, {})
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
        end = chain and max(task["finished"] for task in ended)
        row = {
            "root_id": root,
            "name": first.get("name"),
            "state": first.get("state"),
            "size": len(tasks),
            "depth": max((t["depth"] for t in tasks if t["depth"] is not None), default=None),
            "began": min(begun, default=None),
            "ended": end or None,
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
            edges: list[Row | None] = [None, *events]
            for before, after in zip(edges, events, strict=False):
                first = 1 if before is None else before["seq"] + 1
                if after["seq"] <= first - (before is not None) or after["seq"] == first:
                    continue
                row = {"hostname": hostname, "incarnation": incarnation, "series": series}
                row |= {"first": first, "last": after["seq"] - 1, "missing": after["seq"] - first}
                row |= {"kind": "beginning" if before is None else "hole"}
                row |= {"before": before and before["timestamp"], "after": after["timestamp"]}
                lost = [e for e in events if e["lost"] is not None]
                until = next((e["lost"] for e in lost if e["seq"] >= after["seq"]), 0)
                since = max((e["lost"] for e in lost if e["seq"] < first), default=0)
                row["events_lost"] = min(row["missing"], max(0, until - since))
                made.append(row)
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
    state = "RETRY"
    for kind in PRECEDENCE:
        if kind in last and (retried is None or last[kind]["ord"] > retried["ord"]):
            custom = last[kind]["type"].removeprefix("task-").upper()
            state = custom if kind == "custom" else STATE[kind]
            break
    task: Row = {"uuid": uuid, "state": state}
    for kind in CLASSES:
        task[kind] = last[kind]["timestamp"] if kind in last else None
    for field in FIELDS:
        task[field] = None
        for event in in_order:
            if event["present"] & BIT[field] or (field == "queue" and event["queue"] is not None):
                task[field] = event[field]
    others = [event for event in in_order if event["class"] != "sent"]
    task["worker"] = others[-1]["hostname"] if others else None
    task["client"] = last["sent"]["hostname"] if "sent" in last else None
    giving = in_order
    if state not in {"RECEIVED", "REJECTED", "RETRY", "PENDING"}:
        giving = [event for event in in_order if event["class"] != "received"]
    task["timestamp"], task["clock"] = giving[-1]["timestamp"], giving[-1]["clock"]
    extra: Row = {}
    for event in in_order:
        extra |= json.loads(event["extra"]) if event["extra"] else {}
    task["extra"] = json.dumps(extra) if extra else None
    return task


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


def executions_of(events: list[Row], life_of: Callable[[Row], int | None]) -> list[Row]:
    """The executions of a task, in the order of their first events."""
    made: list[Row] = []
    running: dict[Any, Row] = {}
    received: dict[Any, Row] = {}
    sent: Row | None = None
    outcomes = {
        "task-succeeded": "SUCCESS", "task-failed": "FAILURE", "task-retried": "RETRY",
        "task-revoked": "REVOKED", "task-rejected": "REJECTED", "task-cancelled": "CANCELLED",
    }  # fmt: skip
    for event in events:
        who = (event["hostname"], life_of(event))
        if event["class"] == "sent":
            sent = event
        elif event["class"] == "received":
            received[who] = event
        elif event["class"] == "started":
            if who in running:
                running.pop(who)["_superseded"] = True
            running[who] = execution(who, event, received.pop(who, None), sent)
            made.append(running[who])
        elif event["type"] in outcomes:
            row = running.pop(who, None)
            if row is None:
                dropped = event["class"] == "revoked" and not event["terminated"]
                if dropped or event["class"] == "rejected" or event["type"] == "task-cancelled":
                    continue
                row = execution(who, None, received.pop(who, None), sent)
                row["missing"] = "start"
                made.append(row)
            end(row, event, outcomes[event["type"]])
    return made


def execution(who: Any, start: Row | None, received: Row | None, sent: Row | None) -> Row:
    """An execution that has begun."""
    started = start["timestamp"] if start else None
    eta = (received or sent or {}).get("eta")
    return {
        "worker": who[0],
        "incarnation": who[1],
        "received": received and received["timestamp"],
        "waited": wait(
            sent and sent["timestamp"], received and received["timestamp"], moment(eta), started
        ),
        "started": started,
        "ended": None,
        "outcome": None,
        "runtime": None,
        "reason": None,
        "exception": None,
        "missing": None,
        "started_clock": start and start["clock"],
        "ended_clock": None,
        "_superseded": False,
    }


def end(row: Row, event: Row, outcome: str) -> None:
    """Write the end of an execution into its row."""
    row |= {"ended": event["timestamp"], "ended_clock": event["clock"], "outcome": outcome}
    row["runtime"] = event["runtime"]
    if row["runtime"] is None and row["started"] is not None:
        row["runtime"] = event["timestamp"] - row["started"]
    row["exception"] = event["exception"]
    text = event["exception"] or ""
    if outcome == "FAILURE":
        lost, limit = "WorkerLostError" in text, "TimeLimitExceeded" in text
        row["reason"] = "worker lost" if lost else "time limit" if limit else "exception"
    elif outcome == "REVOKED":
        kinds = ("expired", "terminated")
        row["reason"] = next((kind for kind in kinds if event[kind]), "revoked")
    elif outcome == "REJECTED":
        row["reason"] = "requeued" if event["requeue"] else "rejected"
    else:
        row["reason"] = {"RETRY": "retry", "CANCELLED": "cancelled"}.get(outcome)


# -- small things ------------------------------------------------------------------------------


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
