"""Who listens to control messages, as far as the broker can tell.

Whoever asks all nodes something can stop waiting when all have answered, if it knows who they are.
Transports without a server of their own, and Redis, keep a table of who is bound, which may name
nodes that were killed. RabbitMQ only tells whether there is anybody: a message that it can not
deliver comes back. Redis does too: it tells how many have heard a message.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from kombu import Connection, Producer
from kombu.utils.json import dumps

from umbel.broker.broadcast.mailboxes import Mailboxes
from umbel.broker.sessions.connections import driver
from umbel.wire.control import node_queue_name

# Nobody has this name: whoever gets the message drops it.
NOBODY = "umbel@nobody"


def listeners(connection: Connection, mailboxes: Mailboxes) -> set[str] | None:
    """The names of nodes that may listen, on an open connection; None where nobody knows them."""
    with contextlib.closing(connection.channel()) as channel:
        mailboxes.exchange(channel).declare()
        kind = driver(connection)
        if kind == "amqp":
            return None if _is_anybody(channel, mailboxes) else set()
        suffix = node_queue_name("", mailboxes.prefix)
        try:
            table = channel.get_table(mailboxes.exchange.name)
        except connection.connection_errors:
            raise
        except Exception:  # noqa: BLE001 - a table that is not there yet, on any transport
            return set()
        names = (str(queue) for _, _, queue in table)
        found = {name[: -len(suffix)] for name in names if name.endswith(suffix)}
        if kind == "redis" and found and not _hearers_count(channel, mailboxes):
            return set()
        return found


def _is_anybody(channel: Any, mailboxes: Mailboxes) -> bool:
    returned: list[Any] = []
    channel.events["basic_return"].add(lambda *args: returned.append(args))
    channel.basic_publish = channel.basic_publish_confirm
    Producer(channel, auto_declare=False).publish(
        _BODY, exchange=mailboxes.exchange.name, routing_key="", mandatory=True, **_PROPERTIES
    )
    # What comes back does so before the confirmation.
    return not returned


def _hearers_count(channel: Any, mailboxes: Mailboxes) -> int:
    properties = dict(_PROPERTIES)
    headers = properties.pop("headers")
    content = {name: properties.pop(name) for name in ("content_type", "content_encoding")}
    message = channel.prepare_message(_BODY, headers=headers, properties=properties, **content)
    name = mailboxes.exchange.name
    channel._inplace_augment_message(message, name, "")
    with channel.conn_or_acquire() as client:
        return int(client.publish(channel._get_publish_topic(name, ""), dumps(message)))


_BODY = json.dumps(
    {"method": "ping", "arguments": {}, "destination": [NOBODY], "pattern": None, "matcher": None}
).encode()
_PROPERTIES: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "utf-8",
    "headers": {"clock": 0, "expires": 0},
    "delivery_mode": 1,
}
