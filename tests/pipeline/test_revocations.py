"""Revoked tasks: known, stopped, or run in spite of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pipeline.stories import Story, made

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_revocation_tells_who_knew_and_whether_it_was_of_use(spark: SparkSession) -> None:
    story = Story()
    one, other = story.node("w1@a"), story.node("w2@a")
    again = story.node("w1@a", inc=2)
    one.tell("task-started", "too late")
    one.tell("worker-revocation", ids=["kept", "broken", "too late"], stamp=5.0, method="revoke")
    other.tell("worker-revocation", ids=["kept", "waits"], stamp=9.0, stamps=[5.0, 8.0],
               method="mingle")  # fmt: skip
    one.tell("task-revoked", "kept", terminated=False, expired=False)
    other.tell("task-started", "broken")  # it did not know
    one.tell("task-started", "broken")
    again.tell("task-started", "broken")  # nor does the next life
    one.tell("task-succeeded", "too late")
    one.tell("task-revoked", "ended", terminated=True, expired=False)
    one.tell("task-revoked", "old", terminated=False, expired=True)
    first = one.tell("task-revoked", "twice", terminated=False)
    last = other.tell("task-revoked", "twice", terminated=True)
    for odd in ({}, {"ids": 7}, {"ids": [None, {"a": 1}]}, {"ids": ["kept"], "stamp": "soon"}):
        one.tell("worker-revocation", **odd)
    found = {row["uuid"]: row for row in made(spark, "revocations", story.events)}
    found.pop('{"a":1}', None)  # Spark reads it as a text
    assert {
        uuid: (row["effective"], row["violations"], row["seen_by"]) for uuid, row in found.items()
    } == {
        "kept": (True, 0, ["w1@a", "w2@a"]),
        "broken": (False, 1, ["w1@a"]),
        "too late": (False, 0, ["w1@a"]),
        "waits": (None, 0, ["w2@a"]),
        "ended": (True, 0, []),
        "twice": (True, 0, []),
    }
    kept = found["kept"]
    assert (kept["revoked"], kept["methods"]) == (5.0, ["mingle", "revoke"])
    assert (kept["known"], kept["revoked_clock"]) == (
        story.events[1]["timestamp"],
        story.events[1]["clock"],
    )
    assert (kept["stopped_by"], kept["terminated"]) == ("w1@a", False)
    assert found["waits"]["revoked"] == 8.0
    assert found["broken"]["violated_by"] == ["w1@a"]
    assert found["ended"]["terminated"] is True
    twice = found["twice"]
    assert (twice["revoked"], twice["stopped"]) == (first["timestamp"], last["timestamp"])
    assert (twice["stopped_by"], twice["terminated"]) == ("w2@a", True)
