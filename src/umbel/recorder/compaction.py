"""Many small segments of a day become few: a reader opens tens of files, not thousands.

Small segments that are closed, that is, not written just now, are merged into one; an event that is
in them more than once is kept once, as it was received first. The merged segment is written like
any other, and its manifest names those it stands for. These stay for a time of grace, as there may
be readers that have listed them; later passes remove them. A reader may find an event twice
meanwhile, as it may at any time.

It is safe to be killed anywhere: until the merged segment is there, nothing has happened; from then
on it is written in it what is left to do. It is safe, though wasteful, to compact a day twice at
once: a segment is removed only while another one is there that holds all of it. On local disks a
lock keeps two from it (`day_locks`); object stores have none, so there only one may compact.

Days from which rows were removed on purpose (`retention`) have a segment that is never merged. What
a killed run of that has left to do is done first: else rows of segments that are to go would get
into new ones.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from umbel.cluster.event_rows import ADDED, IDENTITY
from umbel.recorder.day_locks import held
from umbel.recorder.disks import LocalDisk
from umbel.recorder.errors import Damaged, LogError
from umbel.recorder.log import EVENTS, QUARANTINE, Log, Segment, segment_path
from umbel.recorder.manifests import Footer, Key, Range, read_footer, segment_bytes
from umbel.recorder.options import recorder_id
from umbel.recorder.retention import Busy, Retention, pending
from umbel.recorder.rows import QUARANTINE_SCHEMA, SCHEMA

logger = logging.getLogger("umbel.recorder")

CLOSED_S: Final = 600.0
KEEP_S: Final = 3_600.0
EVERY_S: Final = 600.0
# Of a day that still goes on so many small segments are worth a merge.
LIVE_MERGE_MIN: Final = 16
# Bytes are those in memory, before compression: merged segments are put together there.
SMALL_ROWS: Final = 25_000
SMALL_BYTES: Final = 32 * 2**20
MERGED_ROWS_MAX: Final = 100_000
MERGED_BYTES_MAX: Final = 64 * 2**20
PREFIX: Final = "compacted."
# A pass of a running recorder looks at so many of the last days.
RECENT_DAYS: Final = 3


@dataclass(slots=True)
class Outcome:
    """What one pass did."""

    merged: int = 0  # segments that were
    made: int = 0  # segments in their place
    rows: int = 0
    duplicates: int = 0
    removed: int = 0
    busy: list[str] = field(default_factory=list)  # days that somebody else works on
    unreadable: list[str] = field(default_factory=list)


class _Found(NamedTuple):
    segment: Segment
    footer: Footer

    @property
    def replaces(self) -> list[str]:
        manifest = self.footer.manifest
        return [] if manifest is None else manifest.replaces


class Compaction:
    """Compacts a log that is open."""

    def __init__(
        self,
        log: Log,
        *,
        closed_s: float = CLOSED_S,
        keep_s: float = KEEP_S,
        merge_min: int = 2,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._log, self._wall = log, wall
        self._closed_s, self._keep_s = closed_s, keep_s
        self._merge_min = max(2, merge_min)
        self._recorder = PREFIX + recorder_id()
        self._number = 0

    def run(self, *, recent_days: int | None = None) -> Outcome:
        """One pass over all days, or over the last ones. Raises `LogFull` or OSError."""
        outcome = Outcome()
        self._finish_retention()
        for kind in (EVENTS, QUARANTINE):
            days = self._log.days(kind)
            for day in days if recent_days is None else days[-recent_days:]:
                with self._alone(kind, day) as mine:
                    if mine and not self._is_to_go(kind, day):
                        self._compact(kind, day, outcome)
                    else:
                        outcome.busy.append(day)
        return outcome

    def _finish_retention(self) -> None:
        """Finish what a killed `retention` has begun, unless somebody else is at it."""
        with contextlib.suppress(Busy):
            Retention(self._log, self._wall).finish()

    def _is_to_go(self, kind: str, day: str) -> bool:
        """Whether rows of a day are to be removed; asked while the day is held."""
        decision = pending(self._log)
        steps = () if decision is None else decision.steps
        return any((step.kind, step.day) == (kind, day) for step in steps)

    def _alone(self, kind: str, day: str) -> contextlib.AbstractContextManager[bool]:
        disk = self._log.disk
        if isinstance(disk, LocalDisk):
            return held(disk.root / kind / f"day={day}", self._wall)
        return contextlib.nullcontext(True)

    def _compact(self, kind: str, day: str, outcome: Outcome) -> None:
        found = list(self._look(kind, day, outcome))
        found = self._remove_replaced(found, outcome)
        replaced = {name for one in found for name in one.replaces}
        small = [
            one for one in found if self._is_candidate(one) and one.segment.name not in replaced
        ]
        for group in _groups(small):
            if len(group) >= self._merge_min:
                self._merge(kind, day, group, outcome)

    def _look(self, kind: str, day: str, outcome: Outcome) -> Iterator[_Found]:
        for segment in self._log.segments(kind, day):
            if not segment.written_ms:
                continue  # not a recorder's: it is left alone
            try:
                footer = read_footer(self._log, segment.path)
            except FileNotFoundError:
                continue
            except Damaged:
                outcome.unreadable.append(segment.path)
                continue
            yield _Found(segment, footer)

    def _is_candidate(self, one: _Found) -> bool:
        return (
            one.footer.manifest is not None
            and not one.footer.manifest.retained
            and self._age_s(one.segment) >= self._closed_s
            and one.footer.rows < SMALL_ROWS
            and one.footer.bytes < SMALL_BYTES
        )

    def _age_s(self, segment: Segment) -> float:
        return self._wall() - segment.written_ms / 1_000

    # -- removing

    def _remove_replaced(self, found: list[_Found], outcome: Outcome) -> list[_Found]:
        """Remove what has been replaced for long enough; what is left."""
        gone = set()
        for one in found:
            if one.replaces and self._age_s(one.segment) >= self._keep_s:
                gone.update(one.replaces)
        for one in found:  # the oldest first: what replaces others goes after them
            if one.segment.name in gone:
                self._log.remove(one.segment.path)
                outcome.removed += 1
        return [one for one in found if one.segment.name not in gone]

    # -- merging

    def _merge(self, kind: str, day: str, group: list[_Found], outcome: Outcome) -> None:
        schema = SCHEMA if kind == EVENTS else QUARANTINE_SCHEMA
        readable, tables = [], []
        for one in group:
            try:
                tables.append(self._read(one, schema))
                readable.append(one)
            except FileNotFoundError:
                return  # somebody else was here; the next pass sees what there is
            except Damaged as exc:
                outcome.unreadable.append(str(exc))
        if len(tables) < self._merge_min:
            return
        whole = pa.concat_tables(tables)
        merged = unique(whole) if kind == EVENTS else whole
        sequences: dict[Key, list[int | Range]] = {}
        names = [one.segment.name for one in readable]
        for one in readable:
            assert one.footer.manifest is not None
            for hostname, inc, ranges in one.footer.manifest.sequences:
                sequences.setdefault((hostname, inc), []).extend(ranges)
            names.extend(name for name in one.replaces if name not in names)
        content = segment_bytes(merged, self._recorder, sequences, names)
        self._number += 1
        path = segment_path(kind, day, self._wall(), self._recorder, self._number)
        self._log.write(path, content)
        outcome.merged += len(readable)
        outcome.made += 1
        outcome.rows += merged.num_rows
        outcome.duplicates += whole.num_rows - merged.num_rows

    def _read(self, one: _Found, schema: pa.Schema) -> pa.Table:
        path = one.segment.path
        try:
            with self._log.open_file(path) as file:
                table = pq.read_table(file, partitioning=None)
            for name in ADDED & set(schema.names) - set(table.column_names):
                table = table.append_column(name, pa.nulls(len(table), schema.field(name).type))
            # Columns of another version would be lost, so such a segment is refused.
            return table.select(schema.names).cast(schema)
        except FileNotFoundError:
            raise
        except Exception as exc:  # Arrow and each store have exceptions of their own
            raise Damaged(path) from exc


def _groups(small: Iterable[_Found]) -> Iterator[list[_Found]]:
    """The segments in their order, as many together as one merged segment may hold."""
    group: list[_Found] = []
    rows = size = 0
    for one in small:
        if group and (
            rows + one.footer.rows > MERGED_ROWS_MAX or size + one.footer.bytes > MERGED_BYTES_MAX
        ):
            yield group
            group, rows, size = [], 0, 0
        group.append(one)
        rows += one.footer.rows
        size += one.footer.bytes
    if group:
        yield group


def unique(table: pa.Table) -> pa.Table:
    """The events without their repetitions; of each the row that was received first is kept."""
    table = table.take(pc.sort_indices(table, [("received", "ascending")]))
    keys = table.select(list(IDENTITY)).append_column("number", pa.array(range(len(table))))
    groups = keys.group_by(list(IDENTITY), use_threads=False).aggregate([("number", "min")])
    first = groups.column("number_min")
    return table.take(first.take(pc.sort_indices(first)))


class Keeper:
    """Compacts a log again and again in a thread, inside a `with` statement.

    What goes wrong is logged, and tried again the next time.
    """

    def __init__(self, compaction: Compaction, every_s: float = EVERY_S) -> None:
        self._compaction, self._every_s = compaction, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="umbel-compaction", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                outcome = self._compaction.run(recent_days=RECENT_DAYS)
            except (LogError, OSError) as exc:
                logger.warning("compaction was not possible: %s", exc)
                continue
            if outcome.made:
                logger.info("compaction: %s", told(outcome))


def told(outcome: Outcome) -> str:
    """What a pass did, in a line."""
    parts = ["nothing to merge"]
    if outcome.made:
        parts = [f"{outcome.merged} segments merged into {outcome.made} with {outcome.rows} rows"]
    if outcome.duplicates:
        parts.append(f"{outcome.duplicates} duplicates dropped")
    if outcome.removed:
        parts.append(f"{outcome.removed} replaced segments removed")
    if outcome.busy:
        parts.append(f"{len(outcome.busy)} days left to another process")
    if outcome.unreadable:
        parts.append(f"{len(outcome.unreadable)} unreadable segments left alone")
    return ", ".join(parts)
