"""Small tables in the published layout, written without Spark.

`publish` writes rows as a build leaves them. `World` plays a few workers that take tasks, and has
the rows of every table for it; the same seed gives the same rows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from umbel.cluster.task_states import CLASS_STATE, FIELD_KIND

TEXT, WHOLE, NUMBER, FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_KINDS = {"text": TEXT, "whole": WHOLE, "number": NUMBER, "flag": FLAG}

BEGAN = 1_800_000_000.0

SCHEMAS: dict[str, dict[str, pa.DataType]] = {
    "timeline": {
        "position": WHOLE, "clock": WHOLE, "timestamp": NUMBER, "origin": TEXT, "hostname": TEXT,
        "incarnation": WHOLE, "type": TEXT, "uuid": TEXT,
        "previous_of_task": WHOLE, "previous_of_node": WHOLE,
    },
    "tasks": {
        "uuid": TEXT, "state": TEXT, **dict.fromkeys(CLASS_STATE, NUMBER),
        **{name: _KINDS.get(kind, TEXT) for name, kind in FIELD_KIND.items()},
        "worker": TEXT, "client": TEXT, "timestamp": NUMBER, "clock": WHOLE, "extra": TEXT,
        "finished": NUMBER, "queue_wait": NUMBER, "attempts": WHOLE, "root": TEXT, "parent": TEXT,
        "depth": WHOLE,
    },
    "attempts": {
        "uuid": TEXT, "attempt": WHOLE, "name": TEXT, "worker": TEXT, "started": NUMBER,
        "ended": NUMBER, "outcome": TEXT, "runtime": NUMBER, "reason": TEXT, "exception": TEXT,
    },
    "workers": {
        "hostname": TEXT, "incarnation": WHOLE, "pid": WHOLE, "online": NUMBER,
        "last_heartbeat": NUMBER, "offline": NUMBER, "lost": NUMBER, "uptime": NUMBER,
        "processed": WHOLE, "drift": NUMBER, "events_seen": WHOLE, "events_missing": WHOLE,
    },
    "elections": {
        "id": TEXT, "topic": TEXT, "requested": NUMBER, "decided": NUMBER, "decided_clock": WHOLE,
        "decided_after": NUMBER,
        "candidates": pa.list_(pa.struct({"hostname": TEXT, "origin": TEXT, "clock": WHOLE,
                                          "rank": WHOLE})),
        "winner": TEXT, "executions": WHOLE, "verdict": TEXT,
    },
    "revocations": {
        "uuid": TEXT, "name": TEXT, "revoked": NUMBER, "revoked_clock": WHOLE,
        "seen_by": pa.list_(TEXT), "effective": FLAG, "violations": WHOLE,
    },
    "clock_audit": {
        "hostname": TEXT, "incarnation": WHOLE, "kind": TEXT, "clock": WHOLE, "timestamp": NUMBER,
        "type": TEXT, "other_clock": WHOLE, "other_timestamp": NUMBER, "other_type": TEXT,
        "other_hostname": TEXT,
    },
    "rates": {
        "minute": NUMBER, "name": TEXT, "worker": TEXT,
        **dict.fromkeys((*CLASS_STATE, "custom"), WHOLE),
        **{f"{what}_p{part}": NUMBER for what in ("wait", "run") for part in (50, 95, 99)},
    },
    "lineage": {
        "root_id": TEXT, "name": TEXT, "size": WHOLE, "depth": WHOLE, "critical_path": NUMBER,
        "duration": NUMBER, "failed": WHOLE,
    },
    "gaps": {
        "hostname": TEXT, "incarnation": WHOLE, "first": WHOLE, "last": WHOLE, "missing": WHOLE,
        "kind": TEXT,
    },
    "runs": {
        "run": TEXT, "mode": TEXT, "began": NUMBER, "seconds": NUMBER, "since": NUMBER,
        "read": WHOLE, "rows": WHOLE, "kept": WHOLE, "duplicate": WHOLE, "quarantined": WHOLE,
        "tasks": WHOLE,
    },
}  # fmt: skip


def publish(
    directory: Path, tables: Mapping[str, Sequence[Mapping[str, Any]]], run: str = "r1"
) -> Path:
    """Write all tables, those that are not given as empty ones; the index at the end."""
    index: dict[str, Any] = {}
    for name, columns in SCHEMAS.items():
        rows = list(tables.get(name, ()))
        path = f"{name}/r={run}"
        (directory / path).mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(rows, schema=pa.schema(list(columns.items())))
        pq.write_table(table, directory / path / "part-00000.parquet", compression="zstd")
        (directory / path / "_SUCCESS").touch()
        file = {"path": f"{path}/part-00000.parquet", "rows": len(rows), "part": None}
        index[name] = {"rows": len(rows), "files": [file]}
    text = json.dumps({"format": 2, "run": run, "tables": index})
    (directory / "_tables.json").write_text(text)
    return directory


class World:
    """A few workers that take tasks, fail, retry, elect, and lose one of them."""

    def __init__(
        self,
        seed: int = 1,
        tasks: int = 300,
        workers: int = 4,
        names: Sequence[str] = ("shop.charge", "shop.mail", "shop.report"),
        every_s: float = 0.2,
    ) -> None:
        self._dice = random.Random(seed)
        self._names = names
        self.workers = [f"w{number}@farm" for number in range(1, workers + 1)]
        self._free = {name: [BEGAN + 1] * 3 for name in self.workers}
        self._events: list[dict[str, Any]] = []
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}
        self.lost_at = BEGAN + tasks * every_s * 0.7
        self.end = BEGAN + tasks * every_s + 5
        for number in range(tasks):
            self._play_task(number, BEGAN + 1 + number * every_s)
        for name in self.workers:
            self._play_worker(name)
        self._elect()
        self._order()
        self._rest()

    def publish(self, directory: Path) -> Path:
        return publish(directory, self.rows)

    def _play_task(self, number: int, sent: float) -> None:
        dice, uuid = self._dice, f"task-{number:06}"
        name = dice.choices(self._names, range(len(self._names), 0, -1))[0]
        row: dict[str, Any] = {"uuid": uuid, "name": name, "sent": sent, "client": "web@farm"}
        self._say(sent, "web@farm", "task-sent", uuid, clock=0)
        now, attempt, outcome, worker = sent, 0, "PENDING", None
        while outcome in {"PENDING", "RETRY"}:
            attempt += 1
            worker = min(self.workers, key=lambda one: min(self._free[one]))
            slot = self._free[worker].index(min(self._free[worker]))
            received = max(now + 0.005, self._free[worker][slot])
            started = received + 0.001
            took = dice.lognormvariate(-1.6 + self._names.index(name) * 0.5, 0.6)
            ended: float | None = started + took
            fate = dice.random()
            outcome = "RETRY" if fate < 0.06 else "FAILURE" if fate < 0.1 else "SUCCESS"
            self._free[worker][slot] = started + took
            self._say(received, worker, "task-received", uuid)
            self._say(started, worker, "task-started", uuid)
            if worker == self.workers[-1] and started + took > self.lost_at:
                self._free[worker] = [self.end * 2] * 3
                outcome, ended = "LOST", None
            reason = None
            if outcome in {"RETRY", "FAILURE"}:
                reason = dice.choice(["ConnectionError('bank is busy')", "KeyError('order')"])
                row["exception"] = reason
            if ended is not None:
                kind = {"SUCCESS": "succeeded", "FAILURE": "failed", "RETRY": "retried"}[outcome]
                self._say(ended, worker, f"task-{kind}", uuid)
                row[kind] = ended
                now = ended + 0.3
            self.rows["attempts"].append({
                "uuid": uuid, "attempt": attempt, "name": name, "worker": worker,
                "started": started, "ended": ended, "outcome": outcome,
                "runtime": took if outcome == "SUCCESS" else None,
                "reason": outcome.lower() if reason else None, "exception": reason,
            })  # fmt: skip
            row.update(received=received, started=started, worker=worker)
        state = "STARTED" if outcome == "LOST" else outcome
        done = row.get("succeeded") or row.get("failed")
        self.rows["tasks"].append({
            **row, "state": state, "attempts": attempt, "retries": attempt - 1, "depth": 0,
            "finished": done, "queue_wait": row["started"] - sent, "root": uuid,
            "runtime": took if outcome == "SUCCESS" else None, "queue": "celery",
            "timestamp": done or row["started"],
        })  # fmt: skip

    def _play_worker(self, name: str) -> None:
        lost = name == self.workers[-1]
        until = self.lost_at if lost else self.end
        self._say(BEGAN, name, "worker-online")
        beat = BEGAN + 2
        while beat < until:
            self._say(beat, name, "worker-heartbeat")
            beat += 2
        if not lost:
            self._say(until, name, "worker-offline")
        mine = [row for row in self.rows["attempts"] if row["worker"] == name and row["ended"]]
        self.rows["workers"].append({
            "hostname": name, "incarnation": 1, "pid": 100, "online": BEGAN,
            "last_heartbeat": beat - 2, "offline": None if lost else until,
            "lost": beat + 2 if lost else None, "uptime": until - BEGAN, "processed": len(mine),
            "drift": self._dice.uniform(-0.02, 0.02), "events_seen": 900, "events_missing": 0,
        })  # fmt: skip

    def _say(
        self, when: float, who: str, kind: str, uuid: str | None = None, clock: int | None = None
    ) -> None:
        self._events.append(
            {"timestamp": when, "hostname": who, "type": kind, "uuid": uuid, "clock": clock}
        )

    def _order(self) -> None:
        """Clocks follow time here: the workers' events are numbered as they happen."""
        self._events.sort(key=lambda one: one["timestamp"])
        clock = 0
        for one in self._events:
            if one["clock"] is None:
                clock += 1
                one["clock"] = clock
        self._events.sort(key=lambda one: (one["clock"], one["timestamp"]))
        for position, one in enumerate(self._events):
            origin = f"{one['hostname']}.100"
            one.update(position=position, origin=origin, incarnation=1)
        self.rows["timeline"] = self._events

    def _elect(self) -> None:
        for number in range(6):
            when = BEGAN + 3 + number * (self.end - BEGAN - 6) / 6
            candidates = [
                {"hostname": name, "origin": f"{name}.100", "clock": 10 + rank, "rank": rank}
                for rank, name in enumerate(self.workers)
            ]
            executions = (1, 1, 1, 1, 0, 2)[number]
            self.rows["elections"].append({
                "id": f"election-{number}", "topic": "task", "requested": when,
                "decided": when + 0.2 if executions else None,
                "decided_after": 0.2 if executions else None, "candidates": candidates,
                "winner": self.workers[0] if executions else None, "executions": executions,
                "verdict": {0: "none", 1: "exactly once"}.get(executions, "more"),
            })  # fmt: skip

    def _rest(self) -> None:
        dice, w1, w2 = self._dice, self.workers[0], self.workers[1]
        self.rows["revocations"] = [
            {"uuid": f"task-{number:06}", "name": self._names[0], "revoked": BEGAN + number,
             "revoked_clock": number, "seen_by": self.workers[:2], "effective": number != 3,
             "violations": int(number == 3)}
            for number in range(1, 6)
        ]  # fmt: skip
        self.rows["clock_audit"] = [
            {"hostname": w1, "incarnation": 1, "kind": "went back", "clock": 20,
             "timestamp": BEGAN + 5, "type": "worker-heartbeat", "other_clock": 25,
             "other_timestamp": BEGAN + 4, "other_type": "task-started", "other_hostname": w1},
        ]  # fmt: skip
        self.rows["gaps"] = [
            {"hostname": w2, "incarnation": 1, "first": 40, "last": 44, "missing": 5,
             "kind": "hole"},
            {"hostname": w1, "incarnation": 1, "first": 1, "last": 9, "missing": 9,
             "kind": "beginning"},
        ]  # fmt: skip
        self.rows["lineage"] = [
            {"root_id": f"task-{number:06}", "name": self._names[0], "size": 1 + number,
             "depth": 2, "critical_path": dice.random() * 3, "duration": 4.0, "failed": number % 2}
            for number in range(12)
        ]  # fmt: skip
        self.rows["runs"] = [
            {"run": "r1", "began": self.end + 10, "seconds": 12.0, "mode": "increments",
             "read": len(self._events) + 5, "rows": len(self._events) + 5,
             "kept": len(self._events), "duplicate": 5, "quarantined": 2,
             "tasks": len(self.rows["tasks"])}
        ]  # fmt: skip
        seen: dict[tuple[float, str, str], dict[str, Any]] = {}
        for row in self.rows["attempts"]:
            key = row["started"] // 60 * 60, row["name"], row["worker"]
            one = seen.setdefault(
                key, {"minute": key[0], "name": key[1], "worker": key[2], "started": 0}
            )
            one["started"] += 1
        self.rows["rates"] = list(seen.values())
