"""Every transport gives a worker the same task channel, on a real broker."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import wait_until
from tests.transports import REDIS_ROWS, WAIT_S, Desk, Row
from umbel.broker.redis.ledger import Ledger
from umbel.broker.tasks.task_channel import put_back, task_channel

ROWS = [
    Row("memory", "memory_url"),
    *REDIS_ROWS,
    Row("amqp-umbel", "amqp_url"),
    Row("amqp-pyamqp", "amqp_url", {"amqp_transport": "pyamqp"}),
]


@pytest.fixture
def memory_url() -> str:
    return "memory://"


@pytest.fixture(params=ROWS, ids=str)
def row(request: pytest.FixtureRequest) -> Row:
    found: Row = request.param
    return found


@pytest.fixture
def desk(request: pytest.FixtureRequest, row: Row) -> Iterator[Desk]:
    made = Desk(request.getfixturevalue(row.broker), row)
    yield made
    made.close()


@pytest.mark.parametrize("at_once", [True, False])
def test_tasks_arrive_as_bytes_and_their_answers_reach_the_broker(
    desk: Desk, at_once: bool
) -> None:
    channel = task_channel(desk.channel)
    desk.declare("jobs")
    for number in range(4):
        desk.send({"n": number}, compression="zlib")
    channel.leave_compressed()
    channel.take_tasks(desk.seen.append, Ledger(), acks_at_once=at_once)
    channel.slack = 0
    channel.check_queue("jobs")
    consumer = desk.consume("jobs", prefetch=3)
    taken = list(desk.take(3))
    assert all(type(message.body) is bytes for message in taken)
    assert {message.headers["compression"] for message in taken} == {"application/x-gzip"}
    if channel.lease_s is not None:
        assert channel.renew([message.delivery_tag for message in taken]) == 1
    taken[0].ack()
    desk.seen.clear()
    for message in reversed(taken[1:]):
        put_back(message)
    again = list(desk.take(3))
    assert sorted(inflated(message) for message in again) == [b'{"n": 1}', b'{"n": 2}', b'{"n": 3}']
    for message in again:
        message.ack()
    channel.flush_acks()
    consumer.cancel()
    desk.drain(0.2)
    desk.channel.close()
    assert not channel.is_lost
    assert desk.size() == 0


def test_a_queue_is_measured_and_what_is_lost_is_not_put_back(desk: Desk) -> None:
    channel = task_channel(desk.channel)
    desk.declare("jobs")
    for number in range(3):
        desk.send(number)
    wait_until(lambda: channel.length_of("jobs") == 3, WAIT_S, "three messages in the queue")
    desk.consume("jobs", prefetch=1)
    desk.take(1)
    wait_until(lambda: channel.length_of("jobs") == 2, WAIT_S, "one of them taken")
    if channel.lease_s is not None:
        channel.disown()
        desk.channel.close()
        assert desk.size() == 2


def inflated(message: Any) -> bytes:
    return zlib.decompress(message.body)
