"""How many messages wait in queues, where the broker can tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from kombu import Connection, Queue

from umbel.broker.sessions.connections import driver
from umbel.broker.tasks.task_channel import task_channel


def lengths_of(connection: Connection, queues: Iterable[Queue]) -> dict[str, int | None]:
    """By name; None where it is not known, as for queues that do not exist."""
    if driver(connection) == "amqp":
        return {queue.name: _declared(connection, queue.name) for queue in queues}
    with contextlib.closing(connection.channel()) as channel:
        known = task_channel(channel)
        return {queue.name: known.length_of(queue.name) for queue in queues}


def _declared(connection: Connection, name: str) -> int | None:
    # A channel for each: the broker closes it over a queue that is not there.
    try:
        with contextlib.closing(connection.channel()) as channel:
            return task_channel(channel).length_of(name)
    except connection.channel_errors:
        return None
