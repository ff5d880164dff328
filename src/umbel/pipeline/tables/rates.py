"""How much was done, minute by minute: one row for each minute, name of task and worker.

An event counts in the minute of its timestamp.

| column    | what it is                                                                       |
| --------- | -------------------------------------------------------------------------------- |
| minute    | when it began, Unix seconds                                                      |
| name      | the task's name; null where no event told it                                     |
| worker    | the node; null for what was sent, which is before any worker has it              |
| sent, received, started, succeeded, failed, retried, revoked, rejected, custom | how many    |
|           | events of each class                                                             |
| wait_p50, wait_p95, wait_p99 | seconds that those which started in this minute had waited:   |
|           | since they were sent, or received where nobody saw them sent since the last retry |
| run_p50, run_p95, run_p99 | seconds that those which ended in this minute had run: as the    |
|           | worker measured it, else since their start at that worker                        |

Counts are exact. Percentiles are values that occurred; up to a thousand in a group they are exact,
beyond that their rank is off by at most a thousandth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.cluster.task_states import CLASSES
from umbel.pipeline.tables.shapes import check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ACCURACY: Final = 1_000
SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
SCHEMA: Final = ", ".join(
    (
        "minute DOUBLE, name STRING, worker STRING",
        *(f"{name} BIGINT" for name in CLASSES),
        *(f"{what}_{share} DOUBLE" for what in ("wait", "run") for share in SHARES),
    )
)
_COUNTS: Final = ", ".join(f"count_if(class = '{name}') AS {name}" for name in CLASSES)
_SHARES: Final = ", ".join(f"{share}D" for share in SHARES.values())
_PERCENTILES: Final = ", ".join(
    f"{what}[{number}] AS {what}_{share}"
    for what in ("wait", "run")
    for number, share in enumerate(SHARES)
)


def _last(name: str, by: str) -> str:
    """When the last event of a class before this one was sent."""
    return (
        f"last(IF(class = '{name}', timestamp, NULL), true) OVER (PARTITION BY {by} "
        f"ORDER BY timestamp, order_clock ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
    )


def rates(events: DataFrame) -> DataFrame:
    """Counts and percentiles by minute, name and worker; see the module's text."""
    made = events.sparkSession.sql(
        f"""
        WITH told AS (
            SELECT class, minute, timestamp, runtime, IF(class = 'sent', NULL, hostname) AS worker,
                max(name) OVER (PARTITION BY uuid) AS name,
                {_last("sent", "uuid")} AS last_sent,
                {_last("retried", "uuid")} AS last_retried,
                {_last("received", "uuid, hostname")} AS last_received,
                {_last("started", "uuid, hostname")} AS last_started
            FROM {{events}} WHERE class IS NOT NULL
        ), timed AS (
            SELECT *,
                IF(class = 'started', timestamp - IF(last_sent >= coalesce(last_retried, last_sent),
                    last_sent, last_received), NULL) AS waited,
                IF(class IN ('succeeded', 'failed', 'retried'),
                    coalesce(runtime, timestamp - last_started), NULL) AS ran
            FROM told
        ), counted AS (
            SELECT minute, name, worker, {_COUNTS},
                percentile_approx(waited, array({_SHARES}), {ACCURACY}) FILTER (WHERE waited >= 0)
                    AS wait,
                percentile_approx(ran, array({_SHARES}), {ACCURACY}) FILTER (WHERE ran >= 0) AS run
            FROM timed GROUP BY minute, name, worker
        )
        SELECT minute, name, worker, {", ".join(CLASSES)}, {_PERCENTILES} FROM counted
        """,  # noqa: S608 - our own names
        events=events,
    )
    return check(made, SCHEMA)
