"""Queries of users: one SELECT over the tables, and nothing else in reach."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.unit.pipeline.published import World
from umbel.pipeline.errors import HistoryError, TooLong
from umbel.pipeline.reading import QUERY_CHARS_MAX, Tables

ENDLESS = "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range * b.range = 7"
REFUSED = [
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_parquet('/etc/*')",
    "SELECT * FROM parquet_scan('/etc/passwd')",
    "SELECT * FROM '/etc/passwd'",
    'SELECT * FROM "/etc/passwd"',
    "SELECT * FROM glob('/etc/*')",
    'SELECT * FROM (WITH "/etc/passwd" AS (SELECT 1) SELECT 1) a, "/etc/passwd"',
    "SELECT uuid FROM tasks WHERE name IN (SELECT content FROM read_text('/etc/passwd'))",
    "WITH x AS (FROM read_csv('/etc/passwd')) SELECT * FROM x",
    "COPY tasks TO '/tmp/stolen.csv'",
    "COPY (SELECT 1) TO '/tmp/stolen.csv'",
    "EXPORT DATABASE '/tmp/stolen'",
    "ATTACH '/tmp/new.db'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "PRAGMA database_list",
    "SET enable_external_access = true",
    "RESET lock_configuration",
    "CREATE TABLE x AS SELECT 1",
    "CREATE VIEW tasks AS SELECT 1",
    "DROP VIEW tasks",
    "INSERT INTO tasks VALUES (1)",
    "DELETE FROM tasks",
    "WITH x AS MATERIALIZED (DELETE FROM tasks RETURNING *) SELECT * FROM x",
    "WITH x AS (INSERT INTO tasks SELECT 1 RETURNING *) SELECT * FROM x",
    "CALL duckdb_settings()",
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM query('SELECT 1')",
    "SELECT * FROM query_table('tasks')",
    "SELECT * FROM information_schema.tables",
    "SELECT * FROM sqlite_master",
    "SELECT * FROM system.main.duckdb_settings",
    "SHOW TABLES",
    "DESCRIBE tasks",
    "SUMMARIZE tasks",
    "EXPLAIN ANALYZE SELECT 1",
    "PREPARE x AS SELECT 1",
    "BEGIN",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP VIEW tasks",
    "",
    "-- nothing",
    "SELEC 1",
    "SELECT 'a",
    "SELECT ?",
    "SELECT $1",
    "SELECT getenv('HOME')",
    "SELECT * FROM world",
    "SELECT * FROM REFUSED",
    "SELECT 1/*",
    "(" * 3_000,
    "SELECT " + "NOT " * 5_000 + "true",
    "x" * (QUERY_CHARS_MAX + 1),
]


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_what_is_no_select_over_the_tables_is_refused_in_one_line(
    tables: Tables, text: str
) -> None:
    with pytest.raises(HistoryError) as told:
        list(tables.sql(text).rows)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 4_000


def test_local_files_are_out_of_reach_behind_the_check_too(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.pipeline.reading.select_of", lambda statements, known: ["tasks"])
    for text in ("SELECT * FROM read_csv('/etc/passwd')", "SELECT * FROM '/etc/passwd'"):
        with pytest.raises(HistoryError, match=r"(?i)permission|disabled|does not exist"):
            list(tables.sql(text).rows)


def test_joins_common_tables_and_aggregates_give_what_python_gives(
    tables: Tables, world: World
) -> None:
    answer = tables.sql(
        "WITH failed AS (SELECT uuid FROM Tasks WHERE state = 'FAILURE') "
        "SELECT a.worker, count(*) AS n, list(a.attempt) AS attempts "
        "FROM attempts a JOIN failed USING (uuid) GROUP BY a.worker ORDER BY a.worker;"
    )
    assert answer.columns == {"worker": "VARCHAR", "n": "BIGINT", "attempts": "BIGINT[]"}
    failed = {row["uuid"] for row in world.rows["tasks"] if row["state"] == "FAILURE"}
    workers = [row["worker"] for row in world.rows["attempts"] if row["uuid"] in failed]
    assert [(row[0], row[1]) for row in answer.rows] == [
        (worker, workers.count(worker)) for worker in sorted(set(workers))
    ]


@pytest.mark.parametrize(
    "text",
    [
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 5) FROM t",
        "WITH tasks AS (SELECT * FROM tasks WHERE state = 'FAILURE') SELECT count(*) FROM tasks",
        "SELECT i FROM range(3) t(i) UNION ALL SELECT unnest([7, 8])",
        "SELECT * FROM (VALUES (1, 'a')) v(x, y) -- a comment",
        "SELECT main.tasks.uuid FROM main.tasks LIMIT 1",
        "SELECT (SELECT max(clock) FROM timeline) AS last",
        "FROM gaps SELECT missing ORDER BY ALL",
    ],
)
def test_everything_that_only_reads_the_tables_is_allowed(tables: Tables, text: str) -> None:
    assert list(tables.sql(text).rows)


def test_columns_of_one_name_are_told_apart(tables: Tables) -> None:
    answer = tables.sql("SELECT a.uuid, b.uuid FROM tasks a JOIN tasks b USING (uuid) LIMIT 1")
    assert list(answer.columns) == ["uuid", "uuid_2"]


def test_a_mistake_is_told_with_the_columns_of_the_tables(tables: Tables) -> None:
    with pytest.raises(HistoryError, match=r"strte.*; the columns of gaps are hostname, "):
        tables.sql("SELECT strte FROM gaps")
    with pytest.raises(HistoryError, match=r"unknown table 'taks': there are attempts, "):
        tables.sql("SELECT * FROM taks")


def test_a_query_that_takes_too_long_is_ended(tables: Tables) -> None:
    began = time.monotonic()
    with pytest.raises(TooLong, match="--timeout"):
        list(tables.sql(ENDLESS, timeout_s=0.3).rows)
    assert time.monotonic() - began < 30
    assert list(tables.sql("SELECT 1").rows) == [(1,)]  # and the next one runs


def test_other_threads_may_ask(tables: Tables) -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(tables.sql("SELECT 7").rows))
    thread.start()
    thread.join(30)
    assert found == [(7,)]


# -- opening


def test_only_the_tables_that_are_named_are_opened(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(tmp_path)
    opened: list[str] = []
    before = Tables._open

    def note(self: Tables, name: str, entry: dict[str, object]) -> object:
        opened.append(name)
        return before(self, name, entry)

    monkeypatch.setattr(Tables, "_open", note)
    with Tables(tmp_path) as tables:
        assert list(tables.query("gaps").rows)
        assert opened == ["gaps"]
        assert list(tables.sql("SELECT * FROM tasks JOIN attempts USING (uuid) LIMIT 1").rows)
        assert opened == ["gaps", "tasks", "attempts"]
        assert list(tables.query("gaps", "missing > 0").rows)
        assert tables.ask("SELECT count(*) AS n FROM workers")[0]["n"]
        assert opened == ["gaps", "tasks", "attempts", "workers"]
        assert set(tables.tables) == set(tables.names)


def test_rows_that_are_being_read_outlive_the_opening_of_another_table(
    world: World, tmp_path: Path
) -> None:
    world.publish(tmp_path)
    with Tables(tmp_path) as tables:
        rows = iter(tables.query("timeline").rows)
        first = next(rows)
        assert list(tables.sql("SELECT count(*) FROM gaps").rows) == [(2,)]
        assert len([first, *rows]) == len(world.rows["timeline"])


def test_a_damaged_table_does_not_keep_others_from_being_asked(
    world: World, tmp_path: Path
) -> None:
    world.publish(tmp_path)
    (tmp_path / "tasks/r=r1/part-00000.parquet").write_bytes(b"rubbish")
    with Tables(tmp_path) as tables:
        assert list(tables.sql("SELECT count(*) FROM gaps").rows) == [(2,)]
        with pytest.raises(HistoryError, match="table tasks cannot be read"):
            tables.sql("SELECT * FROM gaps, tasks")
