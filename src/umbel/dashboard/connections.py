"""The connections of a dashboard: bounded in number and in time, whoever is at their other end.

Everybody who can reach the port can open connections, long before a login. So

- at most `connections_max` are open, well below the limit of open files. Above that some are
  dropped: first those that wait for a request, then those that answer somebody who has not logged
  in, of the address that has the most of them, the oldest first;
- a request head must be there `head_s` after the connection, or after the first byte of a further
  request; between requests a connection may be idle for `idle_s`;
- an answer that is not read for `write_s` ends with its connection. (Bodies are the guard's.)

Should files run out all the same, waiting connections are dropped, and the log gets one line a
minute.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import resource
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeVar

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("umbel.dashboard")

CONNECTIONS_MAX: Final = 500
# Files for everything else: the broker, tables, the program itself.
FILES_KEPT: Final = 128
BACKLOG_MAX: Final = 128
HEAD_BYTES_MAX: Final = 32_768
LOG_S: Final = 60.0

WAITS, ANSWERS, ANSWERS_KNOWN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Limits:
    """How many connections there may be, and how long each may take."""

    connections_max: int = CONNECTIONS_MAX
    backlog: int = BACKLOG_MAX
    head_s: float = 10.0
    idle_s: float = 30.0
    write_s: float = 30.0

    @classmethod
    def of_process(cls) -> Limits:
        """What the limit of open files leaves; connections are accepted `backlog` at a time."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return cls()
        spare = max(soft - FILES_KEPT, 32)
        backlog = min(BACKLOG_MAX, spare // 4)
        return cls(connections_max=min(CONNECTIONS_MAX, spare - backlog), backlog=backlog)


class Guest(Protocol):
    """Something that takes a place which others may want."""

    @property
    def rank(self) -> int:
        """Who has a lower one goes first."""

    @property
    def address(self) -> Hashable:
        """Whose it is."""

    @property
    def since_s(self) -> float:
        """When it took its place."""


G = TypeVar("G", bound=Guest)


def to_drop(guests: Iterable[G], count: int) -> list[G]:
    """Those of the lowest rank that go first: of the address that has most of them, the oldest."""
    newest_first = sorted(guests, key=lambda one: -one.since_s)
    lowest = min((one.rank for one in newest_first), default=0)
    groups: dict[Hashable, list[G]] = {}
    for one in newest_first:
        if one.rank == lowest:
            groups.setdefault(one.address, []).append(one)
    heap = [(-len(group), number, group) for number, group in enumerate(groups.values())]
    heapq.heapify(heap)
    chosen: list[G] = []
    while heap and len(chosen) < count:
        _, number, group = heapq.heappop(heap)
        chosen.append(group.pop())
        if group:
            heapq.heappush(heap, (-len(group), number, group))
    return chosen


class Table:
    """All connections of one server; used on its loop only."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.clock = clock
        self.connections: set[Connection] = set()
        self._log_at = 0.0

    def add(self, connection: Connection) -> None:
        """Take a connection; where there are too many, make room for more than this one."""
        self.connections.add(connection)
        if len(self.connections) > self.limits.connections_max:
            self._make_room(max(1, self.limits.connections_max // 20), connection)

    def sweep(self) -> None:
        """Drop those whose time is over."""
        now = self.clock()
        for connection in [one for one in self.connections if one.deadline_s <= now]:
            connection.drop()

    def out_of_files(self) -> None:
        """No connection can be accepted: let some go."""
        now = self.clock()
        if now >= self._log_at:
            self._log_at = now + LOG_S
            logger.error(
                "No connection can be accepted: too many open files. %d connections are open; "
                "those without a request are dropped. Raise the limit (ulimit -n).",
                len(self.connections),
            )
        self._make_room(max(1, len(self.connections) // 4))

    def _make_room(self, count: int, newest: Connection | None = None) -> None:
        others = [one for one in self.connections if one is not newest]
        for connection in to_drop(others, count):
            connection.drop()


class Connection(H11Protocol):
    """One connection, with deadlines."""

    table: ClassVar[Table]  # of a subclass for each server: see `protocol_for`

    # -- as a guest --------------------------------------------------------------------

    since_s = 0.0
    _request_until_s = _write_until_s = float("inf")
    _reads_head = False

    @property
    def rank(self) -> int:
        """Waiting, answering, or answering somebody who has logged in."""
        if not self._answers:
            return WAITS
        visit = self.scope["state"].get("visit")
        return ANSWERS_KNOWN if visit is not None and visit.identity.is_known else ANSWERS

    @property
    def address(self) -> Hashable:
        """Of the peer."""
        return self.client[0] if self.client else ""

    @property
    def deadline_s(self) -> float:
        """When its time is over: nobody reads an answer, or a request does not come."""
        if self._answers:
            return self._write_until_s
        return min(self._request_until_s, self._write_until_s)

    @property
    def _answers(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def drop(self) -> None:
        """End it now: what was not sent is lost."""
        self.table.connections.discard(self)
        self.transport.abort()

    # -- as uvicorn calls it -----------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Somebody has connected, and has some seconds to send a request."""
        super().connection_made(transport)
        self._reads_head = True
        self._wait(self.table.limits.head_s)
        self.table.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self.table.connections.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some of a request has come; the head of one that has begun must end in time."""
        if not self._answers and not self._reads_head:
            self._reads_head = True
            self._wait(self.table.limits.head_s)
        super().data_received(data)

    def on_response_complete(self) -> None:
        """The next request may come, or is there already."""
        self._reads_head = False
        self._wait(self.table.limits.idle_s)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Nobody reads what is sent."""
        super().pause_writing()
        self._write_until_s = self.table.clock() + self.table.limits.write_s

    def resume_writing(self) -> None:
        """Somebody reads again."""
        super().resume_writing()
        self._write_until_s = float("inf")

    def _wait(self, patience_s: float) -> None:
        self.since_s = self.table.clock()
        self._request_until_s = self.since_s + patience_s


def protocol_for(table: Table) -> type[asyncio.Protocol]:
    """The protocol of a server whose connections are in this table."""
    return type("BoundConnection", (Connection,), {"table": table})


def watch_accepting(loop: asyncio.AbstractEventLoop, table: Table) -> None:
    """Report to the table when files run out; asyncio logs that hundreds of times a second."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), OSError) and "accept" in context["message"]:
            table.out_of_files()
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


class Sparing(logging.Filter):
    """Lets a message that anybody can provoke pass once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Errors always pass: they are ours."""
        if record.levelno != logging.WARNING:
            return True
        now = self._clock()
        if now < self._next_at.get(str(record.msg), 0.0):
            return False
        self._next_at[str(record.msg)] = now + LOG_S
        return True
