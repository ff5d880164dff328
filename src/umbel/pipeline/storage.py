"""The tables, and the work files of increments. The log is read by `umbel.pipeline.log`.

    TABLES/<table>/v=<run>/part-*.parquet      a table, as one run made it
    TABLES/_tables.json                        which of them are the tables; replaced last of all
    TABLES/_work/manifest.json                 which summaries are alive, and of which segments
    TABLES/_work/tiers/<batch>/                summaries of tasks, of one batch or of several
    TABLES/_work/{events,fold}-<run>/          what tables are made of, while they are

A run that is killed leaves folders that no manifest names: the next one removes them. The versions
of a table before the last one are kept for two more runs, for those who are reading them.

What Spark says that it wrote is compared with what the driver finds, before anything refers to it:
executors that write to a disk of their own would otherwise leave empty tables behind.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql.functions import expr

from umbel.pipeline import schemas, task_fold
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.log import Coverage
from umbel.pipeline.places import Place

FORMAT: Final = 1
MANIFEST_FORMAT: Final = 2
INDEX: Final = "_tables.json"
WORK: Final = "_work"
VERSIONS_KEPT: Final = 3  # the last one included
TIERS_PER_LEVEL: Final = 8
_VERSION: Final = re.compile(r"v=\d{8}T\d{12}-[0-9a-f]{4}")
_LEFT: Final = ("checkpoint-", "events-", "fold-")


def _count_rows(place: Place, path: str) -> int:
    """The rows of a Parquet file, by its footer: a job of Spark takes longer."""
    try:
        with place.open(path) as file:
            return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowException, OSError) as exc:
        raise HistoryError(f"cannot read {place.shown}/{path}: {exc}") from exc


def write(rows: DataFrame, place: Place, path: str) -> int:
    """Write rows as Parquet files into a folder, durably; gives how many there are.

    Raises `HistoryError` if the driver does not find all that the executors wrote.
    """
    counted = Observation()
    made = rows.observe(counted, expr("count(1)").alias("rows"))
    made.write.mode("overwrite").parquet(place.at(path))
    place.flush(path)
    names = (name for name in place.names(path) if name.endswith(".parquet"))
    found, wrote = sum(_count_rows(place, f"{path}/{name}") for name in names), counted.get["rows"]
    if found != wrote:
        raise HistoryError(
            f"Spark wrote {wrote:,} rows of {path}, and {found:,} are in {place.shown}: executors "
            "and driver must see the same directory"
        )
    return found


# -- the tables --------------------------------------------------------------------------------


def new_run_id(now: datetime) -> str:
    """The name of a run; later ones are greater."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%S%f}-{secrets.token_hex(2)}"


def tighten_old(tables: Place) -> None:
    """Close to others what an older version left open; files that are not ours stay as they are."""
    for name in tables.names():
        versions = (one for one in tables.names(name) if _VERSION.fullmatch(one))
        if name in (INDEX, WORK) or next(versions, None) is not None:
            tables.tighten(name)


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
        self.made[name] = {"path": path, "rows": write(rows, self.tables, path)}
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
        write(rows, self.tables, path)
        return self.spark.read.schema(rows.schema).parquet(self.tables.at(path))

    def published_few(self, name: str) -> list[dict[str, Any]]:
        """The rows of a table of the last run that was committed, if it has one."""
        return published_few(self.tables, self.tables.read_json(INDEX) or {}, name)

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


def published_few(tables: Place, index: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of a table that an index names, if it does."""
    entry = index.get("tables", {}).get(name)
    found: list[dict[str, Any]] = []
    for one in tables.names(entry["path"]) if entry is not None else ():
        if one.endswith(".parquet"):
            with tables.open(f"{entry['path']}/{one}") as file:
                found += pq.read_table(file).to_pylist()
    return found


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
    batch: int = -1
    live: list[dict[str, Any]] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)  # the segments behind them
    published: str = ""  # the run whose tables have all of it
    per_level: int = TIERS_PER_LEVEL
    # A Java process may outlive the killed one that started it, and still write into its folders.
    token: str = field(default_factory=lambda: secrets.token_hex(3))

    @classmethod
    def open(cls, place: Place, log: Place, per_level: int = TIERS_PER_LEVEL) -> Self:
        """What the manifest says; the beginning if there is none, or an older version wrote it."""
        told = place.read_json(f"{WORK}/manifest.json") or {}
        if told and told["log"] != log.url:
            raise HistoryError(
                f"the tables in {place.shown} are made from the log {told['log']}, not from "
                f"{log.shown}: take another directory, or build with --full"
            )
        if told.get("format") != MANIFEST_FORMAT:
            return cls(place, log.url, per_level=per_level)
        return cls(
            place, log.url, told["batch"], told["live"], Coverage(**told["coverage"]),
            told["published"], per_level,
        )  # fmt: skip

    def summary(self, spark: SparkSession) -> DataFrame:
        """One summary of all that are alive."""
        return task_fold.merge(self._read(spark, [one["path"] for one in self.live]))

    def add(self, summary: DataFrame, coverage: Coverage) -> None:
        """Keep the summary of one more batch, after which these segments are covered."""
        path = f"{WORK}/tiers/{self.batch + 1:09}-{self.token}"
        self._write(summary, path)
        self.batch += 1
        self.live.append({"path": path, "level": 0})
        self.coverage = coverage
        self.save()

    def compact(self, spark: SparkSession) -> bool:
        """Merge the summaries of a level that is full; whether there was one."""
        for level in sorted({one["level"] for one in self.live}):
            full = [one for one in self.live if one["level"] == level]
            if len(full) < self.per_level:
                continue
            path = f"{WORK}/tiers/{self.batch:09}-{self.token}+{level + 1}"
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
        told = {"format": MANIFEST_FORMAT, "log": self.log, "batch": self.batch, "live": self.live}
        told |= {"coverage": asdict(self.coverage), "published": self.published}
        self.place.write_json(f"{WORK}/manifest.json", told)

    def clean(self) -> None:
        """Remove what no manifest names."""
        alive = {one["path"].rpartition("/")[2] for one in self.live}
        for name in self.place.names(f"{WORK}/tiers"):
            if name not in alive:
                self.place.remove(f"{WORK}/tiers/{name}")
        for name in self.place.names(WORK):
            if name.startswith(_LEFT):
                self.place.remove(f"{WORK}/{name}")

    def _write(self, summary: DataFrame, path: str) -> None:
        write(summary, self.place, path)

    def _read(self, spark: SparkSession, paths: list[str]) -> DataFrame:
        reader = spark.read.schema(task_fold.SUMMARY)
        return reader.parquet(*map(self.place.at, paths))


def forget_increments(place: Place) -> None:
    """Remove all work files: the next increment begins at the beginning."""
    place.remove(f"{WORK}/manifest.json")
    for name in place.names(WORK):
        if name == "tiers" or name.startswith(_LEFT):
            place.remove(f"{WORK}/{name}")
