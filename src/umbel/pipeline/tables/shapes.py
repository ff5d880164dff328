"""The shape of a table: its columns, and that what was made has them.

Each module of a table says its columns as SQL: names, types, order. A table that is made otherwise
is a mistake of ours, seen when its plan is made and before anything runs.

Spark can read such a text too (`StructType.fromDDL`), but that is a query of its own: to ask it for
all tables takes a small build half a second.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Final

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructType,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TYPES: Final[dict[str, DataType]] = {
    "STRING": StringType(),
    "BIGINT": LongType(),
    "INT": IntegerType(),
    "DOUBLE": DoubleType(),
    "BOOLEAN": BooleanType(),
}


def check(made: DataFrame, schema: str) -> DataFrame:
    """The table as it was made, if its columns are those of the schema."""
    wanted = [(field.name, field.dataType.simpleString()) for field in fields(schema)]
    found = [(field.name, field.dataType.simpleString()) for field in made.schema]
    assert found == wanted, f"columns {found}, and not {wanted}"
    return made


@functools.cache
def fields(schema: str) -> StructType:
    """The columns of a schema that is given as SQL; all may be null."""
    words = re.findall(r"\w+|[<>,]", schema)[::-1]
    made = _columns(words)
    assert not words, schema
    return made


def _columns(words: list[str]) -> StructType:
    """The columns at the end of the list, up to the one that closes them."""
    made = StructType()
    while words and words[-1] != ">":
        made.add(words.pop(), _type(words))
        if words and words[-1] == ",":
            words.pop()
    return made


def _type(words: list[str]) -> DataType:
    word = words.pop()
    if word in _TYPES:
        return _TYPES[word]
    assert word in ("ARRAY", "STRUCT"), word
    assert words.pop() == "<", word
    made = ArrayType(_type(words)) if word == "ARRAY" else _columns(words)
    assert words.pop() == ">", word
    return made
