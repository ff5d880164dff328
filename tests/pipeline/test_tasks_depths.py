"""How deep tasks are below their roots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umbel.pipeline.tables.tasks import depths

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_chains_rings_and_parents_that_nobody_saw(spark: SparkSession) -> None:
    chain = [(f"c{number}", f"c{number - 1}") for number in range(1, 100)]
    edges = [("c0", "unseen"), *chain, ("a", "b"), ("b", "a")]
    made = depths(spark.createDataFrame(edges, "uuid STRING, parent STRING"))
    found = {row.uuid: row.depth for row in made.collect()}
    assert found == {"a": None, "b": None} | {f"c{number}": number + 1 for number in range(100)}
