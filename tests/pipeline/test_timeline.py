"""The timeline against sorting in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.stories import made, placed
from tests.pipeline.worlds import Event, as_received, as_table, cluster, disturbed, small_world
from umbel.cluster.event_rows import IDENTITY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def key(event: Event) -> tuple[Any, ...]:
    """The place of an event; what is equal in time and type comes by the task, then the rest."""
    has_pid = event.get("pid") is not None
    origin = f"{event['hostname']}.{event['pid']}" if has_pid else event["hostname"]
    clock = as_received(event).get("clock") or 0
    rest = (event.get(name) for name in ("pid", "inc", "clock", "seq"))
    return (
        *(clock, event["timestamp"], origin, event["type"], event.get("uuid", "")),
        *((-1 if value is None else value) for value in rest),
    )


def model(events: list[Event]) -> list[tuple[Any, ...]]:
    """(clock, timestamp, hostname, type, uuid, previous of task, previous of node) in order."""
    each = {tuple(event.get(name) for name in IDENTITY): event for event in events}
    last: dict[Any, int] = {}
    rows = []
    for position, event in enumerate(sorted(each.values(), key=key)):
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
    from umbel.pipeline.tables.timeline import Ranges, lean, timeline

    monkeypatch.setattr("umbel.pipeline.tables.timeline.RANGE_ROWS", 30)
    unlike = {}
    for event in small_world(5, 60):  # events of one identity that differ have no order
        unlike.setdefault(tuple(event.get(name) for name in IDENTITY), event)
    events = list(unlike.values())

    def ordered(seed: int) -> list[dict[str, Any]]:
        rows = prepare(spark.createDataFrame(as_table(disturbed(events, seed, again=0.5))))
        ranges = Ranges()
        ranges.extend(rows)
        found = timeline(lean(rows, ranges), ranges.bases).collect()
        return placed([row.asDict() for row in found], ranges)

    one, other = ordered(1), ordered(2)
    assert shown(one) == shown(other)
    wanted = model(events)
    assert [row[:5] for row in shown(one)] == [row[:5] for row in wanted]


def test_an_empty_log_has_an_empty_timeline(spark: SparkSession) -> None:
    assert made(spark, "timeline", []) == []
