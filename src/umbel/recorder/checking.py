"""What is in a log, from the ends of its segments only: no row is read, and no Spark is needed.

Each segment names the sequence numbers that are in it. Put together they tell, for each life of
each process that sent events, which numbers are missing between the first and the last that came.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from umbel.recorder.errors import Damaged
from umbel.recorder.log import EVENTS, QUARANTINE, Log, Segment
from umbel.recorder.manifests import Footer, Key, Range, gaps, ranges, read_footer

READERS: Final = 8


@dataclass(slots=True)
class Count:
    """Segments and their rows."""

    segments: int = 0
    rows: int = 0

    def add(self, rows: int) -> None:
        """One segment more."""
        self.segments += 1
        self.rows += rows


@dataclass(slots=True, frozen=True)
class Incarnation:
    """The sequence numbers of one life of one process."""

    hostname: str
    inc: int
    seen: list[Range]

    @property
    def gaps(self) -> list[Range]:
        """The ranges that are missing."""
        return gaps(self.seen)

    @property
    def missing(self) -> int:
        """How many numbers are missing."""
        return sum(last - first + 1 for first, last in self.gaps)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "hostname": self.hostname,
            "inc": self.inc,
            "first": self.seen[0][0],
            "last": self.seen[-1][1],
            "missing": self.missing,
            "gaps": self.gaps,
        }


@dataclass(slots=True)
class Finding:
    """What is in a log."""

    url: str
    days: list[str] = field(default_factory=list)
    events: Count = field(default_factory=Count)
    replaced: Count = field(default_factory=Count)  # compacted, and not removed yet
    quarantine: Count = field(default_factory=Count)
    foreign: list[str] = field(
        default_factory=list
    )  # without a manifest: their numbers are unknown
    unreadable: list[str] = field(default_factory=list)
    incarnations: list[Incarnation] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """How many events are missing by their numbers."""
        return sum(one.missing for one in self.incarnations)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "log": self.url,
            "days": self.days,
            "segments": self.events.segments,
            "rows": self.events.rows,
            "replaced_segments": self.replaced.segments,
            "quarantine_segments": self.quarantine.segments,
            "quarantine_rows": self.quarantine.rows,
            "foreign": self.foreign,
            "unreadable": self.unreadable,
            "missing": self.missing,
            "incarnations": [one.as_json() for one in self.incarnations],
        }


def check(log: Log) -> Finding:
    """Look at every segment of a log that is open. Raises OSError when it can not be listed."""
    finding = Finding(log.url, days=log.days())
    numbers: dict[Key, list[int | Range]] = {}
    read = list(_footers(log, EVENTS, finding))
    replaced = {
        f"{segment.day}/{name}"
        for segment, footer in read
        if footer.manifest is not None
        for name in footer.manifest.replaces
    }
    for segment, footer in read:
        is_replaced = f"{segment.day}/{segment.name}" in replaced
        (finding.replaced if is_replaced else finding.events).add(footer.rows)
        if footer.manifest is None:
            finding.foreign.append(segment.path)
            continue
        for hostname, inc, seen in footer.manifest.sequences:
            numbers.setdefault((hostname, inc), []).extend(seen)
    for _, footer in _footers(log, QUARANTINE, finding):
        finding.quarantine.add(footer.rows)
    finding.incarnations = [
        Incarnation(hostname, inc, ranges(seen))
        for (hostname, inc), seen in sorted(numbers.items())
    ]
    return finding


def _footers(log: Log, kind: str, finding: Finding) -> Iterator[tuple[Segment, Footer]]:
    """The footers that can be read; the finding gets the others."""

    def read(segment: Segment) -> Footer | str | None:
        try:
            return read_footer(log, segment.path)
        except FileNotFoundError:  # compacted meanwhile
            return None
        except Damaged:
            return segment.path

    with ThreadPoolExecutor(READERS) as pool:
        segments = list(log.segments(kind))
        for segment, told in zip(segments, pool.map(read, segments), strict=True):
            if isinstance(told, str):
                finding.unreadable.append(told)
            elif told is not None:
                yield segment, told
