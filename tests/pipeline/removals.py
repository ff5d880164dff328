"""Worlds from which segments are removed: days of everything that the tables tell of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.pipeline.worlds import START, Event, LogWriter, any_event, as_table, cluster, day_of

DAY_S = 86_400.0
# The first second of a day.
DAWN = START - START % DAY_S
_PERIODS = (0.0, 0.2, 0.2, 0.5, 1.0, 1.0, 1.0, 2.0)


def days_of_work(seed: int, days: int, per_day: int) -> list[Event]:
    """Several days of a cluster, tasks that go on over midnight, and what only fuzz makes up."""
    dice = random.Random(seed)
    events = cluster(days * per_day, seed)
    span, first = events[-1]["timestamp"] - START, events[0]["timestamp"]
    factor = days * DAY_S * 0.999 / span
    events = [{**one, "timestamp": DAWN + (one["timestamp"] - first) * factor} for one in events]
    if seed % 5 == 0:  # to remove the start of a Celery worker makes everything anew
        events += [event for number in range(days) for event in _lives(dice, number)]
    events += _wild(dice, days, per_day // 5)
    events += _elections(dice, days)
    return events


def _lives(dice: random.Random, number: int) -> list[Event]:
    """Workers of Celery's, which are process 1 again and again, and of ours."""
    made: list[Event] = []
    for host in ("old@a", "old@b"):
        now = DAWN + number * DAY_S + dice.random() * 20_000
        told: list[tuple[str, dict[str, Any]]] = []
        if number == 0 or dice.random() < 0.6:
            told.append(("worker-online", {"processed": dice.choice([0, 0, 0, 7])}))
        told += [("worker-heartbeat", {"freq": 2.0, "processed": n}) for n in range(3)]
        if dice.random() < 0.3:
            told.append(("worker-offline", {}))
        for kind, fields in told:
            now += dice.random() * 10_000
            clock = int(now - DAWN) + 100
            made.append(
                {"type": kind, "hostname": host, "pid": 1, "timestamp": now, "clock": clock}
                | fields
            )
    return made


def _wild(dice: random.Random, days: int, count: int) -> list[Event]:
    made = []
    for number in range(count):
        base = dice.random() * days * DAY_S
        for _ in range(dice.randint(1, 6)):
            event = any_event(dice, f"wild{number}")
            away = dice.choice(_PERIODS) * DAY_S * dice.random()
            made.append({**event, "timestamp": DAWN + min(base + away, days * DAY_S - 1)})
    return made


def _elections(dice: random.Random, days: int) -> list[Event]:
    made: list[Event] = []
    for number in range(days * 2):
        base = dice.random() * days * DAY_S
        for step, kind in enumerate(("worker-elect", "worker-elect", "worker-elected")):
            now = DAWN + min(base + step * dice.choice([1, 40_000]), days * DAY_S - 1)
            task = f"wild{dice.randrange(20)}"
            made.append(
                {"type": kind, "hostname": f"worker{step}@shop", "pid": 77, "inc": 5,
                 "id": f"e{number}",
                 "topic": "task", "timestamp": now, "clock": int(now - DAWN) + step,
                 "winner": "worker0@shop", "action": {"options": {"task_id": task}}}
            )  # fmt: skip
        made.append(
            {"type": "worker-revocation", "hostname": "worker1@shop", "pid": 77, "inc": 5,
             "timestamp": DAWN + base, "clock": int(base), "method": "revoke", "stamp": DAWN + base,
             "ids": [f"wild{dice.randrange(40)}", f"wild{dice.randrange(40)}"]}
        )  # fmt: skip
    return made


def write_days(
    writer: LogWriter, events: list[Event], dice: random.Random, parts: int = 3, late: float = 0.02
) -> list[Path]:
    """Segments by the day of receipt, which for some events is another one than that of sending."""
    by_day: dict[str, list[tuple[Event, float]]] = {}
    for event in events:
        received = event["timestamp"] + 0.1
        # The start of a Celery worker that is recorded late makes everything anew.
        if dice.random() < late and not event["hostname"].startswith("old@"):
            received += dice.random() * DAY_S
        for _ in range(2 if dice.random() < 0.05 else 1):
            by_day.setdefault(day_of(received), []).append((event, received))
    paths = []
    for day in sorted(by_day):
        told = sorted(by_day[day], key=lambda one: one[1])
        size = -(-len(told) // parts)
        for start in range(0, len(told), size):
            tables = [
                as_table([event], received, dice.choice(["r1", "r2"]))
                for event, received in told[start : start + size]
            ]
            paths.append(writer.add_table(pa.concat_tables(tables).combine_chunks(), day))
    return paths


def retained(path: Path, share: float, dice: random.Random, writer: LogWriter) -> Path:
    """Puts a segment with some of its rows in the place of one, as `umbel history retain` does."""
    rows = pq.read_table(path, partitioning=None)
    kept = rows.filter(pa.array([dice.random() < share for _ in range(len(rows))], pa.bool_()))
    manifest = {"format": 1, "rows": len(kept), "replaces": [path.name], "retained": True}
    made = kept.replace_schema_metadata({b"umbel": json.dumps(manifest).encode()})
    target = writer.add_table(made, path.parent.name.removeprefix("day="))
    path.unlink()
    return target
