"""What a consumer has asked for, and what it owes the server; outlives connections.

Every tag is the ledger's name and a number, and the numbers of a request are reserved before it
is sent. So whatever happened to a request whose answer did not come, the server can be asked for
exactly those tags: what is noted under them was taken by this consumer and never arrived.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_counter = itertools.count(1)

# A sorted set with members up to 64 bytes is a plain list on the server while it is short, which it
# goes through from one end for every note; with longer ones it is a tree from the beginning.
_TAG_BYTES = 65


class Arrival(NamedTuple):
    """A message that was taken and is not delivered yet."""

    tag: str
    queue: str
    key: str  # of its list, with the prefix of all keys
    raw: bytes


class Return(NamedTuple):
    """A message on its way back: RPUSH puts it before all others of its list, LPUSH behind."""

    tag: str
    key: str
    command: str
    raw: bytes


@dataclass(slots=True)
class Asked:
    """A request whose answer has not come."""

    kind: str  # of `fetching`
    at: float
    first: int = 0
    count: int = 0
    acks: list[str] = field(default_factory=list)
    requests: Any = None  # whose lists are meant
    answers_left: int = 1


class Ledger:
    """Of one consumer, over all of its connections."""

    def __init__(self) -> None:
        name = f"{uuid.uuid4().hex}.{os.getpid()}.{next(_counter)}"
        self.prefix = name.ljust(_TAG_BYTES - 13, ".") + ":"
        self.number = 1
        self.asked: deque[Asked] = deque()
        self.arrived: deque[Arrival] = deque()
        self.acks: list[str] = []  # to be sent
        self.returns: list[Return] = []  # to be sent, in this order
        self.missing: list[str] = []  # tags under which something may be noted that is not here
        self.fence: list[str] = []  # what names the connection on which the last request went out

    def reserve(self, count: int) -> int:
        """The first of so many numbers, which nobody gets again."""
        first, self.number = self.number, self.number + count
        return first

    def tag(self, number: int) -> str:
        """The tag of this number, as the server writes it; they sort as the numbers do."""
        return f"{self.prefix}{number:012d}"

    def lost(self) -> list[str]:
        """The connection is gone: what to ask the next one for, until that has answered.

        Acknowledgements that were on their way are to be sent again.
        """
        self.missing += [arrival.tag for arrival in self.arrived]
        unsure: list[str] = []
        for asked in self.asked:
            unsure += asked.acks
            self.missing += [self.tag(asked.first + n) for n in range(asked.count)]
        self.acks[:0] = unsure
        self.asked.clear()
        self.arrived.clear()
        return self.missing

    @property
    def pending(self) -> int:
        """Messages that are coming: asked for, or here and not delivered."""
        return len(self.arrived) + sum(asked.count for asked in self.asked)
