"""Workers answer commands under load: on every pool, at once, and each to who has asked."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.commanded import NAME, Start, Tasks, tell
from tests.servers import wait_until
from tests.sites import Site
from umbel import Umbel

POOLS = ["prefork", "threads", "gevent", "asyncio", "solo"]
WAITING = 1_000


@pytest.mark.parametrize("pool", POOLS)
def test_a_ping_is_answered_within_a_second_while_all_is_busy_and_a_thousand_wait(
    site: Site, pool: str
) -> None:
    slots = 1 if pool == "solo" else 2
    worker = site.worker(pool, concurrency=slots)
    if pool == "asyncio":
        busy = [site.send("async_spin", 60) for _ in range(slots)]
    else:
        busy = [site.send("wait", f"busy-{n}") for n in range(slots)]
    control = site.app.control
    wait_until(lambda: len(ask(site, "active") or ()) == slots, 20, "busy slots")
    with ThreadPoolExecutor(4) as pool_:
        list(pool_.map(lambda _: site.send("noop"), range(WAITING)))
    took_s = []
    for _ in range(5):
        began = time.monotonic()
        assert control.ping(timeout=1.0, limit=1), f"no answer after {took_s}"
        took_s.append(time.monotonic() - began)
    assert {one["id"] for one in ask(site, "active")} == {result.id for result in busy}
    assert ask(site, "stats")["umbel"]["finished"] == 0
    worker.kill()


def ask(site: Site, command: str, **arguments: Any) -> Any:
    """The answer of the only worker."""
    replies = site.app.control.broadcast(command, arguments, reply=True, timeout=5, limit=1)
    assert replies is not None
    return next(iter(replies[0].values())) if replies else None


def test_a_thousand_questions_of_twenty_clients_are_answered_each_to_who_asked(
    site: Site,
) -> None:
    names = ["one@test", "two@test"]
    site.worker("threads", "-n", names[0])
    site.worker("solo", "-n", names[1], concurrency=1)
    settings = {"broker": site.broker_url, "backend": "disabled://", "set_as_current": False}
    clients = [Umbel(f"client-{n}", **settings) for n in range(20)]

    def question(number: int) -> list[dict[str, Any]]:
        # What each is answered tells who has asked: tasks that nobody else asks for.
        wanted = [f"nobody-{number}"]
        replies = clients[number % 20].control.broadcast(
            "rate_limit",
            {"task_name": wanted[0], "rate_limit": f"wrong {number}"},
            reply=True,
            destination=names,
            limit=3,
            timeout=60,
        )
        assert replies is not None
        return replies

    try:
        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(question, range(1_000)))
        for number, replies in enumerate(answers):
            own = {"error": f"Invalid rate limit string: 'wrong {number}'"}
            assert sorted(replies, key=str) == [{name: own} for name in names]
        assert not any(client.control.mailbox.counts for client in clients)
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_what_can_be_asked_is_answered_while_tasks_run_wait_and_are_held(
    broker_url: str, commanded: Start, tasks: Tasks, pool: str
) -> None:
    inside = commanded(broker_url, pool=pool, concurrency=1)
    running = inside.send("hold")
    assert tasks.holding.wait(20)
    if pool != "solo":  # whose loop takes the next message when the task has ended
        waiting, held = inside.send("note", 1), inside.send("note", countdown=3_600)
        wait_until(lambda: len(inside.worker.deliveries.reserved) == 3, what="three tasks")
    inspect = inside.client.control.inspect(timeout=5, limit=1)
    (active,) = inspect.active()[NAME]
    assert active["id"] == running.id
    assert abs(active["time_start"] - time.time()) < 20
    assert active["worker_pid"] == inside.worker.pid
    assert inspect.stats()[NAME]["total"] == {"hold": 1}
    assert inspect.registered()[NAME] == ["burn", "hold", "note", "spin"]
    assert inspect.clock()[NAME]["clock"] > 0
    assert [queue["name"] for queue in inspect.active_queues()[NAME]] == ["celery"]
    assert inspect.memsample()[NAME].endswith("MB")
    assert inspect.memdump()[NAME].count("MB") >= 2
    assert "umbel" in inspect.report()[NAME]["ok"]
    assert inspect.conf()[NAME]["result_backend"] == "disabled://"
    assert "guest:guest" not in json.dumps([inspect.conf(), inspect.stats(), inspect.report()])
    if pool != "solo":
        assert [one["id"] for one in inspect.reserved()[NAME]] == [waiting.id]
        assert [one["request"]["id"] for one in inspect.scheduled()[NAME]] == [held.id]
        found = inspect.query_task(running.id, waiting.id, held.id, "nowhere")[NAME]
        assert {key: value[0] for key, value in found.items()} == {
            running.id: "active",
            waiting.id: "reserved",
            held.id: "scheduled",
        }
        assert inspect.queue_lengths()[NAME] == {"celery": 0}


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_tasks_that_never_wait_do_not_keep_commands_waiting(
    redis_url: str, commanded: Start, tasks: Tasks, pool: str
) -> None:
    inside = commanded(redis_url, pool=pool)
    assert tell(inside, "ping") == {"ok": "pong"}
    for _ in range(2):
        inside.send("burn")
    assert tasks.holding.wait(20)
    for _ in range(3):
        assert inside.client.control.ping(timeout=1.0, limit=1)
    tasks.hold.set()


@pytest.mark.parametrize("pool", ["gevent", "solo"])
def test_an_idle_loop_is_woken_for_commands_that_it_has_to_carry_out(site: Site, pool: str) -> None:
    site.worker(pool, concurrency=1)
    wait_until(lambda: ask(site, "ping"), what="the worker's answer")

    def median_s(command: str, **arguments: Any) -> float:
        took_s = []
        for _ in range(9):
            began = time.monotonic()
            assert ask(site, command, **arguments)
            took_s.append(time.monotonic() - began)
        return sorted(took_s)[4]

    at_once_s = median_s("ping")
    on_the_loop_s = median_s("rate_limit", task_name="tests.probe_app.add", rate_limit="100/s")
    assert on_the_loop_s < at_once_s + 0.1
