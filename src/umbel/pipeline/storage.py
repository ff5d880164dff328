"""Every read and write of data: the log, the tables, and the work files of increments.

The log (`umbel.recorder` writes it) is read with its schema said, so a column that is not known
is ignored. A file that is no segment ends the run with its name; nothing is published then.

    TABLES/<table>/v=<run>/part-*.parquet      a table, as one run made it
    TABLES/_tables.json                        which of them are the tables; replaced last of all
    TABLES/_work/manifest.json                 which summaries are alive, and up to which batch
    TABLES/_work/tiers/<batch>/                summaries of tasks, of one batch or of several
    TABLES/_work/checkpoint-<id>/              what the stream has read
    TABLES/_work/{events,fold}-<run>/          what tables are made of, while they are

A run that is killed leaves folders that no manifest names: the next one removes them. The versions
of a table before the last one are kept for two more runs, for those who are reading them.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from umbel.pipeline import schemas, task_fold
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.places import Place

FORMAT: Final = 1
LOG_MARKER: Final = "_umbel-log.json"
INDEX: Final = "_tables.json"
WORK: Final = "_work"
VERSIONS_KEPT: Final = 3  # the last one included
TIERS_PER_LEVEL: Final = 8
_VERSION: Final = re.compile(r"v=\d{8}T\d{12}-[0-9a-f]{4}")
_LEFT: Final = ("checkpoint-", "events-", "fold-")
# What must be there in every row; a file without it is none of ours.
_BROKEN: Final = (
    "type IS NULL OR hostname IS NULL OR timestamp IS NULL OR uuid IS NULL AND type LIKE 'task-%'"
)


# -- the log -----------------------------------------------------------------------------------


def open_log(url: str) -> Place:
    """The place of a log, once it is known to be one."""
    place = Place(url)
    marker = place.read_json(LOG_MARKER)
    if marker is None:
        raise HistoryError(f"there is no event log at {url}: 'umbel record --log {url}' writes one")
    number = marker.get("format") if isinstance(marker, dict) else None
    if number != FORMAT:
        raise HistoryError(
            f"the log {url} has format {number!r}, this version of Umbel reads {FORMAT}"
        )
    return place


def segments(log: Place, kind: str = "events") -> Iterator[str]:
    """The paths of the segments, as they are now."""
    for day in log.names(kind):
        for name in log.names(f"{kind}/{day}"):
            if name.endswith(".parquet") and not name.startswith((".", "_")):
                yield f"{kind}/{day}/{name}"


def has_segments(log: Place, kind: str = "events") -> bool:
    """Whether there is anything to read."""
    return next(segments(log, kind), None) is not None


def check_segments(log: Place) -> None:
    """A log without events is a mistake more often than not; so is a file without content.

    Spark would tell of neither.
    """
    paths = list(segments(log))
    if not paths:
        raise HistoryError(
            f"the log {log.shown} has no events yet: let 'umbel record' run while tasks do"
        )
    if log.is_local:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # compacted away meanwhile
                if log.size(path) == 0:
                    raise HistoryError(f"cannot read {log.shown}/{path}: it is empty")


def read_log(spark: SparkSession, log: Place, since: float | None = None) -> DataFrame:
    """The rows of the log; with `since` (Unix seconds) of events that were sent after it.

    Folders of days are skipped by their name. An event is received after it was sent, or, by
    clocks that differ, at most a day before.
    """
    reader = spark.read.schema(schemas.LOG).option("recursiveFileLookup", "true")
    if since is None:
        return checked(reader.parquet(log.at("events")))
    first = (datetime.fromtimestamp(since, UTC) - timedelta(days=1)).strftime("day=%Y-%m-%d")
    days = [day for day in log.names("events") if day.startswith("day=") and day >= first]
    if not days:
        raise HistoryError(f"the log {log.shown} has no events since then")
    rows = checked(reader.parquet(*(log.at(f"events/{day}") for day in days)))
    return rows.where(f"timestamp >= {since!r}D")


def stream_log(spark: SparkSession, log: Place, files_per_batch: int) -> DataFrame:
    """The rows of the log as a stream: each segment once, however old it is.

    A segment that was compacted away between two runs is not missed: its rows are in another one.
    """
    reader = spark.readStream.schema(schemas.LOG).option("recursiveFileLookup", "true")
    reader = reader.option("maxFilesPerTrigger", files_per_batch).option("maxFileAge", "36500d")
    return checked(reader.option("ignoreMissingFiles", "true").parquet(log.at("events")))


def checked(rows: DataFrame) -> DataFrame:
    """The rows, failing with the name of the file on one that is no event."""
    text = "concat('no segment of an event log: ', _metadata.file_path)"
    return rows.where(f"CASE WHEN {_BROKEN} THEN raise_error({text}) ELSE true END")


def count_quarantined(log: Place) -> int:
    """How many events the recorders refused."""
    return sum(_count_rows(log, path) for path in segments(log, "quarantine"))


def _count_rows(place: Place, path: str) -> int:
    """The rows of a Parquet file, by its last bytes: a job of Spark takes longer."""
    try:
        with place.open(path) as file:
            return int(pq.read_metadata(file).num_rows)
    except FileNotFoundError:  # compacted away meanwhile
        return 0
    except (pa.ArrowException, OSError) as exc:
        raise HistoryError(f"cannot read {place.shown}/{path}: {exc}") from exc


# -- the tables --------------------------------------------------------------------------------


def new_run_id(now: datetime) -> str:
    """The name of a run; later ones are greater."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%S%f}-{secrets.token_hex(2)}"


@dataclass(slots=True)
class Publication:
    """The tables of one run, seen by nobody until `commit`."""

    spark: SparkSession
    tables: Place
    run: str
    made: dict[str, dict[str, Any]] = field(default_factory=dict)

    def publish(self, rows: DataFrame, name: str) -> DataFrame:
        """Write one table; gives it as it was written."""
        path = f"{name}/v={self.run}"
        rows.write.mode("overwrite").parquet(self.tables.at(path))
        self.tables.flush(path)
        names = (one for one in self.tables.names(path) if one.endswith(".parquet"))
        count = sum(_count_rows(self.tables, f"{path}/{one}") for one in names)
        self.made[name] = {"path": path, "rows": count}
        return self.spark.read.schema(rows.schema).parquet(self.tables.at(path))

    def publish_few(self, rows: list[dict[str, Any]], kinds: Mapping[str, str], name: str) -> None:
        """Write one table of few rows, without Spark."""
        path, sink = f"{name}/v={self.run}", pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, schemas.arrow_schema(kinds)), sink)
        self.tables.write(f"{path}/part-0.parquet", sink.getvalue().to_pybytes())
        self.made[name] = {"path": path, "rows": len(rows)}

    def keep(self, rows: DataFrame, name: str) -> DataFrame:
        """Write what several tables are made of; gives it as it was written."""
        path = f"{WORK}/{name}-{self.run}"
        rows.write.mode("overwrite").parquet(self.tables.at(path))
        return self.spark.read.schema(rows.schema).parquet(self.tables.at(path))

    def published_few(self, name: str) -> list[dict[str, Any]]:
        """The rows of a table of the last run that was committed, if it has one."""
        index = self.tables.read_json(INDEX) or {}
        entry = index.get("tables", {}).get(name)
        if entry is None:
            return []
        found: list[dict[str, Any]] = []
        for one in self.tables.names(entry["path"]):
            if one.endswith(".parquet"):
                with self.tables.open(f"{entry['path']}/{one}") as file:
                    found += pq.read_table(file).to_pylist()
        return found

    def commit(self) -> None:
        """From now on these are the tables."""
        index = self.tables.read_json(INDEX) or {}
        kept = [self.run, *_runs_of(index)][:VERSIONS_KEPT]
        self.tables.write_json(
            INDEX, {"format": FORMAT, "run": self.run, "tables": self.made, "kept": kept}
        )

    def clean(self) -> None:
        """Remove what was kept, and versions that are old or were never committed."""
        for name in self.tables.names(WORK):
            if name.endswith(f"-{self.run}"):
                self.tables.remove(f"{WORK}/{name}")
        kept = set(_runs_of(self.tables.read_json(INDEX) or {}))
        for name in self.tables.names():
            if name.startswith(("_", ".")):
                continue
            for version in self.tables.names(name):
                if _VERSION.fullmatch(version) and version.removeprefix("v=") not in kept:
                    self.tables.remove(f"{name}/{version}")


def _runs_of(index: dict[str, Any]) -> list[str]:
    return [run for run in index.get("kept", [index.get("run")]) if isinstance(run, str)]


# -- summaries of increments -------------------------------------------------------------------


@dataclass(slots=True)
class Tiers:
    """The summaries that are alive: one for each batch of late, merged ones for what is older.

    When a level has `per_level` summaries, they become one of the next level: each event is
    written again a few times at most, and a reader has few folders to merge. `add` and `compact`
    first write a folder and then the manifest; a folder that the manifest does not name is nothing.
    """

    place: Place
    log: str
    checkpoint: str
    batch: int = -1
    live: list[dict[str, Any]] = field(default_factory=list)
    per_level: int = TIERS_PER_LEVEL
    # A Java process may outlive the killed one that started it, and still write into its folders.
    token: str = field(default_factory=lambda: secrets.token_hex(3))

    @classmethod
    def open(cls, place: Place, log: Place, per_level: int = TIERS_PER_LEVEL) -> Self:
        """What the manifest says; the beginning if there is none, or its checkpoint is gone."""
        told = place.read_json(f"{WORK}/manifest.json") or {}
        if told and told.get("format") != FORMAT:
            raise HistoryError(
                f"{place.shown}/{WORK} has format {told.get('format')!r}: build with --full"
            )
        if told and told["log"] != log.url:
            raise HistoryError(
                f"the tables in {place.shown} are made from the log {told['log']}, not from "
                f"{log.shown}: take another directory, or build with --full"
            )
        made = cls(place, log.url, told.get("checkpoint", ""), per_level=per_level)
        made.batch, made.live = told.get("batch", -1), told.get("live", [])
        if f"checkpoint-{made.checkpoint}" not in place.names(WORK):
            # All segments are read again: what is summarised already does no harm.
            made.checkpoint, made.batch = secrets.token_hex(4), -1
        made.clean()
        return made

    @property
    def checkpoint_url(self) -> str:
        """Where the stream keeps what it has read."""
        return self.place.at(f"{WORK}/checkpoint-{self.checkpoint}")

    def summary(self, spark: SparkSession) -> DataFrame:
        """One summary of all that are alive."""
        return task_fold.merge(self._read(spark, [one["path"] for one in self.live]))

    def add(self, summary: DataFrame, batch: int) -> bool:
        """Keep the summary of a batch; False for one that is known already."""
        if batch <= self.batch:
            return False
        path = f"{WORK}/tiers/{self.checkpoint}-{batch:09}-{self.token}"
        self._write(summary, path)
        self.batch = batch
        self.live.append({"path": path, "level": 0})
        self.save()
        return True

    def compact(self, spark: SparkSession) -> bool:
        """Merge the summaries of a level that is full; whether there was one."""
        for level in sorted({one["level"] for one in self.live}):
            full = [one for one in self.live if one["level"] == level]
            if len(full) < self.per_level:
                continue
            path = f"{WORK}/tiers/{self.checkpoint}-{self.batch:09}-{self.token}+{level + 1}"
            self._write(task_fold.merge(self._read(spark, [one["path"] for one in full])), path)
            rest = [one for one in self.live if one["level"] != level]
            self.live = [*rest, {"path": path, "level": level + 1}]
            self.save()
            for one in full:
                self.place.remove(one["path"])
            return True
        return False

    def save(self) -> None:
        """Write the manifest."""
        told = {"format": FORMAT, "log": self.log, "checkpoint": self.checkpoint}
        self.place.write_json(
            f"{WORK}/manifest.json", {**told, "batch": self.batch, "live": self.live}
        )

    def clean(self) -> None:
        """Remove what no manifest names."""
        alive = {one["path"].rpartition("/")[2] for one in self.live}
        for name in self.place.names(f"{WORK}/tiers"):
            if name not in alive:
                self.place.remove(f"{WORK}/tiers/{name}")
        for name in self.place.names(WORK):
            if name.startswith(_LEFT) and not name.endswith(f"-{self.checkpoint}"):
                self.place.remove(f"{WORK}/{name}")

    def _write(self, summary: DataFrame, path: str) -> None:
        summary.write.mode("overwrite").parquet(self.place.at(path))
        self.place.flush(path)

    def _read(self, spark: SparkSession, paths: list[str]) -> DataFrame:
        reader = spark.read.schema(task_fold.SUMMARY)
        return reader.parquet(*map(self.place.at, paths))


def forget_increments(place: Place) -> None:
    """Remove all work files: the next increment begins at the beginning."""
    place.remove(f"{WORK}/manifest.json")
    for name in place.names(WORK):
        if name == "tiers" or name.startswith(_LEFT):
            place.remove(f"{WORK}/{name}")
