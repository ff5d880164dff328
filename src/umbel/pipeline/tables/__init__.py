"""The tables: one module each, pure functions DataFrame -> DataFrame, its columns as code.

A module has `SCHEMA`, the columns as SQL, and its docstring says what is in each of them. Reads and
writes are elsewhere (`umbel.pipeline.storage`). Everything that comes from outside may be missing
or wrong; a table then has nulls, and no job fails.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import StructType

from umbel.pipeline.tables import (
    attempts,
    clock_audit,
    elections,
    gaps,
    lineage,
    queues,
    rates,
    revocations,
    sequences,
    tasks,
    timeline,
    workers,
)
from umbel.pipeline.tables.shapes import fields

__all__ = ["HIDDEN", "SCHEMAS", "stored"]

# The columns of each table, as SQL. Those of `tasks` are in `tables.tasks`, those of `runs` in
# `umbel.pipeline.build`.
SCHEMAS: Final[dict[str, str]] = {
    "timeline": timeline.SCHEMA,
    "attempts": attempts.SCHEMA,
    "workers": workers.SCHEMA,
    "elections": elections.SCHEMA,
    "revocations": revocations.SCHEMA,
    "clock_audit": clock_audit.SCHEMA,
    **{name: rates.schema(name) for name in rates.PERIODS},
    "queues": queues.SCHEMA,
    "lineage": lineage.SCHEMA,
    "gaps": gaps.SCHEMA,
}
# What files have on top of that, for the next build.
_BESIDE: Final = {
    "attempts": "_ran_anew BOOLEAN, _queue STRING, _cell BIGINT",
    "elections": f"{elections.HIDDEN}, _cell BIGINT",
    "revocations": f"{revocations.HIDDEN}, _cell BIGINT",
    "clock_audit": "_cell BIGINT",
    **dict.fromkeys(rates.PERIODS, "_cell BIGINT"),
    "queues": "_cell BIGINT",
    "lineage": "_cell BIGINT",
}
# Tables that only the next build reads.
HIDDEN: Final = {
    "_drifts": workers.DRIFTS,
    "_unclocked": clock_audit.UNCLOCKED,
    "_blocks": sequences.SCHEMA,
    "_facts": workers.FACTS,
}


def stored(name: str) -> StructType:
    """The columns of the files of a table."""
    if name == "tasks":
        return StructType([*tasks.SCHEMA, *fields(tasks.HIDDEN)])
    if name == "timeline":
        return fields(timeline.STORED)
    if name in HIDDEN:
        return fields(HIDDEN[name])
    beside = _BESIDE.get(name)
    return fields(f"{SCHEMAS[name]}, {beside}" if beside else SCHEMAS[name])
