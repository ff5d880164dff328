"""Schemas of tables, read without Spark."""

from __future__ import annotations

import pytest
from pyspark.sql.types import ArrayType, DoubleType, LongType, StringType, StructField, StructType

from umbel.pipeline.tables import HIDDEN, SCHEMAS, stored
from umbel.pipeline.tables.shapes import fields


def test_a_schema_has_names_types_and_order() -> None:
    nested = StructType([StructField("first", LongType()), StructField("since", DoubleType())])
    assert fields("uuid STRING, runs ARRAY<STRUCT<first: BIGINT, since: DOUBLE>>,\n n BIGINT") == (
        StructType(
            [
                StructField("uuid", StringType()),
                StructField("runs", ArrayType(nested)),
                StructField("n", LongType()),
            ]
        )
    )


@pytest.mark.parametrize(
    "schema", ["uuid TEXT", "uuid STRING>", "a ARRAY<STRING", "a STRUCT STRING"]
)
def test_a_schema_that_is_none_is_a_mistake_of_ours(schema: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        fields(schema)


def test_every_table_has_a_schema() -> None:
    for name in [*SCHEMAS, *HIDDEN, "tasks"]:
        assert len(stored(name)) > 3, name
