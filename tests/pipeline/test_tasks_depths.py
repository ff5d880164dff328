"""How deep tasks are below the top of their family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from umbel.pipeline.tables import tasks
from umbel.pipeline.tables.tasks import DEPTH_MAX, depths

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EDGES = "uuid STRING, parent STRING, root STRING"


def found(spark: SparkSession, edges: list[tuple[str, str, str]]) -> dict[str, int | None]:
    rows = depths(spark.createDataFrame(edges, EDGES)).collect()
    assert len(rows) == len(edges)
    return {row.uuid: row.depth for row in rows}


def test_chains_rings_and_parents_that_nobody_saw(spark: SparkSession) -> None:
    chain = [(f"c{number}", f"c{number - 1}", "r") for number in range(1, 100)]
    edges = [
        *(("c0", "unseen", "r"), *chain, ("a", "b", "r"), ("b", "a", "r")),
        *(("under a ring", "a", "r"), ("alone", "r", "r"), ("of itself", "of itself", "s")),
    ]
    ringed = dict.fromkeys(["a", "b", "under a ring", "of itself"])
    wanted = ringed | {"alone": 1} | {f"c{number}": number + 1 for number in range(100)}
    assert found(spark, edges) == wanted


def test_a_parent_of_another_family_is_one_step(spark: SparkSession) -> None:
    edges = [
        *(("a1", "a", "a"), ("a2", "a1", "a"), ("a3", "a2", "a")),
        *(("b", "a3", "b"), ("b1", "b", "b"), ("c", "b1", "c")),
    ]
    assert found(spark, edges) == {"a1": 1, "a2": 2, "a3": 3, "b": 1, "b1": 2, "c": 1}


def test_depths_have_a_bound_and_so_have_the_families_that_are_walked(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = [(f"c{number}", f"c{number - 1}", "r") for number in range(1, DEPTH_MAX + 4)]
    made = found(spark, chain)
    assert made[f"c{DEPTH_MAX}"] == DEPTH_MAX
    assert [made[f"c{DEPTH_MAX + more}"] for more in (1, 2, 3)] == [None] * 3
    monkeypatch.setattr(tasks, "INNER_MAX", 1_000)
    made = found(spark, [*chain, ("d1", "d", "d"), ("d2", "d1", "d")])
    assert (made["c1"], made["c2"], made["d2"]) == (1, None, 2)


def test_depths_need_no_checkpoint_that_a_lost_executor_takes_with_it(
    spark: SparkSession,
) -> None:
    rows = "('a', 'b', 'r'), ('c', 'a', 'r')"
    edges = spark.sql(f"SELECT * FROM VALUES {rows} AS (uuid, parent, root)")
    plan = depths(edges)._jdf.queryExecution().toString()
    assert "LocalRelation" in plan
    assert "ExistingRDD" not in plan
