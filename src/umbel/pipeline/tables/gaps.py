"""Events that were sent and are not in the log: holes in the numbers of a sender.

Every life of a node numbers its events 1, 2, 3, ..., and so does everybody who sends events for it
(`umbel.cluster.sequences`). Celery's workers number nothing: of theirs nothing is known to be
missing. What was sent after the last event of a series that is in the log is in no hole either.

| column      | what it is                                                                     |
| ----------- | ------------------------------------------------------------------------------ |
| hostname    | the node                                                                       |
| incarnation | its life                                                                       |
| series      | whose numbers these are: null of the node itself, else a process that sent     |
|             | events for it, such as those of tasks in its pool                              |
| first, last | the first and the last number that is missing                                  |
| missing     | how many those are                                                             |
| kind        | `hole`; or `beginning`: the life began before anybody recorded, or its first   |
|             | events were lost                                                               |
| before      | when the event before the hole was sent, Unix seconds; null at a beginning     |
| after       | when the event after the hole was sent                                         |
| events_lost | how many of them the node itself says it has dropped, as far as its heartbeats |
|             | before and after the hole tell: at most so many; null where none came after    |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.pipeline.tables.neighbours import SERIES, neighbours
from umbel.pipeline.tables.shapes import check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA: Final = """
    hostname STRING, incarnation BIGINT, series BIGINT, first BIGINT, last BIGINT, missing BIGINT,
    kind STRING, before DOUBLE, after DOUBLE, events_lost BIGINT
"""
_SERIES: Final = ", ".join(SERIES)


def gaps(events: DataFrame) -> DataFrame:
    """One row for each hole."""
    made = events.sparkSession.sql(
        f"""
        WITH holes AS (
            SELECT {_SERIES}, coalesce(before.seq, 0L) + 1 AS first,
                   after.seq - 1 AS last, before.timestamp AS before, after.timestamp AS after,
                   IF(before IS NULL, 'beginning', 'hole') AS kind
            FROM {{pairs}}
            WHERE after.seq > coalesce(before.seq, 0L) + 1
        ), told AS (
            SELECT {_SERIES}, first, last, kind, before, after, NULL AS lost FROM holes
            UNION ALL
            SELECT {_SERIES}, seq, NULL, NULL, NULL, NULL, lost FROM {{events}}
            WHERE lost IS NOT NULL AND seq IS NOT NULL
        ), counted AS (
            SELECT *,
                last(lost, true) OVER (PARTITION BY {_SERIES} ORDER BY first
                    ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS lost_before,
                first(lost, true) OVER (PARTITION BY {_SERIES} ORDER BY first
                    ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS lost_after
            FROM told
        )
        SELECT {_SERIES}, first, last, last - first + 1 AS missing, kind, before, after,
               IF(lost_after IS NULL, NULL, greatest(0L, least(last - first + 1,
                   try_subtract(lost_after, coalesce(lost_before, 0L))))) AS events_lost
        FROM counted WHERE kind IS NOT NULL
        """,  # noqa: S608 - our own names
        events=events,
        pairs=neighbours(events, "timestamp"),
    )
    return check(made, SCHEMA)
