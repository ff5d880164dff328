"""The event log as the pipeline reads it: which segments there are, which are new, their rows.

The list of segments is taken once per build, so that all tables of a build cover the same events,
whatever a recorder writes meanwhile. A compacted segment names those that it stands for: they are
not read beside it, and if they were covered by an earlier build, so is it.

A covered segment that has gone, and that no compacted one stands for, was removed from the log; so
was one that a segment of `umbel history retain` stands for, which has a part of its events. The
tables say what the log says: everything about the time of these segments is computed again.

A damaged segment stops a build with its name, unless damaged ones are to be skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from umbel.pipeline import schemas
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.places import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT: Final = 1
MARKER: Final = "_umbel-log.json"
EVENTS: Final = "events"
QUARANTINE: Final = "quarantine"
_MANIFEST: Final = b"umbel"
# What every row has; a file without it is not a segment.
_BROKEN: Final = (
    "type IS NULL OR hostname IS NULL OR timestamp IS NULL OR uuid IS NULL AND type LIKE 'task-%'"
)

Segments = dict[str, list[str]]  # names by the folder of their day


class Footer(NamedTuple):
    """What the end of a segment tells."""

    rows: int
    replaces: list[str]
    is_retained: bool  # what it replaces had more events
    span: list[float]  # the least and the greatest timestamp; empty where they are not known


@dataclass(slots=True)
class Coverage:
    """The segments that a build has dealt with, as far as they are still there."""

    read: Segments = field(default_factory=dict)
    replaced: Segments = field(default_factory=dict)  # by a compacted one, which is read
    skipped: Segments = field(default_factory=dict)  # damaged
    spans: dict[str, list[float]] = field(default_factory=dict)  # of timestamps, by path

    @property
    def paths(self) -> list[str]:
        """Where the segments are that were read, below the log."""
        return [f"{EVENTS}/{day}/{name}" for day, names in self.read.items() for name in names]

    @property
    def skipped_count(self) -> int:
        """How many segments are left out."""
        return sum(map(len, self.skipped.values()))

    def paths_within(self, times: Sequence[tuple[float, float]]) -> list[str]:
        """The segments that may have events of these spans of time, each up to its end."""
        return [path for path in self.paths if _overlaps(self.spans.get(path, ()), times)]

    def without(self, unread: Collection[str]) -> Coverage:
        """The coverage of a build that has not read these segments yet."""
        read = {
            day: kept
            for day, names in self.read.items()
            if (kept := [name for name in names if f"{EVENTS}/{day}/{name}" not in unread])
        }
        spans = {path: span for path, span in self.spans.items() if path not in unread}
        return replace(self, read=read, spans=spans)

    def times_of(self, paths: Iterable[str]) -> list[tuple[float, float]]:
        """The spans of time of some segments; all of time for one that does not tell."""
        told = (self.spans.get(path) or (-math.inf, math.inf) for path in paths)
        return [(low, high) for low, high in told]


@dataclass(slots=True)
class Listing:
    """The segments of a log at one moment, as a build deals with them."""

    coverage: Coverage = field(default_factory=Coverage)
    fresh: list[str] = field(default_factory=list)  # paths that no build has read
    removed: list[str] = field(default_factory=list)  # paths that a build has read, and are gone


def _overlaps(span: Sequence[float], times: Sequence[tuple[float, float]]) -> bool:
    return not span or any(span[0] < until and span[1] >= since for since, until in times)


def open_log(url: str) -> Place:
    """The place of a log, once it is known to be one."""
    place = Place(url)
    marker = place.read_json(MARKER)
    if marker is None:
        raise HistoryError(f"there is no event log at {url}: 'umbel record --log {url}' writes one")
    number = marker.get("format") if isinstance(marker, dict) else None
    if number != FORMAT:
        raise HistoryError(
            f"the log {url} has format {number!r}, this version of Umbel reads {FORMAT}"
        )
    return place


def segments(log: Place, kind: str = EVENTS) -> Segments:
    """The names of all segments."""
    found = {}
    for day in log.names(kind):
        names = [
            name
            for name in log.names(f"{kind}/{day}")
            if name.endswith(".parquet") and not name.startswith((".", "_"))
        ]
        if names:
            found[day] = names
    return found


def look(log: Place, before: Coverage, *, skip_damaged: bool = False) -> Listing:
    """The log as it is now, for a build that follows one with this coverage."""
    listing = Listing()
    there = segments(log)
    for day, names in there.items():
        _look_at_day(log, day, names, before, listing, skip_damaged=skip_damaged)
    for day in before.read.keys() - there.keys():
        listing.removed += [f"{EVENTS}/{day}/{name}" for name in before.read[day]]
    return listing


def _look_at_day(
    log: Place,
    day: str,
    names: list[str],
    before: Coverage,
    listing: Listing,
    *,
    skip_damaged: bool,
) -> None:
    was_read, replaced = set(before.read.get(day, ())), set(before.replaced.get(day, ()))
    skipped, lost = set(before.skipped.get(day, ())), was_read - set(names)
    new = set(names) - was_read - replaced - skipped
    footers: dict[str, Footer] = {}
    # A compacted segment that was read may stand for one that has gone since.
    for name in sorted(set(names) - skipped if lost else new):
        footer = _footer(log, f"{EVENTS}/{day}/{name}", skip_damaged=skip_damaged)
        if footer is None:
            skipped.add(name)
        else:
            footers[name] = footer
    known = was_read | replaced
    replaced |= {name for footer in footers.values() for name in footer.replaces}
    reduced = {
        name for footer in footers.values() if footer.is_retained for name in footer.replaces
    }
    removed = (lost - replaced) | (was_read & reduced)
    listing.removed += [f"{EVENTS}/{day}/{name}" for name in sorted(removed)]
    read = [name for name in names if name not in skipped and name not in replaced]
    for name in read:
        if name in new and not (footers[name].replaces and known >= set(footers[name].replaces)):
            listing.fresh.append(f"{EVENTS}/{day}/{name}")
        path = f"{EVENTS}/{day}/{name}"
        span = footers[name].span if name in footers else before.spans.get(path, [])
        if span:
            listing.coverage.spans[path] = span
    coverage = listing.coverage
    for found, kept in (
        (coverage.read, read),
        (coverage.replaced, sorted(replaced & set(names))),
        (coverage.skipped, sorted(skipped & set(names))),
    ):
        if kept:
            found[day] = kept


def _footer(log: Place, path: str, *, skip_damaged: bool) -> Footer | None:
    """The end of a segment; None for a damaged one that is to be skipped."""
    try:
        with log.open(path) as file:
            metadata = pq.read_metadata(file)
    except FileNotFoundError:  # removed meanwhile
        return None
    except (pa.ArrowException, OSError) as exc:
        if skip_damaged:
            return None
        raise HistoryError(
            f"cannot read {log.shown}/{path}: {' '.join(str(exc).split())[:200]}; move it away, or "
            "build with --skip-damaged to leave it out"
        ) from exc
    text = (metadata.metadata or {}).get(_MANIFEST)
    try:
        told = {} if text is None else json.loads(text)
    except ValueError:
        told = {}
    told = told if isinstance(told, dict) else {}
    replaces = [str(name) for name in told.get("replaces", ())]
    is_retained = bool(told.get("retained"))
    return Footer(int(metadata.num_rows), replaces, is_retained, _span(metadata))


def _span(metadata: pq.FileMetaData) -> list[float]:
    """The least and the greatest timestamp of a segment, if all parts of it tell."""
    lows, highs = [], []
    for group in range(metadata.num_row_groups):
        columns = metadata.row_group(group)
        for number in range(columns.num_columns):
            column = columns.column(number)
            if column.path_in_schema != "timestamp":
                continue
            told = column.statistics
            if told is None or not told.has_min_max or column.physical_type != "DOUBLE":
                return []
            lows.append(float(told.min))
            highs.append(float(told.max))
    return [min(lows), max(highs)] if lows and len(lows) == metadata.num_row_groups else []


def read(
    spark: SparkSession, log: Place, paths: list[str], since: float | None = None
) -> DataFrame:
    """The rows of some segments; with `since` (Unix seconds) of events that were sent after it.

    Fails with the name of the file on one that is not a segment. Folders of days are skipped by
    their name: an event is received after it was sent, or, by clocks that differ, at most a day
    before.
    """
    if since is not None:
        first = (datetime.fromtimestamp(since, UTC) - timedelta(days=1)).strftime("day=%Y-%m-%d")
        paths = [path for path in paths if path.split("/")[1] >= first]
        if not paths:
            raise HistoryError(f"the log {log.shown} has no events since then")
    if not paths:
        return schemas.no_rows(spark, schemas.LOG)
    rows = spark.read.schema(schemas.LOG).parquet(*map(log.at, paths))
    text = "concat('no segment of an event log: ', _metadata.file_path)"
    rows = rows.where(f"CASE WHEN {_BROKEN} THEN raise_error({text}) ELSE true END")
    return rows if since is None else rows.where(f"timestamp >= {since!r}D")


def count_quarantined(log: Place) -> int:
    """How many events the recorders refused."""
    found = (
        _footer(log, f"{QUARANTINE}/{day}/{name}", skip_damaged=True)
        for day, names in segments(log, QUARANTINE).items()
        for name in names
    )
    return sum(footer.rows for footer in found if footer is not None)
