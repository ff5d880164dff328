"""Leases: which brokers have them, and how they are renewed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from kombu import Connection

from umbel.broker import leases


class Channel:
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
    channel = Channel()
    assert leases.renew(channel, ["a", "b"]) == 1
    assert channel.commands == [("unacked_index", {"a": 7.5, "b": 7.5}, True)]


def test_many_leases_are_renewed_in_pieces_and_none_without_a_command() -> None:
    channel = Channel()
    assert leases.renew(channel, (str(n) for n in range(2 * leases.CHUNK + 1))) == 3
    assert [len(members) for _, members, _ in channel.commands] == [leases.CHUNK, leases.CHUNK, 1]
    assert leases.renew(channel, []) == 0


def test_only_brokers_that_take_silence_for_loss_have_leases() -> None:
    assert leases.lease_s(Channel()) == 3600
    with Connection("memory://") as connection:
        assert leases.lease_s(connection.default_channel) is None
    assert leases.lease_s(SimpleNamespace()) is None
