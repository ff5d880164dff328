"""The recorder with real workers: whatever is killed or restarted, no event is lost in silence.

In `make soak`, or with `RECORDER_TASKS=20000`, there are five workers, ten kills of recorders and
three restarts of the broker.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.interop import nodes
from tests.recording import TAKES, numbers_of, recorder_program, rows_of, unique
from tests.servers import RabbitMQServer, RedisServer, Server, wait_until
from tests.sites import APP, Site
from tests.sizes import size
from tests.workers import Program
from umbel.recorder.log import Log
from umbel.recorder.sources.queues import QUEUE
from umbel.recorder.sources.streams import GROUP

TASKS = int(os.environ.get("RECORDER_TASKS", size(1_000, 20_000)))
IS_LONG = TASKS > 5_000
WORKERS, KILLS, RESTARTS = (5, 10, 3) if IS_LONG else (2, 3, 1)
OPTIONS = {"roll_age_s": 0.3, "roll_rows": 3_000}
SETTINGS = {
    "task_send_sent_event": True,
    "task_ignore_result": True,
    # Else RabbitMQ may lose a task that is sent while a connection breaks.
    "broker_transport_options": {"confirm_publish": True},
}
WAIT_S = 120.0
SECRET = "hunter2-Zq"


class Recorders:
    """Two recorders that share a log; they are killed and replaced."""

    def __init__(self, url: str, log: Path) -> None:
        self._url, self.log = url, log
        Log(str(log)).open()
        self.programs = [self._start(), self._start()]
        self.kill_count = 0

    def _start(self) -> Program:
        return recorder_program(self._url, self.log, **OPTIONS)

    def wait_ready(self) -> None:
        for program in self.programs:
            program.wait_for(TAKES)

    def kill_one(self) -> None:
        self.programs.pop(0).kill()
        self.kill_count += 1
        self.programs.append(self._start())

    def stop(self) -> None:
        for program in self.programs:
            assert program.stop() == 0, program.output

    def close(self) -> None:
        for program in self.programs:
            program.kill()


class Killer:
    """Kills recorders at moments of its own choice, until there were enough."""

    def __init__(self, recorders: Recorders, count: int, pause_s: float) -> None:
        self._recorders, self._count, self._pause_s = recorders, count, pause_s
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._stop = threading.Event()

    def _run(self) -> None:
        for _ in range(self._count):
            if self._stop.wait(random.uniform(0.2, 1) * self._pause_s):
                return
            self._recorders.kill_one()

    def wait(self) -> None:
        self._thread.join(WAIT_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)


@pytest.fixture
def recorders(site: Site, tmp_path: Path) -> Iterator[Recorders]:
    made = Recorders(site.broker_url, tmp_path / "log")
    yield made
    made.close()


@pytest.fixture
def server(site: Site, request: pytest.FixtureRequest) -> Server:
    kind = "redis" if site.broker_url.startswith("redis") else "rabbitmq"
    found: Server = request.getfixturevalue(f"{kind}_server")
    return found


@pytest.fixture
def left(site: Site, server: Server) -> Callable[[], int]:
    """How many messages the broker still keeps for recorders."""
    if isinstance(server, RedisServer):
        client = server.client(int(site.broker_url.rsplit("/", 1)[1]))

        def on_redis() -> int:
            (group,) = client.xinfo_groups("umbel.events")
            assert group["name"] == GROUP.encode()
            # Servers before 7 know no lag, and others none where entries were dropped.
            behind = client.xrange("umbel.events", b"(" + group["last-delivered-id"], count=1000)
            return int(group["pending"]) + len(behind)

        return on_redis
    assert isinstance(server, RabbitMQServer)
    vhost = site.broker_url.rsplit("/", 1)[1]
    return lambda: server.queue_length(QUEUE, vhost) + server.unacknowledged(QUEUE, vhost)


@pytest.mark.timeout(900 if IS_LONG else 120)
def test_what_is_sent_is_recorded_over_kills_of_recorders_and_restarts_of_the_broker(
    site: Site, server: Server, recorders: Recorders, left: Callable[[], int]
) -> None:
    recorders.wait_ready()
    site.app.conf.update(SETTINGS)
    # The first one can keep next to nothing while the broker is away.
    workers = [
        site.worker(
            "threads", "-E", "-n", f"w{n}@test", "--heartbeat-interval", "0.5",
            settings={**SETTINGS, "event_buffer_max": 50 if n == 0 else 50_000},
        )
        for n in range(WORKERS)
    ]  # fmt: skip
    share = TASKS // (RESTARTS + 1)
    with Killer(recorders, KILLS, pause_s=4.0 if IS_LONG else 1.5) as killer:
        for part in range(RESTARTS + 1):
            site.app.send_many([site.app.signature(f"{APP}.add", (n, 1)) for n in range(share)])
            if part < RESTARTS:
                wait_until(lambda: site.waiting() < share * 0.7, WAIT_S, "workers at work")
                server.restart()
        wait_until(lambda: site.waiting() == 0, WAIT_S, "all tasks")
        killer.wait()
    assert recorders.kill_count == KILLS
    # One that is stopped before it has found the broker again has little time for a good-bye.
    everybody = lambda: len(site.app.control.ping(timeout=1.0)) == WORKERS  # noqa: E731
    wait_until(everybody, WAIT_S, "all workers to be back")
    for worker in workers:
        worker.stop()
    wait_until(lambda: left() == 0, WAIT_S, "recorders to have taken all")
    recorders.stop()
    check(recorders.log, site)


def check(log: Path, site: Site) -> None:
    """Every number of every incarnation is there, or is one that its node counted as lost."""
    rows = rows_of(log)
    events = unique(rows)
    numbers = numbers_of(events)
    good_byes = [row for row in events if row["type"] == "worker-offline"]
    assert sorted(row["hostname"] for row in good_byes) == [f"w{n}@test" for n in range(WORKERS)]
    lost: dict[tuple[str, int], int] = {
        (row["hostname"], row["inc"]): row["lost"] for row in good_byes
    }
    for key, seen in numbers.items():
        assert len(seen) == len(set(seen)), f"{key}: a number stands for one event"
        missing = seen[-1] - len(seen)
        told = lost.get(key, site.app.events.sent_lost)
        assert missing <= told, f"{key}: {missing} are missing, and {told} were lost"
    for row in good_byes:
        assert row["seq"] == numbers[row["hostname"], row["inc"]][-1], "good-bye is the last word"
    print(
        f"{len(rows)} rows, {len(events)} events, "
        f"{sum(s[-1] - len(s) for s in numbers.values())} missing, lost {sorted(lost.values())}"
    )
    received = {row["uuid"] for row in events if row["type"] == "task-received"}
    # The one that keeps next to nothing may have run most of them while the broker was away.
    assert len(received) > TASKS * 0.1
    assert rows_of(log, "quarantine") == []


@pytest.fixture
def celery_worker(site: Site, redis_server: RedisServer, tmp_path: Path) -> Iterator[Program]:
    """A Celery worker that tells everything, and takes from a queue of its own."""
    program = nodes.start(
        "celery",
        {"broker_url": site.broker_url, "result_backend": site.backend_url},
        nodes.marks_url(redis_server),
        tmp_path,
        *("-P", "solo", "-E", "-n", "theirs@test", "-Q", "theirs"),
    )
    yield program
    program.kill()


def test_what_celerys_workers_tell_is_recorded_too(
    site: Site, recorders: Recorders, celery_worker: Program
) -> None:
    recorders.wait_ready()
    ours = site.worker("threads", "-E", "-n", "ours@test")
    celery_worker.wait_for("ready")
    mine = site.send("add", 1, 2).id
    their = site.app.send_task("t.add", (1, 2), queue="theirs").id
    # Celery's workers hide nothing: the recorder does.
    echoed = site.app.send_task("t.echo", ({"password": SECRET},), queue="theirs").id
    log = recorders.log

    def stories() -> set[tuple[str, str, str]]:
        return {(row["hostname"], row["type"], row["uuid"] or "") for row in rows_of(log)}

    def is_told() -> bool:
        return stories() >= {
            ("ours@test", "task-succeeded", mine),
            ("theirs@test", "task-succeeded", their),
            ("theirs@test", "task-succeeded", echoed),
        }

    wait_until(is_told, 30, "the tasks in the log")
    ours.stop()
    celery_worker.stop()
    good_byes = {("ours@test", "worker-offline", ""), ("theirs@test", "worker-offline", "")}
    wait_until(lambda: stories() >= good_byes, 30, "good-byes in the log")
    recorders.stop()
    theirs = [row for row in unique(rows_of(log)) if row["hostname"] == "theirs@test"]
    assert {row["inc"] for row in theirs} == {None}
    results = {row["result"] for row in theirs if row["uuid"] == echoed}
    assert results == {None, "[[{'password': '**'}], {}]"}
    assert SECRET not in str(rows_of(log))
    kinds = [row["type"] for row in theirs if row["uuid"] == their]
    assert sorted(kinds) == ["task-received", "task-started", "task-succeeded"]
    assert all(
        numbers == list(range(1, len(numbers) + 1))
        for numbers in numbers_of(unique(rows_of(log))).values()
    )
