"""The prefetch window: how many messages a worker holds at once.

It is computed, never nudged: `max(multiplier, base - debt) + held + parked`.

- *base* is concurrency times multiplier.
- *debt* are the tasks that still run from before a lost connection, times the multiplier: the
  broker will deliver their messages again, so the worker asks for less until they have ended.
- *held* are the tasks that wait for their eta, *parked* those that wait for a rate limit. Neither
  may take the place of tasks that could run. Held ones are counted up to `held_max`.

Every term is a count of things that exist, so the window returns to base by itself when they are
gone. A change is only noticed here; the loop sends it when it is idle, so that many changes cost
one message to the broker.
"""

from __future__ import annotations

from collections.abc import Callable

# AMQP carries the window in 16 bits; 0 would mean "no limit".
WINDOW_MAX = 65_535


class Prefetch:
    """One worker's window."""

    def __init__(self, concurrency: int, multiplier: int, held_max: int | None = None) -> None:
        self.concurrency = concurrency
        self.multiplier = multiplier
        self.held_max = held_max
        self.held = 0
        self.parked = 0
        self.debtors = 0
        self._sent: int | None = None

    @property
    def base(self) -> int:
        """The window of a worker that holds nothing back and owes nothing."""
        return self.concurrency * self.multiplier

    @property
    def window(self) -> int:
        """How many unacknowledged messages the broker may leave with us; 0 is no limit."""
        if self.multiplier == 0:
            return 0
        held = self.held if self.held_max is None else min(self.held, self.held_max)
        own = max(self.multiplier, self.base - self.debtors * self.multiplier)
        return min(own + held + self.parked, WINDOW_MAX)

    @property
    def is_due(self) -> bool:
        """Whether the broker does not know the window yet."""
        return self.window != self._sent

    def forget_sent(self) -> None:
        """A new channel knows nothing of what was sent on the old one."""
        self._sent = None

    def apply(self, send: Callable[[int], object]) -> None:
        """Tell the broker, if it does not know yet."""
        if self.is_due:
            window = self.window
            send(window)
            self._sent = window
