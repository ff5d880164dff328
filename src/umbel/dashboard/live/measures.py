"""Rates, recent series and durations, in bounded memory; the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

RATE_WINDOW_S: Final = 10
SERIES_S: Final = 300
SAMPLES_MAX: Final = 256


class Rate:
    """How many per second, over the last ten seconds."""

    __slots__ = ("_began_s", "_buckets", "total")

    def __init__(self) -> None:
        self._buckets: deque[list[int]] = deque(maxlen=RATE_WINDOW_S + 2)  # [second, count]
        self._began_s: float | None = None
        self.total = 0

    def add(self, now_s: float, count: int = 1) -> None:
        """So many more, now."""
        second = int(now_s)
        self.total += count
        if self._began_s is None:
            self._began_s = now_s
        if self._buckets and self._buckets[-1][0] == second:
            self._buckets[-1][1] += count
        else:
            self._buckets.append([second, count])

    def per_s(self, now_s: float) -> float:
        """The mean over the window, or over what has passed of it; never over less than 1 s."""
        if self._began_s is None:
            return 0.0
        oldest = int(now_s) - RATE_WINDOW_S
        counted = sum(count for second, count in self._buckets if second > oldest)
        passed_s = min(now_s - self._began_s, now_s - oldest - 1)
        return counted / max(1.0, passed_s)


class Series:
    """Counts of several kinds for each of the last seconds."""

    __slots__ = ("_kinds", "_rows", "_second")

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = {kind: at for at, kind in enumerate(kinds)}
        self._rows: deque[list[int]] = deque(maxlen=SERIES_S)
        self._second: int | None = None

    def add(self, kind: str, now_s: float) -> None:
        """One more of a kind."""
        self._advance(int(now_s))
        self._rows[-1][self._kinds[kind]] += 1

    def columns(self, now_s: float, step_s: int) -> dict[str, list[float]]:
        """Per second and kind, oldest first, averaged over steps; the last is still open."""
        self._advance(int(now_s))
        assert self._second is not None
        # Steps begin at whole multiples, so that a column does not change once it is past.
        first = (self._second - SERIES_S) // step_s + 1
        count = self._second // step_s - first + 1
        found = {kind: [0.0] * count for kind in self._kinds}
        for ago, row in enumerate(reversed(self._rows)):
            slot = (self._second - ago) // step_s - first
            if slot < 0:
                break
            width = self._second % step_s + 1 if slot == count - 1 else step_s
            for kind, at in self._kinds.items():
                found[kind][slot] += row[at] / width
        return found

    def _advance(self, second: int) -> None:
        if self._second is None or second - self._second > SERIES_S:
            self._rows.clear()
            self._second = second - 1
        while self._second < second:
            self._second += 1
            self._rows.append([0] * len(self._kinds))


class Sample:
    """The last durations, and their percentiles."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=SAMPLES_MAX)

    def add(self, value_s: float) -> None:
        """One more; below zero is a clock that was set, not a duration."""
        if value_s >= 0:
            self._values.append(value_s)

    def percentiles(self, *shares: float) -> list[float | None]:
        """The smallest values that so large a share of all does not exceed."""
        ordered = sorted(self._values)
        if not ordered:
            return [None for _ in shares]
        last = len(ordered) - 1
        return [ordered[min(last, max(0, -int(-share * len(ordered)) - 1))] for share in shares]
