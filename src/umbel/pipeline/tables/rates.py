"""How much was done in each minute, hour and day: one row for each, name of task and worker.

The tables `rates`, `rates_hourly` and `rates_daily` differ in their first column only. An event
counts in the minute, hour or day (UTC) of its timestamp.

| column    | what it is                                                                       |
| --------- | -------------------------------------------------------------------------------- |
| minute, hour, day | when it began, Unix seconds                                              |
| name      | the task's name, as in `tasks`; null where no event has it                       |
| worker    | the node; null for what was sent, which is before any worker has it              |
| sent, received, started, succeeded, failed, retried, revoked, rejected, custom | how many    |
|           | events of each class                                                             |
| wait_p50, wait_p95, wait_p99 | `waited` of the executions in `attempts` that started in it   |
| run_p50, run_p95, run_p99 | `runtime` of those that ended in it with SUCCESS, FAILURE or     |
|           | RETRY                                                                            |

Percentiles are values that occurred, and exact: a sketch would depend on how the events were cut
into parts. A group is what one worker did of one task in that time, which fits into memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.cluster.task_states import CLASSES
from umbel.pipeline.queries import query
from umbel.pipeline.tables.shapes import check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
# The tables, with their first column and its length in seconds.
PERIODS: Final = {
    "rates": ("minute", 60),
    "rates_hourly": ("hour", 3_600),
    "rates_daily": ("day", 86_400),
}
_COUNTED: Final = ", ".join(f"count_if(class = '{name}') AS {name}" for name in CLASSES)
_SUMMED: Final = ", ".join(f"sum({name}) AS {name}" for name in CLASSES)
_PERCENTILES: Final = ", ".join(
    f"percentile_disc({part}D) WITHIN GROUP (ORDER BY {column}) FILTER (WHERE {column} >= 0) "
    f"AS {what}_{share}"
    for what, column in (("wait", "waited"), ("run", "ran"))
    for share, part in SHARES.items()
)
_RAN: Final = "('SUCCESS', 'FAILURE', 'RETRY')"


def schema(table: str) -> str:
    """The columns of one of the tables, as SQL."""
    return ", ".join(
        (
            f"{PERIODS[table][0]} DOUBLE, name STRING, worker STRING",
            *(f"{name} BIGINT" for name in CLASSES),
            *(f"{what}_{share} DOUBLE" for what in ("wait", "run") for share in SHARES),
        )
    )


def counts(events: DataFrame, names: DataFrame) -> DataFrame:
    """How many events of each class there are by minute, name and worker, with their `_cell`.

    `names` has the name of each task (uuid, name).
    """
    return query(
        f"""
        SELECT min(_cell) AS _cell, minute, names.name,
            IF(class = 'sent', NULL, hostname) AS worker, {_COUNTED}
        FROM {{events}} AS events LEFT JOIN {{names}} AS names ON events.uuid = names.uuid
        WHERE class IS NOT NULL
        GROUP BY minute, names.name, IF(class = 'sent', NULL, hostname)
        """,  # noqa: S608 - our own names
        events=events,
        names=names,
    )


def longer(counts: DataFrame, table: str) -> DataFrame:
    """The counts of hours or days, of those of minutes; `_cell` is the first minute of the day."""
    column, length_s = PERIODS[table]
    return query(
        f"""
        SELECT CAST(floor(minute / 86400) * 1440 AS BIGINT) AS _cell,
            CAST(floor(minute / {length_s}) * {length_s} AS DOUBLE) AS {column}, name, worker,
            {_SUMMED}
        FROM {{counts}} GROUP BY ALL
        """,  # noqa: S608 - our own names
        counts=counts,
    )


def rates(counts: DataFrame, attempts: DataFrame, table: str) -> DataFrame:
    """The counts with the percentiles of executions that started or ended in their time.

    Of the attempts those must be given that did; `_cell` comes last.
    """
    column, length_s = PERIODS[table]
    made = query(
        f"""
        WITH timed AS (
            SELECT CAST(floor(started / {length_s}) * {length_s} AS DOUBLE) AS began, name, worker,
                waited, CAST(NULL AS DOUBLE) AS ran
            FROM {{attempts}} WHERE waited IS NOT NULL
            UNION ALL
            SELECT CAST(floor(ended / {length_s}) * {length_s} AS DOUBLE), name, worker, NULL,
                runtime
            FROM {{attempts}} WHERE outcome IN {_RAN} AND runtime IS NOT NULL
        ), told AS (
            SELECT began, name, worker, {_PERCENTILES} FROM timed GROUP BY began, name, worker
        )
        SELECT counts.{column}, counts.name, counts.worker, {", ".join(CLASSES)},
            {", ".join(f"{what}_{share}" for what in ("wait", "run") for share in SHARES)}, _cell
        FROM {{counts}} AS counts LEFT JOIN told ON counts.{column} = told.began
            AND counts.name <=> told.name AND counts.worker <=> told.worker
        """,  # noqa: S608 - our own names
        counts=counts,
        attempts=attempts,
    )
    check(made.drop("_cell"), schema(table))
    return made
