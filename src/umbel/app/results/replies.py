"""The thread that consumes a client's reply queue.

It connects, declares the queue, says that it is ready, and hands every message on. A broken
connection is made anew with growing pauses for as long as the backend is open. A message that
cannot be read is logged and dropped: nobody can claim it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kombu import Consumer, Exchange, Queue
from kombu.message import Message

from umbel.broker.connections import hang_up
from umbel.exceptions import BackendError
from umbel.wire.limits import Refusal

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

logger = logging.getLogger(__name__)

Received = Callable[[str | None, Any, str, str], None]

# How often a quiet consumer looks whether it should end; costs next to nothing.
CLOSE_CHECK_S = 1.0
BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.1, 5.0


class ReplyConsumer:
    """Consumes one queue until closed."""

    def __init__(self, app: Umbel, name: str, received: Received, shown_url: str) -> None:
        self._app = app
        self._name = name
        self._received = received
        self._shown_url = shown_url
        self._ready = threading.Event()
        self._closing = threading.Event()
        self._trouble: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="umbel-replies", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Return when replies would be received; raises `BackendError` if that takes too long."""
        if self._ready.is_set():
            return
        limit_s = (self._app.conf.broker_connection_timeout or 4.0) * 2
        if not self._ready.wait(limit_s):
            raise BackendError(
                f"the reply queue of the result backend {self._shown_url!r} was not ready within "
                f"{limit_s} s: is the broker up? ({self._trouble})"
            )

    def close(self) -> None:
        """End the thread; the queue goes with its consumer."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=CLOSE_CHECK_S * 3)

    def _run(self) -> None:
        pause_s = BACKOFF_FIRST_S
        while not self._closing.is_set():
            try:
                self._consume()
                pause_s = BACKOFF_FIRST_S
            except Exception as exc:  # noqa: BLE001 - whoever waits still waits: begin again
                self._trouble = exc
                self._ready.clear()
                logger.warning("waiting for replies: %s; connecting again in %.1f s", exc, pause_s)
                self._closing.wait(pause_s)
                pause_s = min(pause_s * 2, BACKOFF_LAST_S)

    def _consume(self) -> None:
        connection = self._app.connection()
        connection.connect()
        try:
            channel = connection.channel()
            consumer = Consumer(
                channel, [self._queue()], on_message=self._take, no_ack=True, accept=None
            )
            consumer.consume()
            self._ready.set()
            while not self._closing.is_set():
                with contextlib.suppress(TimeoutError):
                    connection.drain_events(timeout=CLOSE_CHECK_S)
        finally:
            hang_up(connection)

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
