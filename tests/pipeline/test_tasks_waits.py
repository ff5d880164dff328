"""How long tasks waited."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from tests.pipeline.stories import Story
from tests.pipeline.worlds import as_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WEST = timezone(timedelta(hours=-7))


def test_waiting_for_the_eta_that_the_caller_asked_for_is_no_queue_wait(
    spark: SparkSession,
) -> None:
    from umbel.pipeline.events import prepare, unique
    from umbel.pipeline.tables.tasks import tasks as tasks_table
    from umbel.pipeline.task_fold import summarise, tasks

    story = Story()
    client, one = story.node("gen1@c"), story.node("w1@a")
    due = story.now + 60

    def iso(moment: float, zone: timezone = UTC) -> str:
        return datetime.fromtimestamp(moment, zone).isoformat()

    etas: dict[str, Any] = {
        "none": None,
        "zone": iso(due, WEST),
        "utc": iso(due),
        "zulu": iso(due).replace("+00:00", "Z"),
        "naive": iso(due).removesuffix("+00:00"),
        "micros": iso(due + 0.25),
        "number": due,
        "whole": int(due),
        "past": iso(due - 600),
        "future": iso(due + 600),
        "a time of day": "12:30:00",
        "rubbish": "soon",
        "odd": "2026-13-45T99:99:99",
    }
    for uuid, eta in etas.items():
        sent = client.tell("task-sent", uuid, name="shop.add", eta=eta)
        one.tell("task-received", uuid, name="shop.add", eta=eta, timestamp=sent["timestamp"] + 1)
        one.tell("task-started", uuid, timestamp=sent["timestamp"] + 100)
        story.now = due - 60
    raw = prepare(spark.createDataFrame(as_table(story.events)))
    rows = tasks_table(tasks(summarise(raw)), unique(raw).selectExpr("*", "0L AS _cell")).collect()
    waits = {row["uuid"]: round(row["queue_wait"], 3) for row in rows}
    since_due = round(story.events[0]["timestamp"] + 100 - due, 3)
    assert waits == {
        **dict.fromkeys(("none", "past", "a time of day", "rubbish", "odd"), 100.0),
        **dict.fromkeys(("zone", "utc", "zulu", "naive", "number", "whole"), since_due),
        "micros": round(since_due - 0.25, 3),
        "future": 0.0,  # it was begun before
    }
