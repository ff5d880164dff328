"""What is removed from the log goes from the tables: they are those of a build of the rest."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from tests.pipeline.kills import Killer
from tests.pipeline.published import Rows, assert_same_tables
from tests.pipeline.removals import days_of_work, retained, write_days
from tests.pipeline.stories import Story
from tests.pipeline.worlds import LogWriter, as_table, cluster, differences, folded
from tests.sizes import FULL, size

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(size(900, 3_600))
SEEDS = range(1, size(2, 60))
ROUNDS = size(1, 3)


def assert_equal_to_one_build(spark: SparkSession, log: Path, tables: Path, rows: Rows) -> None:
    """All tables have the rows of one build of everything that is in the log."""
    from umbel.pipeline.build import Options, build

    wanted = tables.with_name(f"{tables.name}-wanted")
    build(Options(log=str(log), tables=str(wanted), full=True), spark)
    assert_same_tables(tables, wanted, rows)


@pytest.fixture
def many_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.pipeline.cells.CELL_ROWS", 60)
    monkeypatch.setattr("umbel.pipeline.tables.timeline.RANGE_ROWS", 70)


@pytest.mark.usefixtures("many_cells")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_removals_between_increments_give_the_tables_of_what_is_left(
    spark: SparkSession,
    rows: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    seed: int,
) -> None:
    from umbel.pipeline.build import Options, build

    dice = random.Random(seed)
    if seed % 2:
        request.getfixturevalue("large")
    monkeypatch.setattr("umbel.pipeline.build.REMOVED_MAX", 0.5 if seed % 4 == 0 else 1.1)
    killer = Killer(monkeypatch)
    writer, tables = LogWriter(tmp_path / "log"), tmp_path / "tables"
    told: list[str] = []
    options = Options(log=str(tmp_path / "log"), tables=str(tables), progress=told.append)
    events = sorted(days_of_work(seed, 3, 70), key=lambda event: float(event["timestamp"]))
    there: list[Path] = []
    for number in range(ROUNDS):
        part = -(-len(events) // ROUNDS)
        there += write_days(writer, events[number * part : (number + 1) * part], dice)
        build(options, spark)
        for path in dice.sample(there, dice.randint(1, max(1, len(there) // 2))):
            there.remove(path)
            if dice.random() < 0.5:
                path.unlink()
            else:
                there.append(retained(path, dice.random(), dice, writer))
        killer.advance(spark, options, dice.randint(1, 90) if FULL else 10_000)
    if seed % 4 and seed % 5:  # otherwise there are Celery's workers, or REMOVED_MAX is small
        assert not any("anew" in one for one in told)
    assert_equal_to_one_build(spark, tmp_path / "log", tables, rows)


@pytest.mark.usefixtures("only_tasks")
def test_a_segment_that_is_removed_while_it_is_read_is_left_out(
    spark: SparkSession, rows: Rows, tmp_path: Path
) -> None:
    from umbel.pipeline.build import Options, build

    writer, tables = LogWriter(tmp_path / "log"), tmp_path / "tables"
    one, other = cluster(40, seed=2), cluster(40, seed=3)
    writer.add(one)
    going = [writer.add(other), writer.add_table(as_table(other), "2026-11-17")]

    def meanwhile(step: str) -> None:
        if step in {"new events", "events"} and going:
            going.pop().unlink()

    options = Options(log=str(tmp_path / "log"), tables=str(tables), progress=meanwhile)
    assert build(options, spark).kept == 40
    assert not going
    assert differences(rows(tables, "tasks"), folded(one)) == []


def test_receipts_times_and_roots_that_only_removed_segments_told_are_forgotten(
    spark: SparkSession, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from umbel.pipeline.build import Options, build

    monkeypatch.setattr("umbel.pipeline.cells.CELL_ROWS", 10)
    writer, tables, story = LogWriter(tmp_path / "log"), tmp_path / "tables", Story()
    one, other = story.node("w1@a"), story.node("w2@a", inc=2)
    for uuid in ("A", "x"):
        one.tell("task-received", uuid, name="shop.add", root_id="A")
    for number in range(12):
        one.tell("task-received", f"t{number}", name="shop.add", root_id=f"t{number}")
        one.tell("task-started", f"t{number}")
        story.now += 60
    one.beat()
    writer.add(story.events)
    early = as_table([{**event, "uuid": "early"} for event in story.events[:20:2]], recorder="r2")
    story.now += 10_000
    last = [other.tell("task-received", "x", root_id="B"), other.beat()]
    newest = writer.add(last, recorder="r3")  # w1 is lost by that, and its tasks with it
    blind = newest.with_name("1794000000099-r2-9.parquet")
    pq.write_table(early, blind, write_statistics=False)
    options = Options(log=str(tmp_path / "log"), tables=str(tables))
    build(options, spark)
    assert {row["outcome"] for row in rows(tables, "attempts")} == {"LOST"}
    monkeypatch.setattr("umbel.pipeline.build.REMOVED_MAX", 1.1)
    newest.unlink()
    blind.unlink()
    build(options, spark)
    assert {row["outcome"] for row in rows(tables, "attempts")} == {"RUNNING"}
    assert_equal_to_one_build(spark, tmp_path / "log", tables, rows)


def test_an_election_is_judged_again_when_only_events_of_its_task_are_removed(
    spark: SparkSession, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from umbel.pipeline.build import Options, build

    monkeypatch.setattr("umbel.pipeline.cells.CELL_ROWS", 10)
    monkeypatch.setattr("umbel.pipeline.build.REMOVED_MAX", 1.1)
    writer, tables, story = LogWriter(tmp_path / "log"), tmp_path / "tables", Story()
    node = story.node("w1@a")
    for number in range(30):
        node.run(f"t{number}")
    action = {"task": "shop.add", "options": {"task_id": "theirs"}}  # as Celery's signatures have
    node.tell("worker-elect", id="e", topic="task", cver=1, action=action)
    node.tell("worker-elected", id="e", winner="w1@a")
    for number in range(30, 40):  # so that its task is in another cell
        node.run(f"t{number}")
    story.now += 60
    node.beat()
    writer.add(story.events)
    story.now += 1
    segment = writer.add([node.tell("task-revoked", "theirs", terminated=False, expired=False)])
    options = Options(log=str(tmp_path / "log"), tables=str(tables))
    build(options, spark)
    assert [row["verdict"] for row in rows(tables, "elections")] == ["none"]
    segment.unlink()
    build(options, spark)
    assert [row["verdict"] for row in rows(tables, "elections")] == ["open"]
    assert_equal_to_one_build(spark, tmp_path / "log", tables, rows)
    assert rows(tables, "revocations") == []  # what is staged of none is no table of Arrow's
