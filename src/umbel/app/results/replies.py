"""The thread that consumes a client's reply queue.

It connects, declares the queue, says that it is ready, and hands every message on. A broken
connection is made anew with growing pauses for as long as the backend is open. A message that
cannot be read is logged and dropped: nobody can claim it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kombu import Connection, Consumer, Exchange, Queue
from kombu.message import Message

from umbel.broker.sessions.session import Outage, Session
from umbel.exceptions import BackendError
from umbel.wire.limits import Refusal

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

logger = logging.getLogger(__name__)

Received = Callable[[str | None, Any, str, str], None]

# How often a quiet consumer looks whether it should end; costs next to nothing.
CLOSE_CHECK_S = 1.0


class ReplyConsumer:
    """Consumes one queue until closed."""

    def __init__(self, app: Umbel, name: str, received: Received, shown_url: str) -> None:
        self._app = app
        self._name = name
        self._received = received
        self._shown_url = shown_url
        outage = Outage(logger, f"receive results from {shown_url}")
        self._session = Session(app.connection, self._consume, outage, name="umbel-replies")
        self._session.start()

    def wait_ready(self) -> None:
        """Return when replies would be received; raises `BackendError` if that takes too long."""
        limit_s = (self._app.conf.broker_connection_timeout or 4.0) * 2
        if not self._session.ready.wait(limit_s):
            raise BackendError(
                f"the reply queue of the result backend {self._shown_url!r} was not ready within "
                f"{limit_s} s: is the broker up? ({self._session.failure})"
            )

    def close(self) -> None:
        """End the thread; the queue goes with its consumer."""
        self._session.stop(CLOSE_CHECK_S * 3)

    def _consume(self, connection: Connection, session: Session) -> None:
        channel = connection.channel()
        consumer = Consumer(
            channel, [self._queue()], on_message=self._take, no_ack=True, accept=None
        )
        consumer.consume()
        session.began()
        while not session.stopping.is_set():
            with contextlib.suppress(TimeoutError):
                connection.drain_events(timeout=CLOSE_CHECK_S)

    def _queue(self) -> Queue:
        ttl = self._app.conf.result_expires
        seconds = ttl.total_seconds() if hasattr(ttl, "total_seconds") else ttl
        return Queue(
            self._name,
            Exchange("", type="direct"),
            routing_key=self._name,
            durable=True,
            auto_delete=True,
            expires=float(seconds) if seconds else None,
        )

    def _take(self, message: Message) -> None:
        task_id = message.properties.get("correlation_id")
        try:
            self._received(
                task_id, message.body, message.content_type, message.content_encoding or "utf-8"
            )
        except Refusal as refusal:
            logger.warning("the reply for task %s was dropped: %s", task_id, refusal.text)
        except Exception:
            logger.exception("the reply for task %s could not be taken", task_id)
