"""Replies to control requests: how a client receives them, and how a node sends them.

A client has one *inbox*, whatever the broker: it says where replies go (`reply_to`), waits for them
and takes itself away when it is closed. When its process is killed it goes too: on RabbitMQ with
the connection, as the queue is exclusive, on Redis after some seconds (`reply_lists`).

A node sends a reply with `publish_reply`, which leaves nothing behind when the client is gone. On
Redis whoever makes a list sets its expiry in the same transaction, and to a client of ours, whose
list exists while it lives, nothing is pushed after its death.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import redis
from kombu import Connection, Consumer, Exchange, Producer
from kombu.message import Message
from kombu.utils.json import dumps

from umbel.broker.broadcast.mailboxes import TRANSIENT, Mailboxes, bind, take_away
from umbel.broker.broadcast.reply_lists import Received, ReplyList, table_key, text
from umbel.broker.sessions.connections import driver
from umbel.broker.tasks.messages import Unreadable
from umbel.broker.tasks.task_channel import task_channel
from umbel.wire.control import (
    ReplyTo,
    Request,
    Written,
    leased_exchange_name,
    reply_exchange_name,
    reply_queue_name,
    write_reply,
)

__all__ = ["Inbox", "Received", "ReplyQueue", "open_inbox", "publish_reply"]

REPLY_EXPIRES_S: Final = 10.0


class Inbox(Protocol):
    """Where the replies to one client arrive; used by one thread."""

    reply_to: ReplyTo

    def wait(self, timeout_s: float) -> list[Received]:
        """Replies, as soon as there are any; an empty list after `timeout_s`."""

    def close(self) -> None:
        """Leave nothing on the broker; never raises."""


def open_inbox(connection: Connection, mailboxes: Mailboxes, routing_key: str) -> Inbox:
    """An inbox on an open connection, ready to receive; raises what the connection raises."""
    kind = ReplyList if driver(connection) == "redis" else ReplyQueue
    return kind(connection, mailboxes, routing_key)


class ReplyQueue:
    """An inbox where the broker has queues that go with their connection, or no server at all."""

    def __init__(self, connection: Connection, mailboxes: Mailboxes, routing_key: str) -> None:
        self.reply_to = ReplyTo(mailboxes.reply_exchange.name, routing_key)
        self._connection = connection
        self._found: list[Received] = []
        self._channel = connection.channel()
        task_channel(self._channel).leave_compressed()
        self._queue = bind(mailboxes.reply_queue(routing_key), self._channel)
        self._consumer = Consumer(
            self._channel,
            [self._queue],
            on_message=self._take,
            no_ack=True,
            accept=None,
            auto_declare=False,
        )
        self._consumer.consume()

    def wait(self, timeout_s: float) -> list[Received]:
        """See `Inbox`."""
        try:
            self._connection.drain_events(timeout=timeout_s)
        except TimeoutError:
            pass
        except Unreadable:
            self._found.append(Received(b"", None, None, None))
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        """See `Inbox`."""
        with contextlib.suppress(Exception):
            self._consumer.cancel()
        with contextlib.suppress(Exception):
            if driver(self._connection) != "amqp":
                take_away(self._queue)

    def _take(self, message: Message) -> None:
        self._found.append(
            Received(message.body, message.content_type, message.content_encoding, message.headers)
        )


def publish_reply(
    outlet: Any,
    request: Request,
    hostname: str,
    value: Any,
    *,
    prefix: str = "celery",
    serializer: str = "json",
    clock: int = 0,
    expires_s: float = REPLY_EXPIRES_S,
    signed: Callable[[Written, str], Written] | None = None,
) -> bool:
    """Send `value` to who sent `request`, on a channel or producer; whether it was sent.

    `signed` gets the reply and the exchange it goes to, and returns what is published.

    It is not when no reply is wanted, when the client is known to be gone, and when the request
    names an exchange that is not for replies: nobody writes to task queues by asking for replies.
    """
    to = request.reply_to
    if to is None or to.exchange not in (reply_exchange_name(prefix), leased_exchange_name(prefix)):
        return False
    reply = write_reply(hostname, value, ticket=request.ticket, clock=clock, serializer=serializer)
    if signed is not None:
        reply = signed(reply, to.exchange)
    producer = outlet if isinstance(outlet, Producer) else Producer(outlet, auto_declare=False)
    channel = producer.channel
    if getattr(channel.connection, "driver_type", None) == "redis":
        return _push(channel, to, prefix, reply, expires_s)
    with _delivering_nothing(channel):
        _declare(channel, to.exchange)
        producer.publish(
            reply.body,
            exchange=to.exchange,
            routing_key=to.routing_key,
            headers=reply.headers,
            content_type=reply.content_type,
            content_encoding=reply.content_encoding,
            delivery_mode=TRANSIENT,
        )
    return True


@contextlib.contextmanager
def _delivering_nothing(channel: Any) -> Iterator[None]:
    """Let py-amqp neither read on before it publishes, nor wait for the broker's confirmation.

    It does the one to see whether the broker is blocked, and the other where `confirm_publish` is
    set. Where a reply is sent while a request is being delivered, the next request would be
    delivered inside of it, and so on: a few hundred at a time would end the node. The loop reads on
    in any case.
    """
    established = channel.connection
    if getattr(channel, "drain_events", None) is not None or "drain_events" in vars(established):
        yield  # a transport that does not do so, or we are inside already
        return
    established.drain_events = _nothing_came
    confirmed = vars(channel).get("basic_publish")
    if confirmed is not None:
        channel.basic_publish = channel._basic_publish
    try:
        yield
    finally:
        del established.drain_events
        if confirmed is not None:
            channel.basic_publish = confirmed


def _nothing_came(**_: Any) -> None:
    raise TimeoutError


def _push(channel: Any, to: ReplyTo, prefix: str, reply: Written, expires_s: float) -> bool:
    message = channel.prepare_message(
        reply.body,
        content_type=reply.content_type,
        content_encoding=reply.content_encoding,
        headers=reply.headers,
        properties={"delivery_mode": TRANSIENT},
    )
    channel._inplace_augment_message(message, to.exchange, to.routing_key)
    item = dumps(message)
    queue = reply_queue_name(to.routing_key, prefix)
    # kombu's client would put the prefix of keys before some commands' keys only.
    client: Any = redis.Redis(connection_pool=channel.pool)
    if to.exchange == leased_exchange_name(prefix):
        return bool(client.lpushx(f"{channel.global_keyprefix}{queue}", item))  # it has its expiry
    queues = _bound(channel, client, to, queue)
    if not queues:
        return False
    with client.pipeline(transaction=True) as pipe:
        for name in queues:
            pipe.lpush(f"{channel.global_keyprefix}{name}", item)
            pipe.pexpire(f"{channel.global_keyprefix}{name}", int(expires_s * 1000))
        pipe.execute()
    return True


def _bound(channel: Any, client: Any, to: ReplyTo, expected: str) -> list[str]:
    """The queues of a client; asking for the one that it should have is quicker than for all."""
    table = table_key(channel, to.exchange)
    if client.sismember(table, channel.sep.join([to.routing_key, "", expected])):
        return [expected]
    members = [text(member).split(channel.sep) for member in client.smembers(table)]
    return [member[-1] for member in members if member[0] == to.routing_key]


# Declared once per channel; only our two exchanges ever get here.
_declared: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def _declare(channel: Any, exchange: str) -> None:
    declared = _declared.setdefault(channel, set())
    if exchange not in declared:
        # Without waiting for the answer, which could have to wait for other messages.
        Exchange(exchange, type="direct", durable=False)(channel).declare(nowait=True)
        declared.add(exchange)
