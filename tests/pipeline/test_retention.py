"""`umbel history retain`: what goes, what is carried over, and tables of nothing but the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from tests.log_reading import rows_of, segments
from tests.pipeline.kills import Killed, Killer
from tests.pipeline.published import comparable
from tests.pipeline.removals import DAWN, DAY_S
from tests.pipeline.stories import Node, Story
from tests.pipeline.test_removals import assert_equal_to_one_build
from tests.pipeline.worlds import Event, LogWriter, as_table, day_of
from tests.sizes import FULL, size
from umbel.cli.history.retain import REMOVING, shorten
from umbel.pipeline.errors import HistoryError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from umbel.recorder.retention import Outcome

Rows = Callable[[Path, str], list[dict[str, Any]]]
pytestmark = pytest.mark.timeout(size(900, 3_600))


class Days(Story):
    """A story of which every day begins where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.late: dict[float, float] = {}  # seconds until receipt, by timestamp

    def at(self, day: float, hour: float = 12.0) -> None:
        self.now = DAWN + day * DAY_S + hour * 3_600

    def write(self, writer: LogWriter) -> None:
        """Two segments for each day of receipt, of what is not written yet."""
        by_day: dict[str, list[tuple[float, Event]]] = {}
        for event in self.events[self.written :]:
            received = event["timestamp"] + self.late.get(event["timestamp"], 0.1)
            by_day.setdefault(day_of(received), []).append((received, event))
        for day, told in by_day.items():
            for some in (told[::2], told[1::2]):
                tables = [as_table([event], received) for received, event in some]
                if tables:
                    writer.add_table(with_manifest(pa.concat_tables(tables)), day)
        self.written = len(self.events)


def with_manifest(table: pa.Table) -> pa.Table:
    manifest = json.dumps({"format": 1, "rows": table.num_rows})
    return table.replace_schema_metadata({b"umbel": manifest.encode()})


def told() -> tuple[Days, Node]:
    """Four days, of which the first two are old on the last; and one long before."""
    story = Days()
    w1, w2, client = story.node("w1@a"), story.node("w2@a", inc=2), story.node("web", inc=3)
    celery, gone = story.node("c@b", inc=None, pid=1), story.node("gone@b", inc=None, pid=1)

    story.at(-95)
    client.tell("task-sent", "stale", name="shop.add")
    client.tell("task-sent", "stale-eta", name="shop.add", eta="2027-06-01T00:00:00+00:00")

    story.at(0)
    w1.tell("worker-online", freq=2.0)
    w2.tell("worker-online", freq=2.0)
    celery.tell("worker-online", freq=2.0, processed=0)
    gone.tell("worker-online", freq=2.0, processed=0)
    for node in (w1, w2, celery, gone):
        node.beat(processed=0)
    w1.run("done", runtime=0.1)
    for uuid in ("open", "lost", "ended-late"):
        client.tell("task-sent", uuid, name="shop.add")
        node = w2 if uuid == "lost" else w1
        node.tell("task-received", uuid, name="shop.add")
        node.tell("task-started", uuid)
    w2.tell("task-received", "requeued", name="shop.add")
    w2.tell("task-rejected", "requeued", requeue=True)
    client.tell("task-sent", "waiting", name="shop.add")
    celery.tell("task-received", "slow", name="shop.add")
    celery.tell("task-started", "slow")
    gone.tell("task-received", "moved", name="shop.add")
    gone.tell("task-started", "moved")
    for election, task in (("e-open", "open"), ("e-done", "done")):
        w1.tell("worker-elect", id=election, topic="task", action={"options": {"task_id": task}})
        w1.tell("worker-elected", id=election, winner="w1@a")
    for uuid in ("open", "done"):
        w1.tell("worker-revocation", ids=[uuid], method="revoke", stamp=story.now)
    w2.beat(processed=1)
    gone.beat(processed=1)

    story.at(1)
    for node in (w1, celery):
        node.beat(processed=5)
    w1.run("done-too", runtime=0.1)
    gone_again = story.node("gone@b", inc=None, pid=1)
    gone_again.tell("worker-online", freq=2.0, processed=0)
    gone_again.beat(processed=0)
    # Recorders share the work: what is numbered first may be received last, on the next day.
    story.at(1, 23.5)
    story.late[w1.beat(processed=6)["timestamp"]] = 3_600.0
    w1.run("numbered", runtime=0.1)

    story.at(2)
    w1.run("new", runtime=0.1)
    w1.tell("task-succeeded", "ended-late", runtime=9.0)
    celery.beat(processed=6)

    story.at(3)
    w1.beat(processed=9)
    celery.beat(processed=7)
    w1.tell("task-received", "moved", name="shop.add")
    w1.tell("task-started", "moved")
    return story, w1


@pytest.fixture(autouse=True)
def many_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.pipeline.cells.CELL_ROWS", 20)
    monkeypatch.setattr("umbel.pipeline.tables.timeline.RANGE_ROWS", 25)
    monkeypatch.setattr("umbel.pipeline.build.REMOVED_MAX", 1.1)


def carried(log: Path, cutoff: str) -> set[tuple[str, str]]:
    """What is left of the days before the cutoff: types, and what they are about."""
    return {
        (row["type"], row["uuid"] or row["id"] or row["hostname"])
        for path in old_segments(log, cutoff)
        for row in rows_of(path)
    }


def old_segments(log: Path, cutoff: str) -> list[Path]:
    return [path for path in segments(log) if path.parent.name < f"day={cutoff}"]


def retain(
    spark: SparkSession,
    log: Path,
    tables: Path,
    now: float,
    *,
    is_dry: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Keep the day of this moment and the one before it."""
    from umbel.pipeline.build import Options

    options = Options(log=str(log), tables=str(tables), progress=progress)
    return shorten(options, 1, is_dry=is_dry, now_s=now, spark=spark)


# Of the story, on its last day: what is older than a day and stays.
CARRIED = {
    *((f"task-{kind}", "open") for kind in ("sent", "received", "started")),
    *((f"task-{kind}", "ended-late") for kind in ("sent", "received", "started")),
    *((f"task-{kind}", "numbered") for kind in ("received", "started", "succeeded")),
    *((f"task-{kind}", uuid) for kind in ("received", "started") for uuid in ("slow", "moved")),
    *((f"task-{kind}", "requeued") for kind in ("received", "rejected")),
    *(("task-sent", uuid) for uuid in ("waiting", "stale-eta")),
    *((kind, "e-open") for kind in ("worker-elect", "worker-elected")),
    ("worker-revocation", "w1@a"),
    *(("worker-online", hostname) for hostname in ("w1@a", "w2@a", "c@b", "gone@b")),
    *(("worker-heartbeat", hostname) for hostname in ("w2@a", "gone@b")),
}
GONE = {"done", "done-too", "lost", "stale"}


TOLD = ("tasks", "attempts", "workers", "elections", "revocations")


@pytest.mark.usefixtures("large")
def test_old_days_go_but_for_what_is_carried_over_and_the_tables_are_those_of_the_rest(
    spark: SparkSession, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, tables = tmp_path / "log", tmp_path / "tables"
    writer, (story, w1) = LogWriter(log), told()
    story.write(writer)
    now, cutoff = DAWN + 3 * DAY_S + 50_000, day_of(DAWN + 2 * DAY_S)
    before: dict[str, list[dict[str, Any]]] = {}

    def note(step: str) -> None:
        if step == REMOVING:
            before.update({name: rows(tables, name) for name in TOLD})

    outcome = retain(spark, log, tables, now, progress=note)
    assert carried(log, cutoff) == CARRIED
    assert (outcome.days, outcome.segments, outcome.carried) == (3, 6, 28)
    assert outcome.events + outcome.carried == len(story.events) - 10
    old = [row for path in old_segments(log, cutoff) for row in rows_of(path)]
    assert {row["uuid"] for row in old if row["seq"] is not None} == {"numbered"}
    assert sum(row["type"] == "worker-revocation" for row in old) == 1

    assert {row["kind"] for row in rows(tables, "gaps")} == {"beginning"}
    assert {row["events_missing"] for row in rows(tables, "workers")} <= {0, None}
    assert GONE.isdisjoint(row["uuid"] for row in rows(tables, "tasks"))
    for name in set(TOLD) - {"workers"}:
        column = "id" if name == "elections" else "uuid"
        kept = {row[column] for row in rows(tables, name)}
        was = [row for row in before[name] if row[column] in kept]
        assert comparable(rows(tables, name)) == comparable(was), name
    assert lives(rows(tables, "workers")) == lives(before["workers"])
    assert_equal_to_one_build(spark, log, tables, rows)
    if FULL:
        go_on(spark, rows, log, tables, now, story, w1, monkeypatch)


def go_on(
    spark: SparkSession,
    rows: Rows,
    log: Path,
    tables: Path,
    now: float,
    story: Days,
    w1: Node,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A day later: the same again, tried first, then killed at two points."""
    story.at(4)
    w1.tell("task-succeeded", "open", runtime=9.0)
    w1.beat(processed=10)
    story.write(LogWriter(log, count=100))
    files, later = sorted(log.rglob("*")), now + DAY_S
    tried = retain(spark, log, tables, later, is_dry=True)
    assert sorted(log.rglob("*")) == files
    killer = Killer(monkeypatch)
    for killer.left in (5, 40, 10_000):
        try:
            outcome = retain(spark, log, tables, later)
        except Killed:
            continue
        break
    killer.left = None
    assert killer.kills
    assert tried.segments >= outcome.segments
    assert {row["kind"] for row in rows(tables, "gaps")} == {"beginning"}
    assert CARRIED - carried(log, day_of(DAWN + 3 * DAY_S)) == {
        *((f"task-{kind}", "ended-late") for kind in ("sent", "received", "started")),
        *((f"task-{kind}", "numbered") for kind in ("received", "started", "succeeded")),
        *((f"task-{kind}", "slow") for kind in ("received", "started")),  # its worker is lost
    }
    assert_equal_to_one_build(spark, log, tables, rows)


def lives(workers: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    """The lives, and what has to stay the same of each."""
    columns = ("hostname", "incarnation", "pid", "status", "online", "last_heartbeat", "offline")
    return {tuple(row[name] for name in columns) for row in workers}


def test_a_log_of_nothing_but_old_days_has_empty_tables_afterwards(
    spark: SparkSession, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from umbel.pipeline.build import Options, build

    monkeypatch.setattr("umbel.pipeline.build.REMOVED_MAX", 0.5)
    log, tables, story = tmp_path / "log", tmp_path / "tables", Days()
    writer, node = LogWriter(log), story.node("w1@a")
    node.run("done")
    story.write(writer)
    retain(spark, log, tables, DAWN + 10 * DAY_S)
    assert (rows(tables, "tasks"), rows(tables, "timeline")) == ([], [])
    story.at(11)
    node.run("new")
    story.write(writer)
    build(Options(log=str(log), tables=str(tables)), spark)
    assert [row["uuid"] for row in rows(tables, "tasks")] == ["new"]


def test_tables_that_somebody_builds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from umbel.pipeline.places import Place
    from umbel.pipeline.turns import turn

    monkeypatch.setattr("umbel.pipeline.retention.WAIT_S", 0.2)
    log, tables, story = tmp_path / "log", tmp_path / "tables", Days()
    story.node("w1@a").run("done")
    story.write(LogWriter(log))
    tables.mkdir()
    with (
        turn(Place(str(tables))),
        pytest.raises(HistoryError, match=r"another build is writing .*wait for it, or stop it"),
    ):
        retain(None, log, tables, DAWN + 10 * DAY_S)  # type: ignore[arg-type]
    assert len(segments(log)) == 2
