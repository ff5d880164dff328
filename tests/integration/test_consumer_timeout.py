"""RabbitMQ takes back what is not acknowledged in time: long tasks, held and waiting ones."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.servers import RabbitMQServer, wait_until
from tests.sites import Site

LIMIT_S = 2.0
CLOSED = r"closed the channel: a message was not acknowledged within 2 s \(consumer_timeout\)"


@pytest.fixture
def site(amqp_site: Site, rabbitmq_server: RabbitMQServer) -> Iterator[Site]:
    """A broker that is impatient."""
    with rabbitmq_server.consumer_timeout(LIMIT_S):
        yield amqp_site


def vhost_of(site: Site) -> str:
    return site.broker_url.rsplit("/", 1)[1]


def unacknowledged(site: Site, server: RabbitMQServer) -> int:
    return server.unacknowledged("celery", vhost_of(site))


def test_a_late_task_that_takes_longer_than_the_limit_runs_once_and_others_go_on(
    site: Site, rabbitmq_server: RabbitMQServer
) -> None:
    worker = site.worker("prefork", settings={"broker_consumer_timeout": LIMIT_S})
    long = site.send("wait_late", "long")
    site.wait_until_begun("long")
    others = []
    for round_ in range(3):
        begun = len(worker.lines)
        others += [site.send("record", f"other-{round_}-{n}") for n in range(40)]
        worker.wait_for(CLOSED, start=begun)
    for other in others:
        assert other.get(timeout=30) == 1
    site.open_gate("long")
    assert long.get(timeout=30) == "long"
    assert site.runs("long") == 1
    wait_until(lambda: unacknowledged(site, rabbitmq_server) == 0, what="the acknowledgement")
    assert worker.stop() == 0
    assert site.waiting() == 0
    assert "Traceback" not in worker.output
    lost = [line for line in worker.lines if re.search(r"lost: |timed out", line)]
    assert not lost, "one clear line each time, and no other"


def test_a_task_that_ends_after_the_limit_unseen_by_a_busy_loop_runs_once(
    site: Site, rabbitmq_server: RabbitMQServer
) -> None:
    """A solo worker reads nothing while the task runs, and acknowledges on a closed channel."""
    worker = site.worker("solo", settings={"broker_consumer_timeout": LIMIT_S})
    late = site.send("sleep_late", "late", 1.5 * LIMIT_S)
    worker.wait_for(CLOSED)
    assert late.get(timeout=30) == "late"
    assert site.works()
    wait_until(lambda: unacknowledged(site, rabbitmq_server) == 0, what="the acknowledgement")
    assert site.runs("late") == 1


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_tasks_that_wait_for_their_eta_are_given_back_before_the_limit(
    site: Site, kind: str
) -> None:
    """Again and again; a quorum queue would drop what is only rejected so often."""
    settings = {"broker_consumer_timeout": LIMIT_S, "task_default_queue_type": kind}
    worker = site.worker("prefork", settings=settings)
    site.app.conf.task_default_queue_type = kind
    due = time.time() + 3 * LIMIT_S
    held = [site.send("record", f"held-{n}", countdown=3 * LIMIT_S) for n in range(20)]
    for one in held:
        assert one.get(timeout=30) == 1
    assert time.time() >= due - 0.1
    assert not re.search(CLOSED, worker.output)
    assert worker.output.count("Connected to") == 1
    assert worker.stop() == 0
    assert site.waiting() == 0


def test_tasks_that_wait_for_the_pool_or_a_rate_limit_are_given_back_before_the_limit(
    site: Site,
) -> None:
    worker = site.worker(
        "threads",
        concurrency=1,
        settings={
            "broker_consumer_timeout": LIMIT_S,
            "worker_prefetch_multiplier": 10,
            "task_annotations": {"tests.probe_app.add": {"rate_limit": "20/m"}},
        },
    )
    slow = [site.send("add", n, 1) for n in range(3)]
    site.send("wait", "early")
    site.wait_until_begun("early")
    waiting = [site.send("record", f"waiting-{n}") for n in range(5)]
    received = r"record\[[-0-9a-f]+\] received"
    wait_until(lambda: len(re.findall(received, worker.output)) >= 4 * len(waiting), 30)
    assert not re.search(CLOSED, worker.output)
    site.open_gate("early")
    for one in waiting:
        assert one.get(timeout=30) == 1
    assert [one.get(timeout=30) for one in slow] == [1, 2, 3]
    assert worker.output.count("Connected to") == 1
    assert worker.stop() == 0


def test_the_limit_that_the_server_tells_is_taken_where_the_setting_is_wrong(site: Site) -> None:
    worker = site.worker("prefork", settings={"broker_consumer_timeout": 1000})
    held = site.send("record", "held", countdown=4 * LIMIT_S)
    worker.wait_for(CLOSED)
    assert held.get(timeout=30) == 1
    assert len(re.findall(CLOSED, worker.output)) == 1, "it is known from then on"
    assert site.runs("held") == 1


def test_a_worker_warns_of_late_tasks_that_may_take_longer_than_the_limit(amqp_site: Site) -> None:
    worker = amqp_site.worker("threads")
    line = worker.wait_for(r".*consumer_timeout.*")[0]
    assert "wait_late" in line
    assert "spin_hard_late" not in line, "it has a time limit"
    assert "1800 s" in line
    assert "broker_consumer_timeout" in line
    worker.stop()
    quiet = amqp_site.worker("threads", settings={"broker_consumer_timeout": 0})
    assert "consumer_timeout" not in quiet.output


def test_a_message_that_is_delivered_again_to_a_worker_that_lost_its_connection_runs_once(
    amqp_site: Site, rabbitmq_server: RabbitMQServer
) -> None:
    worker = amqp_site.worker("prefork", concurrency=4)
    late = [amqp_site.send("wait_late", f"late-{n}") for n in range(4)]
    for n in range(4):
        amqp_site.wait_until_begun(f"late-{n}")
    for _ in range(3):
        lines = len(worker.lines)
        rabbitmq_server.close_connections()
        worker.wait_for(r"\bready\b", start=lines)
        wait_until(lambda: unacknowledged(amqp_site, rabbitmq_server) == 4, what="the deliveries")
        assert amqp_site.waiting() == 0, "all were adopted"
    for n in range(4):
        amqp_site.open_gate(f"late-{n}")
    assert [one.get(timeout=30) for one in late] == [f"late-{n}" for n in range(4)]
    assert [amqp_site.runs(f"late-{n}") for n in range(4)] == [1] * 4
    wait_until(lambda: unacknowledged(amqp_site, rabbitmq_server) == 0, what="all to be settled")
    assert amqp_site.works()
    assert worker.stop() == 0
    assert amqp_site.waiting() == 0
    assert "Traceback" not in worker.output
