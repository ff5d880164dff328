"""Tables are Delta Lake tables, and what Delta says is what was published."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.pipeline.published import assert_delta_is_published, delta_paths, published
from tests.pipeline.worlds import LogWriter, cluster
from umbel.pipeline import delta, storage
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.places import Place
from umbel.pipeline.storage import Publication, new_run_id

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = Callable[[Path, str], list[dict[str, Any]]]
KINDS = {"run": "text", "number": "whole"}


class Tables:
    """Tables of few rows, published without Spark."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.place = directory, Place(str(directory))

    def publication(self, *numbers: int, names: tuple[str, ...] = ("runs", "tasks")) -> Publication:
        run = new_run_id(datetime.now(UTC))
        made = Publication(None, self.place, run, storage.read_index(self.place))  # type: ignore[arg-type]
        for name in names:
            made.replace_few(name, [{"run": run, "number": number} for number in numbers], KINDS)
        return made

    def numbers(self, name: str, version: int | None = None) -> list[int]:
        """What a reader of Delta finds."""
        table = DeltaTable(self.directory / name, version=version)
        return sorted(table.to_pyarrow_table()["number"].to_pylist())


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(tmp_path / "tables")


def test_all_tables_of_builds_are_delta_tables(
    spark: SparkSession, rows: Rows, tmp_path: Path
) -> None:
    from umbel.pipeline.build import Options, build

    log, directory = LogWriter(tmp_path / "log"), tmp_path / "tables"
    for seed in (2, 3):
        log.add(cluster(60, seed=seed))
        build(Options(log=str(log.directory), tables=str(directory)), spark)
        assert_delta_is_published(directory)
    index = json.loads((directory / "_tables.json").read_text())
    assert index["batch"] == 2
    for name, entry in published(directory).items():
        table = DeltaTable(directory / name, version=entry["version"])
        found = [
            {key: value for key, value in row.items() if key[0] != "_"}
            for row in table.to_pyarrow_table().to_pylist()
        ]
        wanted = rows(directory, name)
        for row in wanted if name == "timeline" else ():
            del row["position"]
        assert sorted(map(repr, found)) == sorted(map(repr, wanted)), name
        assert table.transaction_version("umbel-build") in {1, 2}
    assert DeltaTable(directory / "runs").transaction_version("umbel-build") == 2


def test_a_version_of_an_earlier_build_can_still_be_read(tables: Tables) -> None:
    tables.publication(1, 2).commit({})
    tables.publication(3).commit({})
    assert tables.numbers("tasks") == [3]
    assert tables.numbers("tasks", version=0) == [1, 2]


def test_a_table_that_did_not_change_gets_no_commit(tables: Tables) -> None:
    tables.publication(1).commit({})
    tables.publication(2, names=("runs",)).commit({})
    assert {name: one["version"] for name, one in published(tables.directory).items()} == {
        "runs": 1,
        "tasks": 0,
    }


def test_what_a_build_committed_before_it_was_killed_is_taken_back(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.publication(1, 2).commit({})
    kill_commit(tables.publication(3), monkeypatch)
    assert tables.numbers("tasks") == [3]
    storage.take_back_delta(tables.place)
    storage.clean(tables.place)
    assert tables.numbers("tasks") == [1, 2]
    assert_delta_is_published(tables.directory)
    storage.take_back_delta(tables.place)
    assert published(tables.directory)["tasks"]["version"] == 2, "once is enough"
    tables.publication(4).commit({})
    assert tables.numbers("tasks") == [4]
    assert_delta_is_published(tables.directory)


def kill_commit(publication: Publication, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit to Delta's logs, and end before anything is published."""

    def killed(*_: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(Place, "write_json", killed)
        with pytest.raises(InterruptedError):
            publication.commit({})


def test_tables_of_a_first_build_that_was_killed_are_no_tables(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_commit(tables.publication(3), monkeypatch)
    storage.take_back_delta(tables.place)
    storage.clean(tables.place)
    assert not list(tables.directory.rglob("*.parquet"))
    assert not DeltaTable.is_deltatable(str(tables.directory / "tasks"))


def test_of_two_builds_at_once_the_second_publishes_nothing(tables: Tables) -> None:
    tables.publication(1).commit({})
    one, other = tables.publication(2), tables.publication(3)
    one.commit({})
    index = (tables.directory / "_tables.json").read_bytes()
    with pytest.raises(HistoryError, match="another build"):
        other.commit({})
    assert (tables.directory / "_tables.json").read_bytes() == index
    assert tables.numbers("tasks") == [2]
    assert_delta_is_published(tables.directory)


def test_of_two_builds_that_publish_at_the_same_moment_the_log_of_delta_decides(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.publication(1).commit({})
    one, other, stale = (
        tables.publication(2),
        tables.publication(3),
        storage.read_index(tables.place),
    )
    one.commit({})
    with monkeypatch.context() as patch:  # it has looked at the index just before
        patch.setattr(storage, "read_index", lambda _: stale)
        with pytest.raises(HistoryError, match="another build"):
            other.commit({})
    assert tables.numbers("tasks") == [2]
    assert_delta_is_published(tables.directory)


@pytest.mark.parametrize("damage", ["torn", "of other columns", "gone"])
def test_a_log_that_is_of_no_use_is_made_anew(tables: Tables, damage: str) -> None:
    tables.publication(1).commit({})
    log = tables.directory / "tasks/_delta_log"
    if damage == "torn":
        (log / f"{0:020}.json").write_text('{"add":{"path"')
    else:
        shutil.rmtree(log)
    if damage == "of other columns":
        other = pa.table({"other": [1]})
        pq.write_table(other, tables.directory / "tasks/other.parquet")
        from deltalake import write_deltalake

        write_deltalake(tables.directory / "tasks", other)
    tables.publication(2).commit({})
    assert tables.numbers("tasks") == [2]
    assert_delta_is_published(tables.directory)


def test_indexes_without_versions_get_them_with_the_next_build(tables: Tables) -> None:
    tables.publication(1).commit({})
    index = json.loads((tables.directory / "_tables.json").read_text())
    for name, entry in index["tables"].items():
        del entry["version"]
        shutil.rmtree(tables.directory / name / "_delta_log")
    (tables.directory / "_tables.json").write_text(json.dumps(index))
    tables.publication(2, names=("runs",)).commit({})
    assert tables.numbers("tasks") == [1]
    assert_delta_is_published(tables.directory)


def test_logs_stay_short_and_are_for_their_owner_alone(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.modes import check

    short = {**delta.CONFIGURATION, "delta.logRetentionDuration": "interval 0 seconds"}
    monkeypatch.setattr(delta, "CONFIGURATION", short)
    for number in range(65):
        tables.publication(number).commit({})
        storage.clean(tables.place)
    assert tables.numbers("tasks") == [64]
    log = list((tables.directory / "tasks/_delta_log").iterdir())
    assert len(log) < 50
    assert any(path.name.endswith(".checkpoint.parquet") for path in log)
    assert len(delta_paths(tables.directory, "tasks")) == 1
    check(tables.directory)


def test_statistics_bound_what_is_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "one.parquet"
    table = pa.table(
        {
            "whole": [3, None, -2],
            "number": [0.5, 2.5, None],
            "wild": [math.nan, math.inf, 1.0],
            "text": ["b", "a", None],
            "long": ["x" * 40, "a", None],
            "nothing": pa.nulls(3, pa.int64()),
            "flag": [True, False, None],
            "many": [[1], [2], []],
        }
    )
    pq.write_table(table, path, row_group_size=2)
    found = json.loads(json.dumps(delta.statistics(pq.read_metadata(path)), allow_nan=False))
    assert found["numRecords"] == 3
    assert found["minValues"] == {"whole": -2, "number": 0.5, "text": "a"}
    assert found["maxValues"] == {"whole": 3, "number": 2.5, "text": "b"}
    assert found["nullCount"]["whole"] == 1
    assert found["nullCount"]["nothing"] == 3
