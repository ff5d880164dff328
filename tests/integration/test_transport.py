"""What every transport has to do: order, fairness, priorities, restoring, fanout, sizes.

The same tests run on ours and on the library's own. Those that end in `_of_redis` are about the
layout there; what only our own promises is in test_transport_redis.py.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from kombu import Exchange, Queue

from tests.inside import Inside
from tests.servers import wait_until
from tests.transports import REDIS_KOMBU, REDIS_ROWS, REDIS_UMBEL, ROWS, WAIT_S, Desk, Row
from umbel import Umbel
from umbel.broker.tasks.lengths import lengths_of
from umbel.broker.tasks.task_channel import put_back, task_channel

Make = Callable[..., Desk]


@pytest.fixture(params=ROWS, ids=str)
def row(request: pytest.FixtureRequest) -> Row:
    found: Row = request.param
    return found


@pytest.fixture(params=REDIS_ROWS, ids=str)
def redis_row(request: pytest.FixtureRequest) -> Row:
    found: Row = request.param
    return found


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """`make(row)` gives a desk; those of one test share its broker."""
    made: list[Desk] = []

    def start(row: Row, **options: Any) -> Desk:
        made.append(Desk(request.getfixturevalue(row.broker), row, **options))
        return made[-1]

    yield start
    for desk in made:
        desk.close()


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def test_messages_of_one_priority_come_in_the_order_in_which_they_were_sent(
    row: Row, make: Make
) -> None:
    desk = make(row)
    desk.declare("jobs")
    for number in range(200):
        desk.send(number)
    desk.on_message = desk.ack_all
    desk.consume("jobs", prefetch=7)
    desk.take(200)
    assert desk.bodies() == list(range(200))


def test_no_more_come_than_the_window_allows(row: Row, make: Make) -> None:
    desk = make(row)
    desk.declare("jobs")
    for number in range(10):
        desk.send(number)
    desk.consume("jobs", prefetch=4)
    desk.take(4)
    desk.drain(0.2)
    assert len(desk.seen) == 4
    desk.seen[0].ack()
    desk.take(5)
    desk.drain(0.2)
    assert desk.bodies() == [0, 1, 2, 3, 4]


def test_a_hundred_queues_get_equal_shares(row: Row, make: Make) -> None:
    desk = make(row)
    names = [f"queue-{number}" for number in range(100)]
    desk.declare(*names)
    for name in names:
        for _ in range(4):
            desk.send(name, queue=name)
    desk.on_message = desk.ack_all
    desk.consume(*names, prefetch=64)
    desk.take(200, timeout_s=60)
    counts = Counter(desk.bodies()[:200])
    assert set(counts) == set(names)
    assert 1 <= min(counts.values()) <= max(counts.values()) <= 3


def test_a_flooded_queue_does_not_keep_another_one_waiting(row: Row, make: Make) -> None:
    desk = make(row)
    desk.declare("flooded", "other")
    for number in range(300):
        desk.send(number, queue="flooded")
    for _ in range(10):
        desk.send("other", queue="other")
    desk.on_message = desk.ack_all
    desk.consume("flooded", "other", prefetch=8)
    desk.take(40)
    assert desk.bodies()[:40].count("other") == 10


def test_what_is_urgent_comes_first_from_whichever_queue(redis_row: Row, make: Make) -> None:
    desk = make(redis_row)
    desk.declare("a", "b")
    for priority in (9, 6, 5, 3, 0):
        for queue in ("a", "b"):
            desk.send([priority, queue], queue=queue, priority=priority)
    desk.on_message = desk.ack_all
    desk.consume("a", "b", prefetch=3)
    desk.take(10)
    # 5 is rounded down to 3, and was sent before it.
    assert [priority for priority, _ in desk.bodies()] == [0, 0, 5, 5, 3, 3, 6, 6, 9, 9] or [
        priority for priority, _ in desk.bodies()
    ] == [0, 0, 5, 3, 5, 3, 6, 6, 9, 9]


def test_what_is_rejected_comes_again_marked_or_not_at_all(row: Row, make: Make) -> None:
    desk = make(row)
    desk.declare("jobs")
    for number in range(3):
        desk.send(number)
    desk.consume("jobs")
    desk.take(3)
    desk.seen[0].reject(requeue=True)
    desk.seen[1].reject(requeue=False)
    desk.take(4)
    assert desk.bodies() == [0, 1, 2, 0]
    assert desk.seen[3].delivery_info["redelivered"]
    assert not desk.seen[2].delivery_info.get("redelivered")


def test_a_channel_that_is_closed_gives_everything_back_in_order(row: Row, make: Make) -> None:
    desk, heir = make(row), make(row)
    desk.declare("jobs")
    for number in range(30):
        desk.send(number)
    desk.consume("jobs", prefetch=20)
    desk.take(20)
    for message in desk.seen[:5]:
        message.ack()
    desk.channel.close()
    wait_until(lambda: heir.size() == 25, what="what was given back")
    heir.on_message = heir.ack_all
    heir.consume("jobs", prefetch=10)
    heir.take(25)
    if row is REDIS_KOMBU:  # which gives back the oldest first
        assert sorted(heir.bodies()) == list(range(5, 30))
    else:
        assert heir.bodies() == list(range(5, 30))


def test_purging_says_how_many_there_were(row: Row, make: Make) -> None:
    desk = make(row)
    desk.declare("jobs", "others")
    for number in range(12):
        desk.send(number, priority=number % 10)
    desk.send("x", queue="others")
    wait_until(lambda: desk.size() == 12)
    assert desk.channel.queue_purge("jobs") == 12
    assert (desk.size(), desk.size("others")) == (0, 1)
    assert desk.channel.queue_purge("jobs") == 0


def test_sizes_count_every_priority_and_nothing_that_is_taken(row: Row, make: Make) -> None:
    desk = make(row)
    desk.declare("jobs", "empty")
    for number in range(10):
        desk.send(number, priority=number)
    wait_until(lambda: desk.size() == 10)
    assert lengths_of(desk.connection, [Queue("jobs"), Queue("empty")]) == {"jobs": 10, "empty": 0}
    desk.consume("jobs", prefetch=4)
    desk.take(4)
    assert lengths_of(desk.connection, [Queue("jobs")]) == {"jobs": 6}


def test_fanout_reaches_everybody_who_listens(row: Row, make: Make) -> None:
    exchange = Exchange("news", type="fanout")
    desks = [make(row) for _ in range(3)]
    for number, desk in enumerate(desks[1:]):
        queue = Queue(f"ear-{number}", exchange, auto_delete=True)
        desk.consume(queue, no_ack=True)
        desk.drain(0.2)
    sender = desks[0]
    for number in range(5):
        sender.producer.publish(number, exchange=exchange, declare=[exchange])
    for desk in desks[1:]:
        desk.take(5)
        assert desk.bodies() == list(range(5))


def test_a_topic_reaches_the_queues_that_are_bound_to_it(row: Row, make: Make) -> None:
    exchange, desk = Exchange("topics", type="topic"), make(row)
    desk.on_message = desk.ack_all
    desk.consume(
        Queue("all", exchange, routing_key="#"), Queue("some", exchange, routing_key="a.*")
    )
    desk.producer.publish(1, exchange=exchange, routing_key="a.b")
    desk.producer.publish(2, exchange=exchange, routing_key="b.b")
    desk.take(3)
    assert sorted(desk.bodies()) == [1, 1, 2]


def test_a_consumer_that_needs_no_acknowledgement_leaves_nothing_behind(
    row: Row, make: Make
) -> None:
    desk = make(row)
    desk.declare("jobs")
    for number in range(20):
        desk.send(number)
    desk.consume("jobs", no_ack=True)
    desk.take(20)
    desk.close()
    again = make(row)
    assert again.size() == 0


def test_a_consumer_that_is_cancelled_gets_nothing_and_loses_nothing(row: Row, make: Make) -> None:
    desk = make(row)
    desk.declare("jobs", "others")
    consumer = desk.consume("jobs", "others", prefetch=10)
    desk.drain(0.2)
    consumer.cancel_by_queue("jobs")
    for number in range(5):
        desk.send(number)
        desk.send(-number, queue="others")
    desk.take(5)
    desk.drain(0.2)
    assert {message.delivery_info["routing_key"] for message in desk.seen} == {"others"}
    assert desk.size() == 5


def test_a_cancelled_consumer_gets_none_of_those_that_came_with_the_last_one(make: Make) -> None:
    desk = make(REDIS_UMBEL)
    for number in range(10):
        desk.send(number)
    consumer = desk.consume("jobs", prefetch=10)
    desk.on_message = lambda _: consumer.cancel()
    desk.take(1)
    desk.drain(0.1)
    assert desk.bodies() == [0]
    desk.seen[0].ack()
    desk.on_message = desk.ack_all
    desk.consume("jobs")
    desk.take(10)
    assert desk.bodies() == list(range(10))


# -- the layout of Redis: either side takes up what the other one left ------------------------

PAIRS = [(REDIS_UMBEL, REDIS_KOMBU), (REDIS_KOMBU, REDIS_UMBEL), (REDIS_UMBEL, REDIS_UMBEL)]
SHORT = {"visibility_timeout": 0.3, "unacked_restore_throttle": 1, "unacked_mutex_expire": 1}


def crash(desk: Desk) -> None:
    """As if its process had been killed: it says nothing any more."""
    task_channel(desk.channel).disown()
    desk.channel._disconnect_pools()


@pytest.mark.parametrize(("left", "heir"), PAIRS, ids=str)
def test_what_a_dead_consumer_had_comes_again_in_order_of_redis(
    left: Row, heir: Row, make: Make, server: redis.Redis
) -> None:
    dying, other = make(left, **SHORT), make(heir, **SHORT)
    for number in range(12):
        dying.send(number, priority=3 * (number % 2))
    dying.consume("jobs", prefetch=12)
    dying.take(12)
    dying.seen[0].ack()
    crash(dying)
    assert server.hlen("unacked") == 11
    other.on_message = other.ack_all
    other.consume("jobs", prefetch=4)
    other.take(11)
    assert sorted(other.bodies()) == list(range(1, 12))
    if heir is REDIS_UMBEL:  # kombu restores them one by one, and consumes in between
        assert other.bodies() == [2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]
    assert all(message.delivery_info["redelivered"] for message in other.seen)
    assert all(message.headers["redelivered"] for message in other.seen)
    other.channel.close()
    assert server.hlen("unacked") == server.zcard("unacked_index") == 0


@pytest.mark.parametrize(("left", "heir"), PAIRS, ids=str)
def test_nothing_is_restored_twice_by_whoever_tries_of_redis(
    left: Row, heir: Row, make: Make, server: redis.Redis
) -> None:
    dying = make(left)
    for number in range(50):
        dying.send(number)
    dying.consume("jobs", prefetch=50)
    tags = [message.delivery_tag for message in dying.take(50)]
    crash(dying)
    others = [make(heir), make(left), make(heir), make(left)]
    failures: list[BaseException] = []

    def restore(desk: Desk) -> None:
        try:
            for tag in tags:
                desk.channel.qos.restore_by_tag(tag)
        except BaseException as exc:  # told to the test below
            failures.append(exc)

    threads = [threading.Thread(target=restore, args=(desk,)) for desk in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failures
    assert server.llen("jobs") == 50
    assert server.hlen("unacked") == server.zcard("unacked_index") == 0


def test_what_is_renewed_is_not_restored_of_redis(
    redis_row: Row, make: Make, server: redis.Redis
) -> None:
    desk, other = make(redis_row), make(redis_row, visibility_timeout=60)
    desk.send(1)
    desk.consume("jobs")
    desk.take(1)
    other.channel.qos.restore_visible(interval=1)
    assert server.llen("jobs") == 0
    server.zadd("unacked_index", {desk.seen[0].delivery_tag: time.time() - 61}, xx=True)
    other.channel.qos.restore_visible(interval=1)
    assert server.llen("jobs") == 1


def test_a_message_that_is_put_back_is_the_next_one_of_redis(redis_row: Row, make: Make) -> None:
    desk = make(redis_row)
    for number in range(5):
        desk.send(number)
    desk.consume("jobs", prefetch=3)
    taken = list(desk.take(3))
    for message in reversed(taken[1:]):
        put_back(message)
    taken[0].ack()
    desk.seen.clear()
    desk.on_message = desk.ack_all
    desk.take(4)
    assert desk.bodies() == [1, 2, 3, 4]


@pytest.mark.parametrize("sender", REDIS_ROWS, ids=str)
def test_a_message_is_the_same_whoever_sent_it_of_redis(
    sender: Row, redis_row: Row, make: Make
) -> None:
    properties = {"correlation_id": "c", "reply_to": "r", "priority": 3}
    headers = {"task": "t", "id": "1", "nested": {"list": [1, None, "ä/\\"]}}
    make(sender).send({"n": 1}, headers=headers, **properties)
    desk = make(redis_row)
    desk.consume("jobs", accept=["json"])
    message = desk.take(1)[0]
    assert (message.payload, message.headers) == ({"n": 1}, headers)
    assert properties.items() <= message.properties.items()
    assert message.delivery_info == {"exchange": "", "routing_key": "jobs"}
    assert (message.content_type, message.content_encoding) == ("application/json", "utf-8")
    assert not message.acknowledged
    message.ack()
    assert message.acknowledged
    with pytest.raises(message.MessageStateError):
        message.ack()


def test_a_worker_runs_on_either_of_redis(
    redis_row: Row, redis_url: str, server: redis.Redis
) -> None:
    ran: list[int] = []

    def tasks(app: Umbel) -> None:
        app.task(name="note", acks_late=True)(ran.append)

    chosen = redis_row.options.get("redis_transport", "umbel")
    settings = {"broker_url": redis_url, "broker_redis_transport": chosen}
    inside = Inside({**settings, "result_backend": "disabled://"}, tasks, pool="threads")
    try:
        inside.start()
        transport = inside.worker.consumer.connection.transport
        assert type(transport).__module__.startswith(chosen)
        for number in range(20):
            inside.send("note", number)
        wait_until(lambda: len(ran) == 20, WAIT_S, "the tasks")
        inside.break_connection()
        inside.send("note", 20)
        wait_until(lambda: len(ran) == 21, WAIT_S, "the task after that")
        assert inside.stop() == 0
    finally:
        inside.close()
    assert sorted(ran) == list(range(21))
    assert server.hlen("unacked") == server.llen("celery") == 0
