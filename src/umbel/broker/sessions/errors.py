"""Why a message was not sent, where that is not a matter of a broken connection.

All are `OperationalError`s, as callers handle these already. None is tried again by itself: the
broker has understood, and trying again would only take longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from amqp.exceptions import MessageNacked
from kombu.exceptions import OperationalError

# The number of places in a batch that the text of an error names.
NAMED_MAX = 10


class ConnectionBlocked(OperationalError):
    """The broker is short of memory or disk space, and takes no messages."""


class NotTaken(OperationalError):
    """The broker did not take some of the messages of a batch; the connection is fine.

    `indexes` are their places in the batch. Of its first `written` messages all others were taken,
    and those behind were not sent.
    """

    def __init__(
        self, what: str, hint: str, indexes: Sequence[int], count: int, written: int
    ) -> None:
        named = ", ".join(str(index) for index in indexes[:NAMED_MAX])
        more = ", ..." if len(indexes) > NAMED_MAX else ""
        super().__init__(f"{len(indexes)} of {count} messages were {what}: {named}{more}; {hint}")
        self.indexes = list(indexes)
        self.written = written


class Nacked(NotTaken, MessageNacked):
    """The broker has refused messages (`basic.nack`): their queue is full, or it failed."""

    def __init__(self, indexes: Sequence[int], count: int, written: int) -> None:
        hint = (
            "a full queue with x-overflow=reject-publish does that: consume it, or let it be longer"
        )
        super().__init__("refused by the broker", hint, indexes, count, written)


class Unroutable(NotTaken):
    """Messages would have reached no queue, and were returned (`basic.return`)."""

    def __init__(
        self, indexes: Sequence[int], count: int, written: int, reason: str, to: tuple[str, str]
    ) -> None:
        hint = f"no queue is bound to exchange {to[0]!r} with routing key {to[1]!r}: declare one"
        super().__init__(f"returned ({reason})", hint, indexes, count, written)
