"""Taking messages from Redis lists: popped and noted as unacknowledged in one step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Queue

from umbel.broker import taking
from umbel.broker.messages import leave_compressed, put_back
from umbel.broker.taking import Identity, Taker, taker_for

Bench = Callable[..., "Taking"]


class Taking:
    """A consumer of queue `jobs` whose messages are taken by a taker."""

    def __init__(self, url: str, queues: tuple[str, ...] = ("jobs",), **options: Any) -> None:
        self.connection = Connection(url, transport_options=options)
        self.client = redis.Redis.from_url(url)
        self.channel = self.connection.channel()
        leave_compressed(self.channel)
        taker = taker_for(self.channel, Identity())
        assert isinstance(taker, Taker)
        self.taker = taker
        self.seen: list[Any] = []
        self.consumer = Consumer(
            self.channel, [Queue(name) for name in queues], on_message=self.seen.append
        )
        self.consumer.consume()

    def send(self, body: Any, queue: str = "jobs", **options: Any) -> None:
        with self.connection.Producer() as producer:
            producer.publish(body, exchange="", routing_key=queue, **options)

    def bodies(self) -> list[Any]:
        return [message.payload for message in self.seen]

    def close(self) -> None:
        self.client.close()
        self.taker.close()
        self.connection.close()


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    made: list[Taking] = []

    def make(*args: Any, **options: Any) -> Taking:
        made.append(Taking(redis_url, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_messages_come_in_order_and_are_noted_as_kombu_notes_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, other = bench(), bench(("others",))
    for number in range(3):
        taken.send({"n": number})
    taken.send("x", queue="others")
    with monkeypatch.context() as patch:  # by kombu's own BRPOP
        patch.delattr(other.channel, "_brpop_start")
        other.connection.drain_events(timeout=5)
    assert taken.taker.fill() == 3
    assert taken.bodies() == [{"n": 0}, {"n": 1}, {"n": 2}]
    notes = {tag.decode(): json.loads(n) for tag, n in taken.client.hgetall("unacked").items()}
    first, kombus = taken.seen[0], other.seen[0]
    ours, theirs = notes[first.delivery_tag], notes[kombus.delivery_tag]
    assert ours == [first._raw, "", "jobs"]
    assert [type(part) for part in ours] == [type(part) for part in theirs]
    assert ours[0].keys() == theirs[0].keys()
    assert taken.client.zcard("unacked_index") == 4
    for message in (*taken.seen, *other.seen):
        message.ack()
    assert taken.client.hlen("unacked") == 0


def test_a_message_is_noted_even_if_its_taker_dies_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = bench()
    taken.send({"n": 1})

    def killed(message: Any, queue: str) -> None:
        raise SystemExit  # stands for a death right after the server's answer

    monkeypatch.setattr(taken.channel.connection, "_deliver", killed)
    with pytest.raises(SystemExit):
        taken.taker.fill()
    assert taken.client.llen("jobs") == 0
    assert taken.client.hlen("unacked") == 1


def test_no_more_are_taken_than_the_window_allows(bench: Bench) -> None:
    taken = bench()
    taken.consumer.qos(prefetch_count=2)
    for number in range(5):
        taken.send(number)
    assert taken.taker.fill() == 2
    assert taken.taker.fill() == 0
    taken.seen[0].ack()
    assert taken.taker.fill() == 1
    assert taken.client.llen("jobs") == 2


def test_queues_take_turns_and_priorities_go_first(bench: Bench) -> None:
    taken = bench(("a", "b"))
    for number in range(3):
        taken.send(f"a{number}", queue="a")
        taken.send(f"b{number}", queue="b")
    taken.send("urgent", queue="b", priority=0)
    taken.send("later", queue="a", priority=9)
    taken.consumer.qos(prefetch_count=2)
    while taken.taker.fill():
        for message in taken.seen:
            if not message.acknowledged:
                message.ack()
    bodies = taken.bodies()
    assert bodies[-1] == "later"
    assert {body[0] for body in bodies[:4]} == {"a", "b"}
    assert sorted(bodies) == sorted(["a0", "a1", "a2", "b0", "b1", "b2", "urgent", "later"])


def test_a_message_that_is_put_back_is_taken_next(bench: Bench) -> None:
    taken = bench()
    for number in range(3):
        taken.send(number)
    taken.taker.fill()
    for message in reversed(taken.seen[1:]):
        put_back(message)
    taken.seen.clear()
    taken.send(3)
    taken.taker.fill()
    assert taken.bodies() == [1, 2, 3]


def test_rubbish_is_dropped_and_what_follows_is_taken(bench: Bench) -> None:
    taken = bench()
    taken.client.lpush("jobs", "rubbish", b"\xff\x00", "{}")
    half = {"properties": {"delivery_tag": "t", "delivery_info": {"exchange": ""}}, "body": "abc"}
    half["properties"]["delivery_info"]["routing_key"] = "jobs"  # type: ignore[index]
    half["properties"]["body_encoding"] = "base64"  # type: ignore[index]
    taken.client.lpush("jobs", json.dumps(half))
    taken.send("good")
    with pytest.raises(ValueError):  # noqa: PT011 - of whatever kind: the loop tells it
        taken.taker.fill()
    assert taken.taker.fill() == 0
    assert taken.bodies() == ["good"]
    assert taken.client.hlen("unacked") == 1, "only the good one is to be settled"


def test_a_message_too_large_for_the_script_is_noted_by_kombu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "NOTED_BYTES_MAX", 1000)
    taken = bench()
    taken.send("x" * 2000)
    assert taken.taker.fill() == 1
    assert taken.client.hlen("unacked") == 1
    taken.seen[0].ack()
    assert taken.client.hlen("unacked") == 0


def test_a_server_that_refuses_scripts_is_left_to_kombu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "TAKE", "this is no script")
    taken = bench()
    taken.send("x")
    assert taken.taker.fill() == 0
    taken.connection.drain_events(timeout=5)
    assert taken.bodies() == ["x"]


def test_a_key_prefix_is_kept(bench: Bench) -> None:
    taken = bench(global_keyprefix="mine:")
    taken.send("x")
    assert taken.client.llen("mine:jobs") == 1
    assert taken.taker.fill() == 1
    assert taken.client.hlen("mine:unacked") == 1
    taken.seen[0].ack()
    assert taken.client.hlen("mine:unacked") == 0


def test_other_transports_have_no_taker() -> None:
    with Connection("memory://") as connection:
        assert taker_for(connection.channel(), Identity()) is None
