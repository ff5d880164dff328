"""The shape of a table: its columns, and that what was made has them.

Each module of a table says its columns as SQL: names, types, order. A table that is made otherwise
is a mistake of ours, seen when its plan is made and before anything runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def check(made: DataFrame, schema: str) -> DataFrame:
    """The table as it was made, if its columns are those of the schema."""
    wanted = [(field.name, field.dataType.simpleString()) for field in fields(schema)]
    found = [(field.name, field.dataType.simpleString()) for field in made.schema]
    assert found == wanted, f"columns {found}, and not {wanted}"
    return made


def fields(schema: str) -> StructType:
    """The columns of a schema that is given as SQL."""
    return cast("StructType", StructType.fromDDL(schema))
