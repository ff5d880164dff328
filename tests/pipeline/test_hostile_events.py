"""No event that the wire lets through fails a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pipeline.stories import Story, unique_events
from tests.pipeline.worlds import START, small_world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FAR = 2**53 - 1
HUGE = 2**63 - 1


def test_extreme_and_odd_values_fail_no_table(spark: SparkSession) -> None:
    from umbel.pipeline.tables import TABLES, Inputs

    story = Story()
    node, celery = story.node("w1@a"), story.node("old@b", inc=None)
    node.beat(lost=-HUGE, processed=HUGE, active=-HUGE, freq=1e308, timestamp=float(-FAR))
    node.beat(lost=HUGE, processed=-HUGE, freq=-1.0, timestamp=float(FAR), clock=0)
    node.beat(seq=FAR, clock=FAR, lost=0, sw_ident=7, freq="often")
    for stamp in (float(FAR), float(-FAR)):
        node.tell("task-sent", "t'\\", timestamp=stamp, name="'; --", parent_id="t'\\")
        node.tell("task-received", "t'\\", timestamp=stamp, name="{x}", root_id="")
        node.tell("task-started", "t'\\", timestamp=stamp, clock=FAR)
        node.tell("task-succeeded", "t'\\", timestamp=-stamp, runtime=1e300)
    for odd in ({}, {"ids": 7}, {"ids": [None, [], "x" * 5_000]}, {"ids": "abc", "stamp": [1]}):
        node.tell("worker-revocation", **odd)
        celery.tell("worker-elect", id="e", topic="task", action=odd, clock=None)
        celery.tell("worker-elected", id=odd.get("ids"), winner=odd.get("ids"))
    node.tell("worker-elect", id="e2", topic="task", action={"options": {"task_id": {"a": 1}}})
    events = unique_events(spark, [*story.events, *small_world(3, 40)]).cache()
    tasks = events.where("class IS NOT NULL").selectExpr(
        "uuid", "uuid AS root", "parent_id AS parent", "CAST(NULL AS BIGINT) AS depth", "name",
        "type AS state", "timestamp AS finished", "timestamp AS sent", "received",
        "-timestamp AS started",
    ).dropDuplicates(["uuid"])  # fmt: skip
    made = {name: table(Inputs(spark, events, tasks, START)) for name, table in TABLES.items()}
    counts = {name: len(frame.collect()) for name, frame in made.items()}
    events.unpersist()
    assert counts["timeline"] > len(story.events)
    assert min(counts.values()) > 0, counts
