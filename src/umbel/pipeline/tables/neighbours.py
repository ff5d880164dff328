"""Events of one life of a node next to each other in the numbers that the sender gave them.

A life can be long, and one node can send most of what there is. So the numbers are cut into blocks,
each of which is sorted on its own; the ends of the blocks are few, and meet in a second step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BLOCK_BITS: Final = 16


def neighbours(events: DataFrame, columns: str) -> DataFrame:
    """Pairs (hostname, incarnation, before, after) of structs: the number and these columns.

    Of the first event of a life `before` is null. Events with one number come next to each other.
    """
    blocks = events.where("seq IS NOT NULL").selectExpr(
        "hostname",
        "incarnation",
        f"shiftright(seq, {BLOCK_BITS}) AS block",
        f"struct(seq, {columns}) AS event",
    )
    sorted_by = "OVER (PARTITION BY hostname, incarnation, block ORDER BY event)"
    inside = blocks.selectExpr(
        "hostname",
        "incarnation",
        "event",
        f"lag(event) {sorted_by} AS before",
        f"lead(event) {sorted_by} IS NULL AS is_last",
    )
    ends = inside.where("before IS NULL OR is_last").selectExpr(
        "hostname",
        "incarnation",
        "before IS NULL AS is_first",
        "event",
        "lag(event) OVER (PARTITION BY hostname, incarnation ORDER BY event) AS last",
    )
    pair = ("hostname", "incarnation", "before", "event AS after")
    return (
        inside.where("before IS NOT NULL")
        .selectExpr(*pair)
        .union(
            ends.where("is_first").selectExpr(
                "hostname", "incarnation", "last AS before", "event AS after"
            )
        )
    )
