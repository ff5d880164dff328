"""RabbitMQ, and kombu's virtual transports: one durable queue that all recorders take from.

The queue `umbel.recorder` is bound to everything on both exchanges of events. It is made by the
first recorder and stays: what is told while no recorder runs waits in it, up to a bound; then the
oldest are dropped, which shows as gaps in the sequence numbers. On RabbitMQ it is a quorum queue,
as only those keep events over a restart of the server: events are published as transient messages.
Where a server has none, or the name is taken by a queue of another kind, what there is is used.

A token is a delivery tag with the number of its connection. When a connection is lost the server
gives everything that was not acknowledged to somebody else, or again to us: older tokens are void.

At most `PREFETCH` messages are on their way or in our hands. Those that nobody has read yet wait in
the socket, not in our memory. A recorder that does not read for long, because its disk is full, is
cut off by the server; what it has not acknowledged comes again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from kombu import Connection, Consumer, Exchange, Queue

from umbel.app.events.publisher import event_exchange
from umbel.broker.sessions.connections import driver, hang_up
from umbel.broker.sessions.session import opening
from umbel.broker.tasks.messages import Unreadable
from umbel.broker.tasks.task_channel import task_channel
from umbel.recorder.sources.messages import Message
from umbel.wire.events import OWN_EXCHANGE

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

logger = logging.getLogger("umbel.recorder")

QUEUE: Final = "umbel.recorder"
# More lets a segment grow bigger before it has to be rolled, and gives more twice after a crash.
PREFETCH: Final = 5_000
# What the queue keeps while no recorder runs. More bridges longer absences, for disk of the server.
LENGTH_MAX: Final = 200_000
BYTES_MAX: Final = 2 * 2**30
BOUNDS: Final = {
    "x-max-length": LENGTH_MAX,
    "x-max-length-bytes": BYTES_MAX,
    "x-overflow": "drop-head",
}
# So much is given to the recorder at once.
POLL_MESSAGES, POLL_BYTES = 500, 4 * 2**20
CHECK_S: Final = 1.0

Token = tuple[int, Any]  # the number of the connection, the tag


class QueueSource:
    """See the module's text, and `Source`."""

    dropped_count = 0  # the server tells nobody

    def __init__(
        self, app: Umbel, name: str, *, prefetch: int = PREFETCH, queue: str = QUEUE
    ) -> None:
        self._app = app
        self._name = name
        self._prefetch = prefetch
        self._queue_name = queue
        self._connection: Connection | None = None
        self._channel: Any = None
        self._errors: tuple[type[BaseException], ...] = (OSError,)
        self._number = 0
        self._unsettled: deque[Any] = deque()  # tags, in the order of delivery
        self._found: list[Message] = []
        self._found_bytes = 0
        self._counts_multiple = False
        self._check_at = 0.0

    @property
    def is_exhausted(self) -> bool:
        """Whether everything that may be unacknowledged is."""
        return len(self._unsettled) >= self._prefetch

    # -- life --------------------------------------------------------------------------

    def open(self) -> None:
        """Connect, make the queue where it is missing, and consume."""
        self.hang_up()
        connection = self._app.connection()
        self._errors = (*connection.connection_errors, *connection.channel_errors, OSError)
        try:
            with opening(connection):
                self._counts_multiple = driver(connection) == "amqp"
                queue = self._declared(connection)
                self._consume(connection, queue)
        except Exception as exc:
            self._channel = None
            raise _lost(exc) from exc
        self._connection = connection

    def _consume(self, connection: Connection, queue: Queue) -> None:
        self._number += 1
        self._channel = channel = connection.channel()
        task_channel(channel).leave_compressed()
        consumer = Consumer(
            channel, [queue], on_message=self._take, accept=None, auto_declare=False,
            tag_prefix=f"{self._name}.",
        )  # fmt: skip
        consumer.qos(prefetch_count=self._prefetch)
        consumer.consume()

    def hang_up(self) -> None:
        """The connection is lost; all tokens are void."""
        connection, self._connection, self._channel = self._connection, None, None
        self._unsettled.clear()
        self._found = []
        if connection is not None:
            hang_up(connection, lost=True)

    def close(self) -> None:
        """Leave; the queue stays."""
        if not self._counts_multiple and self._channel is not None:
            for tag in self._unsettled:  # there is no server that would do it
                self._channel.basic_reject(tag, requeue=True)
        connection, self._connection, self._channel = self._connection, None, None
        self._unsettled.clear()
        if connection is not None:
            hang_up(connection)

    # -- the queue ---------------------------------------------------------------------

    def _declared(self, connection: Connection) -> Queue:
        exchanges = [
            event_exchange(name, connection)
            for name in (self._app.conf.event_exchange, OWN_EXCHANGE)
        ]
        with contextlib.closing(connection.channel()) as channel:
            for exchange in exchanges:
                exchange(channel).declare()
        queue = self._made(connection)
        with contextlib.closing(connection.channel()) as channel:
            for exchange in exchanges:
                _bind(queue, exchange, channel)
        return queue

    def _made(self, connection: Connection) -> Queue:
        if driver(connection) != "amqp":
            queue = Queue(self._queue_name, durable=True, no_declare=True)
            with contextlib.closing(connection.channel()) as channel:
                queue(channel).queue_declare()
            return queue
        quorum = {"x-queue-type": "quorum", **BOUNDS}
        if _major_version(connection) >= 4:
            quorum["x-delivery-limit"] = -1  # else a message that comes too often is dropped
        refusals = []
        for passive, arguments in ((False, quorum), (True, {}), (False, BOUNDS)):
            queue = Queue(self._queue_name, durable=True, queue_arguments=dict(arguments))
            try:
                with connection.channel() as channel:
                    queue(channel).queue_declare(passive=passive)
            except connection.channel_errors as exc:
                refusals.append(exc)
                continue
            if refusals:
                logger.warning(
                    "queue %s is not the quorum queue that it should be (%s): events in it may "
                    "not outlive a restart of the broker", self._queue_name, refusals[0],
                )  # fmt: skip
            return queue
        raise refusals[0]

    # -- taking ------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[Message]:
        """See `Source`."""
        with self._asking() as connection:
            self._check(connection)
            wait_s = timeout_s
            try:
                while len(self._found) < POLL_MESSAGES and self._found_bytes < POLL_BYTES:
                    connection.drain_events(timeout=wait_s)
                    wait_s = 0
            except TimeoutError:
                pass
        found, self._found, self._found_bytes = self._found, [], 0
        return found

    def _take(self, message: Any) -> None:
        tag = message.delivery_tag
        self._unsettled.append(tag)
        body = message.body
        self._found.append(
            Message(
                body,
                message.content_type,
                message.content_encoding,
                message.headers,
                (self._number, tag),
            )
        )
        self._found_bytes += len(body) if isinstance(body, (bytes, str)) else 100

    def _check(self, connection: Connection) -> None:
        now = time.monotonic()
        if now >= self._check_at and connection.supports_heartbeats and connection.heartbeat:
            self._check_at = now + CHECK_S
            connection.heartbeat_check()

    def idle(self) -> None:
        """Nothing: if it takes long the server cuts us off, which is noticed afterwards."""

    def lag(self) -> int | None:
        """Messages that are ready in the queue."""
        if self._connection is None:
            return None
        with self._asking() as connection, connection.channel() as channel:
            queue = Queue(self._queue_name, durable=True)
            return int(queue(channel).queue_declare(passive=True).message_count)

    # -- done --------------------------------------------------------------------------

    def acknowledge(self, tokens: Iterable[Any]) -> None:
        """See `Source`."""
        done = {tag for number, tag in filter(None, tokens) if number == self._number}
        if not done or self._channel is None:
            return
        with self._asking():
            last = None
            while self._unsettled and self._unsettled[0] in done:
                last = self._unsettled.popleft()
                done.discard(last)
                if not self._counts_multiple:
                    self._channel.basic_ack(last)
            if last is not None and self._counts_multiple:
                self._channel.basic_ack(last, multiple=True)
            for tag in done.intersection(self._unsettled):
                self._channel.basic_ack(tag)
                self._unsettled.remove(tag)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Connection]:
        connection = self._connection
        if connection is None:
            raise ConnectionError("there is no connection")
        try:
            yield connection
        except Unreadable as exc:  # it has no tag by which it could be settled
            logger.warning("what was in the queue is no message: %s", exc)
        except self._errors as exc:
            raise _lost(exc) from exc


def _bind(queue: Queue, exchange: Exchange, channel: Any) -> None:
    queue(channel).bind_to(exchange=exchange, routing_key="#")


def _major_version(connection: Connection) -> int:
    properties = getattr(connection.connection, "server_properties", None) or {}
    major = str(properties.get("version", "0")).partition(".")[0]
    return int(major) if major.isdecimal() else 0


def _lost(exc: BaseException) -> ConnectionError:
    return ConnectionError(f"{type(exc).__name__}: {exc}")
