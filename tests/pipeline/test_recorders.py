"""A log of several recorders and an import, through a whole build."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.pipeline.stories import Story
from tests.pipeline.worlds import LogWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession


def test_neither_a_slow_recorder_nor_an_import_makes_a_healthy_worker_lost(
    spark: SparkSession, tmp_path: Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    from umbel.pipeline.build import Options, build

    story = Story()
    old = story.node("w1@a", inc=1)
    old.tell("worker-online", freq=2.0)
    old.tell("task-started", "orphan")
    old.beat()
    before = list(story.events)
    story.events.clear()
    story.now += 60
    one, two = story.node("w1@a", inc=2), story.node("w2@a")
    for node in (one, two):
        node.tell("worker-online", freq=2.0)
    one.tell("task-started", "running")
    for _ in range(10):
        story.now += 2
        one.beat()
        two.beat()
    by_two = [event for event in story.events if event["hostname"] == "w2@a"]
    by_one = [event for event in story.events if event["hostname"] == "w1@a"]
    log, tables = tmp_path / "log", tmp_path / "tables"
    writer = LogWriter(log)
    writer.add(by_one, recorder="r1")
    writer.add(by_two[:6], recorder="r2")  # the rest is not written yet
    writer.add(before, received=story.now + 3_600, recorder="import")
    build(Options(log=str(log), tables=str(tables), full=True), spark)
    assert {
        (row["hostname"], row["incarnation"]): row["status"] for row in rows(tables, "workers")
    } == {("w1@a", 1): "lost", ("w1@a", 2): "online", ("w2@a", 1): "online"}
    assert {row["uuid"]: row["outcome"] for row in rows(tables, "attempts")} == {
        "orphan": "LOST",
        "running": "RUNNING",
    }
