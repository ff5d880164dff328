"""Time, the order of events, dice, and the record of what happened.

Events are (when, number, what, a, b) on a heap: at their time `what(a, b)` is called. Equal times
go by number, so the order depends on nothing but the seed.

The *hash* is taken over every event, and over whatever is noted in between. It is arithmetic on
whole numbers: Python's own hashes differ from process to process. The *story* is the same for
people, and only kept when somebody wants to read it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple, TypeVar

_PRIME: Final = 0x100000001B3
_MASK: Final = 2**64 - 1

T = TypeVar("T")
What = Callable[[Any, Any], Any]


class Line(NamedTuple):
    """One line of the story."""

    at_s: float
    who: str
    text: str


class World:
    """See the module's text."""

    __slots__ = ("_count", "_heap", "dice", "hash", "now", "story")

    def __init__(self, seed: int, *, tells: bool = False) -> None:
        self.now = 0.0
        self.dice = random.Random(seed).random  # noqa: S311 - a play, not a secret
        self.hash = 0xCBF29CE484222325
        self.story: list[Line] | None = [] if tells else None
        self._heap: list[tuple[float, int, What, Any, Any]] = []
        self._count = 0

    def at(
        self, when: float, what: Callable[[Any, Any], None], a: Any = None, b: Any = None
    ) -> None:
        """Let `what(a, b)` happen at a time."""
        self._count = count = self._count + 1
        heappush(self._heap, (when, count, what, a, b))

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            when, count, what, a, b = heappop(heap)
            self.now = when
            self.hash = ((self.hash ^ count) * _PRIME + int(when * 1e6)) & _MASK
            what(a, b)
        self.now = until

    @property
    def event_count(self) -> int:
        """How many events there were, those to come included."""
        return self._count

    def note(self, number: int) -> None:
        """Let the hash depend on a number."""
        self.hash = ((self.hash ^ number) * _PRIME) & _MASK

    def remark(self, who: str, text: str) -> None:
        """A line for the story alone; only when there is one."""
        assert self.story is not None
        self.story.append(Line(self.now, who, text))

    def tell(self, who: str, text: str) -> None:
        """A line for the story, which the hash depends on with or without a story."""
        self.hash = ((self.hash ^ zlib.crc32(f"{who} {text}".encode())) * _PRIME) & _MASK
        if self.story is not None:
            self.story.append(Line(self.now, who, text))

    def pick(self, choices: Sequence[T]) -> T:
        """One of several."""
        return choices[int(self.dice() * len(choices))]

    def between(self, low: float, high: float) -> float:
        """A number from low to high."""
        return low + (high - low) * self.dice()
