"""Collects events and writes them as segments; tells which messages may be acknowledged.

Each event comes with the *token* of its message. `roll` writes everything that was collected, and
gives back the tokens only when all of it is durably on disk: whoever acknowledges those and no
others loses nothing, wherever he dies. What was written and not acknowledged comes again, and makes
a duplicate that readers drop.

What was collected is bounded. While nothing can be written (`LogFull`) it stays in memory, and
`is_full` says when no more may be added; one message may go over. Rows become Arrow columns a few
thousand at a time, which is a fifth of their size as Python objects.

One thread uses a `Segments`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from umbel.cluster.event_rows import raw_json, row
from umbel.cluster.sequences import key_of
from umbel.recorder.log import EVENTS, QUARANTINE, Log, day_of, segment_path
from umbel.recorder.manifests import Key, segment_bytes
from umbel.recorder.options import FULL_FACTOR, Options
from umbel.recorder.rows import QUARANTINE_SCHEMA, SCHEMA, batch, quarantine_row
from umbel.wire.events import Event
from umbel.wire.redaction import DEFAULT_NAMES, by_name, redact_event

BATCH_ROWS = 4_000
UNHOLDABLE = "not-a-row"
_DAY_S = 86_400


class _Part:
    """What goes into one segment."""

    __slots__ = ("_rows", "_schema", "batches", "day", "kind", "sequences")

    def __init__(self, kind: str, day: int) -> None:
        self.kind, self.day = kind, day
        self.sequences: dict[Key, list[int]] = {}
        self.batches: list[pa.RecordBatch] = []
        self._rows: list[dict[str, Any]] = []
        self._schema = SCHEMA if kind == EVENTS else QUARANTINE_SCHEMA

    def add(self, one: dict[str, Any]) -> None:
        self._rows.append(one)
        if len(self._rows) >= BATCH_ROWS:
            self._gather()

    def _gather(self) -> None:
        if self._rows:
            self.batches.append(batch(self._rows, self._schema))
            self._rows = []

    def table(self) -> pa.Table:
        """All of it."""
        self._gather()
        return pa.Table.from_batches(self.batches, self._schema)


class Segments:
    """The writer of one recorder; see the module's text."""

    def __init__(
        self,
        log: Log,
        options: Options | None = None,
        *,
        names: tuple[str, ...] = DEFAULT_NAMES,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`names`: what stands under these is hidden in events whose senders have not done so."""
        self.log, self.options = log, options or Options()
        self._rules = by_name(names)
        self._clock, self._wall = clock, wall
        self._number = 0
        self._parts: dict[tuple[str, int], _Part] = {}
        self._tokens: list[Any] = []
        self._since: float | None = None  # when the oldest that is not written came
        self.rows = self.raw_bytes = 0  # collected, and not written yet
        # Written since the beginning.
        self.events_written = self.quarantined_written = self.segments_written = 0
        self.bytes_written = 0

    # -- collecting

    def add(self, event: Event, received: float, token: Any = None) -> None:
        """Collect a well-formed event (`wire.events.check`); never raises for what is in it."""
        redact_event(event, self._rules)
        try:
            made = row(event, received, self.options.recorder)
        except Exception as exc:  # noqa: BLE001 - one event, one barrier: it is kept, with the reason
            self.quarantine(raw_json(event), f"{UNHOLDABLE}: {type(exc).__name__}", received, token)
            return
        part = self._part(EVENTS, received)
        part.add(made)
        if (series := key_of(event)) is not None:
            part.sequences.setdefault(series, []).append(event["seq"])
        self._note(len(made["raw"]), token)

    def quarantine(
        self,
        raw: bytes | str,
        reason: str,
        received: float,
        token: Any = None,
        source: str | None = None,
    ) -> None:
        """Collect what is no event, with the reason, and where it was if that is known."""
        made = quarantine_row(self._redacted(raw), reason, received, self.options.recorder, source)
        self._part(QUARANTINE, received).add(made)
        self._note(len(made["raw"]), token)

    def _redacted(self, raw: bytes | str) -> bytes | str:
        if isinstance(raw, str):
            return self._rules.text(raw)
        # Byte by byte, whatever they are: names and marks are the same in all usual encodings.
        return self._rules.text(bytes(raw).decode("latin-1")).encode("latin-1")

    def hold(self, token: Any) -> None:
        """Take the token of a message that had nothing in it: it comes back with the others."""
        self._keep(token)

    def _part(self, kind: str, received: float) -> _Part:
        key = (kind, int(received // _DAY_S))
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = _Part(*key)
        return part

    def _note(self, size: int, token: Any) -> None:
        self.rows += 1
        self.raw_bytes += size
        self._keep(token)

    def _keep(self, token: Any) -> None:
        if self._since is None:
            self._since = self._clock()
        if token is not None and not (self._tokens and self._tokens[-1] == token):
            self._tokens.append(token)

    # -- how it stands

    def due(self, now: float | None = None) -> bool:
        """Whether to roll: enough rows, enough bytes, or the oldest is old enough.

        `now` is a time of the clock that was given, `time.monotonic` if none was.
        """
        if self._since is None:
            return False
        if self.rows >= self.options.roll_rows or self.raw_bytes >= self.options.roll_bytes:
            return True
        return (self._clock() if now is None else now) - self._since >= self.options.roll_age_s

    @property
    def is_full(self) -> bool:
        """Whether no more may be added before something was written."""
        return (
            self.rows >= FULL_FACTOR * self.options.roll_rows
            or self.raw_bytes >= FULL_FACTOR * self.options.roll_bytes
        )

    # -- writing

    def roll(self) -> list[Any]:
        """Write everything; give the tokens that may be acknowledged now, in their order.

        Raises `LogFull` when it could not be written. Then nothing is lost, and another `roll` goes
        on where this one ended.
        """
        for key in sorted(self._parts):
            self._write(self._parts[key])
            del self._parts[key]
        tokens, self._tokens = self._tokens, []
        self.rows = self.raw_bytes = 0
        self._since = None
        return tokens

    def _write(self, part: _Part) -> None:
        table = part.table()
        content = segment_bytes(table, self.options.recorder, part.sequences)
        self._number += 1
        path = segment_path(
            part.kind, day_of(part.day), self._wall(), self.options.recorder, self._number
        )
        self.log.write(path, content)
        self.segments_written += 1
        self.bytes_written += content.size
        if part.kind == EVENTS:
            self.events_written += table.num_rows
        else:
            self.quarantined_written += table.num_rows
