"""Elections: candidates, winners, verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.pipeline.stories import Node, Story, made
from tests.pipeline.worlds import as_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def stand(node: Node, name: str, topic: str = "task", **fields: Any) -> None:
    """A node says that it is a candidate."""
    action = {"task": "shop.add", "options": {}}
    node.tell("worker-elect", id=name, topic=topic, **{"cver": 2, "action": action, **fields})


def test_an_election_tells_who_stood_who_won_and_how_often_it_was_done(
    spark: SparkSession,
) -> None:
    story = Story()
    one, other = story.node("w1@a", pid=1), story.node("w2@a", pid=2)
    for name in ("once", "split", "open", "retried"):
        stand(one, name)
    stand(one, "keys", topic="rotate", action=[1])
    stand(other, "once", clock=5)
    stand(other, "split")
    stand(other, "keys", topic="rotate", action=[1], stands=False)  # it says so for Celery's sake
    stand(other, "refused", stands=False)
    other.tell("worker-elected", id="refused")
    story.now += 0.5
    one.tell("worker-elected", id="once", winner="w2@a")
    other.tell("worker-elected", id="once", winner="w2@a")
    one.tell("worker-elected", id="split", winner="w1@a")
    other.tell("worker-elected", id="split", winner="w2@a")
    one.tell("worker-elected", id="keys", winner="w1@a")
    one.run("once")
    one.run("split")
    other.run("split")
    one.run("retried", "task-retried", exception="OSError()")
    one.run("retried")
    celery = story.node("old@b", inc=None)
    stand(celery, "theirs", cver=1, action={"task": "x", "options": {"task_id": "of its own"}})
    celery.tell("worker-elect-ack", id="theirs")
    celery.run("of its own")
    stand(celery, "odd", action="nothing")
    found = {row["id"]: row for row in made(spark, "elections", story.events)}
    assert {name: (row["executions"], row["verdict"]) for name, row in found.items()} == {
        "once": (1, "exactly once"),
        "split": (2, "more"),
        "open": (0, "open"),
        "retried": (1, "exactly once"),
        "keys": (None, "exactly once"),
        "theirs": (1, "exactly once"),
        "odd": (0, "open"),
        "refused": (0, "open"),
    }
    once = found["once"]
    assert [(one["rank"], one["origin"], one["clock"]) for one in once["candidates"]] == [
        (1, "w2@a.2", 5),
        (2, "w1@a.1", 11),
    ]
    assert (once["winner"], once["disagreement"], once["topic"]) == ("w2@a", False, "task")
    assert once["requested"] == story.events[0]["timestamp"]
    assert round(once["decided_after"], 3) == round(once["decided"] - once["requested"], 3) > 0.5
    assert (found["split"]["winners"], found["split"]["disagreement"]) == (["w1@a", "w2@a"], True)
    assert (found["theirs"]["winner"], found["theirs"]["acks"]) == (None, 1)
    assert [one["hostname"] for one in found["keys"]["candidates"]] == ["w1@a"]
    refused = found["refused"]
    assert (refused["candidates"], refused["requested"], refused["decided"]) == ([], None, None)


def test_an_election_is_open_as_long_as_it_may_still_be_carried_out(spark: SparkSession) -> None:
    story = Story()
    one = story.node("w1@a")

    def tell(name: str, topic: str = "task") -> None:
        stand(one, name, topic=topic)
        if not name.startswith("undecided"):
            one.tell("worker-elected", id=name, winner="w1@a")

    names = ("queued", "waits", "again", "expired", "refused", "runs", "undecided")
    for age in ("old ", "new "):
        for name in names:
            tell(f"{name} {age}")
        tell(f"undecided topic {age}", "rotate")
        one.tell("task-received", f"waits {age}")
        one.run(f"again {age}", "task-retried", exception="OSError()")
        one.tell("task-revoked", f"expired {age}", expired=True)
        one.run(f"refused {age}", "task-rejected", requeue=False)
        one.tell("task-started", f"runs {age}")
        if age == "old ":
            story.now += 4_000
            one.beat()
    found = {row["id"]: row["verdict"] for row in made(spark, "elections", story.events)}
    new = {name: found[f"{name} new "] for name in (*names, "undecided topic")}
    old = {name: found[f"{name} old "] for name in (*names, "undecided topic")}
    assert new == {
        "queued": "open", "waits": "open", "again": "open", "expired": "none",
        "refused": "exactly once", "runs": "exactly once", "undecided": "open",
        "undecided topic": "open",
    }  # fmt: skip
    assert old == {
        "queued": "none", "waits": "none", "again": "none", "expired": "none",
        "refused": "exactly once", "runs": "exactly once", "undecided": "none",
        "undecided topic": "none",
    }  # fmt: skip
    story.now += 100
    one.beat()
    later = {row["id"]: row["verdict"] for row in made(spark, "elections", story.events)}
    assert (later["undecided new "], later["queued new "]) == ("none", "open")


def test_an_election_stays_open_as_long_as_a_recorder_is_behind(spark: SparkSession) -> None:
    story = Story()
    one, other = story.node("w1@a"), story.node("w2@a")
    stand(one, "e")
    behind = as_table([other.beat()], recorder="r2")
    story.now += 100
    one.beat()
    (row,) = made(spark, "elections", story.events, behind)
    assert row["verdict"] == "open"  # its winner may be in what the other one has not written
    (row,) = made(spark, "elections", story.events)
    assert row["verdict"] == "none"
