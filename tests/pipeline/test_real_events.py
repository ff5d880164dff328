"""What workers of both kinds really told, through the whole pipeline: the tables are Python's fold.

Workers of Umbel and of Celery take from one queue, a recorder listens. `make soak` has 20,000
events in 20 increments.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop import nodes
from tests.pipeline.kills import Killer
from tests.pipeline.published import assert_same_tables
from tests.pipeline.worlds import Event, LogWriter, differences, disturbed, folded
from tests.recording import TAKES, recorder_program, rows_of, unique
from tests.servers import RedisServer, wait_until
from tests.sizes import FULL, size
from tests.workers import READY, Program
from umbel import Umbel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS, INCREMENTS = size(2_000, 20_000), size(3, 20)
# A task has four events or more: it is sent, received, started, and ends.
TASKS = EVENTS // 4
WAIT_S = size(180, 600)
SILENCE_S = 15.0
ENDS = frozenset({"task-succeeded", "task-failed"})

pytestmark = pytest.mark.timeout(WAIT_S + 300)


@pytest.fixture
def settings(redis_server: RedisServer) -> dict[str, Any]:
    for number in (1, 2):
        redis_server.client(number).flushdb()
    return {
        "broker_url": redis_server.url_of(1),
        "result_backend": redis_server.url_of(2),
        "task_send_sent_event": True,
        "task_ignore_result": True,
    }


@pytest.fixture
def workers(
    settings: dict[str, Any], redis_server: RedisServer, tmp_path: Path
) -> Iterator[list[Program]]:
    """One of each kind, ready."""
    marks = nodes.marks_url(redis_server)
    more = ("-P", "threads", "-c", "4", "-E")
    made = [
        nodes.start(kind, settings, marks, tmp_path, "-n", f"{kind}@test", "-Q", "both", *more)
        for kind in ("umbel", "celery")
    ]
    try:
        for program in made:
            program.wait_for(READY, WAIT_S)
        yield made
    finally:
        for program in made:
            program.kill()


def calls(dice: random.Random) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What is sent: most goes well, some is tried again, some fails."""
    for number in range(TASKS):
        chance = dice.random()
        if chance < 0.1:
            yield "t.flaky", (1, 0.01)
        elif chance < 0.15:
            yield "t.fail", (number,)
        else:
            yield "t.add", (number, 1)


@pytest.fixture
def events(settings: dict[str, Any], workers: list[Program], tmp_path: Path) -> list[Event]:
    """All that was told, as the log has it: each event once."""
    log = tmp_path / "log"
    recorder = recorder_program(settings["broker_url"], log, roll_age_s=0.5, roll_rows=3_000)
    try:
        recorder.wait_for(TAKES)
        with Umbel("client", set_as_current=False, **settings) as app:
            for name, args in calls(random.Random(3)):
                app.send_task(name, args, queue="both")

        found, since = 0, time.monotonic()

        def ended() -> bool:
            """All is told; or nothing more comes: nobody keeps events of Celery's.

            Heartbeats come for ever.
            """
            nonlocal found, since
            rows = [row for row in rows_of(log) if row["type"].startswith("task-")]
            if len(rows) != found:
                found, since = len(rows), time.monotonic()
            if len({row["uuid"] for row in rows if row["type"] in ENDS}) == TASKS:
                return True
            return found >= 0.9 * EVENTS and time.monotonic() - since > SILENCE_S

        wait_until(ended, WAIT_S, "the end of every task in the log")
        for one in workers:
            assert one.stop() == 0, one.output
    finally:
        recorder.stop()
    return [json.loads(row["raw"]) for row in unique(rows_of(log))]


def test_what_real_workers_tell_is_folded_the_same_at_once_and_in_increments_with_kills(
    spark: SparkSession,
    events: list[Event],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: Callable[[Path, str], list[dict[str, Any]]],
    request: pytest.FixtureRequest,
) -> None:
    from umbel.pipeline.build import Options, build

    if not FULL:
        request.getfixturevalue("only_tasks")
    wanted = folded(events)
    assert len(events) >= EVENTS
    assert {event["hostname"].partition("@")[0] for event in events} >= {"umbel", "celery"}
    assert len(wanted) == TASKS
    at_once = tmp_path / "at-once"
    run = build(Options(log=str(tmp_path / "log"), tables=str(at_once), full=True), spark)
    assert run.kept == len(events)
    assert differences(rows(at_once, "tasks"), wanted) == []

    writer, tables, dice = LogWriter(tmp_path / "again"), tmp_path / "tables", random.Random(7)
    killer, parts = Killer(monkeypatch), disturbed(events, seed=8)
    options = Options(log=str(tmp_path / "again"), tables=str(tables))
    for number in range(INCREMENTS):
        writer.add(parts[number::INCREMENTS])
        killer.advance(spark, options, dice.randint(1, 50))
    assert killer.kills
    assert build(options, spark).kept == len(events)
    assert differences(rows(tables, "tasks"), wanted) == []
    if FULL:
        whole = tmp_path / "whole"
        build(Options(log=options.log, tables=str(whole), full=True), spark)
        assert_same_tables(tables, whole, rows)
