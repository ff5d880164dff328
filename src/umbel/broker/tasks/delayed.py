"""Delays that RabbitMQ keeps itself, for quorum queues.

A quorum queue gives a worker a fixed window, so tasks that wait for their eta in the worker would
block the others. Instead the message goes through a ladder of queues whose message time-outs are
powers of two; the delay in binary is part of the routing key and says on which rungs it waits.
The layout on the broker is the one that Celery peers use (see `kombu.transport.
native_delayed_delivery`, whose declarations are used here).

Direct exchanges can not take part, as they do not match the key behind the delay: such tasks wait
in the worker, and `unsupported` names them. Delays are whole seconds; what is left of the eta
after that, less than a second, is waited for in the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kombu import Connection, Queue
from kombu.transport.native_delayed_delivery import (
    CELERY_DELAYED_DELIVERY_EXCHANGE,
    MAX_LEVEL,
    MAX_NUMBER_OF_BITS_TO_USE,
    bind_queue_to_native_delayed_delivery_exchange,
    calculate_routing_key,
    declare_native_delayed_delivery_exchanges_and_queues,
    level_name,
)

DELAY_MAX_S = 2**MAX_NUMBER_OF_BITS_TO_USE - 1
ENTRY_EXCHANGE = level_name(MAX_LEVEL)
# A delayed message comes from the rung after the last one that it waited on.
EXCHANGES = frozenset(
    {CELERY_DELAYED_DELIVERY_EXCHANGE, *(level_name(level) for level in range(MAX_LEVEL + 1))}
)


def is_quorum(queue: Queue) -> bool:
    """Whether the queue is declared as a quorum queue."""
    arguments: Mapping[str, Any] = queue.queue_arguments or {}
    return arguments.get("x-queue-type") == "quorum"


def any_quorum(queues: Iterable[Queue]) -> bool:
    """Whether delays go through the broker: one quorum queue is enough, as with Celery peers."""
    return any(is_quorum(queue) for queue in queues)


def route(delay_s: float, routing_key: str) -> tuple[str, str] | None:
    """Exchange and key that delay a message; None when the delay is too short or too long."""
    seconds = int(delay_s)
    if not 1 <= seconds <= DELAY_MAX_S or not routing_key:
        return None
    return ENTRY_EXCHANGE, calculate_routing_key(seconds, routing_key)


def unsupported(queues: Iterable[Queue]) -> list[str]:
    """The queues whose delayed tasks have to wait in the worker."""
    return [queue.name for queue in queues if queue.exchange.type == "direct"]


def declare(connection: Connection, queues: Iterable[Queue], queue_type: str) -> None:
    """Declare the ladder and tie every queue to it; harmless when it is there already.

    Takes some hundred round trips, so do it once per connection.
    """
    declare_native_delayed_delivery_exchanges_and_queues(connection, queue_type)
    for queue in queues:
        if queue.exchange.type != "direct":
            bind_queue_to_native_delayed_delivery_exchange(connection, queue)
