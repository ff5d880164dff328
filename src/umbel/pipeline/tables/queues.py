"""What waited in each queue, minute by minute: a row for each queue and minute with anything.

An attempt is in its queue from when it is due until it starts. It is due as `waited` in `attempts`
has it: when it was sent (or received, where nobody saw it sent), or at its eta if that is later.

| column   | what it is                                                                        |
| -------- | --------------------------------------------------------------------------------- |
| minute   | when it began, Unix seconds                                                       |
| queue    | the one that a worker took the task from last, else the one that it was sent to;  |
|          | null where no event names it                                                      |
| arrivals | attempts that became due in it                                                    |
| starts   | attempts that started in it; those of which it is not known when they were due    |
|          | are left out                                                                      |
| waiting  | attempts that were due and had not started at its end                             |
| oldest   | seconds that the oldest of those had waited then; null where none was waiting     |

Of tasks that have not started since they were last sent, and of those that were revoked or rejected
before any start, the last attempt counts likewise: until the end of the log, and until they were
revoked or rejected. An attempt counts as waiting for a day at most: nobody knows of a task that no
worker tells of whether it waits or ran unseen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.pipeline.queries import query
from umbel.pipeline.tables.shapes import check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA: Final = """
    minute DOUBLE, queue STRING, arrivals BIGINT, starts BIGINT, waiting BIGINT, oldest DOUBLE
"""
WAIT_MINUTES_MAX: Final = 1_440
# A task that was due longer than this before a minute does not count in it.
WAIT_S_MAX: Final = (WAIT_MINUTES_MAX + 1) * 60.0
_MINUTE: Final = "CAST(floor({} / 60) AS BIGINT)"
# The first minute at whose end an attempt no longer waits.
_UNTIL: Final = f"least({_MINUTE.format('until')}, {_MINUTE.format('due')} + {WAIT_MINUTES_MAX}L)"


def waits(attempts: DataFrame, tasks: DataFrame, log_ends: float) -> DataFrame:
    """The attempts with when they were due, and when they started, if they did (`until` is when
    they no longer waited): (queue, due, started, until).

    Of `attempts` and `tasks` with their hidden columns.
    """
    return query(
        f"""
        SELECT _queue AS queue, started - waited AS due, started, started AS until
        FROM {{attempts}} WHERE waited IS NOT NULL
        UNION ALL
        SELECT _queue, _due, NULL, {log_ends!r}D FROM {{tasks}}
        WHERE state IN ('PENDING', 'RECEIVED') AND _due <= {log_ends!r}D
        UNION ALL
        SELECT _queue, _due, NULL, coalesce(finished, rejected) FROM {{tasks}}
        WHERE state IN ('REVOKED', 'REJECTED') AND started IS NULL
            AND _due <= coalesce(finished, rejected)
        """,  # noqa: S608 - our own names
        attempts=attempts,
        tasks=tasks,
    )


def minutes(waits: DataFrame) -> DataFrame:
    """The first and the last minute in which each of them is seen."""
    return waits.selectExpr(
        f"{_MINUTE.format('due')} AS first",
        f"greatest({_MINUTE.format('coalesce(started, due)')}, {_UNTIL}) AS last",
    )


def queues(waits: DataFrame) -> DataFrame:
    """The table, of all attempts that were seen in the minutes that are asked for."""
    made = query(
        f"""
        WITH placed AS (
            SELECT queue, {_MINUTE.format("due")} AS first, {_UNTIL} AS until, started, due
            FROM {{waits}}
        ), grouped AS (
            -- most have started in the minute in which they were due, many in the same others
            SELECT queue, first, until, count(1) AS count, min(due) AS oldest_due
            FROM placed WHERE until > first GROUP BY queue, first, until
        ), seen AS (
            SELECT queue, first AS minute, count(1) AS arrivals, 0L AS starts, 0L AS waiting,
                CAST(NULL AS DOUBLE) AS due
            FROM placed GROUP BY queue, first
            UNION ALL
            SELECT queue, {_MINUTE.format("started")}, 0, count(1), 0, NULL
            FROM placed WHERE started IS NOT NULL GROUP BY queue, {_MINUTE.format("started")}
            UNION ALL
            SELECT queue, explode(sequence(first, until - 1)), 0, 0, count, oldest_due FROM grouped
        )
        SELECT minute * 60D AS minute, queue, sum(arrivals) AS arrivals, sum(starts) AS starts,
            sum(waiting) AS waiting, (minute + 1) * 60D - min(due) AS oldest
        FROM seen GROUP BY queue, minute
        """,  # noqa: S608 - our own names
        waits=waits,
    )
    return check(made, SCHEMA)
