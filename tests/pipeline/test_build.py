"""However the log comes to be read, the tables are the same, and they are Python's fold.

`make soak` has 200,000 events in 20 increments, and a standalone master.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.disks import small_disk
from tests.pipeline.conftest import JAVA_OPTIONS
from tests.pipeline.kills import Killer
from tests.pipeline.published import Rows, assert_same_tables
from tests.pipeline.worlds import (
    START,
    Event,
    LogWriter,
    as_table,
    cluster,
    differences,
    disturbed,
    folded,
    stretched,
)
from tests.sizes import FULL, size
from tests.workers import Program
from umbel.pipeline.errors import HistoryError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS, INCREMENTS = size(3_000, 200_000), size(3, 20)
# What the session of the tests has too: see conftest.py.
SHORT_LIVED = {"JAVA_TOOL_OPTIONS": JAVA_OPTIONS}
WAIT_S = size(400, 1_800)
KILLS = 15
BUILD = [sys.executable, "-m", "umbel", "history", "build"]


@dataclass
class World:
    """Events, the log of them, and the tables that one batch makes of it."""

    events: list[Event]
    log: Path
    tables: Path
    wanted: dict[str, Event]


@pytest.fixture(scope="module")
def world(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> World:
    from umbel.pipeline.build import Options, build

    directory = tmp_path_factory.mktemp("world")
    events = stretched(cluster(EVENTS), 300)
    made = World(events, directory / "log", directory / "tables", folded(events))
    writer = LogWriter(made.log)
    rows = disturbed(events, seed=3)
    for number in range(4):
        writer.add(rows[number::4])
    writer.add_quarantined(3)
    run = build(Options(log=str(made.log), tables=str(made.tables), full=True), spark)
    assert (run.read, run.kept, run.duplicate) == (len(rows), EVENTS, len(rows) - EVENTS)
    assert (run.quarantined, run.tasks) == (3, len(made.wanted))
    return made


def test_a_batch_gives_the_tasks_of_the_fold(world: World, rows: Rows) -> None:
    found = rows(world.tables, "tasks")
    assert differences(found, world.wanted) == []


def test_what_follows_from_the_fold_is_in_tasks_too(world: World, rows: Rows) -> None:
    found = {one["uuid"]: one for one in rows(world.tables, "tasks")}
    starts: dict[str, int] = dict.fromkeys(found, 0)
    sent: dict[str, int] = {}
    for event in world.events:
        if event["type"] == "task-started":
            starts[event["uuid"]] += 1
        elif event["type"] == "task-sent":
            sent[event["uuid"]] = event["retries"]
    for uuid, one in found.items():
        assert one["attempts"] == starts[uuid]
        steps, at = 0, one
        while at["parent"] is not None:
            steps, at = steps + 1, found.get(at["parent"], {"parent": None})
        assert one["depth"] == steps
        assert one["root"] == (one["root_id"] or uuid)
        is_over = one["state"] in {"SUCCESS", "FAILURE", "REVOKED"}
        assert (one["finished"] is not None) == is_over
        if one["queue_wait"] is not None:
            # The first attempts are seen to be sent, the retries are not.
            before = one["sent"] if sent.get(uuid) == one["retries"] else one["received"]
            assert one["queue_wait"] == pytest.approx(one["started"] - before)
            assert one["queue_wait"] >= 0
    assert max(one["depth"] for one in found.values()) > 3


def test_runs_has_a_row_for_the_run_with_what_it_counted(world: World, rows: Rows) -> None:
    (run,) = rows(world.tables, "runs")
    assert (run["mode"], run["kept"], run["quarantined"]) == ("full", EVENTS, 3)
    assert run["rows"] == run["kept"] + run["duplicate"]
    assert {"events", "workers", "tasks"} <= json.loads(run["timings"]).keys()


@pytest.mark.usefixtures("large")
def test_increments_with_kills_between_all_steps_give_the_same_tables(
    spark: SparkSession,
    world: World,
    rows: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from umbel.pipeline.build import Options, build

    dice = random.Random(5)
    killer = Killer(monkeypatch)
    writer, tables = LogWriter(tmp_path / "log"), tmp_path / "tables"
    parts = disturbed(world.events, seed=11)
    monkeypatch.setattr("umbel.pipeline.cells.CELL_ROWS", EVENTS // 7)
    monkeypatch.setattr("umbel.pipeline.tables.timeline.RANGE_ROWS", EVENTS // 5)
    options = Options(log=str(tmp_path / "log"), tables=str(tables))
    for part in in_increments(parts):
        writer.add(part)
        killer.advance(spark, options, dice.randint(1, 50))
    assert len(killer.kills) >= INCREMENTS // 2, killer.kills
    writer.add_quarantined(3)
    run = build(options, spark)
    assert (run.kept, run.rows, run.read) == (EVENTS, len(parts), 0)
    assert_same_tables(tables, world.tables, rows)
    index = json.loads((tables / "_tables.json").read_text())
    assert len({one["part"] for one in index["tables"]["tasks"]["files"]}) > 3
    named = {
        one["path"]
        for run_name in index["kept"]
        for table in json.loads((tables / f"_work/index-{run_name}.json").read_text())[
            "tables"
        ].values()
        for one in table["files"]
    }
    there = {
        str(path.relative_to(tables))
        for path in tables.rglob("*.parquet")
        if "_delta_log" not in path.parts  # has checkpoints, in longer runs
    }
    assert there == named, "what no index names is removed"
    written = [path for path in tables.rglob("*") if "_delta_log" not in path.parts]
    assert any(path.name.endswith(".crc") for path in written), "Spark writes these files"
    assert [path for path in written if path.stat().st_mode & 0o077] == []


def in_increments(events: list[Event]) -> list[list[Event]]:
    """Parts as a recorder writes them, with some events that are late."""
    dice = random.Random(6)
    last = INCREMENTS - 1
    parts: list[list[Event]] = [[] for _ in range(INCREMENTS)]
    ordered = sorted(events, key=lambda event: event["timestamp"])
    for number, event in enumerate(ordered):
        due = number * INCREMENTS // len(ordered)
        parts[due if dice.random() < 0.97 else dice.randint(due, last)].append(event)
    return parts


@pytest.mark.skipif(not FULL, reason="make soak runs it; the test above kills at every step")
def test_a_build_that_is_killed_for_real_is_gone_on_with(
    spark: SparkSession, world: World, rows: Rows, tmp_path: Path, start: Callable[..., Program]
) -> None:
    from umbel.pipeline.build import Options, build

    log, tables = tmp_path / "log", tmp_path / "tables"
    writer = LogWriter(log)
    parts = disturbed(world.events, seed=12)
    for number in range(12):
        writer.add(parts[number::12])
    code = (
        "from umbel.pipeline.build import *;"
        f"build(Options(log={str(log)!r}, tables={str(tables)!r}, master='local[1]',"
        "files_per_batch=1))"
    )
    program = start([sys.executable, "-c", code], env=SHORT_LIVED)
    index = tables / "_tables.json"
    deadline = time.monotonic() + WAIT_S
    while not index.exists() or len(json.loads(index.read_text())["kept"]) < 3:
        assert program.process.poll() is None, program.output
        assert time.monotonic() < deadline, "no batch was done"
        time.sleep(0.02)
    os.kill(program.process.pid, signal.SIGKILL)
    program.process.wait()
    run = build(Options(log=str(log), tables=str(tables), files_per_batch=4), spark)
    assert 0 < run.read < len(parts)
    assert_same_tables(tables, world.tables, rows)


def check_same_tables_on(
    master: str, world: World, rows: Rows, tables: Path, start: Callable[..., Program]
) -> None:
    command = [*BUILD, "--log", str(world.log), "--tables", str(tables), "--full"]
    program = start([*command, "--master", master], env=SHORT_LIVED)
    assert program.process.wait(WAIT_S) == 0, program.output
    assert_same_tables(tables, world.tables, rows)
    (run,) = rows(tables, "runs")
    assert run["master"] == master


@pytest.mark.slow
def test_separate_executors_give_the_same_tables(
    world: World, rows: Rows, tmp_path: Path, start: Callable[..., Program]
) -> None:
    check_same_tables_on("local-cluster[2,1,2048]", world, rows, tmp_path / "tables", start)


@pytest.fixture
def standalone(tmp_path: Path, start: Callable[..., Program]) -> str:
    """A standalone master with two workers; its URL."""
    import pyspark

    run_class = str(Path(pyspark.__file__).parent / "bin/spark-class")
    deploy, env = "org.apache.spark.deploy", {"SPARK_LOG_DIR": str(tmp_path)}
    here = ["--host", "127.0.0.1"]
    node = start([run_class, f"{deploy}.master.Master", *here, "--port", "0"], env=env)
    master = node.wait_for(r"Starting Spark master at (spark://\S+)", 100).group(1)
    for _ in range(2):
        worker = [run_class, f"{deploy}.worker.Worker", *here, "--cores", "1", "--memory", "2g"]
        start([*worker, master], env=env).wait_for("Successfully registered with master", 100)
    return str(master)


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="make soak runs it")
def test_a_standalone_master_with_two_workers_gives_the_same_tables(
    world: World, rows: Rows, tmp_path: Path, start: Callable[..., Program], standalone: str
) -> None:
    check_same_tables_on(standalone, world, rows, tmp_path / "tables", start)


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="make soak runs it; others kill at every step")
@pytest.mark.parametrize("where", ["local", "standalone"])
def test_builds_that_are_killed_at_random_moments_leave_nothing_wrong(
    spark: SparkSession,
    rows: Rows,
    tmp_path: Path,
    start: Callable[..., Program],
    request: pytest.FixtureRequest,
    where: str,
) -> None:
    from umbel.pipeline.build import Options, build

    master = "local[2]" if where == "local" else request.getfixturevalue("standalone")
    dice, log, tables = random.Random(17), LogWriter(tmp_path / "log"), tmp_path / "tables"
    events = disturbed(stretched(cluster(KILLS * 200), 300), seed=4)
    events.sort(key=lambda event: event["timestamp"])
    command = [*BUILD, "--log", str(log.directory), "--tables", str(tables), "--master", master]
    killed, began = 0, time.monotonic()
    log.add(events[:200])
    assert start(command, env=SHORT_LIVED).process.wait(WAIT_S) == 0
    usual_s = time.monotonic() - began
    for number in range(KILLS):
        log.add(events[number * 220 + 200 : (number + 1) * 220 + 200])
        program = start(command, env=SHORT_LIVED)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.process.wait(dice.uniform(0.2, 1.0) * usual_s)
        if program.process.poll() is None:
            os.kill(program.process.pid, signal.SIGKILL)
            program.process.wait()
            killed += 1
        else:
            assert program.process.returncode == 0, program.output
    assert killed >= KILLS // 2
    assert start(command, env=SHORT_LIVED).process.wait(WAIT_S) == 0
    build(Options(log=str(log.directory), tables=str(tmp_path / "whole"), full=True), spark)
    assert_same_tables(tables, tmp_path / "whole", rows)


@pytest.mark.usefixtures("only_tasks")
def test_since_builds_a_window_and_the_next_build_everything(
    spark: SparkSession, world: World, rows: Rows, tmp_path: Path
) -> None:
    from umbel.pipeline.build import Options, build

    middle = world.events[len(world.events) // 2]["timestamp"]
    run = build(Options(log=str(world.log), tables=str(tmp_path), since=middle), spark)
    late = [event for event in world.events if event["timestamp"] >= middle]
    assert run.kept == len(late)
    assert differences(rows(tmp_path, "tasks"), folded(late)) == []
    run = build(Options(log=str(world.log), tables=str(tmp_path)), spark)
    assert run.kept == EVENTS
    assert differences(rows(tmp_path, "tasks"), world.wanted) == []


@pytest.mark.usefixtures("only_tasks")
def test_following_publishes_what_comes_and_ends_when_told(
    spark: SparkSession, rows: Rows, tmp_path: Path
) -> None:
    from umbel.pipeline.build import Options, build

    log, tables, stop = tmp_path / "log", tmp_path / "tables", threading.Event()
    events = cluster(60, seed=4)
    writer = LogWriter(log)
    waits: list[float] = []

    def tell(step: str) -> None:
        if step == "waiting for events":
            waits.append(time.monotonic())
            if len(waits) == 1:
                writer.add(events[:30])
            elif len(waits) == 2:
                writer.add(events[30:])
                stop.set()

    options = Options(
        log=str(log), tables=str(tables), follow=True, poll_s=0.01, progress=tell, stop=stop
    )
    build(options, spark)
    assert len(waits) == 2
    assert differences(rows(tables, "tasks"), folded(events)) == []
    assert [run["read"] for run in rows(tables, "runs")] == [30, 30]


# -- what can be wrong with a log --------------------------------------------------------------


def listing(directory: Path) -> list[str]:
    """What is there for readers."""
    return sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if "_work" not in path.parts
    )


@pytest.fixture
def small(tmp_path: Path) -> LogWriter:
    writer = LogWriter(tmp_path / "lög 1% #2" / "log")
    writer.add(cluster(40, seed=2))
    return writer


def refused(spark: SparkSession, writer: LogWriter, **more: Any) -> str:
    """What a build says that must not succeed, and must leave nothing behind."""
    from umbel.pipeline.build import Options, build

    tables = writer.directory.parent / "tables"
    with pytest.raises(HistoryError) as caught:
        build(Options(log=str(writer.directory), tables=str(tables), **more), spark)
    assert listing(tables) == []
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("damage", "full"),
    [
        ("truncated", True),
        ("truncated", False),
        ("garbage", True),
        ("empty", False),
        ("foreign", False),
        ("types", True),
    ],
)
def test_a_damaged_segment_is_named_and_nothing_is_written(
    spark: SparkSession, small: LogWriter, damage: str, full: bool
) -> None:
    bad = small.add(cluster(40, seed=3))
    if damage == "truncated":
        bad.write_bytes(bad.read_bytes()[:-100])
    elif damage == "garbage":
        bad.write_bytes(b"PAR1" + bytes(range(256)) * 8 + b"PAR1")
    elif damage == "empty":
        bad.write_bytes(b"")
    elif damage == "foreign":
        pq.write_table(pa.table({"x": [1, 2]}), bad)
    else:
        pq.write_table(pa.table({"type": [1], "hostname": ["w"], "timestamp": ["now"]}), bad)
    assert bad.name in refused(spark, small, full=full)


@pytest.mark.usefixtures("only_tasks")
def test_once_a_damaged_segment_is_taken_away_increments_go_on(
    spark: SparkSession, small: LogWriter, rows: Rows
) -> None:
    from umbel.pipeline.build import Options, build

    bad = small.add(cluster(40, seed=3))
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    refused(spark, small)
    bad.unlink()
    tables = small.directory.parent / "tables"
    run = build(Options(log=str(small.directory), tables=str(tables)), spark)
    assert run.read == 40
    assert differences(rows(tables, "tasks"), folded(cluster(40, seed=2))) == []


@pytest.mark.usefixtures("only_tasks")
def test_columns_that_are_unknown_are_ignored_and_missing_ones_are_null(
    spark: SparkSession, small: LogWriter, rows: Rows
) -> None:
    from umbel.pipeline.build import Options, build

    table = as_table(cluster(40, seed=3)).drop_columns(["topic", "kwargs"])
    small.add_table(table.append_column("colour", pa.array(["red"] * 40)))
    tables = small.directory.parent / "tables"
    run = build(Options(log=str(small.directory), tables=str(tables), full=True), spark)
    assert run.kept == 80
    assert "colour" not in rows(tables, "tasks")[0]
    assert {one["kwargs"] for one in rows(tables, "tasks")} >= {"{}", None}


def test_an_empty_log_and_none_at_all_are_told_apart(tmp_path: Path) -> None:
    from umbel.pipeline.build import Options, build

    options = Options(log=str(tmp_path / "log"), tables=str(tmp_path / "tables"))
    with pytest.raises(HistoryError, match="there is no event log at"):
        build(options)
    LogWriter(tmp_path / "log")
    with pytest.raises(HistoryError, match="has no events yet"):
        build(options)
    (tmp_path / "log/_umbel-log.json").write_text('{"format": 7}')
    with pytest.raises(HistoryError, match="has format 7"):
        build(options)
    assert not (tmp_path / "tables").exists()


def test_a_target_that_can_not_be_written_is_one_line(small: LogWriter, tmp_path: Path) -> None:
    from umbel.pipeline.build import Options, build

    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match=r"cannot write .*Not a directory"):
        build(Options(log=str(small.directory), tables=str(tmp_path / "file/tables")))


@pytest.mark.usefixtures("only_tasks")
def test_a_disk_without_room_is_one_line_and_the_tables_stay(
    spark: SparkSession, small: LogWriter, rows: Rows, tmp_path: Path
) -> None:
    from umbel.pipeline.build import Options, build

    with small_disk(tmp_path / "disk", mebibytes=8) as disk:
        tables = disk.path / "tables"
        options = Options(log=str(small.directory), tables=str(tables))
        build(options, spark)
        before = (tables / "_tables.json").read_bytes()
        small.add(cluster(40, seed=3))
        disk.fill()
        with pytest.raises(HistoryError, match=r"^[^\n]*(?i:no space left on device)[^\n]*$"):
            build(options, spark)
        assert (tables / "_tables.json").read_bytes() == before
        wanted = folded(cluster(40, seed=2))
        assert differences(rows(tables, "tasks"), wanted) == []
        disk.free()
        build(options, spark)
        wanted = folded([*cluster(40, seed=2), *cluster(40, seed=3)])
        assert differences(rows(tables, "tasks"), wanted) == []


def test_tables_of_one_log_are_not_mixed_with_those_of_another(
    spark: SparkSession, small: LogWriter, tmp_path: Path
) -> None:
    from umbel.pipeline.build import Builder, Options, build
    from umbel.pipeline.places import Place

    tables = tmp_path / "tables"
    options = Options(log=str(small.directory), tables=str(tables))
    builder = Builder(Place(options.log), Place(options.tables), options, spark)
    builder.build()
    other = LogWriter(tmp_path / "other")
    other.add(cluster(40, seed=9))
    with pytest.raises(HistoryError, match=r"made from the log .*take another directory"):
        build(Options(log=str(other.directory), tables=str(tables)), spark)


@pytest.mark.usefixtures("only_tasks")
def test_files_of_older_builds_go_after_two_newer_ones_and_a_lost_state_does_no_harm(
    spark: SparkSession, small: LogWriter, rows: Rows, tmp_path: Path
) -> None:
    from umbel.pipeline.build import Options, build

    tables = tmp_path / "tables"
    runs, events = [], cluster(40, seed=2)
    for number in range(4):
        runs.append(build(Options(log=str(small.directory), tables=str(tables)), spark))
        if number == 1:
            (tables / f"_work/state-{runs[-1].run}.json").unlink()
        new = cluster(10, seed=20 + number)
        small.add(new)
        events += new if number < 3 else []
    assert [run.read for run in runs] == [40, 10, 60, 10]
    written = {path.name.partition(".")[0] for path in (tables / "tasks").glob("r=*")}
    assert written == {f"r={run.run}" for run in runs[1:]}
    assert differences(rows(tables, "tasks"), folded(events)) == []
    assert len(rows(tables, "runs")) == 4
    assert min(one["began"] for one in rows(tables, "runs")) > START


# -- which segments a build covers -------------------------------------------------------------


@pytest.mark.usefixtures("only_tasks")
def test_a_build_with_nothing_new_ends_without_spark(
    spark: SparkSession, small: LogWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from umbel.pipeline.build import Options, build

    options = Options(log=str(small.directory), tables=str(tmp_path / "tables"))
    first = build(options, spark)
    index = (tmp_path / "tables/_tables.json").read_bytes()
    small.add_quarantined(2)
    monkeypatch.setattr("umbel.pipeline.build.session", None)
    again = build(options)
    assert (again.read, again.kept, again.rows) == (0, first.kept, first.rows)
    assert (again.tasks, again.quarantined) == (first.tasks, 2)
    assert (tmp_path / "tables/_tables.json").read_bytes() == index


def test_all_tables_of_a_build_cover_the_segments_that_were_there_when_it_began(
    spark: SparkSession, small: LogWriter, rows: Rows, tmp_path: Path
) -> None:
    from umbel.pipeline.build import Options, build

    def meanwhile(step: str) -> None:
        if step in {"tasks", "timeline", "attempts"}:
            small.add(cluster(40, seed=small.count + 50))

    tables = tmp_path / "tables"
    run = build(Options(log=str(small.directory), tables=str(tables), progress=meanwhile), spark)
    assert small.count > 1
    assert run.kept == 40
    assert len(rows(tables, "timeline")) == 40
    of_timeline = {row["uuid"] for row in rows(tables, "timeline")} - {None}
    assert {row["uuid"] for row in rows(tables, "tasks")} == of_timeline


@pytest.mark.usefixtures("only_tasks")
def test_what_is_removed_from_the_log_goes_from_the_tables(
    spark: SparkSession, small: LogWriter, rows: Rows, tmp_path: Path
) -> None:
    from umbel.pipeline.build import Options, build

    tables = tmp_path / "tables"
    gone = small.add_table(as_table(cluster(40, seed=3)), day="2026-11-15")
    options = Options(log=str(small.directory), tables=str(tables))
    build(options, spark)
    shutil.rmtree(gone.parent)
    small.add(cluster(40, seed=4))
    run = build(options, spark)
    assert (run.kept, run.read) == (80, 40)
    wanted = folded([*cluster(40, seed=2), *cluster(40, seed=4)])
    assert differences(rows(tables, "tasks"), wanted) == []


@pytest.mark.usefixtures("only_tasks")
def test_a_compacted_segment_is_not_read_beside_those_it_stands_for(
    spark: SparkSession, small: LogWriter, rows: Rows, tmp_path: Path
) -> None:
    from umbel.pipeline.build import Options, build

    tables = tmp_path / "tables"
    options = Options(log=str(small.directory), tables=str(tables))
    (first,) = small.directory.rglob("events/*/*.parquet")
    second = small.add(cluster(40, seed=3))
    build(options, spark)
    third = small.add(cluster(40, seed=4))
    both = as_table([*cluster(40, seed=2), *cluster(40, seed=3)])
    merged = small.add_table(as_compacted(both, first.name, second.name))
    run = build(options, spark)
    assert (run.read, run.kept, run.rows) == (40, 120, 120)
    for path in (first, second):
        path.unlink()
    assert build(options, spark).read == 0
    all_three = pa.concat_tables([both, as_table(cluster(40, seed=4))])
    small.add_table(as_compacted(all_three, merged.name, third.name))
    small.add(cluster(40, seed=5))
    run = build(options, spark)
    assert (run.read, run.kept, run.rows) == (40, 160, 160)
    wanted = folded(event for seed in (2, 3, 4, 5) for event in cluster(40, seed=seed))
    assert differences(rows(tables, "tasks"), wanted) == []


def as_compacted(table: pa.Table, *names: str) -> pa.Table:
    """Rows with the manifest of a segment that stands for others."""
    manifest = json.dumps({"format": 1, "rows": table.num_rows, "replaces": names})
    return table.replace_schema_metadata({b"umbel": manifest.encode()})


@pytest.mark.parametrize("damage", ["truncated", "garbage", "foreign", "torn"])
@pytest.mark.usefixtures("only_tasks")
def test_damaged_segments_can_be_left_out_and_are_counted(
    spark: SparkSession, small: LogWriter, rows: Rows, tmp_path: Path, damage: str
) -> None:
    from umbel.pipeline.build import Options, build

    tables = tmp_path / "tables"
    bad = small.add(cluster(40, seed=3))
    content = bad.read_bytes()
    if damage == "truncated":
        bad.write_bytes(content[:-100])
    elif damage == "garbage":
        bad.write_bytes(b"PAR1" + bytes(range(256)) * 8 + b"PAR1")
    elif damage == "foreign":
        pq.write_table(pa.table({"x": [1, 2]}), bad)
    else:  # the footer is whole, what it describes is not
        bad.write_bytes(content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :])
    options = Options(log=str(small.directory), tables=str(tables), skip_damaged=True)
    run = build(options, spark)
    assert (run.read, run.skipped) == (40, 1)
    assert differences(rows(tables, "tasks"), folded(cluster(40, seed=2))) == []
    small.add(cluster(40, seed=4))
    run = build(Options(log=str(small.directory), tables=str(tables)), spark)
    assert (run.read, run.skipped) == (40, 1)
    assert [row["skipped"] for row in rows(tables, "runs")] == [1, 1]
