"""The log as Spark reads it: types of its columns, said once and never inferred.

The columns are those of `umbel.cluster.event_rows`. A segment may have more of them (a newer
recorder wrote it: they are ignored) or fewer (an older one: they are null). The tables' own schemas
are in the modules that make them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from umbel.cluster.event_rows import COLUMNS

# A kind of column, as `event_rows` names it, in Spark.
KIND_TYPES: Final[dict[str, DataType]] = {
    "text": StringType(),
    "whole": LongType(),
    "number": DoubleType(),
    "flag": BooleanType(),
}
# The same for Arrow, for files that are too small for Spark.
_ARROW_TYPES: Final = {
    "text": pa.string(),
    "whole": pa.int64(),
    "number": pa.float64(),
    "flag": pa.bool_(),
}


def schema(kinds: Mapping[str, str]) -> StructType:
    """The schema of columns given by name and kind; all may be null."""
    return StructType([StructField(name, KIND_TYPES[kind]) for name, kind in kinds.items()])


def arrow_schema(kinds: Mapping[str, str]) -> pa.Schema:
    """As `schema`, for Arrow."""
    return pa.schema([(name, _ARROW_TYPES[kind]) for name, kind in kinds.items()])


def nullable(kind: DataType) -> DataType:
    """The same type, in which everything may be null, as in files that Spark writes."""
    if isinstance(kind, StructType):
        return StructType([StructField(one.name, nullable(one.dataType)) for one in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(nullable(kind.elementType))
    return kind


def collected(rows: DataFrame) -> pa.Table:
    """All rows as one table in memory, with the types that Spark writes to files."""
    kinds = nullable(rows.schema)
    assert isinstance(kinds, StructType)
    return rows.toArrow().cast(to_arrow_schema(kinds))


def no_rows(spark: SparkSession, schema: StructType) -> DataFrame:
    """No rows of these columns."""
    return spark.range(0).select(*(lit(None).cast(one.dataType).alias(one.name) for one in schema))


LOG: Final = schema(COLUMNS)
LOG_ARROW: Final = arrow_schema(COLUMNS)
