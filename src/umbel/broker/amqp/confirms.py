"""Which of the messages that were published on a channel the broker has confirmed.

They are numbered from `confirm_select` on. The broker confirms one, or all up to one, in any order,
so what is known is a number below which all are settled and a few above it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Confirms:
    """The numbers of one channel."""

    def __init__(self) -> None:
        self.last = 0  # that was published
        self._on = False
        self._low = 1  # the first that is not settled
        self._above: set[int] = set()  # settled all the same
        self._watches: list[set[int]] = []

    def begin(self) -> None:
        """The broker counts from here."""
        if not self._on:
            self._on, self.last, self._low = True, 0, 1

    def end(self) -> None:
        """The channel is another."""
        self._on, self.last, self._low = False, 0, 1
        self._above.clear()

    def published(self, count: int = 1) -> None:
        """So many more are on their way."""
        if self._on:
            self.last += count

    def confirmed(self, number: int, multiple: bool) -> None:
        """The broker has this one, or all up to it (0: all)."""
        above = self._above
        if multiple:
            upto = number or self.last
            if above:
                above.difference_update(range(self._low, upto + 1))
            self._low = max(self._low, upto + 1)
        elif number >= self._low:
            above.add(number)
        while self._low in above:
            above.remove(self._low)
            self._low += 1

    def refused(self, number: int, multiple: bool) -> None:
        """The broker has not, and will not."""
        first = self._low if multiple else number
        numbers = set(range(first, (number or self.last) + 1)) - self._above
        for watch in self._watches:
            watch.update(numbers)
        self.confirmed(number, multiple)

    def settled(self, first: int, last: int) -> bool:
        """Whether all of these are confirmed or refused."""
        low, above = self._low, self._above
        return low > last or (first > low and all(n in above for n in range(first, last + 1)))

    @contextlib.contextmanager
    def watched(self) -> Iterator[set[int]]:
        """The numbers that are refused meanwhile."""
        nacked: set[int] = set()
        self._watches.append(nacked)
        try:
            yield nacked
        finally:
            # Not by what is in it: another one may be equal.
            self._watches = [watch for watch in self._watches if watch is not nacked]
