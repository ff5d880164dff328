"""Clocks that did not do what they must."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pipeline.stories import Story, made
from umbel.cluster.clock import JUMP_MAX

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_clocks_that_go_back_jump_are_missing_or_contradict_causes_are_found(
    spark: SparkSession,
) -> None:
    story = Story()
    one, client = story.node("w1@a"), story.node("gen1@c")
    one.run("fine")
    one.tell("task-started", "aside", clock=3)  # was set aside
    one.beat()
    back = story.node("w2@a")
    back.beat(clock=500)
    back.beat(clock=400)
    ahead = story.node("w3@a")
    ahead.beat(clock=5)
    ahead.beat(clock=6 + JUMP_MAX)
    story.node("w3@a", inc=2).beat(clock=7)  # another life
    mute = story.node("old@b", inc=None)
    mute.beat(clock=None)
    mute.beat(clock=None)
    client.tell("task-sent", "sync", clock=900, sync=True)
    client.tell("task-sent", "unsync", clock=901)
    four, five = story.node("w4@a"), story.node("w5@a", inc=None)
    four.tell("task-received", "sync", clock=50)
    four.tell("task-received", "unsync", clock=51)
    five.tell("task-received", "early", clock=62)
    five.tell("task-started", "early", clock=61)
    five.tell("task-started", "hasty", clock=80)
    five.tell("task-failed", "hasty", clock=79)
    five.tell("task-received", "child", clock=70, parent_id="hasty", root_id="hasty")
    five.tell("task-received", "late child", clock=90, parent_id="hasty", root_id="hasty")
    five.tell("task-received", "of another family", clock=71, parent_id="hasty")
    five.tell("task-received", "itself", clock=91, parent_id="itself")
    client.tell("task-sent", "sent by hasty", parent_id="hasty", root_id="hasty")  # out of step
    five.tell("task-succeeded", "sent by hasty", clock=60)
    rows = made(spark, "clock_audit", story.events)
    names = ("kind", "hostname", "uuid", "type", "clock", "other_type", "other_clock", "count")
    found = {tuple(row[name] for name in names) for row in rows}
    beat = "worker-heartbeat"
    effect = "effect before cause"
    assert found == {
        ("went back", "w2@a", None, beat, 400, beat, 500, 1),
        ("jump", "w3@a", None, beat, 6 + JUMP_MAX, beat, 5, 1),
        ("missing", "old@b", None, beat, None, None, None, 2),
        (effect, "w4@a", "sync", "task-received", 50, "task-sent", 900, 1),
        (effect, "w5@a", "early", "task-started", 61, "task-received", 62, 1),
        (effect, "w5@a", "hasty", "task-failed", 79, "task-started", 80, 1),
        (effect, "w5@a", "child", "task-received", 70, "task-started", 80, 1),
        (effect, "w5@a", "sent by hasty", "task-succeeded", 60, "task-started", 80, 1),
    }
    assert len(rows) == len(found)
    assert {row["other_hostname"] for row in rows if row["uuid"] == "sync"} == {"gen1@c"}


def test_attempts_are_compared_with_their_own_sending(spark: SparkSession) -> None:
    story = Story()
    client, one, two = story.node("gen1@c"), story.node("w1@a"), story.node("w2@a")
    pool = story.node("gen2@a")
    for uuid, sync in (("from afar", None), ("in step", True)):
        client.tell("task-sent", uuid, retries=0, sync=sync)
        for retries, worker in enumerate((one, two, one)):
            worker.tell("task-received", uuid, retries=retries)
            worker.tell("task-started", uuid)
            if retries < 2:
                aside = story.next()["clock"]
                pool.tell("task-sent", uuid, retries=retries + 1, sync=True)
                worker.tell("task-retried", uuid, clock=aside)
        two.tell("task-received", uuid, retries=2)  # delivered again
        one.tell("task-succeeded", uuid)
    # Replaced by another call under its id, which has no number of retries.
    client.tell("task-sent", "replaced")
    one.tell("task-received", "replaced", retries=0)
    pool.tell("task-sent", "replaced", retries=0, sync=True)
    one.tell("task-received", "replaced", retries=0)
    assert made(spark, "clock_audit", story.events) == []
    late = pool.tell("task-sent", "wrong", retries=1, sync=True)
    two.tell("task-received", "wrong", retries=1, clock=late["clock"])
    (found,) = made(spark, "clock_audit", story.events)
    assert (found["hostname"], found["uuid"], found["other_type"]) == ("w2@a", "wrong", "task-sent")
