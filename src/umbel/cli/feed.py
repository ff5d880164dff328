"""Events for the verbs that follow a cluster: received in a thread, taken by whoever shows them.

A terminal that is slow, or a pipe nobody reads, must not hold up the connection: between the two
stands a bounded buffer. When it is full the oldest event goes and is counted.

The first connection has to work, else the command ends with one line; later breaks are the
receiver's business, which connects again by itself. `condition` says so in the meantime.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from umbel.app.events.receiver import Receiver
from umbel.broker.sessions.connections import is_embedded, masked
from umbel.broker.sessions.session import opened
from umbel.cli.errors import reaching
from umbel.cli.plain import plain
from umbel.wire.events import Event
from umbel.wire.redaction import by_name, redact_event

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

BUFFER_MAX = 50_000
BEGIN_S, TURN_S = 10.0, 0.05
END_S = 3.0
GONE = "the broker is gone: reconnecting"


def place(app: Umbel) -> str:
    """Where the application's events come from, as it may be shown."""
    return "the embedded broker" if is_embedded(app.read_url) else masked(app.read_url)


class Feed:
    """The events of an application's broker, inside a `with` statement."""

    def __init__(self, app: Umbel, *, buffer_max: int = BUFFER_MAX) -> None:
        self._app = app
        self._rules = by_name(app.conf.task_redact_names)
        self._buffer: deque[Event] = deque()
        self._buffer_max = buffer_max
        self._news = threading.Condition()
        self._failure: BaseException | None = None
        self._receiver = Receiver(app, handlers={"*": self._put})
        self._thread = threading.Thread(target=self._run, name="umbel-events", daemon=True)
        self.dropped = 0

    def __enter__(self) -> Self:
        with reaching(self._app, self._app.read_url):
            opened(self._app.connection()).close()
        self._thread.start()
        try:
            until_s = time.monotonic() + BEGIN_S
            while not self._receiver.wait_ready(TURN_S) and time.monotonic() < until_s:
                self._check()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._receiver.close()
        self._thread.join(END_S)

    # -- what has come

    def take(self, timeout_s: float) -> Event | None:
        """The next event, or None when none came in time."""
        with self._news:
            if not self._buffer:
                self._check()
                self._news.wait(timeout_s)
            return self._buffer.popleft() if self._buffer else None

    def drain(self, count_max: int) -> list[Event]:
        """What has come since, at most so many; never raises."""
        with self._news:
            return [self._buffer.popleft() for _ in range(min(count_max, len(self._buffer)))]

    # -- how it stands

    @property
    def condition(self) -> str:
        """How it stands with the broker; empty when all is well."""
        if self._failure is not None:
            return plain(f"stopped: {type(self._failure).__name__}: {self._failure}")
        return "" if self._receiver.wait_ready(0) else GONE

    @property
    def refused(self) -> Mapping[str, int]:
        """What came and was no event, by reason."""
        return dict(self._receiver.counts)

    @property
    def missing(self) -> int:
        """How many events never came, by their sequence numbers."""
        return self._receiver.sequences.missing_count

    @property
    def missing_by_node(self) -> Mapping[str, int]:
        """The same, as far as it is known whose they were."""
        found: dict[str, int] = {}
        for (node, _), ranges in self._receiver.gaps.items():
            found[node] = found.get(node, 0) + sum(last - first + 1 for first, last in ranges)
        return found

    # -- the thread

    def _run(self) -> None:
        try:
            self._receiver.capture()
        except BaseException as exc:  # noqa: BLE001 - told where the events are taken
            with self._news:
                self._failure = exc
                self._news.notify_all()

    def _put(self, event: Event) -> None:
        redact_event(event, self._rules)
        with self._news:
            if len(self._buffer) >= self._buffer_max:
                self._buffer.popleft()
                self.dropped += 1
            self._buffer.append(event)
            self._news.notify()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
