"""RabbitMQ takes no messages: what a process knows of that.

A RabbitMQ that is short of memory or disk space stops reading from connections that publish, and
says so on each of them with its first message (`connection.blocked`). What was written there before
lies in the buffers of the sockets. It arrives when the broker goes on, unless the connection ends
first.

An `Alarm` is shared by the connections that publish to one broker, so that each alarm is logged
once, and its end too. It is over when a connection hears so, or when a message is confirmed.
"""

from __future__ import annotations

import logging
import threading
import time

from umbel.broker.sessions.errors import ConnectionBlocked

logger = logging.getLogger("umbel.broker")


class Alarm:
    """Whether the broker takes messages, as far as this process knows; for all threads."""

    def __init__(self) -> None:
        self.reason: str | None = None  # while it does not
        self._since = 0.0
        self._lock = threading.Lock()

    def begin(self, where: str, reason: str, patience_s: float) -> None:
        """A connection is blocked."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason, self._since = reason, time.monotonic()
        logger.warning(
            "RabbitMQ at %s takes no messages: %s. Senders wait up to %g s"
            " (broker_blocked_connection_timeout)",
            where, reason, patience_s,
        )  # fmt: skip

    def end(self, where: str) -> None:
        """A connection is not blocked any more, or a message was confirmed."""
        with self._lock:
            if self.reason is None:
                return
            self.reason, lasted_s = None, time.monotonic() - self._since
        logger.info("RabbitMQ at %s takes messages again, after %.1f s", where, lasted_s)


def blocked(where: str, reason: str, patience_s: float, *, written: bool) -> ConnectionBlocked:
    """The error for a sender; `written`: the message may be in the buffers of the connection."""
    fate = "may still arrive when it does" if written else "was not sent"
    return ConnectionBlocked(
        f"RabbitMQ at {where} takes no messages: {reason}. Waited {patience_s:g} s"
        f" (broker_blocked_connection_timeout) for it to go on; the message {fate}. See the alarms"
        " of the broker: free memory or disk space there, consume what is queued, or raise"
        " vm_memory_high_watermark or lower disk_free_limit"
    )
