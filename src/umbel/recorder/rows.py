"""Rows as Arrow columns: the schema of the log, and of what is in quarantine.

The columns come from `umbel.cluster.event_rows`. What a sender wrote is checked before it becomes a
row, but not against everything that Arrow can not hold: texts that are not UTF-8, numbers that are
too great. Where a batch of rows is refused, they are cleaned one by one: a text keeps its bad
characters as escapes, a number that does not fit is left out of its column. The whole event is in
`raw` in any case.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from umbel.cluster.event_rows import COLUMNS

Row = Mapping[str, Any]

_ARROW: Final = {
    "text": pa.string(),
    "whole": pa.int64(),
    "number": pa.float64(),
    "flag": pa.bool_(),
}
REQUIRED: Final = frozenset({"type", "hostname", "timestamp", "received", "recorder", "raw"})

# Why it was refused, when, by whom; what it was, and whether that is base64 of bytes that are no
# text; and where it was, for what was imported.
QUARANTINE_COLUMNS: Final = {
    "reason": "text",
    "received": "number",
    "recorder": "text",
    "raw": "text",
    "encoded": "flag",
    "source": "text",
}


def _schema(columns: Mapping[str, str], nullable: frozenset[str]) -> pa.Schema:
    return pa.schema(
        [pa.field(name, _ARROW[kind], nullable=name in nullable) for name, kind in columns.items()]
    )


SCHEMA: Final = _schema(COLUMNS, frozenset(COLUMNS) - REQUIRED)
QUARANTINE_SCHEMA: Final = _schema(QUARANTINE_COLUMNS, frozenset({"source"}))
# Values of these come again and again; those of others hardly ever do.
DICTIONARY: Final = (
    *("type", "hostname", "pid", "inc", "name", "queue", "exchange", "routing_key"),
    *("present", "retries", "sw_ident", "sw_ver", "topic", "recorder", "reason"),
)
UNFIT: Final = (pa.ArrowException, TypeError, ValueError, OverflowError)

_STRUCT: Final = {
    id(schema): pa.struct([field.with_nullable(True) for field in schema])
    for schema in (SCHEMA, QUARANTINE_SCHEMA)
}


def batch(rows: Sequence[Row], schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """The rows as columns; rows that Arrow does not take as they are get cleaned."""
    try:
        return _batch(rows, schema)
    except UNFIT:
        return _batch([clean(row, schema) for row in rows], schema)


def _batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    columns = pa.array(rows, _STRUCT[id(schema)]).flatten()
    made = pa.RecordBatch.from_arrays(columns, schema=schema)
    if any(made.column(name).null_count for name in REQUIRED & set(schema.names)):
        raise ValueError("a column that may not be null is")
    return made


def clean(row: Row, schema: pa.Schema = SCHEMA) -> dict[str, Any]:
    """The row with only what Arrow takes; what must be there is."""
    made: dict[str, Any] = {}
    for field in schema:
        value = _fitting(row.get(field.name), field.type)
        if value is None and not field.nullable:
            value = _EMPTY[field.type]
        if value is not None:
            made[field.name] = value
    return made


_EMPTY: Final = {pa.string(): "", pa.int64(): 0, pa.float64(): 0.0, pa.bool_(): False}


def _fitting(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if kind == pa.string():
        return utf8(value) if isinstance(value, str) else None
    if kind == pa.bool_():
        return value if type(value) is bool else None
    if type(value) not in (int, float):
        return None
    if kind == pa.int64():
        return value if type(value) is int and -(2**63) <= value < 2**63 else None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def utf8(text: str) -> str:
    """The text with what UTF-8 lacks as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def quarantine_row(
    raw: bytes | str, reason: str, received: float, recorder: str, source: str | None = None
) -> dict[str, Any]:
    """What was refused, as a row: texts as they are, bytes that are no text as base64."""
    encoded = False
    if isinstance(raw, str):
        shown = utf8(raw)
    else:
        try:
            shown = bytes(raw).decode("utf-8")
        except UnicodeDecodeError:
            shown, encoded = base64.b64encode(raw).decode(), True
    return {
        "reason": utf8(reason),
        "received": received,
        "recorder": recorder,
        "raw": shown,
        "encoded": encoded,
        "source": None if source is None else utf8(source),
    }
