"""Every event, in the one order of the cluster, with its position and what came before it.

The order is (clock, timestamp, origin), see `umbel.cluster.clock`; what is equal in all three comes
by type, then by a hash of the content. Positions are dense: 0, 1, 2, ... They belong to one build:
events that come late push those behind them on. The order itself never changes.

| column           | what it is                                                                |
| ---------------- | ------------------------------------------------------------------------- |
| position         | the place of the event among all                                          |
| clock            | the clock that orders: 0 where there is none, or nobody kept it in step   |
| timestamp        | the sender's wall clock, Unix seconds                                     |
| origin           | the sender: node and process                                              |
| hostname         | the node                                                                  |
| incarnation      | the life of the node; its process's number where it tells none            |
| type             | what happened                                                             |
| uuid             | the task that it is about; null where it is about the node                |
| seq              | the number that the sender gave the event                                 |
| sent_clock       | the clock as it was sent                                                  |
| previous_of_task | the position of the event of the same task before this one                |
| previous_of_node | the position of the event of the same node before this one                |

No partition sees everything. A first look takes quantiles of the clocks; they cut the order into
*ranges*, each of which is sorted on its own (`_ranges`). How many events are in the ranges before
gives each its offset. What is before an event of a node is mostly in its own range; of the first
one of each node in a range it is the last one of that node in the ranges before, and there are few
of those (`_lasts`). Tasks are many: what is before an event of a task takes a second shuffle.

With `is_unique=False` events may be given more than once: those of one identity meet in one range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from umbel.pipeline.events import PREPARED
from umbel.pipeline.tables.shapes import check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

SCHEMA: Final = """
    position BIGINT, clock BIGINT, timestamp DOUBLE, origin STRING, hostname STRING,
    incarnation BIGINT, type STRING, uuid STRING, seq BIGINT, sent_clock BIGINT,
    previous_of_task BIGINT, previous_of_node BIGINT
"""
# So many events are sorted at a time; more of them spill to disk.
RANGE_ROWS: Final = 120_000
RANGES_MAX: Final = 1_000
# Of one in so many events quantiles are taken. The order does not depend on them.
SAMPLE: Final = 8
_ACCURACY: Final = 2 * RANGES_MAX

_IDENTITY: Final = (
    "order_clock", "timestamp", "type", "uuid", "hostname", "pid", "inc", "clock",
)  # fmt: skip
_LEAN: Final = (*_IDENTITY, "tie", "seq")
# Who sent it follows from other columns: to work it out again takes less than to send it around.
_ORIGIN: Final = PREPARED["origin"]
_ORDER: Final = (
    "order_clock", "timestamp", _ORIGIN, "type", "tie", "uuid", "hostname", "pid", "inc",
    "clock", "seq",
)  # fmt: skip
# The order of a range, roughly, in one number: sorting by numbers first is much faster.
_ROUGH: Final = "IF(order_clock = 0, CAST(timestamp * 1000 AS BIGINT), order_clock)"
# The lower bits of `monotonically_increasing_id` number the rows of a partition.
_NUMBER_BITS: Final = 33
_NUMBER: Final = f"monotonically_increasing_id() & {2**_NUMBER_BITS - 1}L"


def timeline(events: DataFrame, *, is_unique: bool = True) -> DataFrame:
    """The events in order."""
    numbered, count = _ranges(events, is_unique)
    lasts = _lasts(numbered)
    near = _with_near(numbered)
    is_first = (near["range"] == lasts["to_range"]) & (near["hostname"] == lasts["to_hostname"])
    placed = near.join(F.broadcast(lasts), is_first, "left").selectExpr(
        "number + start AS position",
        "order_clock",
        "timestamp",
        "hostname",
        "pid",
        "inc",
        "type",
        "uuid IS NOT NULL AS is_task",
        # what has no task is spread by its position
        "coalesce(uuid, CAST(number + start AS STRING)) AS subject",
        "seq",
        "clock",
        "coalesce(near + start, far) AS previous_of_node",
    )
    before = "lag(position) OVER (PARTITION BY subject, is_task ORDER BY position)"
    told = placed.repartition(count, "subject").selectExpr("*", f"{before} AS previous_of_task")
    made = told.selectExpr(
        "position",
        "order_clock AS clock",
        "timestamp",
        f"{_ORIGIN} AS origin",
        "hostname",
        f"{PREPARED['incarnation']} AS incarnation",
        "type",
        "IF(is_task, subject, NULL) AS uuid",
        "seq",
        "clock AS sent_clock",
        "previous_of_task",
        "previous_of_node",
    )
    return check(made, SCHEMA)


def _ranges(events: DataFrame, is_unique: bool) -> tuple[DataFrame, int]:
    """Unique events with their `range` and their `number` in it from 0 on; how many ranges."""
    lean = events.select(*_LEAN)
    range_of, count = _cut(lean)
    ranged = lean.selectExpr("*", f"{range_of} AS range").repartitionById(count, F.col("range"))
    if not is_unique:
        greatest = F.max("seq").alias("seq"), F.max("tie").alias("tie")
        ranged = ranged.groupBy("range", *_IDENTITY).agg(*greatest)
    # A partition is one range.
    ordered = ranged.sortWithinPartitions(F.expr(_ROUGH), *map(F.expr, _ORDER))
    return ordered.selectExpr("*", f"{_NUMBER} AS number", "xxhash64(hostname) AS node"), count


def _with_near(numbered: DataFrame) -> DataFrame:
    """With the number of the event of the same node before it in its range, if there is one.

    The first sort is by one number, and nearly the order that the second one wants.
    """
    rough = f"(node & {-(2**_NUMBER_BITS)}L) | number"
    return numbered.sortWithinPartitions(F.expr(rough)).selectExpr(
        "*", "lag(number) OVER (PARTITION BY node, range, hostname ORDER BY number) AS near"
    )


def _cut(lean: DataFrame) -> tuple[str, int]:
    """The range of an event as an expression, and how many ranges there are.

    Many events have no clock (clients send tasks without one): those are cut by their time.
    """
    shares = ", ".join(f"{number / RANGES_MAX}D" for number in range(1, RANGES_MAX))
    sampled = f"pmod(xxhash64(timestamp, clock), {SAMPLE}) = 0"
    found = lean.selectExpr(
        "count(1) AS total",
        "count_if(order_clock = 0) AS zero",
        f"approx_percentile(timestamp, array({shares}), {_ACCURACY}) "
        f"FILTER (WHERE order_clock = 0 AND {sampled}) AS times",
        f"approx_percentile(order_clock, array({shares}), {_ACCURACY}) "
        f"FILTER (WHERE order_clock > 0 AND {sampled}) AS clocks",
    ).first()
    assert found is not None
    wanted = min(found["total"] // RANGE_ROWS + 1, RANGES_MAX)
    in_zero = round(wanted * found["zero"] / max(found["total"], 1))
    times = _every(found["times"], in_zero)
    clocks = _every(found["clocks"], wanted - in_zero)
    cases = [f"WHEN order_clock = 0 AND timestamp < {time!r}D THEN {number}"
             for number, time in enumerate(times)]  # fmt: skip
    cases.append(f"WHEN order_clock = 0 THEN {len(times)}")
    first = len(times) + 1
    cases += [f"WHEN order_clock < {clock}L THEN {first + number}"
              for number, clock in enumerate(clocks)]  # fmt: skip
    last = first + len(clocks)
    return f"CASE {' '.join(cases)} ELSE {last} END", last + 1


def _every(quantiles: Sequence[float] | None, count: int) -> list[float]:
    """The quantiles that cut into so many parts of about one size."""
    if not quantiles:
        return []
    places = (round(len(quantiles) * number / count) for number in range(1, count))
    return sorted({quantiles[min(place, len(quantiles) - 1)] for place in places})


def _lasts(numbered: DataFrame) -> DataFrame:
    """For each range its offset, and for each node in it the last position before it."""
    return numbered.sparkSession.sql(
        """
        SELECT range AS to_range, hostname AS to_hostname, start,
               lag(last + start) OVER (PARTITION BY hostname ORDER BY range) AS far
        FROM (
            SELECT *, sum(count) OVER (ORDER BY range) - sum(count) OVER (PARTITION BY range)
                AS start
            FROM (
                SELECT range, hostname, count(*) AS count, max(number) AS last FROM {numbered}
                GROUP BY range, hostname
            )
        )
        """,
        numbered=numbered,
    )
