"""Counts and percentiles by minute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pipeline.stories import Story, made
from tests.pipeline.worlds import START

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_events_count_in_their_minute_by_name_and_worker(spark: SparkSession) -> None:
    story = Story()
    client, one, other = story.node("gen1@c"), story.node("w1@a"), story.node("w2@a")
    minute = START // 60 * 60
    story.now = minute
    for number in range(100):
        uuid, sent = f"t{number}", minute + number / 10
        client.tell("task-sent", uuid, timestamp=sent, name="shop.add")
        one.tell("task-received", uuid, timestamp=sent + 0.5, name="shop.add")
        one.tell("task-started", uuid, timestamp=sent + 1 + number)
        one.tell("task-succeeded", uuid, timestamp=minute + 300, runtime=number / 100)
    other.tell("task-received", "again", timestamp=minute + 1, name="shop.mail")
    other.tell("task-started", "again", timestamp=minute + 2)
    other.tell("task-retried", "again", timestamp=minute + 5)
    other.tell("task-progress", "again", timestamp=minute + 6, percent=5)
    other.tell("task-revoked", "nameless", timestamp=minute + 7)
    found = {
        (row["minute"] - minute, row["name"], row["worker"]): row
        for row in made(spark, "rates", story.events)
    }
    assert found[0, "shop.add", None]["sent"] == 100
    begun = found[0, "shop.add", "w1@a"]
    assert (begun["received"], begun["succeeded"]) == (100, 0)
    assert sum(row["started"] for place, row in found.items() if place[2] == "w1@a") == 100
    done = found[300, "shop.add", "w1@a"]
    assert (done["succeeded"], done["run_p50"], done["run_p95"]) == (100, 0.49, 0.94)
    assert (done["wait_p50"], done["run_p99"]) == (None, 0.98)
    first = begun["started"]
    assert round(begun["wait_p99"], 3) == first  # waits are 1, 2, 3, ...
    mail = found[0, "shop.mail", "w2@a"]
    assert (mail["retried"], mail["custom"], mail["wait_p50"], mail["run_p50"]) == (1, 1, 1.0, 3.0)
    assert found[0, None, "w2@a"]["revoked"] == 1


def test_a_retry_has_waited_since_it_was_sent_itself(spark: SparkSession) -> None:
    story = Story()
    client, pool, one = story.node("gen1@c"), story.node("gen2@a"), story.node("w1@a")
    minute = START // 60 * 60
    client.tell("task-sent", "t", timestamp=minute, name="shop.add", retries=0)
    one.tell("task-received", "t", timestamp=minute + 1, name="shop.add", retries=0)
    one.tell("task-started", "t", timestamp=minute + 2)
    pool.tell("task-sent", "t", timestamp=minute + 60, retries=1, sync=True)
    one.tell("task-retried", "t", timestamp=minute + 61)  # told after the retry was sent
    one.tell("task-received", "t", timestamp=minute + 62, retries=1)
    one.tell("task-started", "t", timestamp=minute + 65)
    one.tell("task-retried", "t", timestamp=minute + 120)
    one.tell("task-received", "t", timestamp=minute + 121, retries=2)  # nobody saw it sent
    one.tell("task-started", "t", timestamp=minute + 124)
    found = {
        row["minute"] - minute: row["wait_p50"]
        for row in made(spark, "rates", story.events)
        if row["started"]
    }
    assert found == {0: 2.0, 60: 5.0, 120: 3.0}
