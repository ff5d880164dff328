"""A broker that is not there, goes away, or closes connections: told in a line, outlived."""

from __future__ import annotations

import re

import pytest

from tests.servers import RabbitMQServer, RedisServer, wait_until
from tests.sites import Site

POOLS = ["prefork", "threads", "gevent"]


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_a_worker_waits_for_a_broker_that_is_down(
    redis_site: Site, redis_server: RedisServer, pool: str
) -> None:
    site = redis_site
    redis_server.stop()
    try:
        worker = site.worker(pool, wait=False)
        line = worker.wait_for(r"Cannot connect to .*Retrying in").string
        assert f"127.0.0.1:{redis_server.port}" in line
    finally:
        redis_server.start()
    worker.wait_until_ready()
    assert site.works()
    assert "Traceback" not in worker.output
    assert worker.stop() == 0


@pytest.mark.parametrize("pool", POOLS)
def test_a_worker_goes_on_when_redis_was_restarted(
    redis_site: Site, redis_server: RedisServer, pool: str
) -> None:
    site = redis_site
    worker = site.worker(pool)
    assert site.works()
    held = site.send("record", "held", countdown=1)
    running = site.send("wait", "running")
    site.wait_until_begun("running")
    redis_server.restart()
    # Its wait ended with the server; that it failed is stored by the new one.
    wait_until(running.ready, 20, "the end of the task that waited on the old server")
    assert site.works()
    assert held.get(timeout=30) >= 1
    assert_outlived(worker.output)
    assert worker.stop() == 0


def test_a_task_that_runs_while_redis_is_restarted_is_acknowledged_when_it_ends(
    redis_site: Site, redis_server: RedisServer
) -> None:
    """On Redis a message outlives its connection: it is settled on the next one."""
    site = redis_site
    worker = site.worker("prefork", "--prefetch-multiplier", "4", concurrency=1)
    running = site.send("sleep_late", "running", 1.5)
    site.wait_until_begun("running")
    waiting = [site.send("record_late", f"waiting-{n}") for n in range(3)]
    site.wait_until_waiting(0)
    redis_server.restart()
    assert running.get(timeout=30) == "running"
    assert [result.get(timeout=30) for result in waiting] == [1, 1, 1]
    wait_until(lambda: site.notes.hlen("unacked") == 0, what="every message to be settled")
    assert worker.stop() == 0
    assert site.order() == ["running", "waiting-0", "waiting-1", "waiting-2"]
    assert site.waiting() == 0


def test_a_worker_outlives_a_redis_that_is_away_for_a_while(
    redis_site: Site, redis_server: RedisServer
) -> None:
    site = redis_site
    worker = site.worker("threads")
    redis_server.kill()
    try:
        worker.wait_for(r"Cannot connect .*Retrying", 20)
    finally:
        redis_server.start()
    assert site.works()
    assert_outlived(worker.output)


@pytest.mark.parametrize("pool", POOLS)
def test_a_worker_goes_on_when_rabbitmq_closed_its_connections(
    amqp_site: Site, rabbitmq_server: RabbitMQServer, pool: str
) -> None:
    site = amqp_site
    worker = site.worker(pool)
    assert site.works()
    held = site.send("record", "held", countdown=1)
    running = site.send("wait", "early")
    late = site.send("wait_late", "late")
    site.wait_until_begun("early")
    site.wait_until_begun("late")
    vhost = site.broker_url.rsplit("/", 1)[1]
    wait_until(lambda: rabbitmq_server.unacknowledged("celery", vhost) <= 2, what="the early ack")
    rabbitmq_server.close_connections()
    worker.wait_for("onnection to .* lost", 20)
    worker.wait_for(r"wait_late\[[-0-9a-f]+\] was delivered again and goes on", 20)
    site.open_gate("late")
    site.open_gate("early")
    assert running.get(timeout=30) == "early"
    assert late.get(timeout=30) == "late"
    assert site.works()
    assert held.get(timeout=30) >= 1
    assert (site.runs("late"), site.runs("early")) == (1, 1)
    assert_outlived(worker.output)
    assert worker.stop() == 0
    assert site.waiting() == 0


def assert_outlived(output: str) -> None:
    """The loss was told in lines, not in tracebacks of the worker's own parts."""
    own = [line for line in output.splitlines() if re.search(r": (ERROR|CRITICAL)/", line)]
    unexpected = [
        line for line in own if "annot connect" not in line and "raised unexpected" not in line
    ]
    assert unexpected == []
