"""The event log: a directory, or a place in an object store, with one layout.

    _umbel-log.json                                          {"format": 1}
    events/day=2026-11-16/<milliseconds>-<recorder>-<number>.parquet
    quarantine/day=2026-11-16/<milliseconds>-<recorder>-<number>.parquet

The day is that of receipt, UTC; the milliseconds are when the segment was written. Names that begin
with a dot or an underscore are no segments; every reader ignores them. Segments are never changed,
only added and, after they were compacted, removed.

A directory that has something else in it is refused: nobody's files are mixed with a log by a
mistyped name. So is a log of a format that is not known here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final, NamedTuple, Self

import msgspec

from umbel.recorder.disks import HIDDEN_SUFFIX, Disk, LocalDisk, disk_of
from umbel.recorder.errors import LogError, LogFull

FORMAT: Final = 1
MARKER: Final = "_umbel-log.json"
EVENTS: Final = "events"
QUARANTINE: Final = "quarantine"
KINDS: Final = (EVENTS, QUARANTINE)

# What may be in a new directory: the root of a disk has this.
_NOTHING: Final = frozenset({"lost+found"})
_DAY: Final = re.compile(r"day=(\d{4}-\d{2}-\d{2})")
_NAME: Final = re.compile(r"(?P<ms>\d{13})-(?P<recorder>.+)-(?P<number>\d+)\.parquet")


class Segment(NamedTuple):
    """A segment by its name. One that a recorder did not name has no time and no recorder."""

    kind: str
    day: str
    name: str
    written_ms: int = 0
    recorder: str = ""

    @property
    def path(self) -> str:
        """Where it is in the log."""
        return f"{self.kind}/day={self.day}/{self.name}"


class Log:
    """A log by its directory or URL; `open` makes sure that it is one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.disk: Disk = disk_of(url)

    @property
    def is_local(self) -> bool:
        """Whether it is a directory here."""
        return self.disk.is_local

    # -- opening

    def open(self, *, create: bool = True) -> Self:
        """Make sure that this is a log, made now if there is none and `create` says so.

        To create also means to write: a log that can not be written is refused, and what dead
        writers left half-written is removed.
        """
        try:
            self._recognise(create)
        except LogError:
            raise
        except OSError as exc:
            raise LogError(f"cannot open the log {self.url}: {exc.strerror or exc}") from exc
        return self

    def _recognise(self, create: bool) -> None:
        names = self.disk.names("")
        if MARKER in names:
            self._check_format()
        elif found := sorted(set(filter(_is_visible, names)) - _NOTHING):
            raise LogError(
                f"{self.url} is no event log and not empty (there is {found[0]!r}): "
                "give an empty or new directory"
            )
        elif not create:
            raise LogError(f"there is no event log at {self.url}")
        if not create:
            return
        if MARKER not in names:
            self.disk.write(MARKER, msgspec.json.encode({"format": FORMAT}))
        self._try_to_write()
        self.clean()

    def _check_format(self) -> None:
        with self.disk.open(MARKER) as file:
            content = file.read(10_000)
        try:
            told = msgspec.json.decode(content)
            number = told["format"]
        except (msgspec.DecodeError, TypeError, KeyError):
            raise LogError(f"{self.url} has a damaged {MARKER}: it is no event log") from None
        if number != FORMAT:
            raise LogError(
                f"the log {self.url} has format {number!r}, and this is Umbel with format {FORMAT}"
            )

    def _try_to_write(self) -> None:
        name = f"{EVENTS}/.try-{secrets.token_hex(8)}{HIDDEN_SUFFIX}"
        try:
            self.disk.write(name, b"")
            self.disk.remove(name)
        except LogFull:
            raise
        except OSError as exc:
            raise LogFull(f"cannot write the log {self.url}: {exc.strerror or exc}") from exc

    def clean(self) -> int:
        """Remove what dead writers left half-written; how many files."""
        count = self.disk.clean("")
        for kind in KINDS:
            count += self.disk.clean(kind)
            count += sum(self.disk.clean(f"{kind}/day={day}") for day in self.days(kind))
        return count

    # -- what is in it

    def days(self, kind: str = EVENTS) -> list[str]:
        """The days that have a folder, in order."""
        found = (_DAY.fullmatch(name) for name in self.disk.names(kind))
        return [match[1] for match in found if match]

    def segments(self, kind: str = EVENTS, day: str | None = None) -> Iterator[Segment]:
        """The segments of a day or of all, in the order in which they were written."""
        for each in self.days(kind) if day is None else [day]:
            for name in self.disk.names(f"{kind}/day={each}"):
                if name.endswith(".parquet") and _is_visible(name):
                    match = _NAME.fullmatch(name)
                    told = (int(match["ms"]), match["recorder"]) if match else ()
                    yield Segment(kind, each, name, *told)

    def open_file(self, path: str) -> AbstractContextManager[BinaryIO]:
        """A file of the log, for reading."""
        return self.disk.open(path)

    def write(self, path: str, content: Any) -> None:
        """Put a file into the log, whole and durable. Raises `LogFull`.

        A directory that has gone, as when its disk is not mounted any more, is not made again.
        """
        if isinstance(self.disk, LocalDisk) and not (self.disk.root / MARKER).exists():
            raise LogFull(f"the log {self.url} has gone: there is no {MARKER} any more")
        self.disk.write(path, content)

    def remove(self, path: str) -> None:
        """Take a file away."""
        self.disk.remove(path)


def segment_path(kind: str, day: str, written_s: float, recorder: str, number: int) -> str:
    """Where a new segment goes."""
    return f"{kind}/day={day}/{int(written_s * 1_000):013}-{recorder}-{number}.parquet"


def day_of(number: int) -> str:
    """A day by its number since 1970, UTC."""
    return datetime.fromtimestamp(number * 86_400, UTC).strftime("%Y-%m-%d")


def _is_visible(name: str) -> bool:
    return not name.startswith((".", "_"))
