"""`umbel history`: what is shown, in which form, and what is told when something is wrong."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from tests.unit.pipeline.published import BEGAN, World, publish
from umbel.cli.history import build as build_verb
from umbel.cli.history import moments
from umbel.cli.history.cells import cell
from umbel.cli.history.command import history
from umbel.pipeline.errors import HistoryError

Umbel = Callable[..., Any]
HOSTILE = "shop.\x1b[2J\u202eevil\nname"


@pytest.fixture(scope="module")
def world() -> World:
    made = World(tasks=120)
    made.rows["tasks"][0]["name"] = HOSTILE
    return made


@pytest.fixture(scope="module")
def tables(world: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(world.publish(tmp_path_factory.mktemp("tables")))


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# -- sql ---------------------------------------------------------------------------------------


def sql(umbel: Umbel, tables: str, query: str, *options: str) -> Any:
    return umbel("history", "sql", "--tables", tables, query, *options)


def test_sql_prints_a_table_json_or_csv(umbel: Umbel, tables: str, world: World) -> None:
    query = "SELECT name, count(*) AS n, bool_or(true) AS yes FROM tasks GROUP BY name ORDER BY n"
    names = [row["name"] for row in world.rows["tasks"]]
    shown = sql(umbel, tables, query)
    assert (shown.code, shown.out.splitlines()[0].split()) == (0, ["name", "n", "yes"])
    assert "\x1b" not in shown.out
    rows = lines_of(sql(umbel, tables, query, "--json").out)
    assert {row["name"]: row["n"] for row in rows} == {name: names.count(name) for name in names}
    head, *cells = csv.reader(io.StringIO(sql(umbel, tables, query, "--csv").out))
    assert head == ["name", "n", "yes"]
    assert {name: int(n) for name, n, _ in cells} == {name: names.count(name) for name in names}
    assert {yes for _, _, yes in cells} == {"true"}


def test_sql_shows_so_many_rows_and_says_that_there_are_more(umbel: Umbel, tables: str) -> None:
    ran = sql(umbel, tables, "SELECT uuid FROM tasks", "--limit", "5", "--json")
    assert len(lines_of(ran.out)) == 5
    assert ran.err == "umbel: there are more than 5 rows: --limit 0 shows all\n"
    ran = sql(umbel, tables, "SELECT uuid FROM tasks", "--limit", "0", "--json")
    assert (len(lines_of(ran.out)), ran.err) == (120, "")


def test_sql_reads_standard_input(
    umbel: Umbel, tables: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("SELECT 6 * 7 AS n"))
    assert lines_of(sql(umbel, tables, "-", "--json").out) == [{"n": 42}]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "COPY tasks TO 'x.csv'",
        "ATTACH 'x.db'",
        "INSTALL httpfs",
        "PRAGMA database_list",
        "SET threads = 1",
        "SELECT 1; SELECT 2",
    ],
)
def test_sql_refuses_what_is_no_select_with_one_line(umbel: Umbel, tables: str, query: str) -> None:
    ran = sql(umbel, tables, query)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "root:" not in ran.err


def test_sql_ends_after_its_time_with_a_code_of_its_own(umbel: Umbel, tables: str) -> None:
    query = "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range * b.range = 7"
    ran = sql(umbel, tables, query, "--timeout", "0.2")
    assert (ran.code, ran.out) == (3, "")
    assert "--timeout SECONDS gives it more time" in ran.err


def test_sql_takes_one_form_of_output(umbel: Umbel, tables: str) -> None:
    ran = sql(umbel, tables, "SELECT 1", "--json", "--csv")
    assert (ran.code, ran.err) == (2, "umbel: choose one of --json and --csv\n")


def test_an_interrupt_ends_a_long_query_at_once(tables: str, tmp_path: Path) -> None:
    query = "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range * b.range = 7"
    code = (
        "import signal, sys, threading, os\n"
        "from umbel.pipeline import reading\n"
        "before = reading._fetched\n"
        "def fetched(*args):\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    return before(*args)\n"
        "reading._fetched = fetched\n"
        "from umbel.cli.main import run\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    argv = ["history", "sql", "--tables", tables, query]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


# -- show --------------------------------------------------------------------------------------


def test_show_without_a_table_lists_them(umbel: Umbel, tables: str) -> None:
    ran = umbel("history", "show", "--tables", tables)
    assert ran.code == 0
    assert "timeline" in ran.out
    told = {
        row["table"]: row
        for row in lines_of(umbel("history", "show", "--tables", tables, "--json").out)
    }
    assert told["tasks"]["rows"] == 120
    assert told["tasks"]["columns"]["started"] == "DOUBLE"


def test_show_prints_one_line_a_row_with_times_that_people_read(
    umbel: Umbel, tables: str, world: World
) -> None:
    ran = umbel("history", "show", "tasks", "--tables", tables, "--order", "sent", "--limit", "3")
    head, *rows = ran.out.splitlines()
    assert head.split()[:5] == ["uuid", "name", "state", "worker", "sent"]
    assert len(rows) == 3
    assert "2027-01-15 08:00:01.200" in rows[1]
    assert ran.err == "umbel: there are more than 3 rows: --limit 0 shows all\n"


def test_show_as_json_has_all_columns_and_raw_times(
    umbel: Umbel, tables: str, world: World
) -> None:
    argv = ("history", "show", "tasks", "--tables", tables, "--order", "sent", "--json")
    ran = umbel(*argv, "--limit", "0")
    rows = lines_of(ran.out)
    assert [row["uuid"] for row in rows] == [row["uuid"] for row in world.rows["tasks"]]
    assert rows[1]["sent"] == world.rows["tasks"][1]["sent"]
    assert rows[0]["name"] == HOSTILE
    assert {"queue_wait", "root", "extra"} <= rows[0].keys()
    assert ran.err == ""


def test_fifty_rows_are_shown_unless_told(umbel: Umbel, tables: str) -> None:
    ran = umbel("history", "show", "tasks", "--tables", tables, "--json")
    assert len(ran.out.splitlines()) == 50


def test_columns_filter_and_order_are_what_was_asked_for(umbel: Umbel, tables: str) -> None:
    ran = umbel(
        "history", "show", "attempts", "--tables", tables, "--where", "outcome = 'RETRY'",
        "--columns", "worker, outcome", "--order", "ended desc,worker", "--json",
    )  # fmt: skip
    rows = lines_of(ran.out)
    assert rows
    assert all(list(row) == ["worker", "outcome"] for row in rows)
    assert {row["outcome"] for row in rows} == {"RETRY"}


def test_names_of_others_can_not_move_the_cursor(umbel: Umbel, tables: str) -> None:
    for extra in ((), ("--json",)):
        out = umbel("history", "show", "tasks", "--tables", tables, "--order", "uuid", *extra).out
        assert not {"\x1b", "\u202e"} & set(out)
        assert "evil" in out.splitlines()[0 if extra else 1]


def test_an_empty_answer_has_its_titles_and_no_objects(umbel: Umbel, tables: str) -> None:
    argv = ("history", "show", "gaps", "--tables", tables, "--where", "false")
    assert umbel(*argv).out.split() == [
        "hostname",
        "incarnation",
        "first",
        "last",
        "missing",
        "kind",
    ]
    assert umbel(*argv, "--json").out == ""


def test_many_rows_in_a_pipe_have_their_titles_once(umbel: Umbel, tmp_path: Path) -> None:
    rows = [{"hostname": f"w{n}", "missing": n} for n in range(2_500)]
    directory = str(publish(tmp_path / "t", {"gaps": rows}))
    out = umbel("history", "show", "gaps", "--tables", directory, "--limit", "0").out
    assert len(out.splitlines()) == 2_501
    assert out.count("hostname") == 1


# -- at ----------------------------------------------------------------------------------------


def test_at_shows_nodes_tasks_and_winners(umbel: Umbel, tables: str, world: World) -> None:
    attempt = max(
        (row for row in world.rows["attempts"] if row["ended"]),
        key=lambda row: row["ended"] - row["started"],
    )
    when = (attempt["started"] + attempt["ended"]) / 2
    ran = umbel("history", "at", "--tables", tables, "--time", f"{when:.6f}")
    assert ran.code == 0
    assert "4 alive" in ran.out
    assert attempt["uuid"] in ran.out
    assert "STARTED" in ran.out
    facts = json.loads(
        umbel("history", "at", "--tables", tables, "--time", str(when), "--json").out
    )
    assert facts["counts"]["nodes"] == len(facts["nodes"]) == 4
    assert attempt["uuid"] in {task["uuid"] for task in facts["running"]}


def test_at_takes_the_time_as_it_is_shown(umbel: Umbel, tables: str) -> None:
    ran = umbel("history", "at", "--tables", tables, "--time", "2027-01-15 08:00:10", "--json")
    assert json.loads(ran.out)["time"] == BEGAN + 10
    clock = umbel("history", "at", "--tables", tables, "--clock", "99")
    assert clock.out.startswith("clock 99, 2027-01-15 08:00:")


# -- mistakes ----------------------------------------------------------------------------------

WRONG = [
    (["show", "taks"], "unknown table 'taks'"),
    (["show", "tasks", "--where", "stat = 1"], "the columns of tasks are uuid"),
    (["show", "tasks", "--where", "true; drop view tasks"], "give one expression"),
    (["show", "tasks", "--columns", "nope"], "no column 'nope'"),
    (["show", "tasks", "--order", "nope desc"], "no column 'nope'"),
    (["show", "tasks", "--limit", "-1"], "limit"),
    (["at"], "give --clock N or --time T"),
    (["at", "--clock", "1", "--time", "1"], "give --clock N or --time T"),
    (["at", "--time", "yesterday"], "'yesterday' is no time: write it such as"),
    (["at", "--time", "nan"], "is no time"),
    (["at", "--time", "2020-01-01"], "is before the history"),
    (["at", "--clock", "99999999999999999999"], "clock"),
    (["report", "-o", "nowhere/report.html"], "cannot write nowhere/report.html: No such file"),
    (["report", "-o", "."], "it is a directory"),
]


@pytest.mark.parametrize(("argv", "why"), WRONG, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_line_and_exit_code_2(
    umbel: Umbel, tables: str, argv: list[str], why: str
) -> None:
    ran = umbel("history", *argv, "--tables", tables)
    assert ran.code == 2, ran.err
    assert ran.out == ""
    assert why in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("verb", [["show", "tasks"], ["at", "--clock", "1"], ["report"]])
def test_missing_tables_are_told_with_how_to_make_them(umbel: Umbel, verb: list[str]) -> None:
    ran = umbel("history", *verb, "--tables", "nowhere")
    assert ran.code == 2
    assert "there are no tables in nowhere/: make them with 'umbel history build" in ran.err
    assert umbel("history", *verb).code == 2  # no --tables at all


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`without("duckdb")` makes a package look as if it was not installed."""

    def hide(package: str) -> None:
        for name in [*sys.modules]:
            if name.partition(".")[0] == package or name.startswith("umbel.pipeline."):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.mark.parametrize(
    ("package", "argv"),
    [
        ("duckdb", ["show", "tasks", "--tables", "t"]),
        ("duckdb", ["at", "--clock", "1", "--tables", "t"]),
        ("duckdb", ["report", "--tables", "t"]),
        ("pyspark", ["build", "--log", "l", "--tables", "t"]),
    ],
)
def test_a_missing_extra_is_told_with_how_to_get_it(
    umbel: Umbel, without: Callable[[str], None], package: str, argv: list[str]
) -> None:
    without(package)
    ran = umbel("history", *argv)
    assert ran.code == 2
    assert ran.err == (
        f"umbel: 'umbel history' needs the package {package}: pip install 'umbel[history]'\n"
    )


def test_every_verb_has_help_with_an_example(umbel: Umbel) -> None:
    assert isinstance(history, click.Group)
    for verb in history.commands:
        ran = umbel("history", verb, "--help")
        assert ran.code == 0
        assert f"umbel history {verb} " in ran.out.split("Example")[1]


# -- report ------------------------------------------------------------------------------------


def test_report_writes_a_page(umbel: Umbel, tables: str) -> None:
    ran = umbel("history", "report", "--tables", tables, "-o", "r.html", "--title", "A <b> day")
    assert ran.code == 0
    assert ran.out.startswith("wrote r.html (")
    text = Path("r.html").read_text()
    assert "<h1>A &lt;b&gt; day</h1>" in text
    assert text.rstrip().endswith("</html>")


# -- times -------------------------------------------------------------------------------------


def test_times_are_read_as_people_write_them() -> None:
    for text in (
        "1800000000",
        "2027-01-15 08:00",
        "2027-01-15T08:00:00Z",
        "2027-01-15T09:00+01:00",
    ):
        assert moments.unix_time(text) == 1_800_000_000
    assert moments.unix_time("15m ago", now=2_000) == 1_100
    assert moments.unix_time("1.5h", now=10_000) == 4_600
    assert abs(moments.unix_time("0s") - time.time()) < 5
    for text in ("", "soon", "-1", "inf", "1e300", "2027-13-01", "9" * 400):
        with pytest.raises(ValueError, match="is no time"):
            moments.unix_time(text)


def test_what_is_shown_is_taken_back() -> None:
    assert moments.unix_time(moments.shown_time(1_794_814_200.125)) == 1_794_814_200.125
    assert (moments.shown_time(None), moments.shown_time(1e300)) == ("", "1e+300")


def test_a_count_by_the_name_of_a_time_stays_a_count() -> None:
    assert cell(12, "BIGINT", "started", 60) == "12"
    assert cell(BEGAN, "DOUBLE", "started", 60) == "2027-01-15 08:00:00.000"
    assert cell(0.25, "DOUBLE", "queue_wait", 60) == "250ms"
    assert cell([{"hostname": "a", "rank": 1}, {"hostname": "b"}], "STRUCT[]", "x", 60) == "a, b"
    assert (cell(None, "DOUBLE", "sent", 60), cell(True, "BOOLEAN", "effective", 60)) == ("", "yes")


# -- following ---------------------------------------------------------------------------------


class FakeOptions:
    """What `_follow` uses of the options: the build itself is Spark's, and tested elsewhere."""

    def __init__(self) -> None:
        self.stop = threading.Event()


def test_a_signal_asks_a_following_build_to_end_and_gives_its_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options: Any = FakeOptions()
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def follow(given: Any) -> str:
        assert threading.current_thread() is not threading.main_thread()
        os.kill(os.getpid(), signal.SIGTERM)
        assert given.stop.wait(10)
        return "the run"

    monkeypatch.setattr(build_verb, "_build", follow)
    assert build_verb._follow(options) == "the run"
    assert "then ending" in capsys.readouterr().err
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = FakeOptions()
    gone = threading.Event()

    def follow(given: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert given.stop.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        gone.wait(10)

    monkeypatch.setattr(build_verb, "_build", follow)
    with pytest.raises(KeyboardInterrupt):
        build_verb._follow(options)
    gone.set()


def test_what_goes_wrong_in_the_thread_is_told_by_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def follow(given: Any) -> None:
        raise HistoryError("the log is gone")

    monkeypatch.setattr(build_verb, "_build", follow)
    options: Any = FakeOptions()
    with pytest.raises(HistoryError, match="the log is gone"):
        build_verb._follow(options)
