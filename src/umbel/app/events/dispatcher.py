"""Sending events: a bounded buffer, and a thread with a connection of its own that empties it.

`send` stamps an event and puts it into the buffer: it never waits, and raises only for what no
broker can take, so that what is told about the work does not hold the work up. What a worker tells
of every task it makes as a form (`wire.event_forms`), stamps itself, and gives to `keep`. The
thread publishes what has gathered, `task-*` events as lists, all others one by one, as peers expect
them. Heartbeats come from the same thread: a node whose loop is stalled is still there.

An event leaves the buffer when the broker has it (RabbitMQ confirms, Redis answers). When the
connection breaks in between, it is sent again: monitors may see an event twice, and know it by its
sequence number. While the broker is away the buffer fills; when it is full the oldest events are
dropped and counted, and the count travels in every heartbeat. What is given to a closed dispatcher
counts as lost, too.

Names and arguments are those of Celery's dispatcher. As everything goes through the buffer and is
sent again until the broker has it, `retry` and `retry_policy` change nothing about `send`, whatever
they are. They matter to `publish`, which uses a producer of the caller on the caller's thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeGuard

from kombu import Connection, Producer

from umbel.app.events.publisher import Publisher, publish_with
from umbel.app.events.stamper import Event, Stamper, hours_west
from umbel.broker.sessions.permanent import described
from umbel.broker.sessions.session import Outage
from umbel.cluster.backoff import Backoff
from umbel.wire.event_forms import TaskForm

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

logger = logging.getLogger("umbel.events")

# So many task events go into one message, unless that gets too big (`publisher`). Some 100 KB: what
# is larger the allocator gives back to the system each time, and every page of it is made anew.
BATCH_MAX = 400
# What is urgent does not wait to gather company.
URGENT_GROUPS = frozenset({"worker"})
RETRY = Backoff(0.2, 3.0)
CLOSE_S = 5.0
JOIN_MIN_S = 0.3
# The longest routing key that AMQP can carry.
SHORT_BYTES_MAX = 255

Factory = Callable[..., Event]


class Dispatcher:
    """Sends the events of one node; safe to use from any thread.

    `groups` are the first words of the types that go out (`worker`, `task`); None is all of them.
    """

    def __init__(
        self,
        app: Umbel,
        hostname: str | None = None,
        *,
        connection: Connection | None = None,
        groups: Iterable[str] | None = None,
        enabled: bool = True,
        buffer_while_offline: bool = True,
        stamper: Stamper | None = None,
    ) -> None:
        """Without a `stamper` the events have a series of numbers of their own.

        `connection` says where to connect; it is not used itself. `buffer_while_offline` matters
        to `publish` only: `send` always buffers.
        """
        if not isinstance(hostname, str | None):
            raise TypeError(f"hostname must be a name such as 'w1@host', not {hostname!r}")
        if isinstance(groups, str):
            raise TypeError(f"groups must be a list of names such as ['task'], not {groups!r}")
        self.app = app
        self.stamper = stamper or app.events.new_stamper(hostname)
        self.groups: set[str] | None = None if groups is None else set(groups)
        self.enabled = enabled
        self.buffer_while_offline = buffer_while_offline
        self.on_enabled: set[Callable[[], object]] = set()
        self.on_disabled: set[Callable[[], object]] = set()
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
        self._publisher = Publisher(app, connection)
        self._outage = Outage(logger, "send the events in the buffer", RETRY)
        self._beat_s: float | None = None
        self._beat_at = 0.0
        self._crowd = 1.0
        self._beat_fields: Callable[[], dict[str, Any]] = dict
        self.on_connected: list[Callable[[], None]] = []

    @property
    def hostname(self) -> str:
        """The node that the events come from."""
        return self.stamper.hostname

    @property
    def headers(self) -> dict[str, str]:
        """The headers of its messages, but for signatures."""
        return {"hostname": self.hostname}

    @property
    def producer(self) -> None:
        """None: events go out on a connection of the dispatcher's thread; see `publish`."""

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more events."""
        return self._closing

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
        """Send events, and call `on_enabled`."""
        self.enabled = True
        for call in list(self.on_enabled):
            call()

    def disable(self) -> None:
        """Send none, and make none up; calls `on_disabled` if events were sent before."""
        if self.enabled:
            self.enabled = False
            for call in list(self.on_disabled):
                call()

    def send(
        self,
        type: str,  # noqa: A002 - Celery's name
        blind: bool = False,
        utcoffset: Callable[[], float] | float | None = None,
        retry: bool = False,
        retry_policy: Mapping[str, Any] | None = None,
        Event: Factory | None = None,  # noqa: N803 - Celery's name
        **fields: Any,
    ) -> None:
        """Put an event into the buffer; what is not sent because its group is off costs nothing.

        A `blind` event carries no clock and does not move it. `utcoffset` gives the hours that the
        sender lies west of UTC. `Event(type, **fields)` makes the event of its type and all its
        fields. `retry` and `retry_policy` change nothing: the event stays in the buffer until the
        broker has it, or until it is the oldest in a full buffer.
        """
        group = type.partition("-")[0]
        if self.enabled and (self.groups is None or group in self.groups):
            event = self._made(type, fields, blind, utcoffset, Event)
            self.keep(event, group in URGENT_GROUPS)

    def publish(
        self,
        type: str,  # noqa: A002 - Celery's name
        fields: Mapping[str, Any],
        producer: Producer | None,
        blind: bool = False,
        Event: Factory | None = None,  # noqa: N803 - Celery's name
        *,
        utcoffset: Callable[[], float] | float | None = None,
        retry: bool = False,
        retry_policy: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish an event now with this producer, also when its group is off, or after the end.

        What cannot be published goes into the buffer, or is raised if `buffer_while_offline` is
        off. Without a producer the event goes into the buffer at once. See `send` for the options;
        with `retry` the producer tries again, as `retry_policy` says.
        """
        if not isinstance(producer, Producer | None):
            raise TypeError(f"producer must be a kombu Producer or None, not {producer!r}")
        event = self._made(type, fields, blind, utcoffset, Event)
        if producer is not None:
            try:
                publish_with(producer, event, self.app, retry, retry_policy)
            except Exception as exc:
                if not self.buffer_while_offline:
                    with self._changed:
                        self.lost += 1
                    raise
                logger.debug("%s waits in the buffer: %s", type, described(exc))
            else:
                with self._changed:
                    self.sent += 1
                return
        self.keep(event, urgent=True)

    def _made(
        self,
        kind: str,
        fields: Mapping[str, Any],
        blind: bool,
        utcoffset: Callable[[], float] | float | None,
        factory: Factory | None,
    ) -> Event:
        if utcoffset is not None:
            fields = {**fields, "utcoffset": utcoffset() if callable(utcoffset) else utcoffset}
        event = self.stamper.make(kind, fields, blind=blind)
        try:
            if factory is not None:
                event = dict(factory(event.pop("type"), **event))
            _check(event)
        except Exception:
            with self._changed:
                self.lost += 1  # it has a number
            raise
        return event

    def put(
        self, kind: str, fields: dict[str, Any], clock: int | None = None, *, urgent: bool = False
    ) -> Event | None:
        """Stamp an event and put it into the buffer, whatever its group; None after the end."""
        event = self.stamper.make(kind, fields, clock)
        self.keep(event, urgent)
        return None if self._closing else event

    def extend_buffer(self, other: Dispatcher) -> None:
        """Put what waits in the buffer of another dispatcher into this one's, too."""
        for event in list(other._buffer):
            self.keep(event)

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
            thread = threading.Thread(
                target=self._run, name=f"umbel-events-{self.hostname}", daemon=True
            )
            thread.start()  # under the lock: nobody may join a thread that was not started
            self._thread = thread

    def beat(self, interval_s: float, fields: Callable[[], dict[str, Any]]) -> None:
        """Send a heartbeat every `interval_s` from now on; `fields` must be quick and safe."""
        with self._changed:
            self._beat_s, self._beat_fields = interval_s, fields
            self._beat_at = time.monotonic() + interval_s
            self._changed.notify_all()

    def beat_slower(self, times: float) -> None:
        """Make the interval this many times as long as it was set to, at least once.

        One that becomes shorter is kept from now on: whatever tells it may be heard before.
        """
        with self._changed:
            self._crowd = max(1.0, times)
            if self._beat_s is not None:
                within_s = self._beat_s * self._crowd
                self._beat_at = min(self._beat_at, time.monotonic() + within_s)

    @property
    def beat_interval_s(self) -> float | None:
        """How long it is from one heartbeat to the next; None without any."""
        return None if self._beat_s is None else self._beat_s * self._crowd

    def stop_beating(self) -> None:
        """No more heartbeats."""
        with self._changed:
            self._beat_s = None

    def flush(
        self,
        errors: bool = True,
        groups: bool = True,
        *,
        timeout_s: float = CLOSE_S,
    ) -> bool:
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
            self.flush(timeout_s=timeout_s)
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
        while not self._closing:
            try:
                self._turn()
                self._outage.over()
            except Exception as exc:  # noqa: BLE001 - every transport has its own errors
                self._publisher.close(lost=True)
                self._pause(self._outage.failure(exc))
        self._publisher.close()

    def _turn(self) -> None:
        if not self._publisher.is_open and self.enabled:
            self._publisher.open()
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
            self._publisher.publish(batch)
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


class SharedDispatcher(Dispatcher):
    """A dispatcher that several users of one process share: a `with` block flushes it only."""

    def __exit__(self, *_: object) -> None:
        self.flush()


def _check(event: Event) -> None:
    """Refuse what no broker can take: it would be tried again for ever, and hold up all others."""
    for name in ("type", "hostname"):
        text = event.get(name)
        if not isinstance(text, str) or not 0 < len(text.encode()) <= SHORT_BYTES_MAX:
            raise TypeError(
                f"{name} of an event must be a text of 1 to {SHORT_BYTES_MAX} bytes, not {text!r}"
            )


def _goes_alone(event: Event | TaskForm) -> TypeGuard[Event]:
    return type(event) is dict and not event["type"].startswith("task-")
