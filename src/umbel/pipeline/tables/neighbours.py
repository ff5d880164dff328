"""Events of one series next to each other in the numbers that the sender gave them.

A worker numbers the events of its life; others who send events for it, such as the tasks in its
pool processes, have a series of numbers each (`umbel.cluster.sequences`).

A life can be long, and one node can send most of what there is. So the numbers are cut into blocks,
each of which is sorted on its own; the ends of the blocks are few, and meet in a second step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BLOCK_BITS: Final = 16
SERIES: Final = ("hostname", "incarnation", "series")
_SERIES: Final = ", ".join(SERIES)


def neighbours(events: DataFrame, columns: str) -> DataFrame:
    """Pairs (`SERIES`, before, after): the latter are structs of the number and these columns.

    Of the first event of a series `before` is null. Events with one number come next to each other.
    """
    blocks = events.where("seq IS NOT NULL").selectExpr(
        *SERIES, f"shiftright(seq, {BLOCK_BITS}) AS block", f"struct(seq, {columns}) AS event"
    )
    sorted_by = f"OVER (PARTITION BY {_SERIES}, block ORDER BY event)"
    inside = blocks.selectExpr(
        *SERIES,
        "event",
        f"lag(event) {sorted_by} AS before",
        f"lead(event) {sorted_by} IS NULL AS is_last",
    )
    ends = inside.where("before IS NULL OR is_last").selectExpr(
        *SERIES,
        "before IS NULL AS is_first",
        "event",
        f"lag(event) OVER (PARTITION BY {_SERIES} ORDER BY event) AS last",
    )
    return (
        inside.where("before IS NOT NULL")
        .selectExpr(*SERIES, "before", "event AS after")
        .union(ends.where("is_first").selectExpr(*SERIES, "last AS before", "event AS after"))
    )
