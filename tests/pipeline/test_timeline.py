"""The timeline against sorting in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.stories import made
from tests.pipeline.worlds import Event, as_received, as_table, cluster, disturbed, small_world
from umbel.cluster.event_rows import IDENTITY
from umbel.cluster.task_states import place, read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def key(event: Event) -> tuple[Any, ...]:
    """The place of an event, as the fold of tasks has it."""
    if event["type"].startswith("task-"):
        return place(read(as_received(event)))
    origin = f"{event['hostname']}.{event['pid']}" if "pid" in event else event["hostname"]
    return (event.get("clock", 0), event["timestamp"], origin, event["type"], 0)


def total(event: Event) -> tuple[Any, ...]:
    """Events of two tasks can be equal in all that: then by the task."""
    return (*key(event), event.get("uuid", ""))


def model(events: list[Event]) -> list[tuple[Any, ...]]:
    """(clock, timestamp, hostname, type, uuid, previous of task, previous of node) in order."""
    each = {tuple(event.get(name) for name in IDENTITY): event for event in events}
    last: dict[Any, int] = {}
    rows = []
    for position, event in enumerate(sorted(each.values(), key=total)):
        uuid, node = event.get("uuid"), ("node", event["hostname"])
        before = last.get(uuid) if uuid else None
        clock = as_received(event).get("clock") or 0
        told = (clock, event["timestamp"], event["hostname"], event["type"], uuid)
        rows.append((*told, before, last.get(node)))
        last[node] = position
        if uuid:
            last[uuid] = position
    return rows


def shown(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The rows in the form of the model."""
    assert sorted(row["position"] for row in rows) == list(range(len(rows)))
    names = ("clock", "timestamp", "hostname", "type", "uuid")
    return [
        (*(row[name] for name in names), row["previous_of_task"], row["previous_of_node"])
        for row in sorted(rows, key=lambda row: row["position"])
    ]


def test_the_timeline_is_the_sorted_log_with_who_was_before(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.pipeline.tables.timeline.RANGE_ROWS", 150)
    events = cluster(1_500, seed=3)
    assert shown(made(spark, "timeline", disturbed(events, 4))) == model(events)


def test_duplicates_and_ties_come_once_and_in_one_order(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from umbel.pipeline.events import prepare
    from umbel.pipeline.tables.timeline import timeline

    monkeypatch.setattr("umbel.pipeline.tables.timeline.RANGE_ROWS", 30)
    unlike = {}
    for event in small_world(5, 60):  # events of one identity that differ have no order
        unlike.setdefault(tuple(event.get(name) for name in IDENTITY), event)
    events = list(unlike.values())
    rows = [spark.createDataFrame(as_table(disturbed(events, seed, again=0.5))) for seed in (1, 2)]
    one, other = (
        [row.asDict() for row in timeline(prepare(frame), is_unique=False).collect()]
        for frame in rows
    )
    assert shown(one) == shown(other)
    wanted = model(events)
    assert [row[:5] for row in shown(one)] == [row[:5] for row in wanted]


def test_an_empty_log_has_an_empty_timeline(spark: SparkSession) -> None:
    assert made(spark, "timeline", []) == []
