"""What remote control declares on a broker: two exchanges, a queue per node and one per client.

Peers declare the same things, and RabbitMQ refuses a declaration that differs in any flag. So they
are described here once, for clients and for workers.

On RabbitMQ the queues are exclusive and go with their connection. Transports without a server keep
them, and the way to them even when they are deleted: `bind` and `take_away` are for those.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

from kombu import Exchange, Queue

from umbel.wire.control import (
    exchange_name,
    node_queue_name,
    reply_exchange_name,
    reply_queue_name,
)

TRANSIENT: Final = 1
# Bindings of transports without a server are lists, which no two threads can change at a time.
_bindings = threading.Lock()


@dataclass(frozen=True, slots=True)
class Mailboxes:
    """Exchanges and queues of one cluster; the settings `control_*` say how they are declared."""

    prefix: str = "celery"
    ttl_s: float | None = 300.0
    expires_s: float | None = 10.0
    exclusive: bool = True
    durable: bool = False

    @property
    def exchange(self) -> Exchange:
        """Where requests go, to all nodes."""
        return Exchange(
            exchange_name(self.prefix), type="fanout", durable=False, delivery_mode=TRANSIENT
        )

    @property
    def reply_exchange(self) -> Exchange:
        """Where replies go, to one client."""
        return Exchange(
            reply_exchange_name(self.prefix), type="direct", durable=False, delivery_mode=TRANSIENT
        )

    def node_queue(self, hostname: str) -> Queue:
        """The queue from which a node takes requests."""
        return self._queue(node_queue_name(hostname, self.prefix), self.exchange, "")

    def reply_queue(self, routing_key: str) -> Queue:
        """The queue from which a client takes replies."""
        name = reply_queue_name(routing_key, self.prefix)
        return self._queue(name, self.reply_exchange, routing_key)

    def _queue(self, name: str, exchange: Exchange, routing_key: str) -> Queue:
        return Queue(
            name,
            exchange=exchange,
            routing_key=routing_key,
            durable=self.durable,
            exclusive=self.exclusive,
            auto_delete=not self.durable,
            expires=self.expires_s,
            message_ttl=self.ttl_s,
        )


def bind(queue: Queue, channel: Any) -> Queue:
    """The queue, declared and bound on this channel."""
    bound = queue(channel)
    with _bindings:
        bound.declare()
    return bound


def take_away(bound: Queue) -> None:
    """Delete a queue and the way to it."""
    with _bindings:
        bound.delete()
        bound.unbind_from(bound.exchange, bound.routing_key)
