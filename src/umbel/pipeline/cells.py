"""Cells: the parts of time by which events are read again and tables are rewritten.

A build reads new segments. What they change is recomputed for the *cells* that their events are in:
spans of time with about `CELL_ROWS` rows of the log each. So the cost of a build depends on what is
new and on how far it reaches back, not on the length of the history.

Cells cover all of time without gaps; their bounds are whole minutes. Only bounds are kept: the
name of a cell is its first minute. How time is cut decides what a build costs, never what a table
says: every table is the same for any cut.

New events mostly come after all others, in the last cell. It is *split* behind its last event when
it is full, which moves no event. A cell that has grown too large in another way, by late events or
because one sender's clock is in the next century, is *cut again*, and everything in it is
recomputed. So are the cells of segments that were removed from the log.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

MINUTE_S: Final = 60
# More rows in a cell: fewer files, and each build recomputes more around what is new.
CELL_ROWS: Final = 100_000
# A cell of this many times as many rows is cut again.
TOO_LARGE: Final = 3
# Before every minute: the name of the first cell.
BEGINNING: Final = -(2**50)
END: Final = 2**50
# The minute of an event, as SQL.
MINUTE: Final = f"CAST(floor(timestamp / {MINUTE_S}) AS BIGINT)"

Minutes = Mapping[int, int]  # rows of the log by minute


@dataclass(slots=True)
class Cells:
    """How time is cut: the first minute of each cell, its rows, and its last minute with any."""

    starts: list[int] = field(default_factory=lambda: [BEGINNING])
    rows: list[int] = field(default_factory=lambda: [0])
    lasts: list[int] = field(default_factory=lambda: [BEGINNING])

    def as_json(self) -> dict[str, Any]:
        """For the state file."""
        return {"starts": self.starts, "rows": self.rows, "lasts": self.lasts}

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Self:
        """What `as_json` gave."""
        return cls(list(told["starts"]), list(told["rows"]), list(told["lasts"]))

    def cell_of(self, minute: int) -> int:
        """The name of the cell of a minute."""
        return self.starts[self._number(minute)]

    def until(self, cell: int) -> int:
        """The first minute behind a cell."""
        number = self.starts.index(cell) + 1
        return self.starts[number] if number < len(self.starts) else END

    def between(self, first: int, last: int) -> list[int]:
        """The cells that have minutes from the first to the last."""
        return self.starts[self._number(first) : self._number(last) + 1]

    def times(self, cells: Iterable[int]) -> list[tuple[float, float]]:
        """The spans of time of some cells, in seconds, each up to its end."""
        ordered = sorted(cells)
        return [(float(cell * MINUTE_S), float(self.until(cell) * MINUTE_S)) for cell in ordered]

    def add(self, minutes: Minutes) -> list[int]:
        """Count new rows; gives the cells that have become too large."""
        for minute in sorted(minutes):
            number = self._number(minute)
            is_last = number == len(self.starts) - 1
            if is_last and self.rows[number] >= CELL_ROWS and minute > self.lasts[number]:
                number += 1
                self._insert(number, minute)
            self.rows[number] += minutes[minute]
            self.lasts[number] = max(self.lasts[number], minute)
        large = TOO_LARGE * CELL_ROWS
        return [cell for cell, rows in zip(self.starts, self.rows, strict=True) if rows > large]

    def recount(self, cell: int, minutes: Minutes) -> list[int]:
        """A cell that has these rows, cut into cells of the right size; gives their names."""
        number, until = self.starts.index(cell), self.until(cell)
        told = sorted(minute for minute in minutes if cell <= minute < until)
        self.rows[number], self.lasts[number] = 0, BEGINNING
        first = number
        for minute in told:
            if self.rows[number] >= CELL_ROWS:
                number += 1
                self._insert(number, minute)
            self.rows[number] += minutes[minute]
            self.lasts[number] = minute
        return self.starts[first : number + 1]

    def drop_empty(self, used: Collection[int]) -> None:
        """Join cells without any rows to those before them, but for those that are used."""
        full = [
            number
            for number, (cell, rows) in enumerate(zip(self.starts, self.rows, strict=True))
            if rows or cell in used or not number
        ]
        self.starts, self.rows, self.lasts = (
            [values[number] for number in full] for values in (self.starts, self.rows, self.lasts)
        )

    def sql(self, minute: str = MINUTE) -> str:
        """The cell of a minute as SQL: a tree of comparisons, as deep as its logarithm."""
        return tree(minute, self.starts[1:], [f"{start}L" for start in self.starts])

    def _number(self, minute: int) -> int:
        return bisect_right(self.starts, minute) - 1

    def _insert(self, number: int, minute: int) -> None:
        self.starts.insert(number, minute)
        self.rows.insert(number, 0)
        self.lasts.insert(number, BEGINNING)


def tree(value: str, bounds: Sequence[object], leaves: Sequence[str]) -> str:
    """Which leaf a value belongs to, as SQL: leaf n is for values from bound n - 1 to bound n."""
    assert len(leaves) == len(bounds) + 1
    if not bounds:
        return leaves[0]
    middle = len(bounds) // 2
    below = tree(value, bounds[:middle], leaves[: middle + 1])
    above = tree(value, bounds[middle + 1 :], leaves[middle + 1 :])
    return f"IF({value} < {bounds[middle]}, {below}, {above})"
