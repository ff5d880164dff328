"""A paused queue: nobody takes from it, not who joins later either, until it is resumed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.inside import Inside
from tests.servers import wait_until
from tests.sites import QUEUE, Site

KEEPER = "keeper@test"


def tell(site: Site, command: str, to: str, **arguments: Any) -> Any:
    """One node hears it, as if all others were away just then."""
    replies = site.app.control.broadcast(
        command, arguments, destination=[to], reply=True, timeout=10
    )
    assert replies, f"{to} does not answer {command}"
    return replies[0][to]


def consumed(site: Site, node: str) -> set[str]:
    return {queue["name"] for queue in tell(site, "active_queues", node)}


@pytest.fixture
def keeper(site: Site) -> str:
    """A node that is always there, and consumes another queue."""
    site.worker("threads", "-n", KEEPER, "-Q", "elsewhere", concurrency=1)
    return KEEPER


@pytest.fixture
def inside(site: Site, keeper: str) -> Iterator[Inside]:
    settings = {"broker_url": site.broker_url, "result_backend": site.backend_url}
    made = Inside(settings, lambda app: None).start()
    yield made
    made.stop()
    made.close()


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_worker_that_starts_leaves_a_paused_queue_alone_until_it_is_resumed(
    site: Site, keeper: str, pool: str
) -> None:
    control = site.app.control
    assert control.pause(QUEUE, reply=True, timeout=2, limit=1) == [
        {keeper: {"ok": f"{QUEUE} is not consumed here"}}
    ]
    sent = site.send("record", "paused")
    site.worker(pool, "-n", "late@test", "-Q", f"{QUEUE},other", concurrency=1)
    assert site.send("add", 1, 1, queue="other").get(timeout=30) == 2, "the other one is consumed"
    assert consumed(site, "late@test") == {"other"}
    assert tell(site, "stats", "late@test")["umbel"]["paused"] == [QUEUE]
    assert (site.runs("paused"), site.waiting()) == (0, 1)
    control.resume(QUEUE)
    assert sent.get(timeout=30) == 1


def test_a_worker_that_was_away_learns_of_a_pause_and_of_its_end(
    site: Site, keeper: str, inside: Inside
) -> None:
    tell(site, "pause", keeper, queue=QUEUE, stamp=time.time())
    assert consumed(site, "inside@test") == {QUEUE}
    inside.break_connection()
    assert consumed(site, "inside@test") == set()
    tell(site, "resume", keeper, queue=QUEUE, stamp=time.time())
    inside.break_connection()
    assert consumed(site, "inside@test") == {QUEUE}


def test_who_missed_it_finds_out_by_heartbeats_and_those_who_were_there_by_a_greeting(
    site: Site, keeper: str, inside: Inside
) -> None:
    tell(site, "pause", keeper, queue=QUEUE, stamp=time.time())
    wait_until(lambda: consumed(site, "inside@test") == set(), 20, "the pause to be known")
    tell(site, "resume", "inside@test", queue=QUEUE, stamp=time.time())
    assert consumed(site, "inside@test") == {QUEUE}
    inside.break_connection()  # its greeting tells it
    assert tell(site, "add_consumer", keeper, queue=QUEUE) == {"ok": f"add consumer {QUEUE}"}


def test_a_pause_for_one_worker_is_its_own_and_a_late_command_is_answered_so(
    site: Site, keeper: str, inside: Inside
) -> None:
    assert tell(site, "pause", "inside@test", queue=QUEUE) == {"ok": f"{QUEUE} paused"}
    assert tell(site, "add_consumer", keeper, queue=QUEUE) == {"ok": f"add consumer {QUEUE}"}
    now = time.time()
    tell(site, "resume", "inside@test", queue=QUEUE, stamp=now)
    late = tell(site, "pause", "inside@test", queue=QUEUE, stamp=now - 5)
    assert "later time" in late["error"]
    assert consumed(site, "inside@test") == {QUEUE}
    wrong = tell(site, "pause", "inside@test", queue=QUEUE, stamp="soon")
    assert "a name and a time" in wrong["error"]
