"""Stopping a worker: what runs, what is held, what waits, and the exit code."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import RedisServer, free_port, wait_until
from tests.sites import Site
from tests.workers import WorkerProcess, ready
from umbel import Umbel
from umbel.app.results import AsyncResult

POOLS = ["prefork", "threads", "gevent"]
COLD_S = 2.0
WARM_SAID, COLD_SAID = "umbel: warm shutdown", "umbel: cold shutdown"


@pytest.mark.parametrize(
    ("pool", "number"),
    [*((pool, signal.SIGTERM) for pool in POOLS), ("threads", signal.SIGINT)],
)
def test_a_warm_shutdown_lets_tasks_end_and_gives_the_rest_back_at_once(
    site: Site, pool: str, number: int, measure: Callable[[], float]
) -> None:
    worker = site.worker(pool, "--prefetch-multiplier", "4", concurrency=1)
    running = site.send("wait", "running")
    site.wait_until_begun("running")
    for n in range(2):
        site.send("record", f"held-{n}", countdown=3600)
    for n in range(3):
        site.send("record", f"waiting-{n}")
    site.wait_until_waiting(0)
    measure()
    worker.signal(number)
    site.wait_until_waiting(5)
    assert measure() < 2
    assert not running.ready()
    site.open_gate("running")
    assert running.get(timeout=30) == "running"
    assert worker.wait(10) == 0
    assert site.waiting() == 5
    assert site.order() == ["running"]
    assert "Traceback" not in worker.output


def test_messages_that_were_given_back_run_in_their_old_order(site: Site) -> None:
    first = site.worker("threads", "--prefetch-multiplier", "4", concurrency=1)
    site.send("wait", "running")
    site.wait_until_begun("running")
    tokens = [f"waiting-{n}" for n in range(6)]
    for token in tokens:
        site.send("record", token)
    site.wait_until_waiting(6 - 4)
    first.signal(signal.SIGTERM)
    site.wait_until_waiting(6)
    site.open_gate("running")
    assert first.wait() == 0
    site.worker("threads", concurrency=1)
    wait_until(lambda: len(site.order()) == 7, what="the tasks")
    assert site.order() == ["running", *tokens]


def test_an_idle_worker_that_only_holds_tasks_loses_none_when_it_stops(site: Site) -> None:
    worker = site.worker("threads")
    for n in range(20):
        site.send("record", f"held-{n}", countdown=3600)
    site.wait_until_waiting(0)
    assert worker.stop() == 0
    assert site.waiting() == 20


@pytest.mark.parametrize(
    ("pool", "numbers"),
    [
        *((pool, (signal.SIGQUIT,)) for pool in POOLS),
        ("threads", (signal.SIGINT, signal.SIGINT)),
        ("prefork", (signal.SIGTERM, signal.SIGQUIT)),
    ],
)
def test_a_cold_shutdown_is_quick_and_late_acknowledged_tasks_go_back(
    site: Site, pool: str, numbers: tuple[int, ...], measure: Callable[[], float]
) -> None:
    worker = site.worker(pool, concurrency=1)
    running = site.send("wait_late", "running")
    site.wait_until_begun("running")
    waiting = site.send("record_late", "waiting")
    site.wait_until_waiting(0)
    for number in numbers[:-1]:
        worker.signal(number)
        worker.wait_for(WARM_SAID)
    measure()
    worker.signal(numbers[-1])
    assert worker.wait(10) == 1
    assert measure() < COLD_S
    site.wait_until_waiting(2)
    assert (running.state, waiting.state) == ("PENDING", "PENDING")
    assert COLD_SAID in worker.output
    assert "Traceback" not in worker.output
    if pool == "threads":
        site.open_gate("running")
        site.worker(pool)
        assert (running.get(timeout=30), waiting.get(timeout=30)) == ("running", 1)


def test_a_solo_worker_that_runs_a_task_stops_cold_at_once(
    site: Site, measure: Callable[[], float]
) -> None:
    worker = site.worker("solo", concurrency=1)
    running = site.send("wait_late", "running")
    site.wait_until_begun("running")
    measure()
    worker.signal(signal.SIGQUIT)
    assert worker.wait(10) == 1
    assert measure() < COLD_S
    site.wait_until_waiting(1)
    assert running.state == "PENDING"


def test_a_solo_worker_ends_its_task_before_it_stops_warm(site: Site) -> None:
    port = free_port()
    worker = site.worker("solo", "--health-port", str(port), concurrency=1)
    running = site.send("wait", "running")
    site.wait_until_begun("running")
    site.send("record", "waiting")
    assert ready(port)[0] == 200
    worker.signal(signal.SIGTERM)
    # The line of the log is written before the stop is asked for, and the loop is in the task.
    wait_until(lambda: ready(port)[0] == 503, what="the stop")
    site.open_gate("running")
    assert worker.wait(10) == 0
    assert running.get(timeout=30) == "running"
    site.wait_until_waiting(1)
    assert site.runs("waiting") == 0


def test_a_task_that_is_ended_by_its_limit_during_a_shutdown_is_settled(site: Site) -> None:
    """Its result is stored away from the loop, which must not end before the message is done."""
    worker = site.worker("prefork", concurrency=1)
    result = site.send("spin_hard_late", "long", 30)
    site.wait_until_begun("long")
    worker.signal(signal.SIGTERM)
    assert worker.wait(10) == 0
    assert result.state == "FAILURE"
    assert site.waiting() == 0, "a task that has failed would run again"


def test_a_worker_can_be_stopped_while_it_waits_for_its_broker(site: Site) -> None:
    worker = site.worker("threads", wait=False, settings={"broker_url": "redis://127.0.0.1:1/0"})
    worker.wait_for("annot connect")
    worker.signal(signal.SIGTERM)
    assert worker.wait(5) == 0
    assert "Traceback" not in worker.output


@pytest.mark.parametrize("pool", ["prefork", "gevent", "solo"])
@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_a_broker_that_does_not_answer_holds_a_stop_up_no_longer_than_the_setting_says(
    request: pytest.FixtureRequest, broker: str, pool: str
) -> None:
    site = request.getfixturevalue("redis_site" if broker == "redis" else "amqp_site")
    server = request.getfixturevalue(f"{broker}_server")
    limit_s = 5.0
    worker = site.worker(pool, settings={"worker_goodbye_timeout": limit_s})
    assert site.works()
    server.pause()
    try:
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert time.monotonic() - began < limit_s + 2  # of a busy machine
    finally:
        server.resume()


@pytest.mark.parametrize("pool", POOLS)
def test_a_broker_that_answers_is_not_left_while_tasks_run(site: Site, pool: str) -> None:
    worker = site.worker(pool, settings={"worker_goodbye_timeout": 1.0})
    result = site.send("sleep_late", "long", 4.0)
    site.wait_until_begun("long")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert "does not answer" not in worker.output
    assert result.get(timeout=5) == "long"
    assert (site.taken(), site.waiting()) == (0, 0)


WORKING = """
import os, time
from umbel import Umbel

app = Umbel("shop", broker=os.environ["URL"], backend=os.environ["URL"])
app.conf.worker_goodbye_timeout = 5.0


@app.task(acks_late=True)
def work(seconds):
    print("begun", flush=True)  # a task that asks no broker for anything
    time.sleep(seconds)
    return "done"
"""


@pytest.fixture
def working(
    tmp_path: Path, redis_url: str, start_worker: Callable[..., WorkerProcess]
) -> Iterator[Callable[..., tuple[WorkerProcess, AsyncResult]]]:
    """A worker of a pool, and the result of a task that it runs."""
    (tmp_path / "shop.py").write_text(WORKING)
    client = Umbel("client", broker=redis_url, backend=redis_url, set_as_current=False)

    def start(pool: str, seconds: float, **options: Any) -> tuple[WorkerProcess, AsyncResult]:
        command = ["-P", pool, "-c", "2", "-l", "info"]
        worker = start_worker("shop", command, cwd=tmp_path, env={"URL": redis_url})
        result = client.send_task("shop.work", (seconds,), **options)
        worker.wait_for("begun")
        return worker, result

    yield start
    client.close()


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "asyncio", "solo"])
def test_a_silent_broker_holds_a_stop_up_no_longer_than_that_after_the_last_task(
    working: Callable[..., tuple[WorkerProcess, AsyncResult]], redis_server: RedisServer, pool: str
) -> None:
    work_s, limit_s = 2.0, 5.0
    worker, _ = working(pool, work_s, ignore_result=True)
    redis_server.pause()
    try:
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert time.monotonic() - began < work_s + limit_s + 2  # of a busy machine
    finally:
        redis_server.resume()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_whose_result_waits_for_a_silent_backend_has_not_ended(
    working: Callable[..., tuple[WorkerProcess, AsyncResult]], redis_server: RedisServer, pool: str
) -> None:
    worker, result = working(pool, 0.5)
    redis_server.pause()
    try:
        worker.signal(signal.SIGTERM)
        worker.wait_for("does not answer, and this worker leaves")
        assert worker.process.poll() is None
    finally:
        redis_server.resume()
    assert worker.wait(10) == 0
    assert result.get(timeout=5) == "done"
