"""The prefetch window: how many messages a worker holds at once.

It is computed, never nudged: base + held. Base is concurrency times multiplier; held are the
tasks that wait for their eta and must not take the place of those that could run. A change is
only remembered here; the loop sends it when it has nothing better to do, so that many changes
cost one message to the broker.
"""

from __future__ import annotations

from collections.abc import Callable

# AMQP carries the window in 16 bits; 0 would mean "no limit".
WINDOW_MAX = 65_535


class Prefetch:
    """One worker's window."""

    def __init__(self, concurrency: int, multiplier: int) -> None:
        self.concurrency = concurrency
        self.multiplier = multiplier
        self.held = 0
        self._sent: int | None = None

    @property
    def window(self) -> int:
        """How many unacknowledged messages the broker may leave with us; 0 is no limit."""
        if self.multiplier == 0:
            return 0
        return min(self.concurrency * self.multiplier + self.held, WINDOW_MAX)

    def forget_sent(self) -> None:
        """A new channel knows nothing of what was sent on the old one."""
        self._sent = None

    @property
    def is_due(self) -> bool:
        """Whether the broker does not know the window yet."""
        return self.window != self._sent

    def apply(self, send: Callable[[int], object]) -> None:
        """Tell the broker, if it does not know yet."""
        window = self.window
        if window != self._sent:
            send(window)
            self._sent = window
