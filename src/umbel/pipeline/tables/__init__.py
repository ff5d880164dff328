"""The tables: one module each, one pure function DataFrame -> DataFrame, its columns as code.

A module has `SCHEMA`, the columns as SQL, and its text tells what is in each of them. Reads and
writes are elsewhere (`umbel.pipeline.storage`). Everything that comes from outside may be missing
or wrong; a table then has nulls, and no job fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from umbel.pipeline.tables import (
    attempts,
    clock_audit,
    elections,
    gaps,
    lineage,
    rates,
    revocations,
    timeline,
    workers,
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What tables are made of: prepared events, each of them once, and the table `tasks`."""

    spark: SparkSession
    events: DataFrame
    tasks: DataFrame
    log_ends: float  # Unix seconds, see `umbel.pipeline.watermarks`


def _attempts(inputs: Inputs) -> DataFrame:
    births = workers.births(inputs.events)
    facts = workers.life_facts(inputs.events, births)
    lived = workers.with_lives(inputs.events, births)
    return attempts.attempts(lived, workers.statuses(facts, inputs.log_ends))


def _workers(inputs: Inputs) -> DataFrame:
    births = workers.births(inputs.events)
    return workers.workers(
        workers.life_facts(inputs.events, births),
        workers.drifts(inputs.events, births),
        workers.missing_numbers(inputs.events),
        inputs.log_ends,
    )


TABLES: Final[dict[str, Callable[[Inputs], DataFrame]]] = {
    "timeline": lambda inputs: timeline.timeline(inputs.events),
    "attempts": _attempts,
    "workers": _workers,
    "elections": lambda inputs: elections.elections(inputs.events, inputs.log_ends),
    "revocations": lambda inputs: revocations.revocations(inputs.events),
    "clock_audit": lambda inputs: clock_audit.clock_audit(inputs.events),
    "rates": lambda inputs: rates.rates(inputs.events),
    "lineage": lambda inputs: lineage.lineage(inputs.tasks, inputs.events),
    "gaps": lambda inputs: gaps.gaps(inputs.events),
}
# The columns of each table, as SQL.
SCHEMAS: Final[dict[str, str]] = {
    "timeline": timeline.SCHEMA,
    "attempts": attempts.SCHEMA,
    "workers": workers.SCHEMA,
    "elections": elections.SCHEMA,
    "revocations": revocations.SCHEMA,
    "clock_audit": clock_audit.SCHEMA,
    "rates": rates.SCHEMA,
    "lineage": lineage.SCHEMA,
    "gaps": gaps.SCHEMA,
}
