"""Which events of a sender are missing: gaps in its sequence numbers.

Every sender numbers its events 1, 2, 3, ... A worker or client does so once per incarnation. Those
who send events for a worker, such as the tasks in its pool processes, have a *series* of numbers
each (`key_of`). Of the numbers that were heard, all between the smallest and the greatest are
expected; those that did not come are *missing*. What was sent before one began to listen is not.
The order of arrival does not matter: a number that comes late fills its gap, one that comes again
is a duplicate.

Gaps are kept as ranges. Of one series there are at most `ranges_max`; then the oldest one is
written off: it still counts as missing, but cannot be filled any more. Of `incarnations_max` series
the one that was silent the longest is forgotten; what it missed stays counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

INCARNATIONS_MAX: Final = 5_000
RANGES_MAX: Final = 64

Range = tuple[int, int]  # both ends belong to it
Key = tuple[str, int]  # hostname, and incarnation or series


def key_of(event: Mapping[str, Any]) -> Key | None:
    """The series that a well-formed event is numbered in; None if it has no number."""
    inc = event.get("inc")
    if inc is None or "seq" not in event:
        return None
    return event["hostname"], event.get("umbel_series", inc)


class Sequence:
    """The numbers of one series."""

    __slots__ = ("_missing", "duplicate_count", "first", "last", "written_off_count")

    def __init__(self, number: int) -> None:
        self.first = self.last = number
        self.duplicate_count = 0
        self.written_off_count = 0
        self._missing: list[Range] = []

    @property
    def missing(self) -> tuple[Range, ...]:
        """The gaps that can still be filled, in order."""
        return tuple(self._missing)

    @property
    def missing_count(self) -> int:
        """How many numbers are missing, those that were written off included."""
        return self.written_off_count + sum(last - first + 1 for first, last in self._missing)

    def note(self, number: int, ranges_max: int = RANGES_MAX) -> bool:
        """A number was heard; False when it was heard before."""
        if number == self.last + 1:
            self.last = number
            return True
        if number > self.last:
            self._missing.append((self.last + 1, number - 1))
            self.last = number
        elif number < self.first:
            if number + 1 < self.first:
                self._missing.insert(0, (number + 1, self.first - 1))
            self.first = number
        elif not self._fill(number):
            self.duplicate_count += 1
            return False
        if len(self._missing) > ranges_max:
            first, last = self._missing.pop(0)
            self.written_off_count += last - first + 1
        return True

    def _fill(self, number: int) -> bool:
        place = bisect_left(self._missing, number, key=_last_of)
        if place == len(self._missing) or self._missing[place][0] > number:
            return False
        first, last = self._missing[place]
        rest = ((first, number - 1), (number + 1, last))
        self._missing[place : place + 1] = [(a, b) for a, b in rest if a <= b]
        return True


def _last_of(gap: Range) -> int:
    return gap[1]


class Sequences:
    """The numbers of everybody who is heard."""

    def __init__(
        self, *, incarnations_max: int = INCARNATIONS_MAX, ranges_max: int = RANGES_MAX
    ) -> None:
        assert incarnations_max > 0, incarnations_max
        assert ranges_max > 0, ranges_max
        self.forgotten_count = 0  # series
        self._forgotten_missing_count = self._forgotten_duplicate_count = 0
        self._incarnations_max, self._ranges_max = incarnations_max, ranges_max
        self._by_key: OrderedDict[Key, Sequence] = OrderedDict()  # the longest silent first

    def note(self, hostname: str, series: int, number: int) -> bool:
        """A number of a series was heard; False when it was heard before."""
        key = (hostname, series)
        known = self._by_key.get(key)
        if known is None:
            self._add(key, number)
            return True
        self._by_key.move_to_end(key)
        return known.note(number, self._ranges_max)

    def _add(self, key: Key, number: int) -> None:
        if len(self._by_key) >= self._incarnations_max:
            _, silent = self._by_key.popitem(last=False)
            self.forgotten_count += 1
            self._forgotten_missing_count += silent.missing_count
            self._forgotten_duplicate_count += silent.duplicate_count
        self._by_key[key] = Sequence(number)

    def gaps(self) -> dict[Key, tuple[Range, ...]]:
        """The missing numbers, of those series that miss some."""
        return {key: one.missing for key, one in self._by_key.copy().items() if one.missing}

    def sequence(self, hostname: str, series: int) -> Sequence | None:
        """What is known of one series."""
        return self._by_key.get((hostname, series))

    @property
    def missing_count(self) -> int:
        """Events that did not come, of everybody ever heard."""
        known = self._by_key.copy().values()
        return self._forgotten_missing_count + sum(one.missing_count for one in known)

    @property
    def duplicate_count(self) -> int:
        """Events that came again, of everybody ever heard."""
        known = self._by_key.copy().values()
        return self._forgotten_duplicate_count + sum(one.duplicate_count for one in known)

    def __len__(self) -> int:
        return len(self._by_key)
