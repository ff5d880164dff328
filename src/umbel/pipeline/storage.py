"""The tables: which files each of them has, and the file that makes them visible.

    TABLES/_tables.json                                  the files of all tables of one build
    TABLES/<table>/_delta_log/                           the same for other readers (`delta`)
    TABLES/<table>/r=<run>/part=<part>/part-*.parquet    written by one run
    TABLES/_work/<table>/r=<run>/…                       of a table that only builds read
    TABLES/_work/state-<run>.json                        what the next build goes on from
    TABLES/_work/index-<run>.json                        the indexes of earlier runs
    TABLES/_work/<name>-<run>/                           what tables are made of, while they are

A table is kept in *parts*: those of a cell of time, of a range of the order, or of a day. A run
writes the parts that it changes as new files and takes over all others. Nobody sees any of it
before the index is replaced, which is the very last step. A run that is killed leaves files that no
index names: the next one removes them. (An object store has no locks: there files of runs that may
still be at work stay for a day.) Files of the last builds stay for those who are still reading them
(`RUNS_KEPT`).

What Spark reports to have written is compared with what the driver finds, before anything refers to
it: executors that write to a disk of their own would otherwise leave empty tables behind.

Columns whose names begin with `_` serve the next build. Readers do not show them.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql.functions import col, expr
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from umbel.pipeline import delta, schemas
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.footers import bounds_of, read_footer
from umbel.pipeline.places import Place

FORMAT: Final = 2
INDEX: Final = "_tables.json"
WORK: Final = "_work"
RUNS_KEPT: Final = 3  # the last one included
# Shorter: a long build in a store may lose its files to another one; longer: more garbage.
AT_WORK_MAX: Final = timedelta(days=1)
_RUN: Final = r"\d{8}T\d{12}-[0-9a-f]{4}"
# What runs of this and of the older version (`v=`) write below a table.
_WRITTEN: Final = re.compile(rf"[rv]=({_RUN})")
_LEFT: Final = re.compile(rf"(?:[a-z_]+-({_RUN})|manifest\.json|tiers)")
_TIMES: Final = ("minute", "began", "received", "timestamp")
_NULL_PART: Final = "__HIVE_DEFAULT_PARTITION__"  # as Spark names it
_KEPT: Final = re.compile(rf"(?:index|state)-({_RUN})\.json")

# The elements of the column `_cells`, as files name them.
_CELLS: Final = "_cells.list.element"

File = dict[str, Any]  # path, rows, part; the least and the greatest of `_cells`, where known


def new_run_id(now: datetime) -> str:
    """The name of a run; later ones are greater."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%S%f}-{secrets.token_hex(2)}"


def read_index(tables: Place) -> dict[str, Any]:
    """The index of the last build; empty if there is none, or an older version wrote it."""
    index = tables.read_json(INDEX)
    return index if isinstance(index, dict) and index.get("format") == FORMAT else {}


def published_run(tables: Place) -> str:
    """The run of the last build; empty if there is none."""
    return str(read_index(tables).get("run", ""))


def read_state(tables: Place, index: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the last build left for the next one; None if it left nothing."""
    found = tables.read_json(f"{WORK}/state-{index['run']}.json") if index else None
    return found if isinstance(found, dict) else None


def published_few(tables: Place, index: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of a small table that an index names, if it does."""
    found: list[dict[str, Any]] = []
    for one in index.get("tables", {}).get(name, {}).get("files", ()):
        with tables.open(one["path"]) as file:
            found += pq.read_table(file).to_pylist()
    return found


def read_files(
    spark: SparkSession, tables: Place, files: Sequence[File], schema: StructType
) -> DataFrame:
    """The rows of some files of a table."""
    if not files:
        return schemas.no_rows(spark, schema)
    return spark.read.schema(schema).parquet(*(tables.at(one["path"]) for one in files))


def tighten_old(tables: Place) -> None:
    """Close to others what an older version left open; files that are not ours stay as they are."""
    for name in tables.names():
        written = (one for one in tables.names(name) if _WRITTEN.match(one))
        if name in (INDEX, WORK) or next(written, None) is not None:
            tables.tighten(name)


def take_back_delta(tables: Place) -> None:
    """Undo what a killed build has committed to Delta's logs and not published."""
    if tables.read_json(INDEX) is not None and not read_index(tables):
        return  # of an older version
    index = read_index(tables)
    if versions := delta.take_back(tables, index.get("tables", {}), index.get("batch", 0)):
        for name, version in versions.items():
            index["tables"][name]["version"] = version
        tables.write_json(INDEX, index)


def clean(tables: Place) -> None:
    """Remove what runs left behind that were killed, and what nobody reads any more.

    Tables of an older version stay until others have taken their place.
    """
    index = read_index(tables)
    if not index and tables.read_json(INDEX) is not None:
        return
    kept = set(index.get("kept", ()))
    files = {one["path"] for run in kept for one in _files_of(tables, run)}
    at_work_since = "" if tables.is_local else new_run_id(datetime.now(UTC) - AT_WORK_MAX)

    def is_gone(run: str | None) -> bool:
        return not at_work_since or run is None or run < at_work_since

    for name in tables.names(WORK):
        if told := _KEPT.fullmatch(name):
            is_left = told[1] not in kept and is_gone(told[1])
        else:
            told = _LEFT.fullmatch(name)
            is_left = told is not None and (told[1] in kept or is_gone(told[1]))
        if is_left:
            tables.remove(f"{WORK}/{name}")
    shown = [name for name in tables.names() if not name.startswith(("_", "."))]
    for folder in (*shown, *(f"{WORK}/{name}" for name in tables.names(WORK))):
        for written in tables.names(folder):
            told = _WRITTEN.match(written)
            if told and is_gone(told[1]):
                _clean_folder(tables, f"{folder}/{written}", files)


def _files_of(tables: Place, run: str) -> Iterable[File]:
    index = tables.read_json(f"{WORK}/index-{run}.json") or {}
    for table in index.get("tables", {}).values():
        yield from table["files"]


def _clean_folder(tables: Place, folder: str, files: Collection[str]) -> None:
    """Remove the files of a folder that are not among these, and the folder if none is."""
    kept = {path for path in files if path.startswith(f"{folder}/")}
    if not kept:
        tables.remove(folder)
        return
    for part in tables.names(folder):
        path = f"{folder}/{part}"
        if not any(one == path or one.startswith(f"{path}/") for one in kept):
            tables.remove(path)


def _reaches(file: File, cells: Collection[int]) -> bool:
    """Whether a file may have rows of these cells; one of which that is not known may."""
    if "cells" not in file:
        return True
    first, last = file["cells"]
    return any(first <= cell <= last for cell in cells)


def _time_of(columns: Collection[str]) -> list[str]:
    """The time that files are sorted by, if the table has one.

    Neighbours are alike then: files are smaller by a third, and readers can skip pages.
    """
    return [name for name in _TIMES if name in columns][:1]


@dataclass(slots=True)
class Publication:
    """The tables of one run, seen by nobody until `commit`.

    `before` is the index that it goes on from; empty for a run that makes everything anew.
    """

    spark: SparkSession
    tables: Place
    run: str
    before: Mapping[str, Any] = field(default_factory=dict)
    # The run that was the published one when this build began; by default the one that is now.
    follows: str | None = None
    is_small: bool = False  # all tables are: the driver collects their rows and writes them
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    _footers: dict[str, pq.FileMetaData] = field(default_factory=dict)  # of files of this run
    # Tables are written by several threads at a time.
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        if self.follows is None:
            self.follows = published_run(self.tables)

    def files(self, name: str) -> list[File]:
        """The files of a table, as far as this run has come."""
        told = self.made.get(name) or self.before.get("tables", {}).get(name) or {"files": []}
        return list(told["files"])

    def read(
        self,
        name: str,
        schema: StructType,
        parts: Collection[int] | None = None,
        *,
        cells: Collection[int] | None = None,
        before: bool = False,
    ) -> DataFrame:
        """The rows of a table as far as this run has come, or `before` it; or of some parts, or at
        least those whose `_cells` have one of some cells.
        """
        files = self.before["tables"][name]["files"] if before else self.files(name)
        chosen = [one for one in files if parts is None or one["part"] in parts]
        if cells is not None:
            chosen = [one for one in chosen if _reaches(one, cells)]
        return self.in_one_partition(read_files(self.spark, self.tables, chosen, schema))

    def in_one_partition(self, rows: DataFrame) -> DataFrame:
        """These rows, which Spark then need not shuffle, if all tables are small."""
        return rows.coalesce(1) if self.is_small else rows

    def replace(
        self, name: str, rows: DataFrame, by: str = "", parts: Collection[int | None] | None = None
    ) -> None:
        """Write these rows in place of some parts of a table, or in place of the table.

        `by` is the column that names the part of a row; without it they are one part, None.
        """
        folder = self._folder(name)
        if self.is_small:
            new = self._write_few(rows, folder, by)
        elif by:
            parted = rows.withColumn("part", col(by)).repartition("part")
            new = self._write(
                parted.sortWithinPartitions("part", *_time_of(rows.columns)), folder, "part"
            )
        else:
            new = self._write(rows, folder)
        others = [one for one in self.files(name) if parts is not None and one["part"] not in parts]
        self._note(name, [*others, *new], rows.schema)

    def replace_sorted(self, name: str, rows: DataFrame, by: str, parts: Collection[int]) -> None:
        """As `replace`, of rows whose partitions are the parts, in an order that is kept."""
        folder = self._folder(name)
        if self.is_small:
            new = self._write_few(rows, folder, by, in_order=True)
        else:
            new = self._write(rows.withColumn("part", col(by)), folder, "part")
        others = [one for one in self.files(name) if one["part"] not in parts]
        self._note(name, [*others, *new], rows.schema)

    def replace_by_nothing(self, name: str, schema: StructType) -> None:
        """Make it an empty table."""
        self._note(name, [], schema)

    def replace_few(self, name: str, rows: list[dict[str, Any]], kinds: Mapping[str, str]) -> None:
        """Write a table of few rows, without Spark."""
        table = pa.Table.from_pylist(rows, schemas.arrow_schema(kinds))
        self.made[name] = {
            "rows": len(rows),
            "files": [self._write_small(self._folder(name), table)],
        }

    def keep(self, rows: DataFrame, name: str) -> DataFrame:
        """Write what several tables are made of; gives it as it was written."""
        if self.is_small:
            table = schemas.collected(rows)
            if not table.num_rows:  # Spark does not take a table without a chunk of rows
                return schemas.no_rows(self.spark, rows.schema)
            return self.spark.createDataFrame(table).coalesce(1)
        path = f"{WORK}/{name}-{self.run}"
        self._write(rows, path)
        return self.spark.read.schema(rows.schema).parquet(self.tables.at(path))

    def rows_of(self, name: str) -> int:
        """How many rows a table has, as far as this run has come."""
        return sum(one["rows"] for one in self.files(name))

    def rows_by_part(self, name: str) -> dict[int, int]:
        """How many rows each part of a table has."""
        made: dict[int, int] = {}
        for one in self.files(name):
            if one["part"] is not None:
                made[one["part"]] = made.get(one["part"], 0) + one["rows"]
        return made

    @property
    def index(self) -> dict[str, Any]:
        """All tables, as far as this run has come."""
        tables = {**self.before.get("tables", {}), **self.made}
        return {"format": FORMAT, "run": self.run, "tables": tables}

    def commit(self, state: Mapping[str, Any]) -> None:
        """From now on these are the tables.

        Raises `HistoryError` if another build has published since this one began.
        """
        published, index = read_index(self.tables), self.index
        if published.get("run", "") != self.follows:
            raise HistoryError(delta.meanwhile(self.tables))
        batch = published.get("batch", 0) + 1
        index |= {"batch": batch, "kept": [self.run, *published.get("kept", ())][:RUNS_KEPT]}
        versions = delta.commit(
            self.tables, index["tables"], published.get("tables", {}), batch, self._footers
        )
        for name, version in versions.items():
            index["tables"][name] = {**index["tables"][name], "version": version}
        self.tables.write_json(f"{WORK}/state-{self.run}.json", state)
        self.tables.write_json(f"{WORK}/index-{self.run}.json", index)
        self.tables.write_json(INDEX, index)

    def _folder(self, name: str) -> str:
        """Where to write next to; a table of which the name begins with `_` is for builds only."""
        table = f"{WORK}/{name[1:]}" if name.startswith("_") else name
        return f"{table}/r={self.run}.{next(self._numbers)}"

    def _note(self, name: str, files: list[File], schema: StructType) -> None:
        full = [one for one in files if one["rows"]]
        if not full and not name.startswith("_"):  # a file with the columns, for those who read
            empty = [one for one in files if not one["rows"]]
            full = empty[:1] or [
                self._write_small(self._folder(name), to_arrow_schema(schema).empty_table())
            ]
        self.made[name] = {"rows": sum(one["rows"] for one in full), "files": full}

    def _write_small(self, folder: str, table: pa.Table, part: int | None = None) -> File:
        """Write a file without Spark."""
        path, sink = f"{folder}/part-0.parquet", pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        self.tables.write(path, sink.getvalue().to_pybytes())
        return {"path": path, "rows": table.num_rows, "part": part}

    def _write_few(
        self, rows: DataFrame, folder: str, by: str, *, in_order: bool = False
    ) -> list[File]:
        """As `_write`, by the driver: the rows are few."""
        found = schemas.collected(rows)
        if not by:
            return [self._write_small(folder, found)]
        if not in_order and (times := _time_of(found.column_names)):
            found = found.sort_by(times[0])
        made = []
        for part in found[by].unique().to_pylist():
            chosen = pc.is_null(found[by]) if part is None else pc.equal(found[by], part)
            name = f"part={_NULL_PART if part is None else part}"
            made.append(self._write_small(f"{folder}/{name}", found.filter(chosen), part))
        return made

    def _write(self, rows: DataFrame, folder: str, by: str = "") -> list[File]:
        """Write rows as Parquet files into a folder, durably; gives the files.

        Raises `HistoryError` if the driver does not find all that the executors wrote.
        """
        counted = Observation()
        made = rows.observe(counted, expr("count(1)").alias("rows")).write.mode("overwrite")
        (made.partitionBy(by) if by else made).parquet(self.tables.at(folder))
        self.tables.flush(folder)
        found = self._found(folder, None)
        if by:
            for name in self.tables.names(folder):
                value = name.partition("=")[2]
                if value:
                    part = None if value == _NULL_PART else int(value)
                    found += self._found(f"{folder}/{name}", part)
        total, wrote = sum(one["rows"] for one in found), counted.get["rows"]
        if total != wrote:
            raise HistoryError(
                f"Spark wrote {wrote:,} rows of {folder}, and {total:,} are in "
                f"{self.tables.shown}: executors and driver must see the same directory"
            )
        return found

    def _found(self, folder: str, part: int | None) -> list[File]:
        names = (name for name in self.tables.names(folder) if name.endswith(".parquet"))
        paths = (f"{folder}/{name}" for name in names if not name.startswith((".", "_")))
        found = []
        for path in paths:
            footer = self._footers[path] = read_footer(self.tables, path)
            found.append({"path": path, "rows": footer.num_rows, "part": part})
            if bounds := bounds_of(footer, _CELLS):
                found[-1]["cells"] = bounds
        return found
