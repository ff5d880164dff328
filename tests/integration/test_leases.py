"""Leases on Redis: what a worker holds is not given to another one because it takes long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection, Queue

from tests.inside import Inside
from tests.servers import RedisServer, wait_until
from tests.sites import QUEUE, Site
from umbel import Umbel

LEASE_S = 2.0
HELD_S = 5.0
SHORT = {
    "broker_transport_options": {
        "visibility_timeout": LEASE_S,
        "unacked_restore_interval": 0.25,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 1,
    }
}


def test_an_eta_and_a_run_time_beyond_the_lease_run_once_with_two_workers(redis_site: Site) -> None:
    site = redis_site
    workers = [site.worker("threads", settings=SHORT) for _ in range(2)]
    held = site.send("record", "held", countdown=HELD_S)
    site.send("wait_late", "running")
    site.wait_until_begun("running")
    began = time.monotonic()
    assert held.get(timeout=30) == 1
    wait_until(lambda: time.monotonic() - began > 2 * LEASE_S, 20, "the end of the lease, twice")
    assert site.runs("running") == 1, "somebody else was given it"
    site.open_gate("running")
    wait_until(lambda: site.notes.hlen("runs") == 2, what="both")
    assert site.works()
    for worker in workers:
        assert worker.stop() == 0
    assert (site.runs("held"), site.runs("running"), site.waiting()) == (1, 1, 0)


def test_a_message_whose_holder_is_silent_goes_to_another_one(redis_site: Site) -> None:
    """What the test above would look like without renewal."""
    site = redis_site
    site.send("record", "taken")
    options = SHORT["broker_transport_options"]
    with Connection(site.broker_url, transport_options=options) as connection:
        channel = connection.channel()
        message = Queue(QUEUE)(channel).get(no_ack=False)
        assert message is not None
        site.worker("threads", settings=SHORT)
        wait_until(lambda: site.runs("taken") == 1, 20, "the second holder")


class Notes:
    def __init__(self) -> None:
        self.ran: list[Any] = []

    def __call__(self, app: Umbel) -> None:
        app.task(name="note")(self.ran.append)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def inside(redis_url: str, notes: Notes) -> Iterator[Inside]:
    made = Inside({"broker_url": redis_url, "result_backend": "disabled://"}, notes).start()
    yield made
    made.close()


def test_acknowledgements_that_did_not_reach_the_server_go_out_on_the_next_connection(
    inside: Inside, notes: Notes, redis_server: RedisServer, redis_url: str
) -> None:
    server = redis_server.client(int(redis_url.rsplit("/", 1)[1]))
    consumer = inside.worker.consumer
    fetcher, acks = consumer.channel.fetcher, consumer.ledger.acks
    fetcher._send = lambda line, now, ahead=True: None
    for n in range(20):
        inside.send("note", n)
    inside.call(lambda: fetcher._send_pop(fetcher._line, 20, time.monotonic()))
    wait_until(lambda: len(notes.ran) == 20, what="the tasks")
    wait_until(lambda: len(acks) == 20, what="what they leave to be said")
    assert server.hlen("unacked") == 20
    inside.break_connection()
    wait_until(lambda: server.hlen("unacked") == server.zcard("unacked_index") == 0)
    inside.send("note", "next")
    wait_until(lambda: "next" in notes.ran, what="the next task")
    assert len(notes.ran) == 21, "none ran twice"


def test_a_stopping_worker_says_what_it_has_gathered(
    inside: Inside, notes: Notes, redis_server: RedisServer, redis_url: str
) -> None:
    server = redis_server.client(int(redis_url.rsplit("/", 1)[1]))
    for n in range(200):
        inside.send("note", n)
    wait_until(lambda: len(notes.ran) > 20, what="some tasks")
    assert inside.stop() == 0
    assert server.hlen("unacked") == server.zcard("unacked_index") == 0
    assert len(notes.ran) + server.llen("celery") == 200
