"""The prefetch window: how many messages a worker holds at once.

It is computed, never nudged: `max(multiplier, base - debt) + held + parked + adopted`.

- *base* is concurrency times multiplier.
- *debt* are the tasks that still run from before a lost connection, times the multiplier: the
  broker will deliver their messages again, so the worker asks for less until they have ended.
- *adopted* are those of them whose messages have come again: each takes a place until it has ended.
- *held* are the tasks that wait for their eta, *parked* those that wait for a rate limit. Neither
  may take the place of tasks that could run. Held ones are counted up to `held_max`.

Every term is a count of things that exist, so the window returns to base by itself when they are
gone. A change is only noticed here; the loop sends it when it is idle, so that many changes cost
one message to the broker.

AMQP carries the window in 16 bits. Where it is wider the worker gives its consumers *credit*
instead: the channel has no limit, and the consumers are replaced by new ones with a limit of their
own, for which messages that came before do not count. Their limit is `CREDIT_STEP` more than the
worker can use; when they have spent that on messages that wait, and the worker has fewer messages
to run than it wants, they are replaced again. So no number of waiting messages keeps the others
from running, and at most twice the base and `CREDIT_STEP` messages are taken ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# What AMQP can express; 0 means "no limit".
AMQP_WINDOW_MAX = 65_535
# A larger step replaces consumers less often, and takes more messages ahead of other workers.
CREDIT_STEP = 500


@dataclass(slots=True, frozen=True)
class Limit:
    """What the broker is asked for; a count of 0 is no limit."""

    count: int
    per_consumer: bool = False  # and for new consumers; otherwise for the channel


class Waiting(Protocol):
    """A message that waits in the worker."""

    era: int


class Prefetch:
    """One worker's window.

    `window_max` is the widest window that the broker can be asked for; `count_taken` counts the
    messages that the worker has, whether they wait or not.
    """

    def __init__(
        self,
        concurrency: int,
        multiplier: int,
        held_max: int | None = None,
    ) -> None:
        self.concurrency = concurrency
        self.multiplier = multiplier
        self.held_max = held_max
        self.window_max: int | None = None
        self.credit_step = CREDIT_STEP
        self.held = 0
        self.parked = 0
        self.debtors = 0
        self.adopted = 0
        self._sent: int | None = None
        self.count_taken: Callable[[], int] = int
        # While consumers have credit, how many of the messages that they have brought wait. Those
        # of an earlier *era* came from consumers that have been replaced.
        self.gives_credit = False
        self._era = 0
        self._era_waiting = 0

    @property
    def base(self) -> int:
        """The window of a worker that holds nothing back and owes nothing."""
        return self.concurrency * self.multiplier

    @property
    def own(self) -> int:
        """The part of the window that is for messages which can run."""
        return max(self.multiplier, self.base - self.debtors * self.multiplier)

    @property
    def window(self) -> int:
        """How many unacknowledged messages the broker may leave with us; 0 is no limit."""
        if self.multiplier == 0:
            return 0
        held = self.held if self.held_max is None else min(self.held, self.held_max)
        return self.own + held + self.parked + self.adopted

    # -- messages that wait --------------------------------------------------------------

    def hold(self, message: Waiting) -> None:
        """A message waits for its eta."""
        self.held += 1
        self._set_aside(message)

    def unhold(self, message: Waiting) -> None:
        """A message that was held waits no longer."""
        self.held -= 1
        self._take_up(message)

    def park(self, message: Waiting) -> None:
        """A message waits for a rate limit."""
        self.parked += 1
        self._set_aside(message)

    def unpark(self, message: Waiting) -> None:
        """A message that was parked waits no longer."""
        self.parked -= 1
        self._take_up(message)

    def _set_aside(self, message: Waiting) -> None:
        message.era = self._era
        self._era_waiting += 1

    def _take_up(self, message: Waiting) -> None:
        if message.era == self._era:
            self._era_waiting -= 1

    # -- what the broker knows -----------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the broker has to be asked for another window."""
        sent = self._sent
        if sent is None or not self.gives_credit:
            return self.window != sent
        if not self._needs_credit():
            return True
        if self.held_max is not None and self.held >= self.held_max:
            return False
        own = self.own
        if sent - self._era_waiting - self.adopted >= own:
            return False
        return self.count_taken() - self.held - self.parked < own

    def _needs_credit(self) -> bool:
        if self.window_max is None or self.own + self.credit_step > self.window_max:
            return False
        # Once it is given, not until the window is clearly narrower: each change costs consumers.
        surplus = self.credit_step if self.gives_credit else 0
        return self.window + surplus > self.window_max

    def forget_sent(self) -> None:
        """A new channel knows nothing of what was sent on the old one."""
        self._sent, self.gives_credit = None, False

    def apply(self, send: Callable[[Limit], object]) -> None:
        """Ask the broker for the window, if it does not know it yet."""
        if not self.is_due:
            return
        self.gives_credit = self._needs_credit()
        if self.gives_credit:
            # Before it is sent: messages of new consumers may arrive while the broker is asked.
            self._era += 1
            self._era_waiting, self._sent = 0, None
            credit = self.own + self.credit_step
            send(Limit(credit, per_consumer=True))
            self._sent = credit
        else:
            window = self.window
            send(Limit(window if self.window_max is None else min(window, self.window_max)))
            self._sent = window
