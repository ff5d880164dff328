"""The task channel: every transport has one, and its leases."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.transport import memory, pyamqp
from kombu.transport import redis as kombu_redis

from tests.unit.worker.parts import Message
from umbel.broker.amqp.bounded import BoundedChannel
from umbel.broker.amqp.channel import BufferedChannel
from umbel.broker.redis.channel import Channel, SentinelChannel
from umbel.broker.redis.ledger import Ledger
from umbel.broker.tasks.task_channel import (
    CHUNK,
    AmqpTaskChannel,
    KombuAmqpChannel,
    KombuChannel,
    KombuRedisChannel,
    RedisTaskChannel,
    TaskChannel,
    put_back,
    task_channel,
)

OURS = [Channel, SentinelChannel, BufferedChannel, BoundedChannel]
KOMBUS = [
    (memory.Channel, "memory", KombuChannel),
    (kombu_redis.Channel, "redis", KombuRedisChannel),
    (pyamqp.Channel, "amqp", KombuAmqpChannel),
]


def unconnected(kind: Any, driver: str = "") -> Any:
    """A channel as it is before it has a connection."""
    channel = kind.__new__(kind)
    channel.connection = SimpleNamespace(driver_type=driver)
    channel.closed = True
    return channel


@pytest.mark.parametrize("kind", OURS)
def test_our_channels_are_task_channels(kind: Any) -> None:
    channel = unconnected(kind)
    assert task_channel(channel) is channel
    assert channel.channel is channel
    assert (channel.is_lost, channel.slack) == (False, None)


@pytest.mark.parametrize(("kind", "driver", "expected"), KOMBUS)
def test_any_channel_of_kombus_gets_one(kind: Any, driver: str, expected: type) -> None:
    channel = unconnected(kind, driver)
    found = task_channel(channel)
    assert type(found) is expected
    assert found.channel is channel
    assert not found.can_move
    assert found.move([object()]) == [False]
    found.flush_acks()
    found.check_queue("q")
    found.leave_compressed()
    assert issubclass(channel.Message, kind.Message)
    assert channel.Message is not kind.Message


@pytest.mark.parametrize("none", [None, SimpleNamespace()])
def test_what_is_no_channel_does_no_harm(none: Any) -> None:
    found, message = task_channel(none), Message(none)
    assert found.lease_s is None
    assert found.length_of("q") is None
    assert found.renew(["a"]) == 0
    found.disown()
    found.take_tasks(print, Ledger(), acks_at_once=True)
    put_back(message)
    assert message.fate == ["requeue"]


@pytest.mark.parametrize("kind", [BufferedChannel, BoundedChannel, pyamqp.Channel])
def test_bodies_stay_bytes_on_rabbitmq(kind: Any) -> None:
    channel = unconnected(kind)
    found = task_channel(channel)
    assert isinstance(found, AmqpTaskChannel)
    assert found.lease_s is None
    channel._gathers, channel.auto_decode = False, True
    found.take_tasks(print, Ledger(), acks_at_once=False)
    assert channel.auto_decode is False
    if kind is BufferedChannel:
        assert (channel.receiver, channel._gathers) == (print, True)


@pytest.mark.parametrize("at_once", [True, False])
def test_our_redis_channel_goes_on_with_the_ledger_and_gathers(at_once: bool) -> None:
    channel, ledger = unconnected(Channel), Ledger()
    channel.fetcher, channel._hurries = None, not at_once
    assert channel.can_move
    channel.take_tasks(print, ledger, acks_at_once=at_once)
    assert (channel.receiver, channel.ledger, channel._gathers) == (print, ledger, True)
    assert channel._hurries is at_once
    channel.leave_compressed()
    assert channel.inflates is False


def test_acknowledgements_of_a_busy_loop_are_written_at_once_on_rabbitmq() -> None:
    channel = unconnected(BufferedChannel)
    channel._gathers = False
    channel.take_tasks(print, Ledger(), acks_at_once=True)
    assert channel._gathers is False


class Leased(RedisTaskChannel):
    """What renewing needs of a Redis channel."""

    unacked_index_key = "unacked_index"
    visibility_timeout = 3600

    def __init__(self) -> None:
        self.commands: list[tuple[str, dict[str, float], bool]] = []

    @contextlib.contextmanager
    def conn_or_acquire(self) -> Iterator[Any]:
        yield SimpleNamespace(zadd=self._zadd, time=lambda: (7, 500_000))

    def _zadd(self, key: str, members: dict[str, float], xx: bool = False) -> None:
        self.commands.append((key, members, xx))


def test_a_renewal_moves_what_is_there_and_adds_nothing() -> None:
    channel = Leased()
    assert channel.lease_s == 3600
    assert channel.renew(["a", "b"]) == 1
    assert channel.commands == [("unacked_index", {"a": 7.5, "b": 7.5}, True)]


def test_many_leases_are_renewed_in_pieces_and_none_without_a_command() -> None:
    channel = Leased()
    assert channel.renew(str(n) for n in range(2 * CHUNK + 1)) == 3
    assert [len(members) for _, members, _ in channel.commands] == [CHUNK, CHUNK, 1]
    assert channel.renew([]) == 0


@pytest.mark.parametrize("name", [name for name in vars(TaskChannel) if not name.startswith("_")])
def test_no_library_has_an_attribute_of_that_name(name: str) -> None:
    theirs: list[Any] = [kombu_redis.Channel, memory.Channel, pyamqp.Channel]
    assert not any(hasattr(kind, name) for kind in theirs), name
