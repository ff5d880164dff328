"""How many messages wait in queues, where the broker can tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from kombu import Connection, Queue

from umbel.broker.connections import driver


def lengths_of(connection: Connection, queues: Iterable[Queue]) -> dict[str, int | None]:
    """By name; None where it is not known, as for queues that do not exist."""
    kind = driver(connection)
    if kind == "amqp":
        return {queue.name: _declared(connection, queue.name) for queue in queues}
    with contextlib.closing(connection.channel()) as channel:
        if kind == "redis":
            return {queue.name: _listed(channel, queue.name) for queue in queues}
        size = getattr(channel, "_size", None)
        return {queue.name: size(queue.name) if size is not None else None for queue in queues}


def _declared(connection: Connection, name: str) -> int | None:
    # A channel for each: the broker closes it over a queue that is not there.
    try:
        with contextlib.closing(connection.channel()) as channel:
            return int(channel.queue_declare(name, passive=True).message_count)
    except connection.channel_errors:
        return None


def _listed(channel: Any, name: str) -> int:
    with channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
        for step in channel.priority_steps:
            pipe.llen(channel._q_for_pri(name, step))
        return sum(int(length) for length in pipe.execute())
