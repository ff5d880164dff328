"""Elections: candidates, winners, verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.pipeline.stories import Node, Story, made

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
        "open": (0, "none"),
        "retried": (1, "exactly once"),
        "keys": (None, "exactly once"),
        "theirs": (1, "exactly once"),
        "odd": (0, "none"),
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
