"""Reading tables without Spark: what is resolved, what a filter may be, what is refused."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.pipeline.published import SCHEMAS, World, publish
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.reading import FILTER_CHARS_MAX, Tables

INJECTIONS = [
    "true; DROP VIEW tasks",
    "true; SELECT 1",
    "true UNION SELECT * FROM tasks",
    "true) OR (true",
    "true LIMIT 3",
    "true ORDER BY name",
    "true GROUP BY uuid",
    "true QUALIFY true",
    "uuid IN (SELECT uuid FROM attempts)",
    "exists(FROM read_csv('/etc/passwd'))",
    "(FROM duckdb_settings() SELECT count(*)) > 0",
    "uuid = ?",
    "uuid = $1",
    "count(*) > 1",
    "row_number() OVER () = 1",
    "getenv('HOME') IS NOT NULL",
    "1 = 1 /*",
    "'",
    "*",
    "(" * 3_000,
    "(" * 300,
    "NOT " * 900 + "true",
    "COPY tasks TO '/tmp/stolen.csv'",
    "x" * (FILTER_CHARS_MAX + 1),
]


def found(tables: Tables, name: str, *args: Any, **options: Any) -> list[tuple[Any, ...]]:
    return list(tables.query(name, *args, **options).rows)


def test_a_filter_an_order_and_a_limit_give_the_rows_that_python_gives(
    tables: Tables, world: World
) -> None:
    failed = sorted(
        (row for row in world.rows["tasks"] if row["state"] == "FAILURE"),
        key=lambda row: -row["started"],
    )
    assert len(failed) > 3
    answer = tables.query(
        "tasks", "state = 'FAILURE'", ["started desc"], 3, columns=["uuid", "started"]
    )
    assert answer.columns == {"uuid": "VARCHAR", "started": "DOUBLE"}
    assert list(answer.rows) == [(row["uuid"], row["started"]) for row in failed[:3]]


def test_without_a_limit_all_rows_come(tables: Tables, world: World) -> None:
    assert len(found(tables, "timeline")) == len(world.rows["timeline"]) > 1_000


def test_a_filter_may_end_in_a_comment_and_use_functions(tables: Tables) -> None:
    all_of_them = len(found(tables, "tasks"))
    assert len(found(tables, "tasks", "true -- all of them")) == all_of_them
    after = "sent >= epoch(timestamp '2027-01-15 08:00:31') and name like 'shop.%'"
    assert 0 < len(found(tables, "tasks", after)) < all_of_them


@pytest.mark.parametrize("where", INJECTIONS, ids=lambda text: text[:30])
def test_what_is_no_expression_over_the_columns_is_refused_in_one_line(
    tables: Tables, where: str
) -> None:
    before = len(found(tables, "tasks"))
    with pytest.raises(HistoryError) as refused:
        found(tables, "tasks", where)
    assert "\n" not in str(refused.value)
    assert len(found(tables, "tasks")) == before  # and the table is still there


def test_an_unknown_column_and_a_syntax_error_name_the_columns(tables: Tables) -> None:
    for where in ("stat = 'FAILURE'", "state = "):
        with pytest.raises(HistoryError, match="the columns of tasks are uuid, state, sent"):
            found(tables, "tasks", where)
    with pytest.raises(HistoryError, match="no column 'nope'; the columns of gaps are hostname"):
        found(tables, "gaps", columns=["nope"])


@pytest.mark.parametrize("order", ["nope", "name; drop view tasks", "1", "name up", "lower(name)"])
def test_an_order_is_columns_of_the_table(tables: Tables, order: str) -> None:
    with pytest.raises(HistoryError, match=r"no column|--order"):
        found(tables, "tasks", order=[order])


def test_an_unknown_table_names_those_there_are(tables: Tables) -> None:
    with pytest.raises(HistoryError, match=r"unknown table 'taks': .* has attempts, clock_audit"):
        tables.query("taks")


def test_no_file_but_those_of_the_tables_can_be_opened_and_nothing_set_or_written(
    tables: Tables, tmp_path: Path
) -> None:
    assert tables.tables
    found(tables, "tasks", "true")
    database = tables._database
    for statement in (
        "SELECT * FROM read_csv('/etc/passwd')",
        f"COPY tasks TO '{tmp_path}/stolen.csv'",
        f"COPY tasks TO '{tables.table('gaps').files[0]}'",
        f"ATTACH '{tmp_path}/new.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
    ):
        with pytest.raises(duckdb.Error):
            database.execute(statement)
    assert list(tmp_path.iterdir()) == []
    assert len(found(tables, "gaps")) == 2


def test_hostile_names_are_plain_values(tmp_path: Path) -> None:
    names = ["'; DROP VIEW tasks; --", '"', "a\0b", "\x1b[2J", "<script>", "名前", "\u202e", ""]
    rows = [{"uuid": str(n), "name": name, "state": "SUCCESS"} for n, name in enumerate(names)]
    with Tables(publish(tmp_path / 'it\'s "here"', {"tasks": rows})) as tables:
        assert [row[0] for row in found(tables, "tasks", order=["uuid"], columns=["name"])] == names
        assert found(tables, "tasks", "name = '<script>'", columns=["uuid"]) == [("4",)]


def test_the_index_decides_which_version_is_read_and_hidden_files_are_not(
    world: World, tmp_path: Path
) -> None:
    publish(tmp_path, {"gaps": world.rows["gaps"]}, run="old")
    publish(tmp_path, {}, run="new")
    (tmp_path / "gaps/r=new/.part-1.parquet").write_bytes(b"half a file")
    (tmp_path / "gaps/r=new/_temporary").mkdir()
    (tmp_path / "gaps/r=new/_temporary/part-1.parquet").write_bytes(b"half a file")
    with Tables(tmp_path) as tables:
        assert tables.run == "new"
        assert found(tables, "gaps") == []


def test_a_table_in_several_files_is_one(world: World, tmp_path: Path) -> None:
    publish(tmp_path, {"workers": world.rows["workers"][:2]})
    schema = pa.schema(list(SCHEMAS["workers"].items()))
    more = pa.Table.from_pylist(world.rows["workers"][2:], schema=schema)
    pq.write_table(more, tmp_path / "workers/r=r1/part-00001.parquet")
    index = json.loads((tmp_path / "_tables.json").read_text())
    index["tables"]["workers"]["files"].append({"path": "workers/r=r1/part-00001.parquet"})
    (tmp_path / "_tables.json").write_text(json.dumps(index))
    with Tables(tmp_path) as tables:
        assert len(found(tables, "workers")) == 4


def test_a_damaged_table_is_named_and_the_others_can_be_read(world: World, tmp_path: Path) -> None:
    world.publish(tmp_path)
    part = tmp_path / "tasks/r=r1/part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-100])
    (tmp_path / "lineage/r=r1/part-00000.parquet").unlink()
    with Tables(tmp_path) as tables:
        with pytest.raises(HistoryError, match="table tasks cannot be read"):
            tables.query("tasks")
        with pytest.raises(HistoryError, match=r"table lineage cannot be read: .*No files found"):
            tables.query("lineage")
        assert len(found(tables, "gaps")) == 2


def test_a_table_damaged_in_its_middle_is_named_as_well(world: World, tmp_path: Path) -> None:
    world.publish(tmp_path)
    part = tmp_path / "timeline/r=r1/part-00000.parquet"
    whole = bytearray(part.read_bytes())
    whole[100:2_000] = bytes(1_900)
    part.write_bytes(whole)
    with Tables(tmp_path) as tables, pytest.raises(HistoryError, match="timeline") as told:
        found(tables, "timeline")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (None, "there are no tables in .*umbel history build"),
        ("{", "cannot read"),
        ("[]", "names no tables"),
        ({"format": 1, "tables": {}}, "has format 1, .* reads 2: .*umbel history build"),
        ({"format": 2, "tables": {"a": {"files": [{"path": "/etc"}]}}}, "has no files"),
        ({"format": 2, "tables": {"a": {"files": [{"path": "../a"}]}}}, "has no files"),
        ({"format": 2, "tables": {"a": {"files": ["a"]}}}, "has no files"),
        ({"format": 2, "tables": {"a": 7}}, "has no files"),
    ],
)
def test_what_is_no_directory_of_tables_is_told_in_one_line(
    index: Any, why: str, tmp_path: Path
) -> None:
    if index is not None:
        text = index if isinstance(index, str) else json.dumps(index)
        (tmp_path / "_tables.json").write_text(text)
    with pytest.raises(HistoryError, match=why):
        Tables(tmp_path)


def test_tables_in_another_file_system_are_read_through_fsspec(
    world: World, tmp_path: Path
) -> None:
    import fsspec

    world.publish(tmp_path)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/test-reading/tables", recursive=True)
    try:
        with Tables("memory://test-reading/tables") as tables:
            assert len(found(tables, "tasks", "state = 'FAILURE'")) > 3
            with pytest.raises(duckdb.Error):
                tables._database.execute("SELECT * FROM read_csv('/etc/passwd')")
    finally:
        memory.rm("/test-reading", recursive=True)


def test_a_filter_over_a_million_rows_costs_little_more_than_counting_them(tmp_path: Path) -> None:
    """A ratio: reading one column of all rows against the filter, the order and the limit."""
    publish(tmp_path, {})
    part = tmp_path / "tasks/r=r1/part-00000.parquet"
    made = ", ".join(
        f"{_MADE.get(name, 'NULL')}::{'DOUBLE' if kind == pa.float64() else 'VARCHAR'} AS {name}"
        for name, kind in SCHEMAS["tasks"].items()
    )
    duckdb.execute(f"COPY (SELECT {made} FROM range(1_000_000)) TO '{part}' (FORMAT parquet)")
    with Tables(tmp_path) as tables:
        tables.ask("SELECT sum(started), max(state) FROM tasks")
        counted = _cpu_s(lambda: tables.ask("SELECT sum(started), max(state) FROM tasks"))
        asked = _cpu_s(lambda: found(tables, "tasks", "state = 'FAILURE'", ["started desc"], 50))
    assert asked < 20 * counted + 0.05


_MADE = {
    "uuid": "range",
    "started": "range * 0.01",
    "state": "if(hash(range) % 20 = 0, 'FAILURE', 'SUCCESS')",
    "name": "(range % 20)",
}


def _cpu_s(work: Any) -> float:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    before = used()
    assert work()
    return used() - before
