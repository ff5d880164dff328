"""A queue of one's own on each exchange of events, made anew whenever the connection breaks.

Every try to connect goes once over the list of brokers. After a failed one there is a pause, which
grows; waiting for it ends early when the owner stops. A break is logged once, however many tries
the way back takes, and so is its end.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from typing import TYPE_CHECKING

from kombu import Connection, Exchange, Producer, Queue

from umbel.app.events.publisher import event_exchange
from umbel.app.trust import Trust
from umbel.broker.broadcast.listening import Listener, OnMessage, OnRubbish
from umbel.broker.sessions.connections import another
from umbel.broker.sessions.session import Outage, opening
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.control import Request, write_request
from umbel.wire.events import OWN_EXCHANGE
from umbel.wire.signing import REQUEST

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

logger = logging.getLogger("umbel.events")

CHECK_S = 1.0
WAKEUP_LIFE_S = 1.0


class Subscription:
    """Used by one thread; `stopping` and `ready` are for all."""

    def __init__(
        self,
        app: Umbel,
        on_message: OnMessage,
        on_rubbish: OnRubbish,
        *,
        connection: Connection | None,
        routing_key: str,
        queue_ttl: float | None = None,
        queue_expires: float | None = None,
        queue_prefix: str | None = None,
        queue_exclusive: bool | None = None,
        queue_durable: bool | None = None,
        node_id: str | None = None,
        own: bool = False,
    ) -> None:
        """`own` asks for the events of Umbel's own exchange as well.

        What is None of a queue's options comes from the settings. The name of the queue ends with
        `node_id`, or with a random id.
        """
        self._app = app
        self._on_message, self._on_rubbish = on_message, on_rubbish
        self._template = connection
        self._routing_key = routing_key
        conf = app.conf
        self._queue_ttl = conf.event_queue_ttl if queue_ttl is None else queue_ttl
        self._queue_expires = conf.event_queue_expires if queue_expires is None else queue_expires
        self._prefix = queue_prefix or conf.event_queue_prefix
        self._exclusive = conf.event_queue_exclusive if queue_exclusive is None else queue_exclusive
        self._durable = conf.event_queue_durable if queue_durable is None else queue_durable
        # Another name at each connection, unless the queue is to be found again: the broker may
        # not have noticed yet that the last connection is gone, with its queue.
        self._name = node_id or (str(uuid.uuid4()) if self._durable else None)
        self._exchanges = list(dict.fromkeys([conf.event_exchange, *[OWN_EXCHANGE] * own]))
        self._listener: Listener | None = None
        self.ready = threading.Event()
        self.stopping = threading.Event()
        self.wakes = True  # ask for heartbeats on every new connection
        self.reconnect_count = 0
        self._check_at = self._retry_at = 0.0
        self._outage = Outage(logger, "receive events")

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._listener is not None

    def listen(self, wait_s: float) -> None:
        """Wait so long for messages, or for the time to connect again, and connect."""
        now = time.monotonic()
        if self._listener is None:
            if now < self._retry_at:
                self.stopping.wait(min(wait_s, self._retry_at - now))
            else:
                self.open()
            return
        try:
            self._listener.listen(wait_s)
            if now >= self._check_at:
                self._check_at = now + CHECK_S
                self._listener.check()
        except ConnectionError as exc:
            self.close(lost=True)
            self._retry_at = time.monotonic() + self._outage.failure(exc)
            self.reconnect_count += 1

    def open(self) -> None:
        """Try once to connect; raises `ImproperlyConfigured` where trying again is in vain."""
        connection = self._new_connection()
        try:
            with opening(connection):
                queues = [self._queue(name, connection) for name in self._exchanges]
                self._listener = Listener(connection, queues, self._on_message, self._on_rubbish)
        except ImproperlyConfigured:
            raise
        except Exception as exc:  # noqa: BLE001 - a broker on its way down can raise anything
            self._retry_at = time.monotonic() + self._outage.failure(exc)
            return
        self._outage.over()
        self.ready.set()
        if self.wakes:
            self.wakeup_workers()

    def close(self, *, lost: bool = False) -> None:
        """Hang up."""
        self.ready.clear()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close(lost=lost)

    def wakeup_workers(self) -> bool:
        """Ask all workers for a heartbeat now, without waiting; whether it went out."""
        if self._listener is None:
            return False
        name = f"{self._app.conf.control_exchange}.pidbox"
        exchange = Exchange(name, type="fanout", durable=False)
        now = time.time()
        request = Request(method="heartbeat", clock=1, expires=now + WAKEUP_LIFE_S, sent_at=now)
        try:
            written = Trust(self._app).signed(write_request(request), name, REQUEST)
            # On a channel of its own: a broker that refuses this closes the channel.
            with contextlib.closing(self._listener.connection.channel()) as channel:
                Producer(channel, auto_declare=False).publish(
                    written.body,
                    exchange=exchange,
                    routing_key="",
                    declare=[exchange],
                    headers=written.headers,
                    content_type=written.content_type,
                    content_encoding=written.content_encoding,
                    delivery_mode=2,
                )
        except Exception as exc:  # noqa: BLE001 - they will beat anyway
            logger.debug("workers were not asked for heartbeats: %s", exc)
            return False
        return True

    def _new_connection(self) -> Connection:
        # Theirs may be busy with other things, and is theirs to close.
        return self._app.connection() if self._template is None else another(self._template)

    def _queue(self, exchange: str, connection: Connection) -> Queue:
        if self._durable and self._exclusive:
            raise ImproperlyConfigured(
                "event_queue_durable and event_queue_exclusive exclude each other: "
                "an exclusive queue goes with its connection, so switch one of them off"
            )
        prefix = self._prefix if exchange == self._exchanges[0] else exchange
        return Queue(
            f"{prefix}.{self._name or uuid.uuid4()}",
            event_exchange(exchange, connection),
            routing_key=self._routing_key,
            durable=self._durable,
            exclusive=self._exclusive,
            auto_delete=not self._durable,
            message_ttl=self._queue_ttl,
            expires=self._queue_expires,
        )
