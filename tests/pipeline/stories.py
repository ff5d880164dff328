"""Handmade histories for the tests of the tables: short to write, and of real events."""

from __future__ import annotations

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
    """The events as tables get them."""
    from umbel.pipeline.events import prepare, unique

    return unique(prepare(spark.createDataFrame(as_table(events))))


def end_of(raw: DataFrame) -> float:
    """Where a log of these rows ends."""
    from pyspark.sql.functions import expr

    from umbel.pipeline.watermarks import RECEIPTS, log_ends, watermarks

    found = raw.groupBy("recorder").agg(*map(expr, RECEIPTS)).collect()
    return log_ends(watermarks(tuple(row) for row in found))


def made(
    spark: SparkSession, name: str, events: Iterable[Event], *more: pa.Table
) -> list[dict[str, Any]]:
    """The rows of a table of these events; not of `lineage`, which is made of tasks.

    `more` are rows of other recorders, or of an import (`worlds.as_table`).
    """
    from umbel.pipeline.events import prepare, unique
    from umbel.pipeline.tables import TABLES, Inputs

    raw = spark.createDataFrame(pa.concat_tables([as_table(events), *more]))
    told = unique(prepare(raw)).cache()
    try:
        rows = TABLES[name](Inputs(spark, told, told, end_of(raw))).collect()
    finally:
        told.unpersist()
    return [row.asDict(recursive=True) for row in rows]
