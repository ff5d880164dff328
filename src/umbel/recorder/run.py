"""The recorder: takes messages from the broker, and gives them back as done when they are on disk.

One loop does all of it. It polls the source, sorts what came into events and rubbish, adds both to
the segments, and rolls when they are due: written, flushed, renamed. Only then are the messages
acknowledged. So whatever kills it, wherever, loses nothing that the broker has: what was not
acknowledged comes again, to this recorder or another one. What comes twice is written twice;
whoever reads the log drops duplicates.

How it fails:

| what                        | then                                                            |
| --------------------------- | --------------------------------------------------------------- |
| the broker is away          | it connects again, with growing pauses; what it has is written  |
| the log can not be written  | it reads no more, acknowledges nothing, says so once, and tries |
|                             | again; the broker keeps what comes, as far as its bounds go     |
| a message is no event       | to quarantine, with the reason                                  |
| several recorders           | share the work                                                  |

Memory is bounded by what `Segments` takes before it is full, and one answer of the source.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from umbel.broker.sessions.permanent import described, permanent
from umbel.broker.sessions.session import Outage
from umbel.cluster.sequences import Sequences, key_of
from umbel.exceptions import ImproperlyConfigured
from umbel.recorder.errors import LogFull
from umbel.recorder.options import Options
from umbel.recorder.segments import Segments
from umbel.recorder.sorting import take
from umbel.recorder.sources import Message, Source, source_for
from umbel.wire.content import JSON
from umbel.wire.events import EVENT_LIMITS, Event
from umbel.wire.limits import TOO_BIG

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.recorder.log import Log

logger = logging.getLogger("umbel.recorder")

POLL_S: Final = 0.5
ROOM_RETRY_S: Final = 1.0
TELL_S: Final = 60.0
# So much is kept of what is too big.
QUARANTINE_MAX: Final = 2**20
UNFORESEEN: Final = "unforeseen"


@dataclass(slots=True)
class Counts:
    """What a recorder has done since it started."""

    messages: int = 0
    received: int = 0  # events
    recorded: int = 0  # events, on disk
    duplicates: int = 0  # events whose number was seen before, since the start
    quarantined: int = 0
    dropped: int = 0  # messages that were gone before they were taken, as far as the broker tells
    segments: int = 0
    reconnects: int = 0
    lag: int | None = None  # messages that wait at the broker


class Recorder:
    """See the module's text; `run` once, on one thread. `counts` is for all."""

    def __init__(
        self,
        app: Umbel,
        log: Log,
        options: Options | None = None,
        *,
        source: Source | None = None,
    ) -> None:
        self.options = options or Options()
        self.counts = Counts()
        self.ready = threading.Event()  # the broker keeps events for us from now on
        self._segments = Segments(log, self.options, names=app.conf.task_redact_names)
        self._source = source_for(app, self.options.recorder) if source is None else source
        self._accept = app.accept | {JSON}
        self._numbers = Sequences()
        self._is_open = False
        self._outage = Outage(logger, "take events from the broker")
        self._blocked = False  # the log can not be written
        self._tell_at = time.monotonic() + TELL_S

    @property
    def unwritten_count(self) -> int:
        """Events that were taken and are not on disk."""
        return self._segments.rows

    def run(self, stop: threading.Event) -> None:
        """Record until `stop` is set; what was taken is then written, if it can be."""
        try:
            while not stop.is_set():
                self._turn(stop)
            self._finish()
        finally:
            self.ready.clear()
            self._source.close()

    def _turn(self, stop: threading.Event) -> None:
        try:
            if not self._is_open:
                self._open(stop)
            elif self._blocked:
                self._source.idle()
            else:
                for message in self._source.poll(POLL_S):
                    self._take(message)
            if self._blocked:
                stop.wait(ROOM_RETRY_S)
            if self._blocked or self._is_due():
                self._roll()
            self._tell()
        except ConnectionError as exc:
            self.counts.reconnects += 1
            self._is_open = False
            self.ready.clear()
            self._source.hang_up()
            stop.wait(self._outage.failure(exc))

    def _is_due(self) -> bool:
        segments = self._segments
        return (
            segments.due() or segments.is_full or (segments.rows > 0 and self._source.is_exhausted)
        )

    # -- the broker --------------------------------------------------------------------

    def _open(self, stop: threading.Event) -> None:
        try:
            self._source.open()
        except ConnectionError as exc:
            if permanent(exc) is not None:
                raise ImproperlyConfigured(f"events cannot be recorded: {described(exc)}") from exc
            stop.wait(self._outage.failure(exc))
            return
        self._is_open = True
        self._outage.over()
        self.ready.set()
        logger.info("recorder %s takes events from the broker", self.options.recorder)

    # -- messages ----------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        """The barrier: whatever is in a message is recorded, or in quarantine."""
        self.counts.messages += 1
        body, headers, received = message.body, message.headers, time.time()
        if isinstance(body, (bytes, str)) and len(body) > EVENT_LIMITS.body_bytes:
            self._refuse(message, TOO_BIG, received)
            return
        try:
            taken = take(
                self._segments,
                body,
                message.content_type,
                message.content_encoding,
                received=received,
                token=message.token,
                accept=self._accept,
                compression=headers.get("compression") if isinstance(headers, dict) else None,
                wants=self._wants_unnumbered if message.unnumbered_only else self._wants,
            )
        except Exception as exc:  # ours to mend, and no reason to end
            logger.exception("a message could not be sorted out")
            self._refuse(message, f"{UNFORESEEN}: {type(exc).__name__}", received)
        else:
            self.counts.received += taken.events
            self.counts.quarantined += taken.refused

    def _wants(self, event: Event) -> bool:
        """Notes its number; all are wanted, also those that came before."""
        series = key_of(event)
        if series is not None:
            self.counts.duplicates += not self._numbers.note(*series, event["seq"])
        return True

    def _wants_unnumbered(self, event: Event) -> bool:
        return "inc" not in event

    def _refuse(self, message: Message, reason: str, received: float) -> None:
        self.counts.quarantined += 1
        raw = message.body if isinstance(message.body, (bytes, str)) else repr(message.body)
        self._segments.quarantine(raw[:QUARANTINE_MAX], reason, received, message.token)

    # -- the log -----------------------------------------------------------------------

    def _roll(self) -> bool:
        """Write what there is, then acknowledge it; whether it could be written."""
        segments = self._segments
        try:
            tokens = segments.roll()
        except LogFull as exc:
            if not self._blocked:
                logger.error(
                    "%s; nothing is taken from the broker until it can be written again", exc
                )
            self._blocked = True
            return False
        if self._blocked:
            logger.warning("the log can be written again")
            self._blocked = False
        self.counts.recorded = segments.events_written
        self.counts.segments = segments.segments_written
        self._source.acknowledge(tokens)
        return True

    def _finish(self) -> None:
        try:
            if not self._roll():
                logger.error(
                    "%d events were not written: the broker still has them, but for those that "
                    "Celery's nodes publish on Redis",
                    self._segments.rows,
                )
        except ConnectionError as exc:
            logger.warning("what was written last may be recorded twice: %s", exc)
        self._say()

    def _tell(self) -> None:
        now = time.monotonic()
        self.counts.dropped = self._source.dropped_count
        if now < self._tell_at:
            return
        self._tell_at = now + TELL_S
        if self._is_open:
            self.counts.lag = self._source.lag()
        self._say()

    def _say(self) -> None:
        told = ", ".join(f"{name} {value}" for name, value in asdict(self.counts).items())
        logger.info("recorder %s: %s", self.options.recorder, told)
