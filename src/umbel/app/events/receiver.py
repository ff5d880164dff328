"""Receiving events: everything that nodes and clients tell, from queues of one's own.

Two exchanges are heard: the one that Celery's nodes use too, and Umbel's own (`umbelev`), so that
the sequence numbers of a node have no holes where it told something to its own kind only.

A `Receiver` opens nothing until it captures. `capture` hands every event to the handler of its
type, or to that of `*`; `itercapture` yields them too. When the connection breaks, it is made anew,
with growing pauses; what was sent meanwhile is lost, and shows as gaps in the sequence numbers.

One barrier: whatever comes from the broker is an event, or is counted by its reason in `counts`,
logged the first time, and dropped. Pickle is never read. A handler that fails is logged and
counted, and the next event follows; it ends the capture by raising `StopCapture`.

Clocks. Every event that is handed on has a clock, and one that was sent moves the application's
clock. One that is too far ahead to be true is refused (`clock-jump`). An event without a clock gets
clock 0, which no event is sent with: it stands where the recorder, the pipeline and every other
receiver put it. Clients that hear nobody have clocks of their own that mean nothing here: a
`task-sent` gets clock 0 too, before everything that became of the task, unless it says that its
clock is in step (`sync`). The receiver's own clock would not do: it may be ahead of the worker's,
and then the task would seem to be sent after it ran; and two receivers would disagree.

Times. `timestamp` is Unix time, the same in every time zone, and is left as it is. Celery's
receivers shift it by the difference of the `utcoffset`s, hours away from when it was; `utcoffset`
tells what the clock on the sender's wall shows, nothing more. `local_received` is the Unix time
of receipt.

Sequence numbers. Umbel's senders number their events, so `gaps` tells which ones did not come; it
is kept only where all events are asked for. Events that come twice are counted and handed on: a
fold does not mind, and a forged number must not hide an event.

Without a `with` statement a capture opens a connection and closes it when it ends. Inside of one
the connection stays open, and what arrives between two captures belongs to the next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from kombu import Connection

from umbel.app.events.subscription import Subscription
from umbel.cluster.clock import CLOCK_JUMP, Clock
from umbel.cluster.sequences import Key, Range, Sequences, key_of
from umbel.wire.content import JSON, accept_set
from umbel.wire.events import Event, read

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

logger = logging.getLogger("umbel.events")

# Why something is refused, besides the reasons of `wire.events`.
UNREADABLE: Final = "unreadable"
UNFORESEEN: Final = "unforeseen"

# How often a quiet receiver looks whether it should end.
TURN_S = 0.2
# No more is read from the broker while so many events wait to be handled.
WAITING_MAX = 1_000
# So many kinds of failures of handlers are logged with their traceback.
FAILURE_KINDS_MAX = 100

Handler = Callable[[Event], Any]


class StopCapture(Exception):
    """Raised by a handler that has seen enough: the capture ends in order."""


class Receiver:
    """See the module's text. One capture at a time; `stop` and `close` from any thread."""

    def __init__(
        self,
        app: Umbel,
        *,
        connection: Connection | None = None,
        handlers: Mapping[str, Handler] | None = None,
        types: Collection[str] | None = None,
        routing_key: str = "#",
        state: Any = None,
        wakeup: bool = True,
        accept: Iterable[str] | None = None,
        clock: Clock | None = None,
        **queue: Any,
    ) -> None:
        """`connection` says where to connect; it is not used itself.

        `types` are the only ones that are handed on, and that count as captured; None is all.
        `state` gets every event that is handed on, before the handlers. `accept` names the
        serializers that are read; JSON always is. `queue` are options of `Subscription`.
        """
        if handlers is not None and not isinstance(handlers, Mapping):
            raise TypeError(
                "handlers must be a mapping of event types to functions, such as "
                f"{{'*': print}}, not {handlers!r}"
            )
        self.app = app
        self.handlers: dict[str, Handler] = dict(handlers or {})
        self.types = None if types is None else frozenset(types)
        self.routing_key = routing_key
        self.state = state
        self.wakeup = wakeup
        self.clock = app.clock if clock is None else clock
        self.accept = (app.accept if accept is None else accept_set(accept)) | {JSON}
        self.counts: Counter[str] = Counter()
        self.failed_count = 0  # how often a handler, or the state, failed
        self.sequences = Sequences()
        self._waiting: deque[Event] = deque()
        self._subscription = Subscription(
            app,
            self._on_message,
            self._on_rubbish,
            connection=connection,
            routing_key=routing_key,
            own=True,
            **queue,
        )
        self._stopping = self._subscription.stopping
        self._capturing = threading.Lock()
        self._stays_open = False
        self._failure_kinds: set[tuple[str, str]] = set()

    # -- capturing ---------------------------------------------------------------------

    def capture(
        self,
        limit: int | None = None,
        timeout: float | None = None,
        wakeup: bool | None = None,
        *,
        deadline_s: float | None = None,
    ) -> None:
        """Hand on events until `stop`, or until so many were captured (None or 0: no limit).

        Raises TimeoutError when no event came for `timeout` seconds, whether there is a broker or
        not; the time that handlers take does not count. After `deadline_s` altogether it returns.
        A try to connect is not cut short by either. `wakeup` asks all workers for a heartbeat
        first.
        """
        for _ in self.itercapture(limit, timeout, wakeup, deadline_s=deadline_s):
            pass

    def itercapture(
        self,
        limit: int | None = None,
        timeout: float | None = None,
        wakeup: bool | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Iterator[Event]:
        """Like `capture`, and yields every event after its handler."""
        if not self._capturing.acquire(blocking=False):
            raise RuntimeError("this receiver captures already: make one for each thread")
        try:
            self._subscription.wakes = self.wakeup if wakeup is None else wakeup
            if wakeup:
                self._subscription.wakeup_workers()
            yield from self._captured(limit, timeout, deadline_s)
        finally:
            if not self._stays_open:
                self._hang_up()
            self._capturing.release()

    def _captured(
        self, limit: int | None, timeout_s: float | None, deadline_s: float | None
    ) -> Iterator[Event]:
        quiet_since = time.monotonic()
        deadline = None if deadline_s is None else quiet_since + deadline_s
        count = 0
        while not self._stopping.is_set():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            if self._waiting:
                event = self._waiting.popleft()
                if not self._hand_on(event):
                    return
                yield event
                count += 1
                if count == limit:
                    return
                quiet_since = time.monotonic()
                continue
            if timeout_s is not None and now - quiet_since >= timeout_s:
                raise TimeoutError(f"no event came for {timeout_s:g} s")
            ends = [now + TURN_S]
            if deadline is not None:
                ends.append(deadline)
            if timeout_s is not None:
                ends.append(quiet_since + timeout_s)
            self._subscription.listen(min(ends) - now)

    def _hand_on(self, event: Event) -> bool:
        """Let the state and the handler have an event; False when that was enough."""
        handler = self.handlers.get(event["type"]) or self.handlers.get("*")
        for take in (getattr(self.state, "event", None), handler):
            try:
                if take is not None:
                    take(event)
            except StopCapture:
                return False
            except Exception as exc:  # noqa: BLE001 - theirs, not ours: the next event follows
                self._handler_failed(event, exc)
        return True

    def _handler_failed(self, event: Event, exc: Exception) -> None:
        self.failed_count += 1
        kind = (event["type"], type(exc).__name__)
        if kind not in self._failure_kinds and len(self._failure_kinds) < FAILURE_KINDS_MAX:
            self._failure_kinds.add(kind)
            logger.error(
                "the handler of %s events failed; further ones of this kind are counted only",
                event["type"],
                exc_info=exc,
            )

    # -- life --------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether captures are to end; once set, later ones end at once."""
        return self._stopping.is_set()

    @should_stop.setter
    def should_stop(self, wanted: bool) -> None:
        if wanted:
            self._stopping.set()
        else:
            self._stopping.clear()

    def stop(self) -> None:
        """Let the capture end, within a moment."""
        self._stopping.set()

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that is published is heard; False when it took too long."""
        return self._subscription.ready.wait(timeout_s)

    def close(self) -> None:
        """Stop, and hang up; a capture on another thread hangs up by itself."""
        self.stop()
        self._stays_open = False
        if self._capturing.acquire(blocking=False):
            try:
                self._hang_up()
            finally:
                self._capturing.release()

    def _hang_up(self) -> None:
        self._subscription.close()
        self._waiting.clear()

    def __enter__(self) -> Self:
        self._stays_open = True
        self._subscription.wakes = self.wakeup
        self._subscription.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what was heard ----------------------------------------------------------------

    @property
    def gaps(self) -> dict[Key, tuple[Range, ...]]:
        """The sequence numbers that did not come, as ranges, by hostname and series.

        The series of a worker's own events is its incarnation.
        """
        return self.sequences.gaps()

    @property
    def reconnect_count(self) -> int:
        """How often the connection broke."""
        return self._subscription.reconnect_count

    def read(
        self, body: Any, content_type: Any, content_encoding: Any, headers: Any = None
    ) -> list[Event]:
        """The events of one message that are to be handed on; what is none is counted."""
        compression = headers.get("compression") if isinstance(headers, dict) else None
        found = read(
            body, content_type, content_encoding, accept=self.accept, compression=compression
        )
        for reason in found.refused:
            self._refuse(reason)
        now = time.time()
        return [event for event in found.events if self._admit(event, now)]

    def _admit(self, event: Event, now: float) -> bool:
        kind = event["type"]
        if kind == "task-sent" and event.get("sync") is not True:
            event["clock"] = 0  # known to nobody: before all that has one
        else:
            clock = event.get("clock")
            if clock is None:
                event["clock"] = 0
            # Whoever takes a clock over is not behind it afterwards.
            elif self.clock.adjust(clock) < clock:
                self._refuse(CLOCK_JUMP)
                return False
        if self.routing_key == "#" and (series := key_of(event)) is not None:
            self.sequences.note(*series, event["seq"])
        event["local_received"] = now
        return self.types is None or kind in self.types

    def _on_message(self, message: Any) -> bool:
        """The barrier; whether more can be taken right now."""
        try:
            self._waiting.extend(
                self.read(
                    message.body, message.content_type, message.content_encoding, message.headers
                )
            )
        except Exception as exc:  # noqa: BLE001 - ours to mend, and no reason to end
            self._refuse(UNFORESEEN, exc)
        return len(self._waiting) < WAITING_MAX

    def _on_rubbish(self, exc: Exception) -> None:
        self._refuse(UNREADABLE, exc)

    def _refuse(self, reason: str, exc: Exception | None = None) -> None:
        self.counts[reason] += 1
        if self.counts[reason] == 1:
            logger.warning(
                "an event was refused (%s); further ones are counted only", reason, exc_info=exc
            )
