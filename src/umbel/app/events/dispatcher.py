"""Sending events: a bounded buffer, and a thread with a connection of its own that empties it.

`send` stamps an event and puts it into the buffer: it never waits and never fails, so that what is
told about the work does not hold the work up. What a worker tells of every task it makes as a form
(`wire.event_forms`), stamps itself, and gives to `keep`. The thread publishes what has gathered,
`task-*` events as lists, all others one by one, as peers expect them. Heartbeats come from the same
thread: a node whose loop is stalled is still there.

An event leaves the buffer when the broker has it (RabbitMQ confirms, Redis answers). When the
connection breaks in between, it is sent again: monitors may see an event twice, and know it by its
sequence number. While the broker is away the buffer fills; when it is full the oldest events are
dropped and counted, and the count travels in every heartbeat.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self, TypeGuard

from umbel.app.events.outlet import Outlet
from umbel.app.events.stamper import Event, Stamper, hours_west
from umbel.wire.event_forms import TaskForm

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

logger = logging.getLogger("umbel.events")

# So many task events go into one message, unless it gets too big (`outlet`). Some 100 KB: what is
# larger the allocator gives back to the system each time, and every page of it is made anew.
BATCH_MAX = 400
# What is urgent does not wait to gather company.
URGENT_GROUPS = frozenset({"worker"})
RETRY_MIN_S, RETRY_MAX_S = 0.2, 3.0
CLOSE_S = 5.0
JOIN_MIN_S = 0.3


class Dispatcher:
    """Sends the events of one node; safe to use from any thread.

    `groups` are the first words of the types that go out (`worker`, `task`); None is all of them.
    """

    def __init__(
        self,
        app: Umbel,
        hostname: str | None = None,
        *,
        groups: Iterable[str] | None = None,
        enabled: bool = True,
    ) -> None:
        self.app = app
        self.stamper = Stamper(hostname or app.origin, app.clock)
        self.groups: set[str] | None = None if groups is None else set(groups)
        self.enabled = enabled
        self.sent = 0  # events that the broker has
        self.lost = 0  # events that were dropped
        self._buffer: deque[Event | TaskForm] = deque()
        self._buffer_max = app.conf.event_buffer_max
        self._enough = self._buffer_max // 2  # so many wait for no more
        self._gather_s = app.conf.event_flush_interval
        self._changed = threading.Condition()
        self._urgent = False
        self._hurried = False
        self._told = False
        self._unsent = 0  # taken out of the buffer, not with the broker yet
        self._closing = False
        self._thread: threading.Thread | None = None
        self._outlet = Outlet(app)
        self._beat_s: float | None = None
        self._beat_at = 0.0
        self._crowd = 1.0
        self._beat_fields: Callable[[], dict[str, Any]] = dict
        self.on_connected: list[Callable[[], None]] = []

    @property
    def hostname(self) -> str:
        """The node that the events come from."""
        return self.stamper.hostname

    # -- what goes out -----------------------------------------------------------------

    def sends(self, group: str) -> bool:
        """Whether events of this group go out."""
        return self.enabled and (self.groups is None or group in self.groups)

    def enable_group(self, group: str) -> bool:
        """Send events of this group too; False when they were sent already."""
        if self.groups is None or group in self.groups:
            return False
        self.groups = {*self.groups, group}
        return True

    def disable_group(self, group: str, known: Iterable[str] = ("worker", "task")) -> bool:
        """Send no more events of this group; False when they were not sent anyway."""
        current = set(known) if self.groups is None else self.groups
        if group not in current:
            return False
        self.groups = current - {group}
        return True

    def enable(self) -> None:
        """Send events."""
        self.enabled = True

    def disable(self) -> None:
        """Send none, and make none up."""
        self.enabled = False

    def send(self, kind: str, /, *, event_clock: int | None = None, **fields: Any) -> None:
        """Tell something; what is not sent because its group is off costs nothing."""
        group = kind.partition("-")[0]
        if self.enabled and (self.groups is None or group in self.groups):
            self.put(kind, fields, event_clock, urgent=group in URGENT_GROUPS)

    def put(
        self, kind: str, fields: dict[str, Any], clock: int | None = None, *, urgent: bool = False
    ) -> Event | None:
        """Stamp an event and put it into the buffer, whatever its group; None after the end."""
        if self._closing:
            return None
        event = self.stamper.make(kind, fields, clock)
        self.keep(event, urgent)
        return event

    def keep(self, event: Event | TaskForm, urgent: bool = False) -> None:
        """Put an event that has its number into the buffer; after the end it is lost."""
        buffer = self._buffer
        buffer.append(event)
        count = len(buffer)
        # Once told, the thread looks into the buffer before it sleeps again.
        if urgent or not self._told or count == self._enough or count > self._buffer_max:
            self._attend(urgent or count >= self._enough)

    def _attend(self, urgent: bool) -> None:
        """Something is to be done about what was put into the buffer."""
        if self._closing:
            self._count_left()
            return
        self._drop_oldest()
        self._wake(urgent)

    def _count_left(self) -> None:
        with self._changed:
            self.lost += len(self._buffer)
            self._buffer.clear()

    def _drop_oldest(self) -> None:
        with self._changed:
            while len(self._buffer) > self._buffer_max:
                with contextlib.suppress(IndexError):
                    self._buffer.popleft()
                    self.lost += 1

    def _wake(self, urgent: bool) -> None:
        with self._changed:
            self._told = not self._closing
            self._urgent = self._urgent or urgent
            self._changed.notify_all()
        if self._thread is None:
            self.start()

    def hurry(self) -> None:
        """The broker is known to be there, or somebody waits: try now, not after the pause."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    # -- life --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to send; the first `send` does it too."""
        with self._changed:
            if self._thread is not None or self._closing:
                return
            self._thread = threading.Thread(
                target=self._run, name=f"umbel-events-{self.hostname}", daemon=True
            )
        self._thread.start()

    def beat(self, interval_s: float, fields: Callable[[], dict[str, Any]]) -> None:
        """Send a heartbeat every `interval_s` from now on; `fields` must be quick and safe."""
        with self._changed:
            self._beat_s, self._beat_fields = interval_s, fields
            self._beat_at = time.monotonic() + interval_s
            self._changed.notify_all()

    def beat_slower(self, times: float) -> None:
        """Make the interval so many times as long as it was said to be; at least once."""
        with self._changed:
            self._crowd = max(1.0, times)

    @property
    def beat_interval_s(self) -> float | None:
        """How long it is from one heartbeat to the next; None without any."""
        return None if self._beat_s is None else self._beat_s * self._crowd

    def stop_beating(self) -> None:
        """No more heartbeats."""
        with self._changed:
            self._beat_s = None

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until the broker has everything; False when it has not in that time."""
        deadline = time.monotonic() + timeout_s
        self._wake(urgent=True)
        self.hurry()
        with self._changed:
            while self._buffer or self._unsent:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._thread is None or not self._thread.is_alive():
                    return False
                self._changed.wait(min(left_s, 0.1))
        return True

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Flush, as long as it takes or so long, and end; what is left then counts as lost."""
        deadline = time.monotonic() + timeout_s
        if self._thread is not None and not self._closing:
            self.flush(timeout_s)
        with self._changed:
            self._closing, self._told = True, False
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(JOIN_MIN_S, deadline - time.monotonic()))
        self._count_left()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while not self._closing:
            try:
                self._turn()
                failures = 0
            except Exception as exc:  # noqa: BLE001 - every transport has its own errors
                self._outlet.close(lost=True)
                failures += 1
                say = logger.warning if failures == 1 else logger.debug
                say("events could not be sent (%s: %s); trying again", type(exc).__name__, exc)
                ceiling_s = min(RETRY_MIN_S * 2 ** min(failures - 1, 8), RETRY_MAX_S)
                self._pause(random.uniform(ceiling_s / 2, ceiling_s))  # noqa: S311 - no secret
        self._outlet.close()

    def _turn(self) -> None:
        if not self._outlet.is_open and self.enabled:
            self._outlet.open()
            for call in self.on_connected:
                call()
        self._wait()
        self._beat_if_due()
        self._publish(len(self._buffer))
        with self._changed:
            self._changed.notify_all()  # whoever waits in flush

    def _wait(self) -> None:
        """Until there is something to send, and then a little for more to gather."""
        with self._changed:
            self._told = False
            if not self._buffer and not self._closing:
                self._changed.wait(self._idle_s())
            self._told = not self._closing  # nobody has to wake us before we look again
            if self._buffer and not self._urgent and not self._closing:
                self._changed.wait(self._gather_s)
            self._urgent = False

    def _idle_s(self) -> float:
        if self._beat_s is None:
            return 1.0
        return max(0.0, min(1.0, self._beat_at - time.monotonic()))

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._closing and (left_s := deadline - time.monotonic()) > 0:
                if self._hurried:  # now, or during the try that has just failed
                    self._hurried = False
                    return
                self._changed.wait(left_s)

    def _beat_if_due(self) -> None:
        now = time.monotonic()
        if self._beat_s is None or now < self._beat_at:
            return
        self._beat_at = now + self._beat_s * self._crowd
        self.stamper.utcoffset = hours_west()
        if self.sends("worker"):
            self.put("worker-heartbeat", self._beat_fields())

    def _publish(self, count: int) -> None:
        """So many events; what comes meanwhile gathers, or every message would carry a few."""
        while count > 0 and not self._closing:
            count -= self._publish_some()

    def _publish_some(self) -> int:
        """One message; the number of events in it."""
        batch = self._take()
        if not batch:
            return self._buffer_max  # all of it was dropped meanwhile
        try:
            self._outlet.publish(batch)
        except BaseException:
            with self._changed:
                self._buffer.extendleft(reversed(batch))
                self._unsent = 0
            self._drop_oldest()
            raise
        with self._changed:
            self.sent += len(batch)
            self._unsent = 0
        return len(batch)

    def _take(self) -> list[Event | TaskForm]:
        """The next events that may go in one message: many of tasks, or one other."""
        buffer = self._buffer
        with self._changed:
            if buffer and _goes_alone(first := buffer[0]):
                batch = [buffer.popleft()]
                if "lost" in first:
                    first["lost"] = self.lost  # what was dropped since it was made, too
            else:
                batch = [buffer.popleft() for _ in range(min(len(buffer), BATCH_MAX))]
                if dict in map(type, batch):  # rare: what every task tells are forms
                    self._put_back(batch)
            self._unsent = len(batch)
        return batch

    def _put_back(self, batch: list[Event | TaskForm]) -> None:
        """Leave in the buffer what may not go with the first ones."""
        for place, event in enumerate(batch):
            if _goes_alone(event):
                self._buffer.extendleft(reversed(batch[place:]))
                del batch[place:]
                return


def _goes_alone(event: Event | TaskForm) -> TypeGuard[Event]:
    return type(event) is dict and not event["type"].startswith("task-")
