"""Events that were recorded more than once are one, whichever way that is found out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.pipeline.worlds import Event, as_table, cluster, disturbed, small_world

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def comparable(frame: DataFrame) -> list[str]:
    return sorted(json.dumps(row.asDict(), sort_keys=True) for row in frame.collect())


def repeated() -> list[Event]:
    """Events of which some come again, and some are told otherwise under the same identity."""
    return [
        *disturbed(cluster(300, seed=6), seed=7, again=0.2),
        *small_world(8, 60),
        {"type": "worker-heartbeat", "hostname": "w1", "timestamp": 0.0, "clock": 3},
        {"type": "worker-heartbeat", "hostname": "w1", "timestamp": -0.0, "clock": 3, "freq": 9.0},
        {"type": "worker-elect", "hostname": "w1", "timestamp": 5.0, "id": "e", "topic": "task"},
    ]


@pytest.mark.parametrize("again", [True, False], ids=["repeated", "not repeated"])
def test_letting_single_rows_through_gives_what_grouping_all_of_them_gives(
    spark: SparkSession, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from umbel.pipeline.events import once, unique

    events = repeated() if again else cluster(200, seed=6)
    rows = spark.createDataFrame(as_table(events)).cache()
    wanted = comparable(unique(rows))
    assert (len(wanted) < len(events)) is again
    assert comparable(once(rows)) == wanted
    monkeypatch.setattr("umbel.pipeline.events.REPEATED_MAX", 3)  # too many to be sent around
    assert comparable(once(rows)) == wanted
    spark.catalog.clearCache()


def test_whole_events_are_kept_of_the_types_that_tables_read_whole(spark: SparkSession) -> None:
    from umbel.pipeline.events import unique

    rows = unique(spark.createDataFrame(as_table(repeated()))).select("type", "raw").collect()
    assert {row["type"] for row in rows if row["raw"] is not None} == {"worker-elect"}
