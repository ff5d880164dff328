"""One connection on which events are published, with the exchange that they go to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kombu import Connection, Exchange, Producer

from umbel.app.events.stream import EventStream
from umbel.app.trust import Trust
from umbel.broker.amqp.bounded import share_alarm
from umbel.broker.base64text import quicken
from umbel.broker.sessions.connections import another, driver, hang_up
from umbel.broker.sessions.session import opening
from umbel.wire.control import Written
from umbel.wire.event_forms import TaskForm, kind_of
from umbel.wire.events import (
    CONTENT_ENCODING,
    CONTENT_TYPE,
    EVENT_LIMITS,
    MULTI_KEY,
    OWN_EXCHANGE,
    OWN_TYPES,
    Event,
    encode,
    routing_key,
)
from umbel.wire.signing import EVENT

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

# Half of what our own readers take.
BODY_BYTES_MAX = EVENT_LIMITS.body_bytes // 2
# Nodes act on what these events tell.
SIGNED_GROUP = "worker-"


def event_exchange(name: str, connection: Connection) -> Exchange:
    """The exchange of events; topics where the broker has them, else to everybody."""
    kind = "fanout" if driver(connection) == "redis" else "topic"
    return Exchange(name, type=kind, durable=True)


def exchange_for(kind: str, app: Umbel) -> str:
    """The name of the exchange of a type: some would hurt Celery's nodes, and go elsewhere."""
    return OWN_EXCHANGE if kind in OWN_TYPES else str(app.conf.event_exchange)


def publish_events(
    producer: Producer,
    exchange: Exchange,
    events: Sequence[Event | TaskForm],
    stream: EventStream | None = None,
    trust: Trust | None = None,
) -> None:
    """Publish events as peers expect them: one of its own kind alone, several of tasks as a list.

    All must be of one sender. A list that would be too big for readers goes out in parts. On Redis
    they also go to `stream`, in the same round trip. With `trust`, what a worker tells about itself
    is signed; events of tasks never are.
    """
    first, alone = events[0], len(events) == 1
    body = encode(first if alone else events)
    if len(body) > BODY_BYTES_MAX and not alone:
        middle = len(events) // 2
        publish_events(producer, exchange, events[:middle], stream)
        publish_events(producer, exchange, events[middle:], stream)
        return
    hostname = first.hostname if isinstance(first, TaskForm) else first["hostname"]
    kind, headers = kind_of(first), {"hostname": hostname}
    if trust is not None and alone and kind.startswith(SIGNED_GROUP):
        written = Written(body, headers, CONTENT_TYPE, CONTENT_ENCODING)
        headers = trust.signed(written, exchange.name, EVENT).headers
    address: dict[str, Any] = {
        "exchange": exchange.name,
        "routing_key": routing_key(kind) if alone else MULTI_KEY,
        "headers": headers,
        "content_type": CONTENT_TYPE,
        "content_encoding": CONTENT_ENCODING,
    }
    if stream is not None and stream.takes(producer.channel):
        stream.publish(producer.channel, body, properties={"delivery_mode": 1}, **address)
    else:
        producer.publish(body, delivery_mode=1, priority=0, **address)


def publish_with(
    producer: Producer,
    event: Event,
    app: Umbel,
    retry: bool = False,
    retry_policy: Mapping[str, Any] | None = None,
) -> None:
    """Publish one event with somebody's producer, and raise its errors.

    With `retry` it is tried again after connection errors, as `task_publish_retry_policy` says
    where the policy says nothing.
    """

    def publish() -> None:
        exchange = event_exchange(exchange_for(event["type"], app), producer.connection)
        exchange(producer.channel).declare()
        publish_events(producer, exchange, [event], app.events.stream, Trust(app))

    if retry:
        policy = {**app.conf.task_publish_retry_policy, **(retry_policy or {})}
        producer.connection.ensure(producer, publish, **policy)()
    else:
        publish()


class Publisher:
    """Publishes events on a connection of its own; opened and used by one thread."""

    def __init__(self, app: Umbel, template: Connection | None = None) -> None:
        """`template` says where to connect; it is not used itself."""
        self._app = app
        self._template = template
        self._trust = Trust(app)
        self._connection: Connection | None = None
        self._producer: Producer | None = None
        self._exchanges: dict[str, Exchange] = {}

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None

    def open(self) -> None:
        """Connect, once over the list of brokers, and declare the exchange."""
        app, template = self._app, self._template
        # Nothing reads from this connection, so nobody would see the broker's heartbeats.
        if template is None:
            connection = app.connection(app.write_url, heartbeat=0, confirm=True)
        else:
            options = {**(template.transport_options or {}), "confirm_publish": True}
            connection = another(template, heartbeat=0, transport_options=options)
        with opening(connection):
            tasks = app.publisher  # an alarm of the broker is logged once for both
            share_alarm(connection, tasks.alarm, tasks.blocked_timeout_s)
            exchange = event_exchange(app.conf.event_exchange, connection)
            channel = connection.default_channel
            quicken(channel)
            exchange(channel).declare()
            self._producer = Producer(channel, auto_declare=False)
        self._connection = connection
        self._exchanges = {exchange.name: exchange}

    def publish(self, events: Sequence[Event | TaskForm]) -> None:
        """Publish; returns when the broker has them."""
        assert self._producer is not None, "open first"
        assert self._connection is not None
        name = exchange_for(kind_of(events[0]), self._app)
        exchange = self._exchanges.get(name)
        if exchange is None:
            exchange = event_exchange(name, self._connection)
            exchange(self._producer.channel).declare()
            self._exchanges[name] = exchange
        publish_events(self._producer, exchange, events, self._app.events.stream, self._trust)

    def close(self, *, lost: bool = False) -> None:
        """Hang up."""
        connection, self._connection = self._connection, None
        self._producer = None
        if connection is not None:
            hang_up(connection, lost=lost)
