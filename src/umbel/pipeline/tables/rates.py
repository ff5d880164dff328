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
|           | since this attempt was sent, or received where nobody saw it sent                |
| run_p50, run_p95, run_p99 | seconds that those which ended in this minute had run: as the    |
|           | worker measured it, else since their start at that worker                        |

Percentiles are values that occurred, and exact: a sketch would depend on how the events were cut
into parts. A group is what one worker did of one task in a minute, which fits into memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.cluster.task_states import CLASSES
from umbel.pipeline.tables.shapes import check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
SCHEMA: Final = ", ".join(
    (
        "minute DOUBLE, name STRING, worker STRING",
        *(f"{name} BIGINT" for name in CLASSES),
        *(f"{what}_{share} DOUBLE" for what in ("wait", "run") for share in SHARES),
    )
)
_COUNTS: Final = ", ".join(f"count_if(class = '{name}') AS {name}" for name in CLASSES)
_PERCENTILES: Final = ", ".join(
    f"percentile_disc({part}D) WITHIN GROUP (ORDER BY {column}) FILTER (WHERE {column} >= 0) "
    f"AS {what}_{share}"
    for what, column in (("wait", "waited"), ("run", "ran"))
    for share, part in SHARES.items()
)


def _last(name: str, by: str, what: str = "timestamp") -> str:
    """When the last event of a class before this one was sent, or something else of it."""
    return (
        f"last(IF(class = '{name}', {what}, NULL), true) OVER (PARTITION BY {by} "
        f"ORDER BY timestamp, order_clock ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
    )


def rates(events: DataFrame) -> DataFrame:
    """Counts and percentiles by minute, name and worker."""
    made = events.sparkSession.sql(
        f"""
        WITH queued AS (
            -- Of a receipt: when this attempt was sent. Starts and ends have no number of retries.
            SELECT uuid, hostname, class, minute, timestamp, order_clock, runtime, name,
                {_last("sent", "uuid, coalesce(retries, 0L)")} AS sent
            FROM {{events}} WHERE class IS NOT NULL
        ), told AS (
            SELECT class, minute, timestamp, runtime, IF(class = 'sent', NULL, hostname) AS worker,
                max(name) OVER (PARTITION BY uuid) AS name,
                {_last("sent", "uuid")} AS last_sent,
                {_last("retried", "uuid")} AS last_retried,
                {_last("received", "uuid, hostname", "coalesce(sent, timestamp)")} AS last_queued,
                {_last("started", "uuid, hostname")} AS last_started
            FROM queued
        ), timed AS (
            SELECT *,
                IF(class = 'started', timestamp - coalesce(last_queued,
                    IF(last_retried IS NULL, last_sent, NULL)), NULL) AS waited,
                IF(class IN ('succeeded', 'failed', 'retried'),
                    coalesce(runtime, timestamp - last_started), NULL) AS ran
            FROM told
        )
        SELECT minute, name, worker, {_COUNTS}, {_PERCENTILES}
        FROM timed GROUP BY minute, name, worker
        """,  # noqa: S608 - our own names
        events=events,
    )
    return check(made, SCHEMA)
