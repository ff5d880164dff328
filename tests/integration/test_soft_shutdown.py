"""Soft shutdown: time for running tasks before a cold stop; what waits goes back at once."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.servers import wait_until
from tests.sites import Site

LONG, SHORT_S = {"worker_soft_shutdown_timeout": 60}, 1.5
POOLS = ["prefork", "threads"]


@pytest.mark.parametrize("pool", POOLS)
def test_tasks_that_end_in_time_make_a_soft_stop_a_warm_one(site: Site, pool: str) -> None:
    worker = site.worker(pool, concurrency=1, settings=LONG)
    running = site.send("wait_late", "running")
    site.wait_until_begun("running")
    waiting = site.send("record", "waiting")
    site.wait_until_waiting(0)
    worker.signal(signal.SIGQUIT)
    worker.wait_for(r"soft shutdown: 1 running tasks have [\d.]+ s to end")
    site.wait_until_waiting(1)
    assert not running.ready()
    site.open_gate("running")
    assert running.get(timeout=30) == "running"
    assert worker.wait() == 0
    assert site.waiting() == 1
    assert not waiting.ready()


@pytest.mark.parametrize("pool", POOLS)
def test_tasks_that_do_not_end_in_time_are_stopped_and_go_back(
    site: Site, pool: str, measure: Callable[[], float]
) -> None:
    soft = {"worker_soft_shutdown_timeout": SHORT_S}
    worker = site.worker(pool, concurrency=1, settings=soft)
    site.send("wait_late", "running")
    site.wait_until_begun("running")
    measure()
    worker.signal(signal.SIGQUIT)
    assert worker.wait() == 1
    assert SHORT_S <= measure() < SHORT_S + 5
    site.wait_until_waiting(1)


def test_a_second_request_is_cold_at_once(site: Site, measure: Callable[[], float]) -> None:
    worker = site.worker("threads", concurrency=1, settings=LONG)
    site.send("wait_late", "running")
    site.wait_until_begun("running")
    worker.signal(signal.SIGQUIT)
    worker.wait_for("soft shutdown")
    measure()
    worker.signal(signal.SIGQUIT)
    assert worker.wait() == 1
    assert measure() < 5
    site.wait_until_waiting(1)


def test_an_idle_worker_stops_softly_without_waiting(
    site: Site, measure: Callable[[], float]
) -> None:
    worker = site.worker("threads", settings=LONG)
    measure()
    worker.signal(signal.SIGQUIT)
    assert worker.wait() == 0
    assert measure() < 5


def test_the_time_is_limited_without_a_broker_too(redis_site: Site) -> None:
    """The loop that would look at the clock has ended with the connection."""
    site = redis_site
    settings = {
        "worker_soft_shutdown_timeout": SHORT_S,
        "broker_connection_retry": False,
        "broker_url": site.broker_url,
    }
    worker = site.worker("prefork", concurrency=1, settings=settings)
    site.send("spin", 60)
    wait_until(lambda: "received" in worker.output, what="the task")
    server = site.notes
    for client in server.client_list():
        if client["cmd"] != "client|list":
            server.client_kill_filter(_id=client["id"], skipme=True)
    worker.wait_for("the worker ends when its running tasks have")
    worker.signal(signal.SIGQUIT)
    assert worker.wait(15) == 1


@pytest.mark.parametrize(
    ("number", "runs"), [(signal.SIGTERM, 1), (signal.SIGQUIT, 2)], ids=["warm", "cold"]
)
def test_a_second_worker_has_what_goes_back_within_a_second(
    site: Site, number: int, runs: int, measure: Callable[[], float]
) -> None:
    first = site.worker("threads", "--prefetch-multiplier", "8", concurrency=1)
    site.send("wait_late", "running")
    site.wait_until_begun("running")
    tokens = [f"waiting-{n}" for n in range(5)]
    for token in tokens:
        site.send("record", token)
    site.wait_until_waiting(0)
    second = site.worker("threads", "--prefetch-multiplier", "8", concurrency=2)
    wanted = [*tokens, "running"] if runs == 2 else tokens
    measure()
    first.signal(number)
    for token in wanted:
        site.wait_until_begun(token)
    assert measure() < 1.0
    for _ in range(runs):
        site.open_gate("running")
    first.wait()
    assert second.stop() == 0
    assert site.runs("running") == runs
    assert [site.runs(token) for token in tokens] == [1] * 5
    assert site.waiting() == 0
