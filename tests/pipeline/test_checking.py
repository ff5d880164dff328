"""`umbel history check` finds what is wrong with tables, and nothing in those that are right."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.pipeline.worlds import LogWriter, cluster, stretched
from tests.sizes import FULL
from umbel.pipeline.errors import HistoryError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from umbel.pipeline.build import Options

EVENTS = 600


@pytest.fixture(scope="module")
def built(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log and tables of it, in several cells."""
    from umbel.pipeline.build import Options, build

    directory = tmp_path_factory.mktemp("built")
    log = LogWriter(directory / "log")
    events = sorted(stretched(cluster(EVENTS), 900), key=lambda event: event["timestamp"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("umbel.pipeline.cells.CELL_ROWS", EVENTS // 6)
        patch.setattr("umbel.pipeline.tables.timeline.RANGE_ROWS", EVENTS // 4)
        for part in range(2):
            log.add(events[part * EVENTS // 2 : (part + 1) * EVENTS // 2])
            build(Options(log=str(directory / "log"), tables=str(directory / "tables")), spark)
    return directory


@pytest.fixture
def options(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """A copy that a test may damage."""
    from umbel.pipeline.build import Options

    monkeypatch.setattr("umbel.pipeline.cells.CELL_ROWS", EVENTS // 6)
    monkeypatch.setattr("umbel.pipeline.tables.timeline.RANGE_ROWS", EVENTS // 4)
    shutil.copytree(built, tmp_path / "copy")
    state = next((tmp_path / "copy/tables/_work").glob("state-*.json"))
    for path in state.parent.glob("state-*.json"):
        told = json.loads(path.read_text())
        path.write_text(json.dumps({**told, "log": f"file://{tmp_path}/copy/log"}))
    return Options(log=str(tmp_path / "copy/log"), tables=str(tmp_path / "copy/tables"))


def index_of(options: Options) -> dict[str, Any]:
    return json.loads(Path(options.tables, "_tables.json").read_text())


def change(options: Options, name: str, make: Callable[[pa.Table], pa.Table]) -> None:
    """Change a file of a table that has rows, as nobody should."""
    entry = index_of(options)["tables"][name]
    path = next(Path(options.tables, one["path"]) for one in entry["files"] if one["rows"] > 1)
    pq.write_table(make(pq.ParquetFile(path).read()), path)
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)  # or Spark finds out by that


@pytest.mark.parametrize("sample", [2, None] if FULL else [2])
def test_right_tables_are_right_and_stay_as_they_are(
    spark: SparkSession, options: Options, sample: int | None
) -> None:
    from umbel.pipeline.checking import check

    before = {path: path.read_bytes() for path in Path(options.tables).rglob("*.parquet")}
    index = index_of(options)
    writer = LogWriter(Path(options.log))
    writer.count = 7
    writer.add(cluster(40, seed=9))
    verdict = check(options, sample, spark, random.Random(1))
    assert verdict.findings == []
    assert verdict.rows > 0
    assert verdict.unread == 1
    assert verdict.cells_in_all > 3
    assert verdict.cells == (sample or verdict.cells_in_all)
    assert index_of(options) == index
    assert {path: path.read_bytes() for path in Path(options.tables).rglob("*.parquet")} == before


def test_rows_that_the_log_does_not_give_are_found_in_any_table(
    spark: SparkSession, options: Options
) -> None:
    from umbel.pipeline.checking import check

    def one_more(column: str) -> Callable[[pa.Table], pa.Table]:
        def changed(table: pa.Table) -> pa.Table:
            number = table.schema.get_field_index(column)
            return table.set_column(number, column, pc.add(pc.fill_null(table[column], 0), 1))

        return changed

    columns = {
        "queues": "arrivals",
        "rates_daily": "received",
        "tasks": "attempts",
        "timeline": "_number",
        "workers": "events_seen",
    }
    for name, column in columns.items():
        change(options, name, one_more(column))
    verdict = check(options, None, spark)
    assert [finding.partition(":")[0] for finding in verdict.findings] == list(columns)
    for finding in verdict.findings:
        assert "not what the log says" in finding
        assert "missing" in finding


def test_files_that_are_gone_or_short_are_found_without_spark(options: Options) -> None:
    from umbel.pipeline.checking import check

    change(options, "tasks", lambda table: table.slice(1))
    gone = index_of(options)["tables"]["attempts"]["files"][0]["path"]
    Path(options.tables, gone).unlink()
    shutil.rmtree(Path(options.tables, "lineage/_delta_log"))
    verdict = check(options)
    # The log of Delta is made anew as the check begins.
    assert [finding.partition(":")[0] for finding in verdict.findings] == ["tasks", "attempts"]


def test_what_was_removed_from_the_log_has_to_be_built_first(options: Options) -> None:
    from umbel.pipeline.checking import check

    next(Path(options.log).rglob("events/*/*.parquet")).unlink()
    with pytest.raises(HistoryError, match=r"1 segments were removed .* 'umbel history build'"):
        check(options)


def test_without_tables_there_is_nothing_to_check(options: Options, tmp_path: Path) -> None:
    from umbel.pipeline.build import Options as Chosen
    from umbel.pipeline.checking import check

    (tmp_path / "none").mkdir()
    with pytest.raises(HistoryError, match="run 'umbel history build' first"):
        check(Chosen(log=options.log, tables=str(tmp_path / "none")))
