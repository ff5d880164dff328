"""What Celery's nodes tell, on Redis: they publish, and put nothing into a stream.

A thread of its own listens, so that the server never has to wait for a recorder that writes. It
hears all events. Those of our own kind come by the stream as well: they are known by their first
bytes and dropped before anything else is done with them, as they are many. What is left waits until
the recorder takes it, up to a bound; then the oldest are dropped and counted.

What is published while the connection is away is lost: pub/sub keeps nothing. Every recorder hears
all of it, so with several of them the log has duplicates. Where there is no stream everything comes
this way, on both exchanges.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import re
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import redis
from kombu import Connection
from redis.backoff import NoBackoff
from redis.retry import Retry

from umbel.app.events.stream import topics_of
from umbel.broker import base64text
from umbel.broker.sessions.session import Outage, Session
from umbel.recorder.sources.messages import Message
from umbel.wire.events import EVENT_LIMITS, OWN_EXCHANGE
from umbel.wire.jsontext import loads_json
from umbel.wire.limits import Limits, Refusal

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

logger = logging.getLogger("umbel.recorder")

TURN_S: Final = 0.2
CHECK_S: Final = 1.0
UNANSWERED_MAX: Final = 5
JOIN_S: Final = 5.0
WAITING_BYTES_MAX = 32 * 2**20
WAITING_MAX = 20_000
# What Redis wraps around a message has its body in base64, a third longer.
ENVELOPE_LIMITS: Final = Limits(body_bytes=2 * EVENT_LIMITS.body_bytes, depth=40)

# How a message begins, and how an event of our dispatchers does, whatever else is in it
# (`Stamper.make`, compact JSON). Names are at most some hundred bytes long.
BODY: Final = re.compile(rb'\s*\{\s*"body"\s*:\s*"([A-Za-z0-9+/]{0,2000})')
NUMBERED: Final = re.compile(
    rb'\[?\{"type":"[^"\\]*","hostname":"[^"\\]*","pid":\d+,"utcoffset":[-+.\deE]+,'
    rb'(?:"clock":\d+,)?"timestamp":[-+.\deE]+,"seq":\d+,"inc":\d'
)


class Peers:
    """Listens from `start` to `stop`; `take` is for another thread."""

    def __init__(self, app: Umbel, *, unnumbered_only: bool) -> None:
        self._app = app
        self._unnumbered_only = unnumbered_only
        own = [] if unnumbered_only else [OWN_EXCHANGE]
        self._exchanges = [str(app.conf.event_exchange), *own]
        self._waiting: deque[Message] = deque()
        self._bytes = 0
        self._lock = threading.Lock()
        self.dropped_count = 0
        outage = Outage(logger, "receive the events of Celery's nodes")
        self._session = Session(app.connection, self._listen, outage, name="umbel-peers")

    def start(self) -> None:
        """Listen, from the first call on."""
        self._session.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until everything that is published is heard; False when it took too long."""
        return self._session.ready.wait(timeout_s)

    def take(self, count_max: int) -> list[Message]:
        """The oldest of what waits."""
        found: list[Message] = []
        with self._lock:
            while self._waiting and len(found) < count_max:
                one = self._waiting.popleft()
                self._bytes -= len(one.body)
                found.append(one)
        return found

    def stop(self) -> None:
        """Listen no more."""
        self._session.stop(JOIN_S)

    # -- the thread --------------------------------------------------------------------

    def _listen(self, connection: Connection, session: Session) -> None:
        channel = connection.channel()
        channel.async_pool.disconnect()  # of which kombu has opened one to see whether it can
        pool = channel._get_pool()  # also knows how to find the master behind sentinels
        pool.connection_kwargs.update(
            retry=Retry(NoBackoff(), 0), protocol=2, health_check_interval=CHECK_S
        )
        try:
            client: Any = redis.Redis(connection_pool=pool)
            subscription = client.pubsub()
            for exchange in self._exchanges:
                for topic in topics_of(channel, exchange, "*"):
                    subscription.psubscribe(f"{channel.global_keyprefix}{topic}")
            self._receive(subscription, session)
        finally:
            with contextlib.suppress(Exception):
                pool.disconnect()

    def _receive(self, subscription: Any, session: Session) -> None:
        check_at = 0.0
        while not session.stopping.is_set():
            heard = subscription.get_message(timeout=TURN_S)
            kind = heard["type"] if heard is not None else ""
            if kind == "pmessage":
                self._hear(heard["data"])
            elif kind == "psubscribe" and heard["data"] == len(subscription.patterns):
                session.began()
            now = time.monotonic()
            if now >= check_at:
                check_at = now + CHECK_S
                if subscription.health_check_response_counter >= UNANSWERED_MAX:
                    raise ConnectionError("the subscription does not answer")
                subscription.check_health()

    # -- messages ----------------------------------------------------------------------

    def _hear(self, data: bytes) -> None:
        if self._unnumbered_only and is_numbered(data):
            return
        one = opened(data)._replace(unnumbered_only=self._unnumbered_only)
        with self._lock:
            self._waiting.append(one)
            self._bytes += len(one.body)
            while self._bytes > WAITING_BYTES_MAX or len(self._waiting) > WAITING_MAX:
                self._bytes -= len(self._waiting.popleft().body)
                self.dropped_count += 1


def is_numbered(data: bytes) -> bool:
    """Whether a message begins as those of our dispatchers do."""
    body = BODY.match(data)
    if body is None:
        return False
    part = body.group(1)
    return NUMBERED.match(base64.b64decode(part[: len(part) // 4 * 4])) is not None


def opened(data: bytes) -> Message:
    """The message in an envelope; what is none becomes one that will be refused."""
    try:
        envelope = loads_json(data, ENVELOPE_LIMITS)
        body, properties = envelope["body"], envelope["properties"]
        if properties.get("body_encoding") == "base64":
            body = base64text.decode(body)
        kind, encoding = envelope.get("content-type"), envelope.get("content-encoding")
        if isinstance(body, (bytes, str)):
            return Message(body, kind, encoding, envelope.get("headers"), None)
    except (Refusal, KeyError, TypeError, AttributeError, ValueError, binascii.Error):
        pass
    return Message(data, None, None, None, None)
