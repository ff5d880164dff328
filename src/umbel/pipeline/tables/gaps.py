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

from umbel.pipeline.tables.sequences import holes
from umbel.pipeline.tables.shapes import check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA: Final = """
    hostname STRING, incarnation BIGINT, series BIGINT, first BIGINT, last BIGINT, missing BIGINT,
    kind STRING, before DOUBLE, after DOUBLE, events_lost BIGINT
"""


def gaps(blocks: DataFrame) -> DataFrame:
    """One row for each hole, of all blocks of numbers (`sequences.blocks`)."""
    made = holes(blocks).selectExpr(
        "hostname", "incarnation", "series", "first", "last", "last - first + 1 AS missing",
        "kind", "before", "after",
        "IF(lost_after IS NULL, NULL, greatest(0L, least(last - first + 1, "
        "try_subtract(lost_after, coalesce(lost_before, 0L))))) AS events_lost",
    )  # fmt: skip
    return check(made, SCHEMA)
