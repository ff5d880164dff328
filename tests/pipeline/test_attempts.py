"""Executions, as the events of tasks tell them."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tests.pipeline.stories import Story, made
from tests.pipeline.worlds import Event, cluster, disturbed
from umbel.cluster.task_states import place, read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_each_execution_is_a_row_that_says_how_it_went(spark: SparkSession) -> None:
    story = Story()
    one, other, dead = story.node("w1@a"), story.node("w2@a"), story.node("w3@a")
    dead.beat()
    one.run("fine", runtime=0.5)
    one.run("bad", "task-failed", exception="ValueError('x')")
    one.run("killed", "task-failed", exception="WorkerLostError('signal 9')")
    one.run("slow", "task-failed", exception="TimeLimitExceeded(5)")
    one.run("again", "task-retried", exception="OSError()")
    other.run("again")
    one.run("ended", "task-revoked", terminated=True, expired=False)
    one.tell("task-revoked", "never", terminated=False, expired=True)
    one.tell("task-failed", "unknown", exception="NotRegistered('shop.x')", traceback="")
    one.run("back", "task-rejected", requeue=True)
    one.tell("task-succeeded", "no start")
    one.tell("task-started", "twice")
    other.tell("task-started", "twice")
    one.tell("task-succeeded", "twice")
    other.tell("task-failed", "twice", exception="KeyError()")
    dead.tell("task-started", "orphan")
    one.tell("task-started", "no end")
    one.tell("task-started", "no end")
    one.tell("task-cancelled", "no end")
    one.run("told twice", "task-revoked", terminated=True)
    one.tell("task-failed", "told twice", exception="Terminated(15)")
    eta = story.now + 30
    story.node("gen1@c").tell("task-sent", "no receipt", eta=eta)
    one.tell("task-started", "no receipt", timestamp=eta + 2)
    one.tell("task-succeeded", "no receipt", timestamp=eta + 3)
    story.now += 60
    one.beat()
    other.beat()
    one.tell("task-started", "running")
    rows = made(spark, "attempts", story.events)
    found: dict[str, list[Any]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["uuid"], row["attempt"])):
        found[row["uuid"]].append((row["worker"], row["outcome"], row["reason"], row["missing"]))
    assert found == {
        "fine": [("w1@a", "SUCCESS", None, None)],
        "bad": [("w1@a", "FAILURE", "exception", None)],
        "killed": [("w1@a", "FAILURE", "worker lost", None)],
        "slow": [("w1@a", "FAILURE", "time limit", None)],
        "again": [("w1@a", "RETRY", "retry", None), ("w2@a", "SUCCESS", None, None)],
        "ended": [("w1@a", "REVOKED", "terminated", None)],
        "back": [("w1@a", "REJECTED", "requeued", None)],
        "no start": [("w1@a", "SUCCESS", None, "start")],
        "twice": [("w1@a", "SUCCESS", None, None), ("w2@a", "FAILURE", "exception", None)],
        "orphan": [("w3@a", "LOST", "worker lost", "end")],
        "no end": [("w1@a", "LOST", "event lost", "end"), ("w1@a", "CANCELLED", "cancelled", None)],
        "told twice": [("w1@a", "REVOKED", "terminated", None)],
        "no receipt": [("w1@a", "SUCCESS", None, None)],
        "running": [("w1@a", "RUNNING", None, None)],
    }
    by_uuid = {row["uuid"]: row for row in rows}
    assert by_uuid["fine"]["runtime"] == 0.5
    assert by_uuid["no receipt"]["waited"] == 2.0  # since the eta that its sender asked for
    assert round(by_uuid["bad"]["runtime"], 3) == 0.1
    assert by_uuid["bad"]["exception"] == "ValueError('x')"
    assert by_uuid["fine"]["name"] == "shop.add"
    assert by_uuid["fine"]["received"] < by_uuid["fine"]["started"] < by_uuid["fine"]["ended"]


ENDS = ("task-succeeded", "task-failed", "task-retried", "task-revoked", "task-rejected")


def model(events: list[Event]) -> list[tuple[Any, ...]]:
    """(uuid, worker, started, ended) of each execution, one event after the other."""
    by_task: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["type"] in {"task-received", "task-started", *ENDS}:
            by_task[event["uuid"], event["hostname"]].append(event)
    found = []
    for (uuid, worker), told in by_task.items():
        executions: list[list[Any]] = []
        before = ""
        for event in sorted(told, key=lambda event: place(read(event))):
            kind = event["type"]
            if kind == "task-started":
                executions.append([event["timestamp"], None])
            elif kind in ENDS and before == "task-started":
                executions[-1][1] = event["timestamp"]
            elif kind in ENDS and before in {"", "task-received", "task-retried"}:
                executions.append([None, event["timestamp"]])
            before = kind
        found += [(uuid, worker, start, end) for start, end in executions]
    return sorted(found, key=repr)


def test_executions_of_a_history_with_holes_are_those_of_a_plain_reading(
    spark: SparkSession,
) -> None:
    dice = random.Random(2)
    events = [event for event in cluster(2_000, seed=6) if dice.random() > 0.1]
    rows = made(spark, "attempts", disturbed(events, 7))
    found = [(row["uuid"], row["worker"], row["started"], row["ended"]) for row in rows]
    assert sorted(found, key=repr) == model(events)
    assert any(row["missing"] == "start" for row in rows)
