"""Takes old days out of a log, but for the rows that are carried over; safe to kill anywhere.

Which rows those are is not known here: whoever asks has decided, for the segments of each old day
that were there when he looked. Of these one *retained* segment per day is left. Its manifest names
the segments that are gone but for its rows (`"replaces"`, with `"retained": true`).

1. Retained segments are *staged*: written under hidden names, which every reader ignores.
2. The decision is *committed*: a file `_retention.json` in the root of the log names what was
   staged, and which segments go.
3. It is *carried out*, day by day: the staged segment gets its final name, then the others are
   removed. At the end the file is removed.

Killed before 2 nothing has happened, and the next run removes what was staged. Killed after 2 the
decision stands: the next run, and every compaction before it looks at any segment, carries out what
is left of it. Each step may be done twice. So a decision is made once, from a whole log.

The days are held meanwhile (`day_locks`), so that no compaction puts rows of removed segments into
a new one. Compaction never merges a retained segment. Segments that were written since the decision
stay, unless they are merged from nothing but segments that go. Object stores have no locks: there
only one process may compact or retain. They have no renaming either: what was staged is written
again under its final name, and then removed.

Readers may list a day at any moment. Until the retained segment is there they see the day as it
was; from then on it stands for all others.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from umbel.recorder import day_locks
from umbel.recorder.disks import LocalDisk
from umbel.recorder.errors import Damaged, LogError
from umbel.recorder.log import EVENTS, QUARANTINE, Log, segment_path
from umbel.recorder.manifests import KEY, Key, Range, manifest_bytes, read_footer
from umbel.recorder.options import recorder_id
from umbel.recorder.rows import DICTIONARY, SCHEMA

FORMAT: Final = 1
MARKER: Final = "_retention.json"
STAGED_SUFFIX: Final = ".staged"
PREFIX: Final = "retained."
ROW_GROUP_ROWS: Final = 50_000
# Often enough that no lock looks abandoned (`day_locks.STALE_S`).
REFRESH_S: Final = 60.0
# Rows of segments that others wrote may lack what a recorder's rows always have.
_SCHEMA: Final = pa.schema([one.with_nullable(True) for one in SCHEMA])

Folder = tuple[str, str]  # kind, day


class Step(msgspec.Struct, kw_only=True):
    """What is to be done in the folder of one day."""

    kind: str
    day: str
    staged: str = ""  # the hidden name of the retained segment; empty where there is none
    name: str = ""  # the final one
    remove: list[str] = []


class Decision(msgspec.Struct, kw_only=True):
    """The content of `_retention.json`."""

    format: int
    cutoff: str  # the first day that is kept
    steps: list[Step] = []


class OldDay(NamedTuple):
    """The events of an old day, as somebody has decided about them."""

    day: str
    segments: Collection[str]  # the names of those that were looked at
    rows: int
    carried: int  # how many of the rows stay
    batches: Callable[[], Iterable[pa.Table]]  # those


@dataclass(slots=True)
class Outcome:
    """What was removed, or would be."""

    cutoff: str
    days: int = 0  # of which anything was removed
    segments: int = 0
    events: int = 0
    quarantined: int = 0
    carried: int = 0  # events in retained segments
    bytes: int = 0  # that were freed
    finished: bool = False  # whether an earlier run had to be finished first
    folders: set[Folder] = field(default_factory=set)

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        names = ("cutoff", "days", "segments", "events", "quarantined", "carried", "bytes")
        return {name: getattr(self, name) for name in (*names, "finished")}


class Busy(LogError):
    """Somebody else works on a day that is needed."""


def cutoff_of(days: int, now_s: float) -> str:
    """The first day to keep, in UTC: the one `days` days before today."""
    return (datetime.fromtimestamp(now_s, UTC) - timedelta(days=days)).strftime("%Y-%m-%d")


def pending(log: Log) -> Decision | None:
    """A decision that was committed and is not carried out yet."""
    if MARKER not in log.disk.names(""):
        return None
    try:
        with log.open_file(MARKER) as file:
            found = msgspec.json.decode(file.read(), type=Decision)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        raise LogError(f"{log.url}/{MARKER} is damaged: remove it") from None
    named = [name for step in found.steps for name in (step.staged, step.name, *step.remove)]
    if found.format != FORMAT or any("/" in name for name in named):
        raise LogError(f"{log.url}/{MARKER} is of another version of Umbel: use that one")
    return found


class Retention:
    """Takes old days out of a log that is open."""

    def __init__(self, log: Log, wall: Callable[[], float] = time.time) -> None:
        self._log, self._wall = log, wall
        self._recorder = PREFIX + recorder_id()
        self._number = 0
        self._refreshed_s = time.monotonic()

    def finish(self) -> bool:
        """Carry out what an earlier run has committed; whether there was anything.

        Raises `Busy` if somebody else is at it.
        """
        decision = pending(self._log)
        if decision is None:
            return False
        folders = [(step.kind, step.day) for step in decision.steps]
        with self._alone(folders):
            decision = pending(self._log)
            if decision is not None:
                self._carry_out(decision)
        self._remove_empty(folders)
        return decision is not None

    def preview(self, cutoff: str, old_days: Sequence[OldDay]) -> Outcome:
        """What `apply` would do; the bytes of retained segments are not known before."""
        outcome = Outcome(cutoff)
        for one in old_days:
            self._count(outcome, one, self._victims(one))
        for day, names in self._quarantined(cutoff):
            self._count_quarantined(outcome, day, names)
        outcome.days = len({day for _, day in outcome.folders})
        return outcome

    def apply(self, cutoff: str, old_days: Sequence[OldDay]) -> Outcome:
        """Remove the events of these days but for those that are carried over, and quarantine.

        An earlier decision must have been finished. Raises `Busy`, `LogFull` or OSError, and then
        nothing has happened, or the decision stands.
        """
        outcome, steps = Outcome(cutoff), list[Step]()
        quarantined = list(self._quarantined(cutoff))
        left = self._left_staged(cutoff)
        folders = {(EVENTS, one.day) for one in old_days} | {
            (QUARANTINE, d) for d, _ in quarantined
        }
        with self._alone(sorted(folders.union(left))):
            if pending(self._log) is not None:
                raise Busy(f"another process has just begun to remove days from {self._log.url}")
            self._log.clean()  # or what a dead run was staging would keep its folder
            for folder, names in self._left_staged(cutoff).items():
                for name in names:
                    self._log.remove(_path(*folder, name))
            try:
                for one in old_days:
                    steps += self._staged(one, outcome)
                self._leave_something(steps)
            except BaseException:
                for step in steps:
                    with contextlib.suppress(OSError):
                        self._log.remove(_path(step.kind, step.day, step.staged))
                raise
            for day, names in quarantined:
                self._count_quarantined(outcome, day, names)
                steps.append(Step(kind=QUARANTINE, day=day, remove=names))
            if steps:
                decision = Decision(format=FORMAT, cutoff=cutoff, steps=steps)
                self._log.write(MARKER, msgspec.json.encode(decision))
                self._carry_out(decision)
        self._remove_empty(
            (kind, day) for kind in (EVENTS, QUARANTINE) for day in self._old(kind, cutoff)
        )
        outcome.days = len({day for _, day in outcome.folders})
        return outcome

    # -- who goes

    def _old(self, kind: str, cutoff: str) -> list[str]:
        return [day for day in self._log.days(kind) if day < cutoff]

    def _quarantined(self, cutoff: str) -> Iterator[tuple[str, list[str]]]:
        for day in self._old(QUARANTINE, cutoff):
            if names := [one.name for one in self._log.segments(QUARANTINE, day)]:
                yield day, names

    def _victims(self, one: OldDay) -> list[str]:
        """The segments of a day that go, the oldest first."""
        known = set(one.segments)
        return [
            segment.name
            for segment in self._log.segments(EVENTS, one.day)
            if segment.name in known or self._is_merged_from(segment.path, known)
        ]

    def _is_merged_from(self, path: str, known: set[str]) -> bool:
        try:
            manifest = read_footer(self._log, path).manifest
        except (Damaged, FileNotFoundError):
            return False
        return manifest is not None and bool(manifest.replaces) and known >= set(manifest.replaces)

    def _left_staged(self, cutoff: str) -> dict[Folder, list[str]]:
        """What a run that was killed has staged and not committed."""
        found = {}
        for day in self._old(EVENTS, cutoff):
            names = self._log.disk.names(f"{EVENTS}/day={day}")
            if left := [n for n in names if n.startswith(".") and n.endswith(STAGED_SUFFIX)]:
                found[EVENTS, day] = left
        return found

    # -- staging

    def _staged(self, one: OldDay, outcome: Outcome) -> Iterator[Step]:
        if not (victims := self._victims(one)):
            return
        self._count(outcome, one, victims)
        step = Step(kind=EVENTS, day=one.day, remove=victims)
        if one.carried:
            content, rows = self._segment(one.batches(), victims)
            assert rows == one.carried, (one.day, rows, one.carried)
            outcome.bytes -= content.size
            self._stage(step, content)
        yield step

    def _leave_something(self, steps: list[Step]) -> None:
        """A log from which everything goes keeps a segment without rows, for the tables."""
        going = {(step.day, name) for step in steps for name in step.remove}
        if not steps or any(step.staged for step in steps):
            return
        if all((one.day, one.name) in going for one in self._log.segments()):
            last = max(steps, key=lambda step: step.day)
            self._stage(last, self._segment((), last.remove)[0])

    def _stage(self, step: Step, content: pa.Buffer) -> None:
        self._number += 1
        path = segment_path(EVENTS, step.day, self._wall(), self._recorder, self._number)
        step.name = path.rpartition("/")[2]
        step.staged = f".{step.name}{STAGED_SUFFIX}"
        self._log.write(_path(EVENTS, step.day, step.staged), content)

    def _segment(
        self, batches: Iterable[pa.Table], replaces: Iterable[str]
    ) -> tuple[pa.Buffer, int]:
        """A retained segment, and how many rows it has; it is compressed as the rows come."""
        stream, rows = pa.BufferOutputStream(), 0
        sequences: dict[Key, list[int | Range]] = {}
        dictionary = [name for name in DICTIONARY if name in _SCHEMA.names]
        with pq.ParquetWriter(
            stream, _SCHEMA, compression="zstd", use_dictionary=dictionary
        ) as writer:
            for table in _grouped(batches):
                writer.write_table(table)
                rows += table.num_rows
                _note_numbers(table, sequences)
                self._refresh()
            manifest = manifest_bytes(self._recorder, rows, sequences, replaces, retained=True)
            writer.add_key_value_metadata({KEY.decode(): manifest.decode()})
        return stream.getvalue(), rows

    # -- carrying out

    def _carry_out(self, decision: Decision) -> None:
        """Every step may have been done before."""
        disk = self._log.disk
        for step in decision.steps:
            if step.staged:
                staged = _path(step.kind, step.day, step.staged)
                try:
                    disk.move(staged, _path(step.kind, step.day, step.name))
                except FileNotFoundError:
                    raise LogError(
                        f"{self._log.url} has lost {staged}, which {MARKER} names: nothing of "
                        "that day is removed"
                    ) from None
            for name in step.remove:
                self._log.remove(_path(step.kind, step.day, name))
            disk.flush(f"{step.kind}/day={step.day}")
            self._refresh()
        self._log.remove(MARKER)

    def _remove_empty(self, folders: Iterable[Folder]) -> None:
        for kind, day in folders:
            if next(self._log.segments(kind, day), None) is None:
                disk, folder = self._log.disk, f"{kind}/day={day}"
                if isinstance(disk, LocalDisk) and day_locks.NAME in disk.names(folder):
                    with day_locks.held(disk.root / folder, self._wall):
                        pass  # what a killed run has left of its lock is gone then
                disk.remove_folder(folder)

    # -- alone

    @contextlib.contextmanager
    def _alone(self, folders: Iterable[Folder]) -> Iterator[None]:
        disk = self._log.disk
        if not isinstance(disk, LocalDisk):
            yield
            return
        self._held: list[os.PathLike[str]] = []
        with contextlib.ExitStack() as stack:
            for kind, day in folders:
                folder = disk.root / kind / f"day={day}"
                if not folder.is_dir():
                    continue
                if not stack.enter_context(day_locks.held(folder, self._wall)):
                    raise Busy(
                        f"another process works on {kind}/day={day} of the log {self._log.url}, "
                        "such as a compaction: try again later"
                    )
                self._held.append(folder / day_locks.NAME)
            yield

    def _refresh(self) -> None:
        """Show that the locks are not abandoned."""
        now_s = time.monotonic()
        if now_s - self._refreshed_s < REFRESH_S or not self._log.is_local:
            return
        self._refreshed_s = now_s
        for lock in self._held:
            with contextlib.suppress(OSError):
                os.utime(lock)

    # -- counting

    def _count(self, outcome: Outcome, one: OldDay, victims: list[str]) -> None:
        if not victims:
            return
        outcome.folders.add((EVENTS, one.day))
        outcome.segments += len(victims)
        outcome.events += one.rows - one.carried
        outcome.carried += one.carried
        outcome.bytes += self._bytes(EVENTS, one.day, victims)

    def _count_quarantined(self, outcome: Outcome, day: str, names: list[str]) -> None:
        outcome.folders.add((QUARANTINE, day))
        outcome.segments += len(names)
        outcome.bytes += self._bytes(QUARANTINE, day, names)
        for name in names:
            with contextlib.suppress(Damaged, FileNotFoundError):
                outcome.quarantined += read_footer(self._log, _path(QUARANTINE, day, name)).rows

    def _bytes(self, kind: str, day: str, names: Iterable[str]) -> int:
        return sum(self._log.disk.size(_path(kind, day, name)) for name in names)


def _path(kind: str, day: str, name: str) -> str:
    return f"{kind}/day={day}/{name}"


def _grouped(batches: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The rows as tables of the size of a row group, or smaller."""
    some: list[pa.Table] = []
    for batch in itertools.chain(batches, (None,)):
        if some and (batch is None or sum(map(len, some)) + len(batch) > ROW_GROUP_ROWS):
            yield pa.concat_tables(some)
            some = []
        if batch is not None and len(batch):
            some.append(batch.select(_SCHEMA.names).cast(_SCHEMA))


def _note_numbers(table: pa.Table, sequences: dict[Key, list[int | Range]]) -> None:
    """Carried-over rows have numbers only where those still tell something."""
    numbered = table.filter(table.column("seq").is_valid()).select(
        ["hostname", "inc", "series", "seq"]
    )
    for row in numbered.to_pylist():
        series = row["series"] if row["series"] is not None else row["inc"]
        if series is not None:
            sequences.setdefault((row["hostname"], series), []).append(row["seq"])
