"""Not waiting for ever for an AMQP broker's answer.

py-amqp waits without a bound, and a bound on reading from the socket is none: the heartbeats of a
broker that does not hear us keep coming. So every wait gets a deadline, which is looked at before
each frame is read. A wait that has a time-out of its own keeps it. `TimeoutError` is raised then,
which counts as a lost connection: an answer that comes later would be taken for another one's.
"""

from __future__ import annotations

import time
from typing import Any

from kombu import Connection
from kombu.transport import pyamqp


class BoundedConnection(pyamqp.Connection):
    """An AMQP connection whose waits end."""

    driver_type = "amqp"  # as kombu's own channels tell it by their connection

    def __init__(self, *args: Any, answer_timeout_s: float, **options: Any) -> None:
        self.answer_timeout_s = answer_timeout_s
        self.answer_by: float | None = None
        super().__init__(*args, **options)

    def wait(self, method: Any, *args: Any, **options: Any) -> Any:
        """Wait for the answer to a method of the connection itself."""
        return _bounded(self, super().wait, method, *args, **options)

    def blocking_read(self, timeout: float | None = None) -> Any:
        """Read a frame; not at all when an answer is overdue."""
        return super().blocking_read(self.patience_s(timeout))

    def patience_s(self, timeout: float | None) -> float | None:
        """How long may be read, where that is asked for `timeout`; raises when that is over."""
        if self.answer_by is None:
            return timeout
        left_s = self.answer_by - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no answer within {self.answer_timeout_s:g} s")
        return left_s if timeout is None else min(timeout, left_s)


class BoundedChannel(pyamqp.Channel):
    """A channel of such a connection."""

    def wait(self, method: Any, *args: Any, **options: Any) -> Any:
        """Wait for the answer to a method of the channel."""
        return _bounded(self.connection, super().wait, method, *args, **options)


BoundedConnection.Channel = BoundedChannel


def bound(connection: Connection, timeout_s: float) -> None:
    """Change how long an open connection waits for each answer."""
    established = getattr(connection, "_connection", None)
    if isinstance(established, BoundedConnection):
        established.answer_timeout_s = timeout_s


def _bounded(established: Any, wait: Any, method: Any, *args: Any, **options: Any) -> Any:
    # Messages are handled while one waits, and may wait for something in turn.
    if established is None or established.answer_by is not None or options.get("timeout"):
        return wait(method, *args, **options)
    established.answer_by = time.monotonic() + established.answer_timeout_s
    try:
        return wait(method, *args, **options)
    finally:
        established.answer_by = None
