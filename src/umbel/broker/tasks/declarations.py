"""Declaring and trying queues one at a time, so that one that is refused harms no other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from amqp.exceptions import ChannelError
from kombu import Connection, Queue
from redis.exceptions import RedisError

from umbel.broker.sessions.connections import driver
from umbel.broker.sessions.permanent import Refused, permanent, refused_consumer
from umbel.broker.tasks.task_channel import task_channel


def declare_each(
    connection: Connection, channel: Any, queues: Iterable[Queue]
) -> dict[str, Refused]:
    """Declare queues; returns those that the broker refuses, by name.

    RabbitMQ closes the channel of a refusal, so the declarations have a channel of their own. What
    it answers there is about that queue alone, also if it may pass: a queue that another connection
    has for itself, one too many for its virtual host, an exchange that is not there yet. On
    Redis the lists of a queue are looked at as well: one script takes messages from all of them,
    and would fail as a whole.
    """
    refused: dict[str, Refused] = {}
    apart = driver(connection) == "amqp"
    used = connection.channel() if apart else channel
    for queue in queues:
        try:
            queue(used).declare()
            task_channel(used).check_queue(queue.name)
        except (*connection.channel_errors, RedisError) as exc:
            cause = permanent(exc)
            if cause is None and isinstance(exc, ChannelError):
                text = " ".join(str(exc).split())
                cause = Refused(text, "It is declared again once a minute.", may_pass=True)
            if cause is None or cause.login:
                raise
            refused[queue.name] = cause
            if apart:
                used = connection.channel()
    if apart:
        used.close()
    return refused


@contextlib.contextmanager
def trial(connection: Connection, queue: Queue) -> Iterator[Refused | None]:
    """Consume a queue apart from all others while the block runs; yields why that is refused.

    RabbitMQ closes the channel of a refusal, and the worker's own holds messages of tasks that run.
    The block is where to begin on that one: a queue that is deleted with its last consumer is not
    without any in between. A message that comes here, at most one, goes back after the block.
    """
    if driver(connection) != "amqp":
        yield None
        return
    channel = connection.channel()
    try:
        channel.basic_qos(0, 1, False)
        channel.basic_consume(
            queue.name, callback=_leave, arguments=queue.consumer_arguments, nowait=False
        )
    except connection.channel_errors as exc:
        cause = refused_consumer(exc)
        if cause is None or cause.login:
            raise
        yield cause
        return
    try:
        yield None
    finally:
        channel.close()


def _leave(message: Any) -> None:
    """Leave a message of a trial for the end of its channel."""
