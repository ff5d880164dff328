"""Rates and durations of the recent past, in bounded memory, for whoever shows them live.

Time is an argument.
"""

from __future__ import annotations

from collections import deque
from typing import Final

RATE_WINDOW_S: Final = 10
SAMPLES_MAX: Final = 512


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
