"""Leases of messages on Redis are judged by the clock of the server, not by those of workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from kombu import Queue
from kombu.transport import redis as kombu_redis

from tests.servers import wait_until
from tests.sites import Site
from tests.transports import REDIS_ROWS, REDIS_UMBEL, Desk, Row
from umbel.broker import server_time as clock
from umbel.broker.tasks.task_channel import task_channel

SHIFT_S = 7_200.0
LEASE_S = 2.0
QUICK = {
    "visibility_timeout": LEASE_S,
    "unacked_restore_interval": 0.25,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 1,
}
SETTINGS = {"broker_transport_options": QUICK}
TOKENS = [f"long-{number}" for number in range(6)]


# -- workers ---------------------------------------------------------------------------------


def test_long_tasks_run_once_on_workers_whose_clocks_are_hours_apart(redis_site: Site) -> None:
    site = redis_site
    for shift_s in (0.0, -SHIFT_S, SHIFT_S):
        site.worker("threads", "--prefetch-multiplier", "1", settings=SETTINGS, shift_s=shift_s)
    for token in TOKENS:
        site.send("wait_late", token)
    for token in TOKENS:
        site.wait_until_begun(token)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 2.5 * LEASE_S, 20, "the end of the lease, twice")
    assert {token: site.runs(token) for token in TOKENS} == dict.fromkeys(TOKENS, 1)
    for token in TOKENS:
        site.open_gate(token)
    wait_until(lambda: not site.notes.zcard("unacked_index"), 20, "the acknowledgements")
    assert {token: site.runs(token) for token in TOKENS} == dict.fromkeys(TOKENS, 1)
    assert site.waiting() == 0


@pytest.mark.parametrize("shift_s", [-SHIFT_S, SHIFT_S], ids=["behind", "ahead"])
def test_the_messages_of_a_dead_worker_come_back_after_the_timeout_of_the_server(
    redis_site: Site, shift_s: float
) -> None:
    site = redis_site
    dying = site.worker("threads", settings=SETTINGS, shift_s=shift_s)
    site.send("wait_late", "left")
    site.wait_until_begun("left")
    heir = site.worker("threads", settings=SETTINGS, shift_s=-shift_s)
    dying.kill()
    ((_, noted_s),) = site.notes.zrange("unacked_index", 0, -1, withscores=True)
    assert noted_s == pytest.approx(server_time(site.notes), abs=LEASE_S)
    site.wait_until_begun("left", 10 * LEASE_S)
    assert server_time(site.notes) - noted_s >= LEASE_S
    site.open_gate("left")
    wait_until(lambda: not site.notes.zcard("unacked_index"), 20, "the acknowledgement")
    assert site.runs("left") == 2
    assert heir.stop() == 0


# -- what is written to the server -----------------------------------------------------------


def server_time(client: redis.Redis) -> float:
    seconds, microseconds = client.time()
    return float(seconds + microseconds / 1e6)


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(params=[-SHIFT_S, SHIFT_S], ids=["behind", "ahead"])
def shifted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """The wall clock of this process is hours off, from now on."""
    shift_s: float = request.param
    real = time.time

    def time_of_a_wrong_clock() -> float:
        return real() + shift_s

    monkeypatch.setattr(time, "time", time_of_a_wrong_clock)
    monkeypatch.setattr(kombu_redis, "time", time_of_a_wrong_clock)
    return shift_s


@pytest.fixture
def make(redis_url: str) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def start(url: str = redis_url, row: Row = REDIS_UMBEL, **options: Any) -> Desk:
        made.append(Desk(url, row, **options))
        return made[-1]

    yield start
    for desk in made:
        desk.close()


def assert_noted_now(server: redis.Redis, count: int) -> None:
    """So many messages are noted, with the time of the server."""
    scores = [score for _, score in server.zrange("unacked_index", 0, -1, withscores=True)]
    assert scores == [pytest.approx(server_time(server), abs=10)] * count


def set_back(server: redis.Redis, by_s: float) -> None:
    """As if everything had been noted earlier."""
    for tag, _ in server.zrange("unacked_index", 0, -1, withscores=True):
        server.zadd("unacked_index", {tag: server_time(server) - by_s})


@pytest.mark.usefixtures("shifted")
def test_what_is_taken_is_noted_with_the_time_of_the_server(
    make: Callable[..., Desk], server: redis.Redis
) -> None:
    desk = make()
    for number in range(3):
        desk.send(number)
    desk.consume("jobs", prefetch=10)
    desk.take(3)
    assert_noted_now(server, 3)


@pytest.mark.usefixtures("shifted")
def test_what_is_got_without_a_consumer_is_noted_with_the_time_of_the_server(
    make: Callable[..., Desk], server: redis.Redis
) -> None:
    desk = make()
    desk.send("x")
    assert Queue("jobs")(desk.channel).get(no_ack=False) is not None
    assert_noted_now(server, 1)


@pytest.mark.usefixtures("shifted")
def test_what_is_taken_from_a_server_without_tracking_is_noted_with_its_time(
    make: Callable[..., Desk], restricted: Callable[[str], str], server: redis.Redis
) -> None:
    desk, sender = make(restricted("-client|tracking")), make()
    desk.consume("jobs", prefetch=10)
    desk.drain(0.2)  # so that the server is waited for
    sender.send("x")
    desk.take(1)
    assert_noted_now(server, 1)


@pytest.mark.usefixtures("shifted")
def test_what_is_reclaimed_is_noted_with_the_time_of_the_server(
    make: Callable[..., Desk], server: redis.Redis
) -> None:
    desk = make()
    desk.send("x")
    desk.consume("jobs", prefetch=10)
    fetcher = desk.channel.fetcher
    fetcher.turn(time.monotonic())
    wait_until(lambda: server.hlen("unacked") == 1, what="the message to be taken")
    set_back(server, LEASE_S)
    fetcher.close()  # the answer is lost
    desk.take(1)
    assert_noted_now(server, 1)


@pytest.mark.usefixtures("shifted")
@pytest.mark.parametrize("row", REDIS_ROWS, ids=str)
def test_leases_are_renewed_with_the_time_of_the_server(
    make: Callable[..., Desk], server: redis.Redis, row: Row
) -> None:
    desk = make(row=row)
    desk.send("x")
    desk.consume("jobs", prefetch=10)
    (message,) = desk.take(1)
    set_back(server, LEASE_S)
    task_channel(desk.channel).renew([message.delivery_tag])
    assert_noted_now(server, 1)


@pytest.mark.usefixtures("shifted")
def test_what_is_overdue_is_judged_by_the_server(
    make: Callable[..., Desk], server: redis.Redis
) -> None:
    holder, sender = make(), make()
    holder.consume("jobs", prefetch=10)
    sender.send("x")
    holder.take(1)
    set_back(server, 0)
    options = {**QUICK, "visibility_timeout": 60}
    other = make(**options)
    other.consume("jobs", prefetch=10)
    other.channel.qos.restore_visible(interval=1)
    assert server.hlen("unacked") == 1, "it was noted a moment ago"
    set_back(server, 61)
    other.channel.qos.restore_visible(interval=1)
    other.take(1)
    assert other.bodies() == ["x"]


# -- a server that does not give its time ----------------------------------------------------


def test_a_server_that_is_busy_for_a_moment_does_not_bring_in_the_clock_of_the_worker(
    server: redis.Redis, redis_url: str
) -> None:
    server.config_set("busy-reply-threshold", 10)
    with redis.Redis.from_url(redis_url) as other, ThreadPoolExecutor(1) as pool:
        other.ping()  # a busy server takes no new connections
        script = pool.submit(server.eval, "while true do end", 0)
        try:
            wait_until(lambda: is_busy(other), what="the server to be busy")
            with pytest.raises(redis.ResponseError, match="BUSY"):
                clock.server_time(other)
        finally:
            other.script_kill()
        assert script.exception(10) is not None
    server.config_set("busy-reply-threshold", 5_000)


def is_busy(server: redis.Redis) -> bool:
    try:
        return not server.ping()
    except redis.ResponseError:
        return True


def test_a_server_that_refuses_its_time_is_reported_and_the_workers_clock_used(
    make: Callable[..., Desk],
    restricted: Callable[[str], str],
    server: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "_refusal_logged", False)
    desk, sender = make(restricted("-time")), make()
    desk.consume("jobs", prefetch=10)
    for number in range(3):
        sender.send(number)
    desk.take(3)
    assert desk.channel.fetcher is not None, "messages are still taken by a script"
    assert_noted_now(server, 3)
    for _ in range(3):
        task_channel(desk.channel).renew([message.delivery_tag for message in desk.seen])
        desk.channel.qos.restore_visible(interval=1)
    assert server.hlen("unacked") == 3
    (line,) = [one.message for one in caplog.records if "TIME" in one.message]
    assert "this machine's clock" in line
