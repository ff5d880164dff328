"""Holes in the numbers of events."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.pipeline.stories import Story, made
from tests.pipeline.worlds import cluster, disturbed
from umbel.cluster.sequences import Sequences

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_every_hole_is_a_row_with_what_the_node_says_of_it(spark: SparkSession) -> None:
    story = Story()
    one, other = story.node("w1@a"), story.node("w1@a", inc=2)
    one.beat(lost=0)
    one.skip(3)
    one.beat(lost=2)
    one.skip(1)
    one.beat()
    other.skip(4)
    other.beat()
    story.node("old@b", inc=None).beat()  # one of Celery's has no numbers
    found = {
        (row["incarnation"], row["first"]): row for row in made(spark, "gaps", story.events * 2)
    }
    assert {
        place: (row["last"], row["missing"], row["kind"], row["events_lost"])
        for place, row in found.items()
    } == {
        (1, 2): (4, 3, "hole", 2),
        (1, 6): (6, 1, "hole", None),
        (2, 1): (4, 4, "beginning", None),
    }
    times = [event["timestamp"] for event in story.events]
    assert (found[1, 2]["before"], found[1, 2]["after"]) == (times[0], times[1])
    assert found[2, 1]["before"] is None


def test_gaps_are_those_of_the_live_view(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.pipeline.tables.sequences.BLOCK", "shiftright(seq, 5)")
    dice = random.Random(8)
    kept = [event for event in cluster(1_500, seed=8) if dice.random() > 0.1]
    events = disturbed(kept, 9)
    live = Sequences(ranges_max=10_000)
    for event in events:
        live.note(event["hostname"], event["inc"], event["seq"])
    wanted = {(*key, *gap) for key, gaps in live.gaps().items() for gap in gaps}
    rows = made(spark, "gaps", events)
    holes = {
        (row["hostname"], row["incarnation"], row["first"], row["last"])
        for row in rows
        if row["kind"] == "hole"
    }
    assert len(wanted) > 50
    assert holes == wanted
