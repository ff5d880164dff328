"""What happened in each of the last seconds, in bounded memory; the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

SERIES_S: Final = 300


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
