"""Lives of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pipeline.stories import Story, made

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_each_life_of_a_worker_has_its_end_its_figures_and_its_holes(spark: SparkSession) -> None:
    story = Story()
    software = {"sw_ident": "py-umbel", "sw_ver": "1.0"}
    lost, gone = story.node("w1@a", inc=1), story.node("w2@a", inc=1)
    lost.tell("worker-online", freq=2.0)
    gone.tell("worker-online", freq=2.0)
    lost.beat(processed=5, lost=2, active=1, **software)
    lost.skip(3)
    lost.beat(processed=9, lost=3, active=2, **software)
    gone.tell("worker-offline", processed=1)
    silent = story.node("w4@a", inc=1)
    silent.beat()
    mute = story.node("w5@a", inc=1)  # without heartbeats nobody can tell
    mute.tell("task-received", "t1")
    story.now += 30
    alive = story.node("w1@a", inc=2)
    alive.beat(freq=-5.0)
    celery = story.node("old@b", inc=None, pid=99)
    celery.beat(sw_ident="py-celery")
    story.node("gen1@c", inc=4).tell("task-sent", "t1")
    found = {
        (row["hostname"], row["incarnation"]): row for row in made(spark, "workers", story.events)
    }
    assert {place: row["status"] for place, row in found.items()} == {
        ("w1@a", 1): "lost",
        ("w1@a", 2): "online",
        ("w2@a", 1): "offline",
        ("w4@a", 1): "lost",
        ("w5@a", 1): "online",
        ("old@b", 99): "online",
    }
    times = [event["timestamp"] for event in story.events]
    first = found["w1@a", 1]
    assert (first["online"], first["last_heartbeat"]) == (times[0], times[3])
    assert first["lost"] == times[3] + 4.0
    assert round(first["uptime"], 3) == 0.3
    assert (first["processed"], first["active"]) == (9, 2)
    assert (first["events_seen"], first["events_missing"], first["events_lost"]) == (3, 3, 3)
    assert (first["sw_ident"], first["sw_ver"]) == ("py-umbel", "1.0")
    assert round(first["drift"], 3) == 0.1
    assert found["w2@a", 1]["offline"] == times[4]
    assert found["old@b", 99]["events_missing"] is None
