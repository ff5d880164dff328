"""Our Redis transport: batches, tags, reclaiming, being woken, and servers that allow less."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from tests.proxy import Proxy
from tests.servers import RedisServer, wait_until
from tests.transports import REDIS_UMBEL, Desk
from umbel.broker.redis import SentinelTransport, fetching
from umbel.broker.redis.fetching import BATCH_MAX
from umbel.broker.redis.ledger import Ledger

Make = Callable[..., Desk]


@pytest.fixture
def make(redis_url: str) -> Iterator[Make]:
    made: list[Desk] = []

    def start(url: str = redis_url, *, ledger: Ledger | None = None, **options: Any) -> Desk:
        made.append(Desk(url, REDIS_UMBEL, **options))
        if ledger is not None:
            made[-1].channel.use(ledger)
        return made[-1]

    yield start
    for desk in made:
        desk.close()


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def calls(server: redis.Redis, command: str) -> int:
    return int(server.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))


def test_messages_are_noted_as_kombu_notes_them_under_tags_of_ours(
    make: Make, server: redis.Redis
) -> None:
    desk = make()
    for number in range(3):
        desk.send({"n": number})
    raw = server.lindex("jobs", -1)
    desk.consume("jobs", prefetch=10)
    desk.take(3)
    first, tag = desk.seen[0], desk.seen[0].delivery_tag
    assert tag == desk.channel.ledger.tag(1)
    assert first.properties["delivery_tag"] != tag
    note = server.hget("unacked", tag)
    assert note == b"[" + raw + b',"","jobs"]'
    assert server.zscore("unacked_index", tag) == pytest.approx(time.time(), abs=5)


@pytest.mark.parametrize(("window", "requests"), [(BATCH_MAX, 1), (3 * BATCH_MAX, 3)])
def test_a_window_is_filled_by_as_few_requests_as_the_server_can_bear(
    make: Make, server: redis.Redis, window: int, requests: int
) -> None:
    desk = make()
    server.lpush("jobs", *[_envelope(desk, n) for n in range(500)])
    desk.consume("jobs", prefetch=window)
    before = calls(server, "evalsha") + calls(server, "eval")
    desk.take(window)
    assert len(desk.seen) == window
    asked = calls(server, "evalsha") + calls(server, "eval") - before
    assert asked <= requests + 1, "and another one if the server did not know the script"
    assert desk.bodies() == list(range(window))


def _envelope(desk: Desk, body: Any) -> bytes:
    """As it is sent."""
    desk.send(body, queue="scratch")
    client = desk.channel.plain
    return bytes(client.rpop("scratch"))


def test_acknowledgements_ride_along_with_the_next_request(make: Make, server: redis.Redis) -> None:
    desk = make()
    server.lpush("jobs", *[_envelope(desk, n) for n in range(400)])
    desk.on_message = desk.ack_all
    desk.consume("jobs", prefetch=40)
    before = calls(server, "evalsha")
    said = calls(server, "hdel")
    desk.take(400)
    desk.channel.close()
    assert server.hlen("unacked") == server.zcard("unacked_index") == 0
    assert calls(server, "evalsha") - before < 60
    assert calls(server, "hdel") - said < 60


def test_the_next_request_leaves_while_messages_are_delivered(make: Make) -> None:
    desk = make()
    for number in range(20):
        desk.send(number)
    asked: list[int] = []

    def on_message(message: Any) -> None:
        message.ack()
        asked.append(len(desk.channel.ledger.asked))

    desk.on_message = on_message
    desk.consume("jobs", prefetch=8)
    desk.take(8)
    assert asked[:4] == [0, 0, 0, 0], "half of the window is worth a request"
    assert asked[4] == 1


def test_a_waiting_consumer_is_woken_and_hardly_asks(make: Make, server: redis.Redis) -> None:
    desk, sender = make(), make()
    desk.consume("jobs", prefetch=10)
    desk.drain(0.1)
    before = calls(server, "evalsha"), calls(server, "brpop")
    for number in range(5):
        timer = threading.Timer(0.3, sender.send, args=(number,))
        timer.start()
        desk.take(number + 1)
        timer.join()
        desk.seen[-1].ack()
    assert calls(server, "evalsha") - before[0] <= 15
    assert calls(server, "brpop") == before[1]


def test_a_script_that_the_server_forgot_is_sent_again(make: Make, server: redis.Redis) -> None:
    desk = make()
    desk.on_message = desk.ack_all
    desk.consume("jobs", prefetch=4)
    for number in range(3):
        server.script_flush()
        desk.send(number)
        desk.take(number + 1)
    assert desk.bodies() == [0, 1, 2]


def test_a_large_message_is_taken_and_given_back_like_any_other(
    make: Make, server: redis.Redis
) -> None:
    desk, other = make(), make()
    desk.send("x" * 5_000_000)
    desk.consume("jobs", prefetch=4)
    desk.take(1)
    desk.channel.close()
    other.consume("jobs")
    assert len(other.take(1)[0].payload) == 5_000_000
    assert server.hlen("unacked") == 1


def test_rubbish_is_dropped_and_said_and_what_follows_is_taken(
    make: Make, server: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    desk = make()
    info = {"exchange": "", "routing_key": "jobs"}
    half = {"properties": {"delivery_info": info, "body_encoding": "base64"}, "body": "abc"}
    odd = ["rubbish", b"\xff\x00", "{}", json.dumps(half), '{"properties": 7}', "{nonsense}", "[]"]
    server.lpush("jobs", *odd)
    desk.send("good")
    desk.consume("jobs", prefetch=20)
    with caplog.at_level(logging.ERROR, logger="umbel.broker"):
        desk.take(1)
    assert desk.bodies() == ["good"]
    assert sum("could not be read" in record.message for record in caplog.records) == len(odd)
    desk.channel.flush_acks()
    assert server.hkeys("unacked") == [desk.seen[0].delivery_tag.encode()]


def test_headers_that_only_python_writes_are_read(make: Make, server: redis.Redis) -> None:
    desk = make()
    envelope = json.loads(_envelope(desk, 1))
    envelope["headers"] = {"nan": float("nan"), "lone": "\ud800"}
    server.lpush("jobs", json.dumps(envelope))
    desk.consume("jobs")
    assert desk.take(1)[0].headers["lone"] == "\ud800"


def test_what_a_callback_raises_costs_no_other_message(make: Make, server: redis.Redis) -> None:
    desk = make()
    for number in range(6):
        desk.send(number)

    def on_message(message: Any) -> None:
        message.ack()
        if message.payload == 2:
            raise ValueError("a bad one")

    desk.on_message = on_message
    desk.consume("jobs", prefetch=6)
    with pytest.raises(ValueError, match="a bad one"):
        desk.take(6)
    desk.take(6)
    assert desk.bodies() == list(range(6))
    desk.channel.close()
    assert server.hlen("unacked") == server.llen("jobs") == 0


def test_a_list_of_another_type_keeps_nobody_from_the_others(
    make: Make, server: redis.Redis
) -> None:
    desk = make()
    desk.consume("odd", "jobs", prefetch=10)
    server.set("odd", "this is no list")
    for number in range(3):
        desk.send(number)
    desk.take(3)
    assert desk.bodies() == [0, 1, 2]


def test_a_prefix_of_all_keys_is_kept(make: Make, server: redis.Redis) -> None:
    desk = make(global_keyprefix="mine:")
    for number in range(3):
        desk.send(number, priority=3)
    desk.consume("jobs", prefetch=3)
    desk.take(3)
    assert server.hlen("mine:unacked") == 3
    desk.seen[0].ack()
    desk.seen[1].reject(requeue=True)
    assert server.hlen("mine:unacked") == 1
    assert server.llen("mine:jobs\x06\x163") == 1
    desk.channel.close()
    assert server.llen("mine:jobs\x06\x163") == 2
    assert {key.partition(b":")[0] for key in server.keys("*")} == {b"mine"}


@pytest.mark.parametrize("strategy", ["priority", "sorted"])
def test_queues_may_have_an_order(strategy: str, make: Make) -> None:
    desk = make(queue_order_strategy=strategy)
    for number in range(10):
        desk.send(f"b{number}", queue="b")
        desk.send(f"a{number}", queue="a")
    desk.on_message = desk.ack_all
    desk.consume("b", "a", prefetch=4)
    desk.take(20)
    first = "a" if strategy == "sorted" else "b"
    assert {body[0] for body in desk.bodies()[:10]} == {first}


# -- connections that break ------------------------------------------------------------------


def through(proxy: Proxy, url: str) -> str:
    return f"redis://127.0.0.1:{proxy.port}{urlsplit(url).path}"


def ask(desk: Desk) -> None:
    """Send a request, and do not look at the answer."""
    desk.channel.fetcher.turn(time.monotonic() + 2 * fetching.LOOK_AGAIN_S)
    assert desk.channel.ledger.asked


def lose(desk: Desk) -> None:
    desk.channel.disown()
    desk.channel._disconnect_pools()


def test_messages_whose_answer_was_lost_are_delivered_on_the_next_connection(
    make: Make, redis_server: RedisServer, redis_url: str, server: redis.Redis
) -> None:
    ledger = Ledger()
    with Proxy(redis_server.port) as proxy:
        cut = make(through(proxy, redis_url), ledger=ledger)
        cut.consume("jobs", prefetch=10)
        cut.drain(0.1)
        for number in range(30):
            cut.send(number, priority=3 * (number % 2))
        assert proxy.swallow(to_server=False)
        ask(cut)
        wait_until(lambda: server.hlen("unacked") == 10, what="a request that is carried out")
        assert cut.seen == []
        lose(cut)
        desk = make(ledger=ledger)
        desk.consume("jobs", prefetch=10)
        desk.take(10)
        assert desk.bodies() == list(range(0, 20, 2)), "those, not others"
        assert not any(one.delivery_info.get("redelivered") for one in desk.seen)
        desk.on_message = desk.ack_all
        for message in desk.seen:
            message.ack()
        desk.take(30)
        assert sorted(desk.bodies()) == list(range(30))


def test_what_was_cut_off_is_asked_for_until_there_is_an_answer(
    make: Make, redis_server: RedisServer, redis_url: str, server: redis.Redis
) -> None:
    ledger = Ledger()
    with Proxy(redis_server.port) as proxy:
        cut = make(through(proxy, redis_url), ledger=ledger)
        cut.consume("jobs", prefetch=10)
        cut.drain(0.1)
        for number in range(3):
            cut.send(number)
        proxy.swallow(to_server=False)
        ask(cut)
        wait_until(lambda: server.hlen("unacked") == 3, what="a request that is carried out")
        lose(cut)
        again = make(redis_url, ledger=ledger)
        again.consume("jobs", prefetch=10)
        redis_server.pause()
        try:
            again.channel.socket_timeout = 0.2
            with pytest.raises(again.connection.connection_errors):
                again.channel.fetcher.turn(time.monotonic())
        finally:
            redis_server.resume()
        again.take(3)
        assert again.bodies() == [0, 1, 2]


def test_a_request_that_got_lost_gives_nothing_a_second_time(
    make: Make, redis_server: RedisServer, redis_url: str, server: redis.Redis
) -> None:
    ledger = Ledger()
    with Proxy(redis_server.port) as proxy:
        cut = make(through(proxy, redis_url), ledger=ledger)
        cut.consume("jobs", prefetch=10)
        for number in range(5):
            cut.send(number)
        cut.take(5)
        assert proxy.swallow(to_server=True)
        ask(cut)
        lose(cut)
        desk = make(ledger=ledger)
        desk.consume("jobs", prefetch=10)
        desk.send(5)
        desk.take(1)
        desk.drain(0.2)
        assert desk.bodies() == [5]
        assert server.hlen("unacked") == 6


def test_a_request_that_is_late_is_not_carried_out_behind_our_back(
    make: Make, redis_server: RedisServer, server: redis.Redis
) -> None:
    """The server stands still, gets the request, and goes on when there is a new connection."""
    ledger = Ledger()
    cut = make(ledger=ledger)
    cut.consume("jobs", prefetch=10)
    cut.drain(0.1)
    for number in range(5):
        cut.send(number)
    redis_server.pause()
    try:
        ask(cut)
        lose(cut)
    finally:
        redis_server.resume()
    desk = make(ledger=ledger)
    desk.consume("jobs", prefetch=10)
    desk.take(5)
    assert sorted(desk.bodies()) == list(range(5))
    assert server.hlen("unacked") == 5


def test_acknowledgements_that_were_on_their_way_are_said_again(
    make: Make, redis_server: RedisServer, redis_url: str, server: redis.Redis
) -> None:
    ledger = Ledger()
    with Proxy(redis_server.port) as proxy:
        cut = make(through(proxy, redis_url), ledger=ledger)
        cut.channel.gather_acks()
        cut.consume("jobs", prefetch=10)
        for number in range(10):
            cut.send(number)
        cut.take(10)
        assert proxy.swallow(to_server=True)
        for message in cut.seen[:7]:
            message.ack()
        ask(cut)
        cut.seen[7].ack()
        assert server.hlen("unacked") == 10
        lose(cut)
        desk = make(ledger=ledger)
        desk.consume("jobs", prefetch=10)
        desk.drain(0.2)
        wait_until(lambda: server.hlen("unacked") == server.zcard("unacked_index") == 2)


def test_a_server_that_does_not_answer_is_found_out(
    make: Make, redis_server: RedisServer, redis_url: str
) -> None:
    with Proxy(redis_server.port) as proxy:
        cut = make(through(proxy, redis_url), socket_timeout=0.5)
        cut.consume("jobs", prefetch=10)
        cut.drain(0.1)
        proxy.swallow(to_server=False)
        with pytest.raises(cut.connection.connection_errors):
            cut.take(1)
        lose(cut)


def test_an_ended_connection_is_told_to_the_loop(make: Make, server: redis.Redis) -> None:
    desk = make()
    desk.consume("jobs", prefetch=10)
    desk.drain(0.1)
    server.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(desk.connection.connection_errors):
        desk.take(1)
    desk.send(1)
    desk.take(1)
    assert desk.bodies() == [1], "who goes on all the same gets another connection"


# -- sentinels -------------------------------------------------------------------------------


class SentinelServer(RedisServer):
    """A sentinel that watches one Redis server."""

    def __init__(self, directory: Path, watched_port: int) -> None:
        super().__init__(directory)
        self._file = directory / "sentinel.conf"
        self._file.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {directory}\n"
            f"sentinel monitor main 127.0.0.1 {watched_port} 1\n"
        )

    def command(self) -> list[str]:
        return [self.program, str(self._file), "--sentinel"]


def test_sentinels_are_asked_where_the_server_is(
    tmp_path: Path, redis_server: RedisServer, redis_url: str, make: Make, server: redis.Redis
) -> None:
    sentinel = SentinelServer(tmp_path, redis_server.port)
    sentinel.start()
    try:
        path = urlsplit(redis_url).path
        desk = make(f"sentinel://127.0.0.1:{sentinel.port}{path}", master_name="main")
        assert isinstance(desk.connection.transport, SentinelTransport)
        desk.on_message = desk.ack_all
        desk.consume("jobs", prefetch=10)
        desk.drain(0.1)
        for number in range(50):
            desk.send(number)
        desk.take(50)
        assert desk.bodies() == list(range(50))
        assert desk.channel.fetcher.is_told, "the server tells of changes here too"
        desk.close()
        assert server.hlen("unacked") == server.llen("jobs") == 0
    finally:
        sentinel.close()


# -- servers that allow less -----------------------------------------------------------------


def test_where_the_server_tells_nothing_it_is_waited_with_brpop(
    make: Make, restricted: Callable[[str], str], server: redis.Redis
) -> None:
    desk, sender = make(restricted("-client|tracking")), make()
    desk.on_message = desk.ack_all
    desk.consume("jobs", "others", prefetch=10)
    before, waited = calls(server, "evalsha") + calls(server, "eval"), calls(server, "brpop")
    desk.drain(0.2)
    for number in range(10):
        sender.send(number)
        desk.take(number + 1)
    sender.send("x", queue="others", priority=9)
    desk.take(11)
    assert desk.bodies() == [*range(10), "x"]
    assert calls(server, "brpop") > waited
    assert calls(server, "evalsha") + calls(server, "eval") > before
    desk.channel.close()
    assert server.hlen("unacked") == server.zcard("unacked_index") == 0


def test_where_scripts_are_refused_messages_stay_where_they_are(
    make: Make, restricted: Callable[[str], str], server: redis.Redis
) -> None:
    desk, sender = make(restricted("-eval -evalsha")), make()
    desk.consume("jobs", prefetch=10)
    sender.send(1)
    with pytest.raises(redis.exceptions.NoPermissionError):
        desk.take(1)
    assert server.llen("jobs") == 1


def test_a_server_that_writes_nothing_for_now_is_waited_for(
    make: Make, server: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    desk = make()
    desk.consume("jobs", prefetch=10)
    desk.drain(0.1)
    desk.send(1)
    server.config_set("min-replicas-to-write", "1")
    try:
        with caplog.at_level(logging.ERROR, logger="umbel.broker"):
            wait_until(lambda: desk.drain(0.1) or caplog.records, what="a word about it")
        assert server.llen("jobs") == 1
    finally:
        server.config_set("min-replicas-to-write", "0")
    desk.take(1)
    assert desk.channel.fetcher is not None


def test_a_full_server_can_be_emptied(make: Make, server: redis.Redis) -> None:
    desk = make()
    desk.on_message = desk.ack_all
    desk.consume("jobs", prefetch=10)
    for number in range(20):
        desk.send(number)
    server.config_set("maxmemory", "1")
    try:
        desk.take(20)
    finally:
        server.config_set("maxmemory", "0")
    assert desk.bodies() == list(range(20))
