"""The state file under real conditions: processes that are killed, that fork, that come back."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tests.servers import wait_until
from tests.sites import Site
from tests.workers import Program, WorkerProcess, run_umbel
from umbel import Umbel
from umbel.cluster.clock import Clock
from umbel.cluster.revocations import Revocations
from umbel.worker.runtime.statedb import StateDB

Start = Callable[..., Program]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker.db"


def kept(path: Path, clock: Clock | None = None) -> set[str]:
    """The ids that a worker would find that starts with this file now."""
    found = Revocations(time.time)
    with StateDB.open(path) as statedb:
        statedb.load(found, clock or Clock())
    return set(found.ids())


def revoke(path: Path, *ids: str) -> None:
    """Revoke while no worker runs."""
    revocations = Revocations(time.time)
    with StateDB.open(path) as statedb:
        statedb.save_revoked(revocations.revoke(ids, time.time()))


def script(start: Start, path: Path, text: str) -> Program:
    """A program that has opened the state file at `path` as `statedb`."""
    head = f"""
        import os, sys, time, uuid
        from umbel.worker.runtime.statedb import StateDB
        statedb = StateDB.open({str(path)!r})
        def save(key):
            statedb.save_revoked([("task", key, time.time(), time.time() + 999)])
            print("saved", key, flush=True)
    """
    return start([sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(text)])


SAVES_FOR_EVER = """
    count = 0
    while True:
        count += 1
        save(uuid.uuid4().hex)
        statedb.save_clock(count)
        print("clock", count, flush=True)
        if count % 50 == 0:
            statedb.purge()
"""


def test_nothing_that_was_saved_is_lost_by_a_kill_at_any_moment(start: Start, path: Path) -> None:
    told: set[str] = set()
    for attempt in range(6):
        program = script(start, path, SAVES_FOR_EVER)
        program.wait_for(f"^clock {(7, 1, 90, 33, 210, 52)[attempt]}$")
        os.kill(program.pid, signal.SIGKILL)  # in the midst of the next ones
        program.wait()
        told |= {line.split()[1] for line in program.lines if line.startswith("saved ")}
        last = [int(line.split()[1]) for line in program.lines if line.startswith("clock ")][-1]
        clock = Clock()
        found = kept(path, clock)
        assert told <= found
        assert len(found) <= len(told) + attempt + 1  # one may be saved and not told
        assert clock.value > last


def test_another_process_is_refused_until_the_first_one_is_gone(start: Start, path: Path) -> None:
    first = script(start, path, "save('a'); time.sleep(60)")
    first.wait_for("^saved a$")
    second = script(start, path, "save('b')")
    assert second.wait() != 0
    assert "is in use by another worker: give each worker its own" in second.output
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert kept(path) == {"a"}


FORKS = """
    save("a")
    child = os.fork()
    if child == 0:
        assert statedb.closed
        sys.exit(0)  # all the way through the interpreter's end
    assert os.waitpid(child, 0)[1] == 0
    save("b")
    child = os.fork()
    if child == 0:
        time.sleep(60)
    save("c")
    print("child", child, flush=True)
    time.sleep(60)
"""


def test_a_child_neither_harms_the_file_nor_keeps_it(start: Start, path: Path) -> None:
    program = script(start, path, FORKS)
    program.wait_for("^child ")
    os.kill(program.pid, signal.SIGKILL)  # its child lives on
    program.process.wait()
    assert kept(path) == {"a", "b", "c"}


# -- with workers --------------------------------------------------------------------------

APP = """
import os, threading, time
import redis
from umbel import Umbel
from umbel.worker.blueprint import Step

app = Umbel("state")
notes = redis.Redis.from_url(os.environ["PROBE_URL"])

class Reach(Step):
    def __init__(self, parent, **options):
        global worker
        worker = parent

app.steps["worker"].add(Reach)

@app.task(name="run")
def run(token):
    notes.hincrby("runs", token, 1)
    return token

@app.task(name="revoke", ignore_result=True)
def revoke(task_id):
    worker.keep_revoked(worker.revocations.revoke(task_id, time.time()))
    print("saved", task_id, flush=True)
"""


class Place:
    """A broker, a client, and workers of the application above that share a state file."""

    def __init__(
        self, url: str, directory: Path, path: Path, start: Callable[..., WorkerProcess]
    ) -> None:
        (directory / "state_app.py").write_text(APP)
        self.directory = directory
        self.path = path
        self.env = {
            "UMBEL_BROKER_URL": url,
            "UMBEL_RESULT_BACKEND": url,
            "PROBE_URL": url,
        }
        self.client = Umbel("client", broker=url, backend=url, set_as_current=False)
        self.notes = redis.Redis.from_url(url)
        self._start = start

    def worker(self, pool: str = "threads", *args: str, wait: bool = True) -> WorkerProcess:
        command = ["-P", pool, "-c", "1", "-l", "info", "--statedb", str(self.path), *args]
        return self._start("state_app", command, cwd=self.directory, env=self.env, wait=wait)

    def runs(self, token: str) -> int:
        return int(self.notes.hget("runs", token) or 0)


@pytest.fixture
def place(
    redis_url: str, tmp_path: Path, path: Path, start_worker: Callable[..., WorkerProcess]
) -> Iterator[Place]:
    made = Place(redis_url, tmp_path, path, start_worker)
    yield made
    made.client.close()
    made.notes.close()


def test_a_task_revoked_just_before_its_worker_is_killed_does_not_run_afterwards(
    place: Place,
) -> None:
    worker = place.worker()
    revoked = uuid.uuid4().hex
    place.client.send_task("revoke", [revoked])
    worker.wait_for(rf"\bsaved {revoked}$")
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()

    result = place.client.send_task("run", ["revoked"], task_id=revoked)
    after = place.client.send_task("run", ["after"])
    again = place.worker()
    again.wait_for("state file .*: 1 revocations")
    assert after.get(timeout=30) == "after"
    again.wait_for(rf"Discarding revoked task: run\[{revoked}\]")
    wait_until(lambda: result.state == "REVOKED", what="its end to be stored")
    assert place.runs("revoked") == 0


def test_a_task_revoked_while_its_worker_is_down_does_not_run_when_it_comes_back(
    place: Place, path: Path
) -> None:
    result = place.client.send_task("run", ["revoked"])
    revoke(path, result.id)
    after = place.client.send_task("run", ["after"])
    worker = place.worker()
    assert after.get(timeout=30) == "after"
    assert place.runs("revoked") == 0
    assert worker.stop() == 0
    assert kept(path) == {result.id}


def test_a_second_worker_with_the_same_file_ends_with_a_line_and_the_first_goes_on(
    place: Place,
) -> None:
    first = place.worker()
    second = place.worker(wait=False)
    assert second.wait() == 2
    line = second.lines[-1]
    assert line.startswith(f"umbel: state file {place.path} is in use by another worker")
    assert place.client.send_task("run", ["on"]).get(timeout=30) == "on"
    place.client.send_task("revoke", ["x"])
    first.wait_for(r"\bsaved x$")
    assert first.stop() == 0
    assert kept(place.path) == {"x"}


def test_a_file_of_something_else_ends_the_start_with_a_line(place: Place, path: Path) -> None:
    path.write_text("dear diary")
    args = ["-A", "state_app", "worker", "-S", str(path)]
    program = run_umbel(args, cwd=place.directory, env=place.env)
    assert program.process.returncode == 2
    assert program.lines == [
        f"umbel: {path} is no state file of a worker and is left alone: give another file"
    ]
    assert path.read_text() == "dear diary"


def test_children_that_come_and_go_leave_the_file_alone(site: Site, path: Path) -> None:
    worker = site.worker("prefork", "--max-tasks-per-child", "1", "-S", str(path))
    for number in range(6):
        site.send("record", str(number)).get(timeout=30)
    assert worker.stop() == 0
    clock = Clock()
    assert kept(path, clock) == set()
    revoke(path, "a")
    again = site.worker("prefork", "-S", str(path))
    again.wait_for("state file .*: 1 revocations")
    os.kill(again.pid, signal.SIGKILL)
    again.wait()
    assert kept(path) == {"a"}
