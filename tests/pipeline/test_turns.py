"""Two builds of the same tables are never at work at once, not even after a kill."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pipeline.worlds import LogWriter, cluster
from tests.workers import Program
from umbel.pipeline import turns
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.places import Place
from umbel.pipeline.turns import JAVA_LOCK, turn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Stands for the Java process of a build whose Python was killed.
ORPHAN = f"""
import fcntl, os, signal
fd = os.open("tables/{JAVA_LOCK}", os.O_RDWR | os.O_CREAT)
fcntl.lockf(fd, fcntl.LOCK_EX)
os.write(fd, b"Java process 4711 on here")
print("held", flush=True)
signal.pause()
"""


@pytest.fixture
def tables(tmp_path: Path) -> Place:
    place = Place(str(tmp_path / "tables"))
    (tmp_path / "tables/_work").mkdir(parents=True)
    return place


@pytest.fixture
def orphan(tables: Place, start: Callable[..., Program]) -> Program:
    program = start([sys.executable, "-c", ORPHAN])
    program.wait_for("held")
    return program


def is_held(path: Path) -> bool:
    """Whether another process has it."""
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def test_a_second_build_is_refused_and_told_who_is_at_it(tables: Place) -> None:
    mine = f"process {os.getpid()} on "
    with (
        turn(tables),
        pytest.raises(HistoryError, match=f"another build is writing {tables.shown}.*{mine}"),
        turn(tables),
    ):
        pass
    with turn(tables):  # the first is over, and has left nothing that holds
        pass


def test_the_java_process_of_a_killed_build_is_waited_for(tables: Place, orphan: Program) -> None:
    steps: list[str] = []

    def tell(step: str) -> None:
        steps.append(step)
        orphan.signal(signal.SIGKILL)

    with turn(tables, tell):
        assert not is_held(tables.path(JAVA_LOCK))
    assert steps[0] == ("waiting for the end of a build that was killed: Java process 4711 on here")


def test_one_that_does_not_end_is_named_and_nothing_is_built(
    tables: Place, orphan: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "ORPHAN_WAIT_S", 0.2)
    said = rf"another build is writing {tables.shown}.*Java process 4711 on here"
    with pytest.raises(HistoryError, match=said), turn(tables):
        pytest.fail("two builds at once")
    orphan.kill()
    with turn(tables):
        pass


@pytest.mark.usefixtures("only_tasks")
def test_java_holds_the_tables_while_a_build_works_and_not_after(
    spark: SparkSession, tables: Place, tmp_path: Path
) -> None:
    from umbel.pipeline.build import Options, build

    writer = LogWriter(tmp_path / "log")
    writer.add(cluster(40, seed=2))
    lock = tables.path(JAVA_LOCK)
    held: dict[str, bool] = {}

    def look(step: str) -> None:
        held[step] = is_held(lock)

    build(Options(log=str(writer.directory), tables=tables.shown, full=True, progress=look), spark)
    assert held.keys() >= {"new events", "events", "workers", "tasks"}
    assert all(held.values())
    java = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
    assert lock.read_text().startswith(f"Java process {java} on ")
    assert not is_held(lock)


def test_a_turn_is_waited_for_as_long_as_it_is_worth(tables: Place) -> None:
    taken, ended = threading.Event(), threading.Event()

    def first() -> None:
        with turn(tables):
            taken.set()
            ended.wait(30)

    other = threading.Thread(target=first)
    other.start()
    assert taken.wait(30)
    with pytest.raises(turns.Busy), turn(tables, wait_s=0.2):
        pytest.fail("two builds at once")
    with turn(tables, lambda _: ended.set(), wait_s=60):
        assert not other.is_alive() or ended.is_set()
    other.join(30)


@pytest.mark.usefixtures("only_tasks")
def test_a_build_that_follows_lets_others_at_the_tables_between_its_own_turns(
    spark: SparkSession, tables: Place, tmp_path: Path
) -> None:
    from umbel.pipeline.build import Options, build

    writer, stop, waits = LogWriter(tmp_path / "log"), threading.Event(), []
    writer.add(cluster(40, seed=2))

    def tell(step: str) -> None:
        if step != "waiting for events":
            return
        waits.append(step)
        with turn(tables):  # nobody else has it
            writer.add(cluster(40, seed=2 + len(waits)))
            if len(waits) == 2:
                stop.set()

    options = Options(
        log=str(writer.directory), tables=tables.shown, follow=True, progress=tell, stop=stop,
        poll_s=0.01, publish_every_s=0.0,
    )  # fmt: skip
    assert build(options, spark).kept == 120
    assert len(waits) == 2
