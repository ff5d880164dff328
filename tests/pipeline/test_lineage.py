"""Families of tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = (
    "uuid STRING, parent STRING, root STRING, depth BIGINT, finished DOUBLE, state STRING, "
    "name STRING, sent DOUBLE, received DOUBLE, started DOUBLE"
)


def task(
    uuid: str,
    parent: str | None,
    root: str,
    depth: int | None,
    finished: float | None,
    state: str = "SUCCESS",
) -> tuple[Any, ...]:
    """A row of the table `tasks`: received 5 seconds before its end, and started 1 second later."""
    ended = finished or 45.0
    return (uuid, parent, root, depth, finished, state, uuid, None, ended - 5, ended - 4)


def test_a_family_has_its_size_its_depth_and_the_chain_that_took_longest(
    spark: SparkSession,
) -> None:
    from umbel.pipeline.tables.lineage import lineage

    tasks = [
        task("root", None, "root", 0, 10.0),
        task("left", "root", "root", 1, 20.0),
        task("right", "root", "root", 1, 30.0, "FAILURE"),
        task("leaf", "left", "root", 2, 40.0),
        task("waits", "leaf", "root", 3, None, "RECEIVED"),
        task("alone", None, "alone", 0, 7.0),
        task("child", "unseen", "gone", 1, 9.0),
        task("a", "b", "ring", None, 11.0),
        task("b", "a", "ring", None, 12.0),
        task("open", None, "open", 0, None, "STARTED"),
    ]
    rows = [row.asDict() for row in lineage(spark.createDataFrame(tasks, COLUMNS)).collect()]
    found = {row["root_id"]: row for row in rows}
    assert {
        root: (row["size"], row["depth"], row["critical_path"], row["critical_tasks"])
        for root, row in found.items()
    } == {
        "root": (5, 3, 35.0, ["root", "left", "leaf"]),
        "alone": (1, 0, 5.0, ["alone"]),
        "gone": (1, 1, 5.0, ["child"]),
        "ring": (2, None, 6.0, ["a", "b"]),
        "open": (1, 0, None, []),
    }
    whole = found["root"]
    assert (whole["name"], whole["state"], whole["duration"]) == ("root", "SUCCESS", 35.0)
    assert (whole["failed"], whole["failed_part"]) == (1, 0.2)
    assert found["open"]["duration"] is None
