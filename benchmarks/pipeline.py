"""What the pipeline costs: Spark's fold next to Celery's `State` and duckdb, on the same events.

The events are those of a cluster that works: tasks that are sent, received, started and end, some
retried, failed or revoked, heartbeats in between. They are written as a log, in segments of 50,000
rows, once. Then, in one run:

- the native fold, from the log to no sink, at `--events` and at four times as many (`--big`)
- the same fold by duckdb, and the same events through Celery's `State`, in one process. What
  `State` takes is counted alone: reading and decoding are not on its bill
- the timeline with its write
- what builds cost as the history grows (`benchmarks/history_growth.py`)

    python -m benchmarks.pipeline [--events 5000000] [--big 20000000] [--directory DIR]

`--big 0` and `--without state` and so on leave parts out. It ends with 1 if a figure is not met.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb

from benchmarks import history_growth
from umbel.cluster import task_states as rules
from umbel.cluster.event_rows import COLUMNS, PRESENT_BIT, row

SEGMENT_ROWS = 50_000
EVENTS_PER_TASK = 4.27  # of those that are made here, heartbeats included
REQUIRED = {
    "fold to State": (9.0, ">="),
    "fold to duckdb": (0.7, ">="),
    "time of four times as many": (4.5, "<="),
    "timeline to State": (3.0, ">="),
    **history_growth.REQUIRED,
}
SQL_TYPES = {"text": "VARCHAR", "whole": "BIGINT", "number": "DOUBLE", "flag": "BOOLEAN"}


# -- events ------------------------------------------------------------------------------------

_CALL = "name, args, kwargs, root_id, NULL AS parent_id, retries, NULL AS eta, NULL AS expires"
# Steps of a task: type, who says it, how many there are before it, its fields, which tasks.
_STEPS = (
    ("task-sent", "client", 0, f"{_CALL}, 'celery' AS queue, '' AS exchange", "true"),
    ("task-received", "worker", 1, _CALL, "true"),
    ("task-started", "worker", 2, "", "NOT revoked"),
    ("task-retried", "worker", 3, "error AS exception, stack AS traceback", "retried"),
    ("task-received", "worker", 4, _CALL.replace("retries", "1 AS retries"), "retried"),
    ("task-started", "worker", 5, "", "retried"),
    ("task-succeeded", "worker", 6, "result, runtime", "NOT failed AND NOT revoked"),
    ("task-failed", "worker", 6, "error AS exception, stack AS traceback", "failed"),
    (
        "task-revoked",
        "worker",
        6,
        "false AS terminated, NULL AS signum, false AS expired",
        "revoked",
    ),
    ("worker-heartbeat", "worker", 7, "2.0 AS freq, 1 AS active, i AS processed", "i % 10 = 0"),
)
_TASKS = """
    SELECT i, printf('%08x-%016x', hash(i) % 4294967296, i) AS uuid, i * 8 AS base,
        (i * 104729) % 100 AS dice, dice < 1 AS revoked, dice BETWEEN 1 AND 3 AS failed,
        dice BETWEEN 4 AND 9 AS retried, 1.7e9 + i * 0.002 AS t,
        'worker' || (i % 8) || '@shop.example.org' AS worker, 'gen77@web.example.org' AS client,
        'shop.order.' || (i % 12) AS name, '(' || i || ', 7)' AS args,
        '{{"order": ' || i || '}}' AS kwargs, uuid AS root_id, 0 AS retries,
        'OSError(' || i || ')' AS error, repeat('Traceback ', 20) AS stack,
        i || ' done' AS result, 0.1 + (i % 100) / 1000 AS runtime
    FROM range({first}, {last}) AS r(i)
"""


def make_log(directory: Path, event_count: int) -> None:
    """Write the log of about so many events, unless it is there."""
    marker = directory / "_umbel-log.json"
    if marker.exists():
        return
    folder = directory / "events" / "day=2026-11-16"
    folder.mkdir(parents=True)
    task_count = int(event_count / EVENTS_PER_TASK)
    step = int(SEGMENT_ROWS / EVENTS_PER_TASK)
    for number, first in enumerate(range(0, task_count, step)):
        target = folder / f"{1_794_000_000_000 + number}-bench-{number}.parquet"
        tasks = _TASKS.format(first=first, last=min(first + step, task_count))
        duckdb.execute(f"COPY ({_rows(tasks)}) TO '{target}' (FORMAT parquet, COMPRESSION zstd)")
    marker.write_text('{"format": 1}')


def _rows(tasks: str) -> str:
    """The query for the rows of some tasks, a little out of order as networks have it."""
    steps = "\nUNION ALL BY NAME\n".join(_step(*one) for one in _STEPS)
    columns = ", ".join(
        f"CAST({name} AS {SQL_TYPES[kind]}) AS {name}" for name, kind in COLUMNS.items()
    )
    nothing = ", ".join(f"CAST(NULL AS {SQL_TYPES[k]}) AS {name}" for name, k in COLUMNS.items())
    return f"""
        WITH tasks AS MATERIALIZED ({tasks})
        SELECT {columns} FROM (
            SELECT * FROM (SELECT {nothing}) WHERE false UNION ALL BY NAME {steps}
        ) ORDER BY timestamp + (hash(clock) % 100) * 0.001
    """


def _step(kind: str, sender: str, number: int, fields: str, which: str) -> str:
    names = [field.rpartition(" ")[2] for field in fields.split(", ")] if fields else []
    is_task = kind.startswith("task-")
    present = sum(PRESENT_BIT[name] for name in names) if is_task else 0
    common = {
        "type": f"'{kind}'",
        "hostname": sender,
        "pid": "1000 + i % 8",
        "clock": f"base + {number} + 1",
        "timestamp": f"t + {number} * 0.01",
    }
    if is_task:
        common["uuid"] = "uuid"
    said = {**common, **dict(zip(names, _values(fields), strict=True))}
    raw = "json_object(" + ", ".join(f"'{name}', {text}" for name, text in said.items()) + ")"
    mark = f"{present} AS present, CAST(hash(i, {number}) >> 1 AS BIGINT) AS tie" if is_task else ""
    parts = [f"{text} AS {name}" for name, text in said.items()]
    parts += [f"t + {number} * 0.01 + 0.05 AS received", "'bench' AS recorder", f"{raw} AS raw"]
    return f"SELECT {', '.join([*parts, *([mark] if mark else [])])} FROM tasks WHERE {which}"


def _values(fields: str) -> list[str]:
    return [field.partition(" AS ")[0] for field in fields.split(", ")] if fields else []


def events_of(log: Path) -> Iterator[dict[str, Any]]:
    """The events of a log, as they were sent."""
    import msgspec
    import pyarrow.parquet as pq

    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for path in sorted((log / "events").rglob("*.parquet")):
        for raw in pq.read_table(path, columns=["raw"], partitioning=None)["raw"]:
            yield decode(raw.as_py())


def check_log(log: Path) -> None:
    """The columns of the log are what the recorder makes of its raw events."""
    import pyarrow.parquet as pq

    path = next((log / "events").rglob("*.parquet"))
    for one in pq.read_table(path, partitioning=None).slice(0, 2_000).to_pylist():
        wanted = {**row(json.loads(one["raw"]), one["received"], "bench"), "raw": one["raw"]}
        for name in COLUMNS.keys() - {"tie"}:
            assert one[name] == wanted.get(name), (name, one, wanted)


# -- those who fold ----------------------------------------------------------------------------


def by_state(log: Path) -> tuple[float, int, int]:
    """Celery's `State`, events in the order of the log: seconds, events, tasks."""
    from celery.events.state import State

    state = State(max_tasks_in_memory=10**9)
    seconds, count, batch = 0.0, 0, []

    def take() -> None:
        nonlocal seconds, count
        began = time.perf_counter()
        for event in batch:
            state.event(event)
        seconds += time.perf_counter() - began
        count += len(batch)
        batch.clear()

    for event in events_of(log):
        event["local_received"] = event["timestamp"]
        event["utcoffset"] = 0
        batch.append(event)
        if len(batch) == 10_000:
            take()
    take()
    return seconds, count, len(state.tasks)


def by_duckdb(log: Path) -> tuple[float, int]:
    """duckdb, the same fold: seconds, tasks."""
    began = time.perf_counter()
    with duckdb.connect() as database:
        database.execute(f"CREATE TEMP TABLE tasks AS {duckdb_fold(f'{log}/events/*/*.parquet')}")
        seconds = time.perf_counter() - began
        found = database.execute("SELECT count(*) FROM tasks").fetchone()
    return seconds, found[0] if found else 0


def duckdb_fold(files: str) -> str:
    """The text of the fold, from the same tables as Spark's."""
    from umbel.pipeline.events import PREPARED
    from umbel.pipeline.task_fold import SUMMARY_FIELDS

    kinds = " ".join(
        f"WHEN type = '{kind}' THEN '{name}'" for kind, name in rules.EVENT_CLASS.items()
    )
    order_clock = PREPARED["order_clock"].replace("0L", "0")
    summary = ", ".join(
        f"max(CASE WHEN class = '{name}' THEN {_pack(fields)} END) AS {name}"
        for name, fields in SUMMARY_FIELDS.items()
    )
    keys = ", ".join(f"{_key(name)} AS key_{name}" for name in rules.CLASSES)
    holder = " ".join(
        f"WHEN {name} IS NOT NULL AND coalesce(key_{name} > key_retried, true) THEN '{name}'"
        for name in rules.STATE_CLASSES
    )
    return f"""
        WITH events AS (
            SELECT *, {order_clock} AS order_clock,
                coalesce(hostname || '.' || pid, hostname) AS origin,
                CASE {kinds} ELSE '{rules.CUSTOM}' END AS class
            FROM read_parquet('{files}', hive_partitioning = false) WHERE type LIKE 'task-%'
        ), summary AS (SELECT uuid, {summary} FROM events GROUP BY uuid),
        placed AS (SELECT *, {keys} FROM summary),
        held AS (
            SELECT *, CASE {holder} ELSE 'retried' END AS holder,
                {_last("hostname")} AS last, {_last("hostname", "sent")} AS last_unsent,
                {_last("hostname", "received")} AS last_unreceived, {_last("extra")} AS last_extra
            FROM placed
        ) SELECT {_fields()} FROM held
    """


def _pack(fields: tuple[str, ...]) -> str:
    return "{" + ", ".join(f"'{field}': {field}" for field in fields) + "}"


def _key(name: str) -> str:
    kinds = {one: f"'{kind}'" for kind, one in rules.EVENT_CLASS.items()}
    parts = {field: f"{name}.{field}" for field in ("order_clock", "timestamp", "origin")}
    parts |= {"type": kinds.get(name, f"{name}.type"), "tie": f"{name}.tie"}
    packed = ", ".join(f"'{field}': {text}" for field, text in parts.items())
    return f"CASE WHEN {name} IS NOT NULL THEN {{{packed}}} END"


def _last(said: str, but: str = "") -> str:
    told = (
        f"CASE WHEN {name}.{said} IS NOT NULL THEN {{'key': key_{name}, 'said': {name}.{said}}} END"
        for name in rules.CLASSES
        if name != but
    )
    return f"greatest({', '.join(told)})"


def _fields() -> str:
    states = " ".join(f"WHEN '{name}' THEN '{state}'" for name, state in rules.CLASS_STATE.items())
    timed = ", ".join(f"'{name}'" for name in sorted(rules.TIMED_BY_ANY))
    timing = f"(CASE WHEN holder IN ({timed}) THEN last ELSE last_unreceived END).key"
    made = {
        "uuid": "uuid",
        "state": f"CASE holder {states} ELSE upper(substr(custom.type, 6)) END",
        **{name: f"{name}.timestamp" for name in rules.CLASS_STATE},
        **{field: _field(field, classes) for field, classes in rules.FIELD_CLASSES.items()},
        "worker": "last_unsent.said",
        "client": "sent.hostname",
        "timestamp": f"{timing}.timestamp",
        "clock": f"{timing}.order_clock",
        "extra": "last_extra.said",
    }
    ready = " ".join(
        f"WHEN holder = '{name}' THEN {name}.timestamp"
        for name, state in rules.CLASS_STATE.items()
        if state in rules.READY_STATES
    )
    told = [f"{made[field]} AS {field}" for field in rules.TASK_FIELDS]
    return ", ".join([*told, f"CASE {ready} END AS finished"])


def _field(field: str, classes: tuple[str, ...]) -> str:
    if len(classes) == 1:
        return f"{classes[0]}.{field}"
    has = {name: f"coalesce({name}.present & {PRESENT_BIT[field]}, 0) != 0" for name in classes}
    asked = " ".join(
        f"WHEN {has[name]}"
        + "".join(
            f" AND NOT ({has[other]} AND key_{other} > key_{name})"
            for other in classes
            if other != name
        )
        + f" THEN {name}.{field}"
        for name in classes
    )
    return f"CASE {asked} END"


class BySpark:
    """The pipeline's own functions, on a session as users have it."""

    def __init__(self, directory: Path, master: str) -> None:
        from umbel.pipeline.session import session

        self.spark, self.directory = session(master), directory

    def raw(self, log: Path) -> Any:
        """The rows of a log."""
        from umbel.pipeline import log as logs

        place = logs.open_log(str(log))
        paths = logs.look(place, logs.Coverage()).coverage.paths
        return logs.read(self.spark, place, paths)

    def sized(self, log: Path) -> contextlib.AbstractContextManager[None]:
        """The session as a build of this log has it."""
        from umbel.pipeline.places import Place
        from umbel.pipeline.session import sized

        size = Place(str(log)).bytes_in("events")
        return sized(self.spark, size, size)

    def fold(self, log: Path) -> float:
        """From the log to no sink."""
        from umbel.pipeline.events import prepare
        from umbel.pipeline.task_fold import summarise, tasks

        began = time.perf_counter()
        with self.sized(log):
            made = tasks(summarise(prepare(self.raw(log))))
            made.write.format("noop").mode("overwrite").save()
        return time.perf_counter() - began

    def count(self, log: Path) -> tuple[int, int]:
        """Events and tasks of a log."""
        told = self.raw(log).selectExpr("count(1)", "count(DISTINCT uuid)").first()
        return int(told[0]), int(told[1])

    def timeline(self, log: Path) -> float:
        """From the log to the table, written."""
        from umbel.pipeline.events import prepare
        from umbel.pipeline.tables.timeline import Ranges, lean, timeline

        began = time.perf_counter()
        with self.sized(log):
            rows, ranges = prepare(self.raw(log)), Ranges()
            ranges.extend(rows)
            made = timeline(lean(rows, ranges), ranges.bases)
            made.write.mode("overwrite").parquet(str(self.directory / "timeline"))
        return time.perf_counter() - began


# -- the run -----------------------------------------------------------------------------------


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All figures of one run."""
    log, big = directory / f"log-{options.events}", directory / f"log-{options.big}"
    say("writing the log")
    make_log(log, options.events)
    check_log(log)
    if options.big:
        make_log(big, options.big)
    say("Spark")
    spark = BySpark(directory, options.master)
    events, tasks = spark.count(log)
    made: dict[str, Any] = {"events": events, "tasks": tasks}
    spark.fold(log)  # the first one compiles
    folds = [spark.fold(log) for _ in range(options.rounds)]
    made["fold s"] = statistics.median(folds)
    if "timeline" not in options.without:
        say("timeline")
        made["timeline s"] = min(spark.timeline(log) for _ in range(2))
    if options.big:
        say("fold of the big one")
        made["big events"], _ = spark.count(big)
        made["big fold s"] = spark.fold(big)
    spark.spark.stop()
    if "duckdb" not in options.without:
        say("duckdb")
        rounds = [by_duckdb(log) for _ in range(options.rounds)]
        made["duckdb s"] = statistics.median(seconds for seconds, _ in rounds)
        assert rounds[0][1] == tasks, (rounds[0][1], tasks)
    if "state" not in options.without:
        say("Celery's State")
        made["state s"], count, known = by_state(log)
        assert (count, known) == (events, tasks), (count, known, events, tasks)
    if "growth" not in options.without:
        say("growth")
        made |= history_growth.measure(directory, say)
    return made


def ratios(made: dict[str, Any]) -> dict[str, float]:
    """The figures that are required, of what was measured."""
    found: dict[str, Callable[[], float]] = {
        "fold to State": lambda: made["state s"] / made["fold s"],
        "fold to duckdb": lambda: made["duckdb s"] / made["fold s"],
        "time of four times as many": lambda: (
            (made["big fold s"] / made["fold s"]) * 4 / (made["big events"] / made["events"])
        ),
        "timeline to State": lambda: made["state s"] / made["timeline s"],
        **history_growth.figures(made),
    }
    told = {}
    for name, ratio in found.items():
        try:
            told[name] = ratio()
        except (KeyError, statistics.StatisticsError):
            continue
    return told


def report(made: dict[str, Any], told: dict[str, float]) -> bool:
    """Print everything; whether all figures are met."""
    print(f"{made['events']:,} events, {made['tasks']:,} tasks; Python {platform.python_version()}")
    for name, value in made.items():
        if isinstance(value, float) and name.endswith(" s"):
            count = made["big events"] if name.startswith("big") else made["events"]
            print(f"  {name:<20} {value:8.2f}   {count / value:>12,.0f} events/s")
    if builds := made.get("builds"):
        print(history_growth.table(builds))
    is_met = True
    for name, value in told.items():
        limit, sign = REQUIRED[name]
        good = value >= limit if sign == ">=" else value <= limit
        is_met &= good
        print(f"  {name:<28} {value:6.2f}   ({sign} {limit}) {'' if good else 'NOT MET'}")
    return is_met


def say(what: str) -> None:
    """Tell on stderr where the run is."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def main() -> int:
    """Run everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--big", type=int, default=20_000_000, help="0: leave it out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--master", default="local[*]")
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--directory", type=Path, help="keep the logs there for another run")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="umbel-pipeline-") as temporary:
        made = measure(options, options.directory or Path(temporary))
    told = ratios(made)
    if options.json:
        options.json.write_text(json.dumps({**made, "ratios": told}, indent=1))
    return 0 if report(made, told) else 1


if __name__ == "__main__":
    raise SystemExit(main())
