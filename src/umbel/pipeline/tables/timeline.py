"""Every event, in the one order of the cluster, with its position.

The order is (clock, timestamp, origin), see `umbel.cluster.clock`; what is equal in all three comes
by type, then by task, then by what else tells two events apart. Positions are dense: 0, 1, 2, ...
They belong to one build: events that come late push those behind them on. The order itself never
changes.

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

The order is cut into *ranges*, and a file has one range. A row has the name of its range (`_range`)
and its number in it (`_number`); how many events are in the ranges before is kept beside the files
(`base`). So new events rewrite the ranges that they fall into, mostly the last ones, and positions
of all others follow. `position` is the base plus the number, and `previous_…` are found by looking
at the order: readers work these three out (`umbel.pipeline.reading`).

Many events have no clock that orders (clients send tasks without being in step). They come first,
and are cut by their time; all others are cut by their clock. Copies of an event are equal in all of
that, so they meet in one range: there each event is kept once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from umbel.cluster.event_rows import IDENTITY
from umbel.pipeline.cells import tree
from umbel.pipeline.tables.shapes import check, fields

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA: Final = """
    position BIGINT, clock BIGINT, timestamp DOUBLE, origin STRING, hostname STRING,
    incarnation BIGINT, type STRING, uuid STRING, seq BIGINT, sent_clock BIGINT,
    previous_of_task BIGINT, previous_of_node BIGINT
"""
# The columns of the files. `position`, `previous_of_task` and `previous_of_node` follow from them.
STORED: Final = """
    clock BIGINT, timestamp DOUBLE, origin STRING, hostname STRING, incarnation BIGINT,
    type STRING, uuid STRING, seq BIGINT, sent_clock BIGINT, _pid BIGINT, _inc BIGINT,
    _range BIGINT, _number BIGINT
"""
# More events in a range: fewer files, and more is rewritten for what is new.
RANGE_ROWS: Final = 120_000
# Of one in this many events quantiles are taken. The order does not depend on them.
SAMPLE: Final = 8
_ACCURACY: Final = 2_000
_KEY: Final = "IF(order_clock = 0, timestamp, CAST(order_clock AS DOUBLE))"
# The lower bits of `monotonically_increasing_id` number the rows of a partition.
_NUMBER_BITS: Final = 33
_NUMBER: Final = f"monotonically_increasing_id() & {2**_NUMBER_BITS - 1}L"
# The order of a range, roughly, in one number: sorting by numbers first is much faster.
_ROUGH: Final = "IF(clock = 0, CAST(timestamp * 1000 AS BIGINT), clock)"
_ORDER: Final = (
    "clock", "timestamp", "origin", "type", "uuid", "hostname", "_pid", "_inc", "sent_clock", "seq",
)  # fmt: skip


@dataclass(slots=True)
class Zone:
    """The ranges of events without a clock, by time, or of those with one, by clock.

    The first range begins at the beginning. `bounds` are the beginnings of all others.
    """

    bounds: list[float] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    greatest: float | None = None  # the key of the last event


@dataclass(slots=True)
class Ranges:
    """How the order is cut, and how many events are in each range."""

    zero: Zone = field(default_factory=Zone)
    clocked: Zone = field(default_factory=Zone)
    named: int = 0  # how many names were given

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Self:
        """What `as_json` gave."""
        return cls(Zone(**told["zero"]), Zone(**told["clocked"]), told["named"])

    def as_json(self) -> dict[str, Any]:
        """For the state file."""
        return asdict(self)

    @property
    def bases(self) -> dict[int, int]:
        """How many events are before each range, by its name."""
        made, before = {}, 0
        for zone in (self.zero, self.clocked):
            for name, rows in zip(zone.names, zone.rows, strict=True):
                made[name] = before
                before += rows
        return made

    @property
    def total(self) -> int:
        """How many events there are, each once."""
        return sum(self.zero.rows) + sum(self.clocked.rows)

    def extend(self, events: DataFrame) -> None:
        """Make room for prepared events that come after all others."""
        zones = {"order_clock = 0": self.zero, "order_clock > 0": self.clocked}
        behind = [
            which if zone.greatest is None else f"{which} AND {_KEY} > {zone.greatest!r}D"
            for which, zone in zones.items()
        ]
        for zone, (asked, count, greatest) in zip(
            zones.values(), _counted(events, behind), strict=True
        ):
            if not count:
                continue
            if not zone.names:
                self._name(zone)
            room, bounds = RANGE_ROWS - zone.rows[-1], []
            if room <= 0 and zone.greatest is not None:
                # Behind the last event, not at it: copies of it belong to the full range.
                room, bounds = RANGE_ROWS, [math.nextafter(zone.greatest, math.inf)]
            if count > room:
                bounds += _cuts(events.where(asked), -(-(count - room) // RANGE_ROWS) + 1)
            for bound in sorted(set(bounds)):
                if not zone.bounds or bound > zone.bounds[-1]:
                    zone.bounds.append(bound)
                    self._name(zone)
            zone.greatest = greatest if zone.greatest is None else max(zone.greatest, greatest)

    def _name(self, zone: Zone) -> None:
        zone.names.append(self.named)
        zone.rows.append(0)
        self.named += 1

    def sql(self) -> str:
        """The name of the range of a prepared event."""
        zero, clocked = (
            tree(_KEY, [f"{bound!r}D" for bound in zone.bounds], [f"{n}L" for n in zone.names])
            if zone.names
            else "CAST(NULL AS BIGINT)"
            for zone in (self.zero, self.clocked)
        )
        return f"IF(order_clock = 0, {zero}, {clocked})"

    def drop_empty(self) -> None:
        """Join ranges without any events to those before them; the last one of a zone stays."""
        for zone in (self.zero, self.clocked):
            full = [n for n, rows in enumerate(zone.rows) if rows or n == len(zone.rows) - 1]
            zone.bounds = [zone.bounds[number - 1] for number in full[1:]]
            zone.names = [zone.names[number] for number in full]
            zone.rows = [zone.rows[number] for number in full]

    def count(self, rows: Mapping[int, int]) -> None:
        """Note how many events there are in some ranges."""
        for zone in (self.zero, self.clocked):
            for number, name in enumerate(zone.names):
                zone.rows[number] = rows.get(name, zone.rows[number])


def lean(events: DataFrame, ranges: Ranges) -> DataFrame:
    """What the timeline has of prepared events (`STORED`, without the number); copies stay."""
    return events.selectExpr(
        "order_clock AS clock", "timestamp", "origin", "hostname", "incarnation", "type", "uuid",
        "seq", "clock AS sent_clock", "pid AS _pid", "inc AS _inc", f"{ranges.sql()} AS _range",
    )  # fmt: skip


def timeline(rows: DataFrame, ranges: Iterable[int], *, is_unique: bool = False) -> DataFrame:
    """The rows of whole ranges in order, each event once.

    A partition is one range, as it is written.
    """
    if not is_unique:
        stored = {"clock": "sent_clock", "pid": "_pid", "inc": "_inc"}
        same = [stored.get(name, name) for name in IDENTITY]
        others = (name for name in rows.columns if name not in same)
        rows = rows.groupBy(*same).agg(*(F.max(name).alias(name) for name in others))
    names = sorted(ranges) or [0]
    numbers = [str(number) for number in range(len(names))]
    number_of = tree("_range", [f"{name}L" for name in names[1:]], numbers)
    placed = rows.repartitionById(len(names), F.expr(number_of))
    ordered = placed.sortWithinPartitions(F.expr(_ROUGH), *_ORDER)
    made = ordered.selectExpr("*", f"{_NUMBER} AS _number")
    return check(made.select(*fields(STORED).names), STORED)


def _counted(events: DataFrame, asked: list[str]) -> list[tuple[str, int, float]]:
    """How many events fulfil each condition, and the greatest key of those."""
    columns = [f"count_if({one})" for one in asked]
    columns += [f"max({_KEY}) FILTER (WHERE {one})" for one in asked]
    found = events.selectExpr(*columns).first()
    assert found is not None
    return list(zip(asked, found[: len(asked)], found[len(asked) :], strict=True))


def _cuts(events: DataFrame, count: int) -> list[float]:
    """The keys that cut events into this many parts of about one size."""
    shares = ", ".join(f"{number / count}D" for number in range(1, count))
    quantiles = f"approx_percentile({_KEY}, array({shares}), {_ACCURACY})"
    sampled = events.where(f"pmod(xxhash64(timestamp, clock), {SAMPLE}) = 0")
    found = sampled.selectExpr(quantiles).first()
    return [] if found is None else sorted(set(found[0] or ()))
