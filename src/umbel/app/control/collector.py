"""The thread that receives replies, for all calls of a process that wait at a time.

It opens an inbox, says that it is ready, and hands over whatever comes. It runs while calls need it
and a little longer, so that the next call finds the inbox open; then it closes the inbox and ends,
and nothing of the client is left on the broker.

A connection that breaks is opened again, with the same address, so that replies still find their
way; what was sent in between is lost. If that fails too, the thread ends and whoever waits is told
why. `use` and the decision to end exclude each other: who was let in is served.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kombu import Connection

from umbel.broker.broadcast.mailboxes import Mailboxes
from umbel.broker.broadcast.replies import Inbox, Received, open_inbox
from umbel.broker.sessions.connections import hang_up
from umbel.broker.sessions.session import opened
from umbel.wire.control import ReplyTo

logger = logging.getLogger(__name__)

# How long an inbox stays open without need.
LINGER_S = 2.0
# How often the thread looks whether it is still needed.
CHECK_S = 0.1
REOPEN_S = 0.1
CLOSE_TIMEOUT_S = 5.0


class Collector:
    """Receives replies until nobody needs it any more."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        mailboxes: Mailboxes,
        routing_key: str,
        deliver: Callable[[Received], None],
        on_end: Callable[[Collector, BaseException], None],
    ) -> None:
        self._connect = connect
        self._mailboxes = mailboxes
        self._routing_key = routing_key
        self._deliver = deliver
        self._on_end = on_end
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._users = 0
        self._idle_since = time.monotonic()
        self._closing = self._over = self._ended = False
        self._reply_to: ReplyTo | None = None  # while replies would be received
        self._trouble: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="umbel-control", daemon=True)
        self._thread.start()

    def use(self) -> bool:
        """Need it until `release`; False if it has ended."""
        with self._lock:
            if self._over or self._closing:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """Need it no longer."""
        with self._lock:
            self._users -= 1
            self._idle_since = time.monotonic()

    def ready(self, timeout_s: float) -> ReplyTo:
        """Where replies go, as soon as they would be received; raises what prevents it."""
        with self._changed:
            self._changed.wait_for(lambda: self._reply_to or self._ended, timeout_s)
            if self._reply_to is not None:
                return self._reply_to
            raise self._trouble or TimeoutError(f"there was no answer within {timeout_s:g} s")

    def close(self) -> None:
        """End now; whoever waits is told."""
        with self._lock:
            self._closing = True
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        trouble: BaseException = ConnectionError("the application was closed")
        try:
            while not self._is_over():
                self._receive()
        except Exception as exc:  # noqa: BLE001 - told to whoever waits
            trouble = exc
        with self._changed:
            self._over = self._ended = True
            self._trouble, self._reply_to = trouble, None
            self._changed.notify_all()
        self._on_end(self, trouble)

    def _is_over(self) -> bool:
        """Decide whether this is the end; if so nobody is let in any more."""
        with self._lock:
            idle_s = time.monotonic() - self._idle_since
            self._over = self._closing or (not self._users and idle_s > LINGER_S)
            return self._over

    def _receive(self) -> None:
        """Receive until the end; an inbox that can not be opened raises, a break only returns."""
        connection = opened(self._connect())
        lost = False
        try:
            inbox = open_inbox(connection, self._mailboxes, self._routing_key)
            self._announce(inbox.reply_to)
            try:
                self._hand_over(inbox)
            except Exception as exc:  # noqa: BLE001 - every transport has its own errors
                lost = True
                self._announce(None)
                logger.warning("the connection for replies broke, opening another: %s", exc)
                time.sleep(REOPEN_S)
            else:
                inbox.close()
        finally:
            hang_up(connection, lost=lost)

    def _hand_over(self, inbox: Inbox) -> None:
        while not self._is_over():
            for received in inbox.wait(CHECK_S):
                self._deliver(received)

    def _announce(self, reply_to: ReplyTo | None) -> None:
        with self._changed:
            self._reply_to = reply_to
            self._changed.notify_all()
