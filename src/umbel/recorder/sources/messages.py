"""What a source of events is, and the messages that it gives.

A message has a *token*, by which it is acknowledged when all that is in it is on disk. Until then
the broker keeps it, and gives it to another recorder, or again to this one, when this one is gone.
So every message comes at least once, and some come twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol


class Message(NamedTuple):
    """One message as it came; nothing in it has been looked at."""

    body: Any
    content_type: Any
    content_encoding: Any
    headers: Any
    token: Any  # None: there is nothing to acknowledge
    # What has an incarnation in it comes another way, too: only the rest is to be recorded.
    unnumbered_only: bool = False


class Source(Protocol):
    """Used by one thread. Whatever means a lost connection is raised as `ConnectionError`."""

    @property
    def dropped_count(self) -> int:
        """Messages that were there for us and are gone, as far as is known."""

    @property
    def is_exhausted(self) -> bool:
        """Whether the broker gives no more before something is acknowledged."""

    def open(self) -> None:
        """Connect, once over the list of brokers, and make what is needed there."""

    def poll(self, timeout_s: float) -> list[Message]:
        """The messages that have come; waits for the first, not longer than that."""

    def acknowledge(self, tokens: Iterable[Any]) -> None:
        """All of these are on disk. Tokens of a lost connection do no harm."""

    def idle(self) -> None:
        """Nothing can be taken now: say to the broker that we are still there."""

    def lag(self) -> int | None:
        """How many messages wait at the broker; None when it does not tell."""

    def hang_up(self) -> None:
        """The connection is lost; another `open` may follow."""

    def close(self) -> None:
        """Leave in order; what is not acknowledged is for others."""
