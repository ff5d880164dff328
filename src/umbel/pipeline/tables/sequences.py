"""The numbers that senders gave their events, in blocks: what `gaps` and `clock_audit` are made of.

A worker numbers the events of its life; others who send events for it, such as the tasks in its
pool processes, have a series of numbers each (`umbel.cluster.sequences`). A *block* is
`2 ** BLOCK_BITS` numbers of one series. What has to be known of a block is little, does not depend
on other blocks, and is enough to compare it with the next one:

| column     | what it is                                                                        |
| ---------- | --------------------------------------------------------------------------------- |
| hostname, incarnation, series, block | the key; `series` is null for the worker's own numbers  |
| runs       | its numbers without holes: first, last, when those were sent, and the first and  |
|            | last report of lost events (`lost`) among them                                     |
| first, last | the first and the last event with a clock that can be compared, if there is one  |
| findings   | pairs of neighbours in it whose clocks are wrong                                    |
| _cells     | the cells (`umbel.pipeline.cells`) that its events are in                           |

New events change the blocks that their numbers are in, and no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.cluster.clock import JUMP_MAX
from umbel.pipeline.queries import query
from umbel.pipeline.tables.shapes import check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# More numbers in a block: fewer blocks; fewer: less is read again around what is new.
BLOCK_BITS: Final = 12
KEY: Final = "hostname, incarnation, series, block"
BLOCK: Final = f"shiftright(seq, {BLOCK_BITS})"
_SERIES: Final = "hostname, incarnation, series"
_EVENT: Final = "seq: BIGINT, clock: BIGINT, timestamp: DOUBLE, type: STRING, uuid: STRING"
_LOST: Final = "STRUCT<seq: BIGINT, lost: BIGINT>"
SCHEMA: Final = f"""
    hostname STRING, incarnation BIGINT, series BIGINT, block BIGINT,
    runs ARRAY<STRUCT<first: BIGINT, last: BIGINT, since: DOUBLE, until: DOUBLE,
        first_lost: {_LOST}, last_lost: {_LOST}>>,
    first STRUCT<{_EVENT}>, last STRUCT<{_EVENT}>,
    findings ARRAY<STRUCT<before: STRUCT<{_EVENT}>, after: STRUCT<{_EVENT}>>>,
    _cells ARRAY<BIGINT>
"""
# Their clocks are set aside before they are numbered, or put behind all others on purpose.
SET_ASIDE: Final = ("task-sent", "task-started", "task-retried", "worker-elect")
_IS_WRONG: Final = f"(after.clock < before.clock OR after.clock - before.clock > {JUMP_MAX}L)"
_LAST_LOST: Final = "ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING"
_NEXT_LOST: Final = "ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING"


def blocks(events: DataFrame) -> DataFrame:
    """The blocks of these events, which must be all events of each block."""
    aside = ", ".join(f"'{kind}'" for kind in SET_ASIDE)
    made = query(
        f"""
        WITH told AS (
            SELECT hostname, incarnation, series, {BLOCK} AS block, seq, clock, timestamp, type,
                uuid, lost, _cell
            FROM {{events}} WHERE seq IS NOT NULL
        ), numbers AS (
            SELECT {KEY}, seq, min(timestamp) AS since, max(timestamp) AS until, max(lost) AS lost
            FROM told GROUP BY {KEY}, seq
        ), islands AS (
            SELECT *, seq - row_number() OVER (PARTITION BY {KEY} ORDER BY seq) AS island
            FROM numbers
        ), runs AS (
            SELECT {KEY}, struct(min(seq) AS first, max(seq) AS last,
                min(struct(seq, since)).since AS since, max(struct(seq, until)).until AS until,
                min(IF(lost IS NULL, NULL, struct(seq, lost))) AS first_lost,
                max(IF(lost IS NULL, NULL, struct(seq, lost))) AS last_lost) AS run
            FROM islands GROUP BY {KEY}, island
        ), of_runs AS (
            SELECT {KEY}, array_sort(collect_list(run)) AS runs FROM runs GROUP BY {KEY}
        ), clocked AS (
            SELECT {KEY}, struct(seq, clock, timestamp, type, uuid) AS event FROM told
            WHERE clock IS NOT NULL AND type NOT IN ({aside})
        ), pairs AS (
            SELECT {KEY}, event AS after,
                lag(event) OVER (PARTITION BY {KEY} ORDER BY event) AS before
            FROM clocked
        ), of_clocks AS (
            SELECT {KEY}, min(after) AS first, max(after) AS last,
                array_sort(collect_list(IF({_IS_WRONG}, struct(before, after), NULL))) AS findings
            FROM pairs GROUP BY {KEY}
        ), places AS (
            SELECT {KEY}, array_sort(collect_set(_cell)) AS _cells FROM told GROUP BY {KEY}
        )
        SELECT of_runs.hostname, of_runs.incarnation, of_runs.series, of_runs.block, runs, first,
            last, coalesce(findings, array()) AS findings, _cells
        FROM of_runs
        JOIN places ON {_same("of_runs", "places")}
        LEFT JOIN of_clocks ON {_same("of_runs", "of_clocks")}
        """,  # noqa: S608 - our own names
        events=events,
    )
    return check(made, SCHEMA)


def _same(one: str, other: str) -> str:
    """Whether two rows are of the same block; the life and the series may be null."""
    return " AND ".join(f"{one}.{name} <=> {other}.{name}" for name in KEY.split(", "))


def touched(events: DataFrame) -> DataFrame:
    """The keys of the blocks that these events are in."""
    return (
        events.where("seq IS NOT NULL")
        .selectExpr(*_SERIES.split(", "), f"{BLOCK} AS block")
        .distinct()
    )


def only(blocks: DataFrame, keys: DataFrame, how: str = "left_semi") -> DataFrame:
    """The rows with one of these keys; with `left_anti` the others. Both have the key's columns."""
    same = [blocks[name].eqNullSafe(keys[name]) for name in KEY.split(", ")]
    return blocks.join(keys, same, how)


def holes(blocks: DataFrame) -> DataFrame:
    """The holes in the numbers: (series, first, last, kind, before, after, lost_…)."""
    return query(
        f"""
        WITH runs AS (
            SELECT {_SERIES}, inline(runs) FROM {{blocks}}
        ), told AS (
            SELECT *, lag(last) OVER ordered AS previous, lag(until) OVER ordered AS before,
                last(last_lost.lost, true) OVER (PARTITION BY {_SERIES} ORDER BY first
                    {_LAST_LOST}) AS lost_before,
                first(first_lost.lost, true) OVER (PARTITION BY {_SERIES} ORDER BY first
                    {_NEXT_LOST}) AS lost_after
            FROM runs WINDOW ordered AS (PARTITION BY {_SERIES} ORDER BY first)
        )
        SELECT {_SERIES}, coalesce(previous, 0L) + 1 AS first, first - 1 AS last,
            IF(previous IS NULL, 'beginning', 'hole') AS kind, before, since AS after,
            lost_before, lost_after
        FROM told WHERE first > coalesce(previous, 0L) + 1
        """,  # noqa: S608 - our own names
        blocks=blocks,
    )


def wrong_pairs(blocks: DataFrame) -> DataFrame:
    """Events next to each other in a series whose clocks are wrong: (series, before, after)."""
    return query(
        f"""
        SELECT {_SERIES}, inline(findings) FROM {{blocks}}
        UNION ALL
        SELECT {_SERIES}, before, after FROM (
            SELECT {_SERIES}, first AS after,
                lag(last) OVER (PARTITION BY {_SERIES} ORDER BY block) AS before
            FROM {{blocks}} WHERE first IS NOT NULL
        ) WHERE {_IS_WRONG}
        """,  # noqa: S608 - our own names
        blocks=blocks,
    )


def missing_numbers(blocks: DataFrame) -> DataFrame:
    """How many numbers are missing inside of each life (hostname, incarnation, events_missing).

    Lives without holes are left out.
    """
    return query(
        """
        SELECT hostname, incarnation, sum(last - first + 1) AS events_missing
        FROM {holes} WHERE kind = 'hole' GROUP BY hostname, incarnation
        """,
        holes=holes(blocks),
    )
