"""The log as Spark reads it: types of its columns, said once and never inferred.

The columns are those of `umbel.cluster.event_rows`. A segment may have more of them (a newer
recorder wrote it: they are ignored) or fewer (an older one: they are null). The tables' own schemas
are in the modules that make them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import (
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
QUARANTINE_COLUMNS: Final = {
    "reason": "text",
    "received": "number",
    "recorder": "text",
    "raw": "text",
    "encoded": "flag",
}


def schema(kinds: Mapping[str, str]) -> StructType:
    """The schema of columns given by name and kind; all may be null."""
    return StructType([StructField(name, KIND_TYPES[kind]) for name, kind in kinds.items()])


LOG: Final = schema(COLUMNS)
QUARANTINE: Final = schema(QUARANTINE_COLUMNS)
