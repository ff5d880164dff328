"""The logical clock, and the one order of events.

A Lamport clock: sending advances it by one, receiving `x` makes it max(own, x) + 1. So whatever
was caused by an event has a greater clock than that event.

A clock only ever grows, and everybody takes over the greatest one he hears of. One forged value
could therefore drive every clock of a cluster to its end for good. Two bounds prevent it. Clocks
are whole numbers below 2**53, which every language holds exactly; and one message moves a clock
by at most `JUMP_MAX`, a million events per second for two weeks. A clock that has heard nobody yet
knows nothing, and takes any value of the lower half. What is out of bounds is refused and counted.

Events are ordered by (clock, timestamp, origin). An event without a clock counts as clock 0:
nobody can say what caused it, so it stands before all that have one, by its timestamp. The order
is total, in Python and in Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

CLOCK_MAX = 2**53 - 1
JUMP_MAX = 2**40
FIRST_MAX = 2**52

# Why an event's clock is not believed.
CLOCK_JUMP: Final = "clock-jump"

Order = tuple[int, float, str]


class Clock:
    """One process's clock. Threads share it through the lock that they give it.

    Who counts something together with the clock holds `lock` himself and calls `step`.
    """

    __slots__ = ("lock", "refused", "value", "witnessed")

    def __init__(self, value: int = 0, lock: AbstractContextManager[Any] | None = None) -> None:
        assert is_clock(value), f"not a clock: {value!r}"
        self.value = value
        self.witnessed = value > 0  # somebody else's clock went into this one
        self.refused = 0
        self.lock: AbstractContextManager[Any] = nullcontext() if lock is None else lock

    def forward(self) -> int:
        """Something is sent: the next value. At the very end the clock stands still."""
        with self.lock:
            return self.step()

    def step(self) -> int:
        """The same, for who holds the lock."""
        value = self.value
        if value < CLOCK_MAX:
            self.value = value = value + 1
        return value

    def adjust(self, other: Any) -> int:
        """Something was received; a value out of bounds is refused and moves nothing."""
        with self.lock:
            own = self.value
            if type(other) is int and 0 <= other <= own < CLOCK_MAX:  # the usual case
                self.value = own = own + 1
            elif self.accepts(other):
                self.value = own = min(max(own, other) + 1, CLOCK_MAX)
            else:
                self.refused += 1
                return own
            self.witnessed = True
            return own

    def accepts(self, other: Any) -> bool:
        """Whether a received value is within the bounds."""
        if not is_clock(other):
            return False
        if not self.witnessed and other <= FIRST_MAX:
            return True
        return bool(other - self.value <= JUMP_MAX)

    def __repr__(self) -> str:
        return f"<Clock {self.value}>"


def is_clock(value: Any) -> bool:
    """Whether this can be a clock at all; True is no number here."""
    return type(value) is int and 0 <= value <= CLOCK_MAX


def origin(event: Mapping[str, Any]) -> str:
    """Who sent an event: the node and its process."""
    pid = event.get("pid")
    return event["hostname"] if pid is None else f"{event['hostname']}.{pid}"


def order(event: Mapping[str, Any]) -> Order:
    """The place of a well-formed event among all others."""
    return (event.get("clock") or 0, event["timestamp"], origin(event))
