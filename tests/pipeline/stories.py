"""Handmade histories for the tests of the tables: short to write, and of real events."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tests.pipeline.worlds import START, Event, as_table
from umbel.wire.events import check

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import DataFrame, SparkSession


class Node:
    """Somebody who sends events: each has the next clock, number and tenth of a second."""

    def __init__(self, story: Story, hostname: str, inc: int | None, pid: int) -> None:
        self.story, self.hostname, self.inc, self.pid, self.seq = story, hostname, inc, pid, 0

    def tell(self, kind: str, uuid: str | None = None, **fields: Any) -> Event:
        """One event; any of its fields can be given, None is left out."""
        self.seq += 1
        told: Event = {
            "type": kind,
            "hostname": self.hostname,
            "pid": self.pid,
            "inc": self.inc,
            "seq": None if self.inc is None else self.seq,
            "uuid": uuid,
            **self.story.next(),
            **fields,
        }
        event = {name: value for name, value in told.items() if value is not None}
        assert check(event) == "", event
        self.story.events.append(event)
        return event

    def run(self, uuid: str, end: str = "task-succeeded", **fields: Any) -> None:
        """Receipt, start and end of a task."""
        self.tell("task-received", uuid, name="shop.add", root_id=uuid)
        self.tell("task-started", uuid)
        self.tell(end, uuid, **fields)

    def beat(self, **fields: Any) -> Event:
        """One heartbeat."""
        return self.tell("worker-heartbeat", **{"freq": 2.0, **fields})

    def skip(self, count: int) -> None:
        """So many events are numbered and never come."""
        self.seq += count


class Story:
    """Events in the order in which they happen, by one clock."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.clock, self.now = 10, START

    def node(self, hostname: str, inc: int | None = 1, pid: int = 7) -> Node:
        """Somebody new; without `inc` it is one of Celery's."""
        return Node(self, hostname, inc, pid)

    def next(self) -> dict[str, Any]:
        """The next clock and time."""
        self.clock += 1
        self.now += 0.1
        return {"clock": self.clock, "timestamp": round(self.now, 3)}


def unique_events(spark: SparkSession, events: Iterable[Event]) -> DataFrame:
    """The events as tables get them, all in one cell."""
    from umbel.pipeline.events import prepare, unique

    made = unique(prepare(spark.createDataFrame(as_table(events))))
    return made.selectExpr("*", "0L AS _cell")


def end_of(raw: DataFrame) -> float:
    """Where a log of these rows ends."""
    from pyspark.sql.functions import expr

    from umbel.pipeline.watermarks import RECEIPTS, log_ends, watermarks

    found = raw.groupBy("recorder").agg(*map(expr, RECEIPTS)).collect()
    return log_ends(watermarks(tuple(row) for row in found))


def made(
    spark: SparkSession, name: str, events: Iterable[Event], *more: pa.Table
) -> list[dict[str, Any]]:
    """The rows of a table of these events, made by its functions.

    `more` are rows of other recorders, or of an import (`worlds.as_table`).
    """
    from umbel.pipeline.events import prepare, unique

    raw = spark.createDataFrame(pa.concat_tables([as_table(events), *more]))
    told = unique(prepare(raw)).selectExpr("*", "0L AS _cell").cache()
    try:
        rows = Made(spark, raw, told).rows(name)
    finally:
        told.unpersist()
    return [{key: value for key, value in row.items() if key[0] != "_"} for row in rows]


class Made:
    """The tables of some rows of a log, each by its pure functions alone."""

    def __init__(self, spark: SparkSession, raw: DataFrame, events: DataFrame) -> None:
        from umbel.pipeline.events import prepare
        from umbel.pipeline.tables.tasks import tasks
        from umbel.pipeline.task_fold import summarise
        from umbel.pipeline.task_fold import tasks as fold

        self.spark, self.events, self.end = spark, events, end_of(raw)
        folded = fold(summarise(prepare(raw)))
        self.known = folded.selectExpr(
            "uuid", "name", "queue AS _queue", "coalesce(root_id, uuid) AS root"
        ).cache()
        self.tasks = tasks(folded, events)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a table."""
        if name == "timeline":
            return self._timeline()
        return [row.asDict(recursive=True) for row in self._frame(name).collect()]

    def _frame(self, name: str) -> DataFrame:
        from umbel.pipeline.tables import (
            attempts,
            clock_audit,
            elections,
            gaps,
            lineage,
            rates,
            revocations,
            sequences,
            workers,
        )

        events, names = self.events, self.known.select("uuid", "name", "_queue")
        births = workers.births(events)
        facts = workers.merge_life_facts(workers.life_facts(events, births))
        blocks = sequences.blocks(events)
        lived = workers.with_lives(events, births)
        statuses = workers.statuses(facts, self.end)

        def executed() -> DataFrame:
            return attempts.judged(attempts.attempts(lived, names), statuses)

        def rated() -> DataFrame:
            counts = rates.counts(events, names)
            counts = counts if name == "rates" else rates.longer(counts, name)
            return rates.rates(counts, executed(), name)

        def audited() -> DataFrame:
            of_senders = clock_audit.of_senders(blocks, clock_audit.unclocked(events))
            return of_senders.union(clock_audit.of_tasks(events, self.known))

        def lives() -> DataFrame:
            drifts = workers.merge_drifts(workers.drifts(events, births))
            return workers.workers(facts, drifts, sequences.missing_numbers(blocks), self.end)

        return {
            "attempts": executed,
            "workers": lives,
            "elections": lambda: elections.judged(elections.elections(events), self.end),
            "revocations": lambda: revocations.revocations(events, names),
            "clock_audit": audited,
            "lineage": lambda: lineage.lineage(self.tasks, events),
            "gaps": lambda: gaps.gaps(blocks),
            **dict.fromkeys(rates.PERIODS, rated),
        }[name]()

    def _timeline(self) -> list[dict[str, Any]]:
        from umbel.pipeline.tables.timeline import Ranges, lean, timeline

        ranges = Ranges()
        ranges.extend(self.events)
        found = timeline(lean(self.events, ranges), ranges.bases, is_unique=True)
        return placed([row.asDict() for row in found.collect()], ranges)


def placed(rows: list[dict[str, Any]], ranges: Any) -> list[dict[str, Any]]:
    """Rows of the timeline with what readers work out: positions, and who was before."""
    ranges.count(Counter(row["_range"] for row in rows))
    bases = ranges.bases
    for row in rows:
        row["position"] = bases[row["_range"]] + row["_number"]
    rows.sort(key=lambda row: row["position"])
    last: dict[Any, int] = {}
    for row in rows:
        uuid, node = row["uuid"], ("node", row["hostname"])
        row["previous_of_task"] = last.get(uuid) if uuid is not None else None
        row["previous_of_node"] = last.get(node)
        last[node] = row["position"]
        if uuid is not None:
            last[uuid] = row["position"]
    return rows
