"""Not waiting for ever for an AMQP broker: its answers, its confirms, the end of an alarm.

py-amqp waits without a bound, and a bound on reading from the socket is none: the heartbeats of a
broker that does not hear us keep coming. So every wait gets a deadline, which is looked at before
each frame is read. A wait that has a time-out of its own keeps it. `TimeoutError` is raised then,
which counts as a lost connection: an answer that comes later would be taken for another one's.

A broker that has blocked the connection (`blocking`) is waited for up to `blocked_timeout_s`; then
`ConnectionBlocked` is raised. Only what is published with confirms waits like that.

*Confirms* go by number (`confirms`): each message that is published after `confirm_select` has one.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from typing import Any, Final

from amqp import spec
from amqp.exceptions import RecoverableConnectionError
from kombu import Connection
from kombu.transport import pyamqp

from umbel.broker.amqp import blocking
from umbel.broker.amqp.confirms import Confirms
from umbel.broker.sessions.errors import Nacked
from umbel.broker.tasks.task_channel import AmqpTaskChannel

BLOCKED_TIMEOUT_S: Final = 10.0
# The other side has taken nothing for as long as the socket was told to wait.
NOT_WRITTEN: Final = (BlockingIOError, TimeoutError, ssl.SSLWantWriteError)


class BoundedConnection(pyamqp.Connection):
    """An AMQP connection whose waits end."""

    driver_type = "amqp"  # as kombu's own channels tell it by their connection
    blocked: str | None = None  # why the broker takes no messages on it
    blocked_timeout_s = BLOCKED_TIMEOUT_S

    def __init__(self, *args: Any, answer_timeout_s: float, **options: Any) -> None:
        self.answer_timeout_s = answer_timeout_s
        self.answer_by: float | None = None
        self.alarm = blocking.Alarm()
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

    # -- alarms --------------------------------------------------------------------------

    def dispatch_method(self, method_sig: Any, payload: Any, content: Any) -> Any:
        """Note what the broker says of the connection; py-amqp leaves the reason out."""
        if method_sig == spec.Connection.Blocked:
            size = int.from_bytes(payload[4:5])
            self.blocked = bytes(payload[5 : 5 + size]).decode("utf-8", "replace") or "no reason"
        elif method_sig == spec.Connection.Unblocked:
            self.blocked = None
        return super().dispatch_method(method_sig, payload, content)

    def await_unblocked(self, by: float, *, written: bool) -> None:
        """Wait until the broker takes messages; raises `ConnectionBlocked` at the time `by`.

        `written`: a message of whoever waits is under way.
        """
        while self.blocked is not None:
            self.alarm.begin(self.host, self.blocked, self.blocked_timeout_s)
            left_s = by - time.monotonic()
            if left_s <= 0:
                raise self._blocked(written)
            with contextlib.suppress(TimeoutError):
                self.drain_events(timeout=left_s)
        self.alarm.end(self.host)

    def not_written(self, exc: OSError) -> Exception:
        """A part of a frame was not taken: end the connection. Gives the reason, as an error."""
        with contextlib.suppress(Exception):
            while self.blocked is None:
                self.drain_events(timeout=0)
        self.collect()
        if self.blocked is None:
            return TimeoutError(f"the broker took nothing for too long: {exc}")
        self.alarm.begin(self.host, self.blocked, self.blocked_timeout_s)
        return self._blocked(written=True)

    def _blocked(self, written: bool) -> Exception:
        reason = self.blocked or ""
        return blocking.blocked(self.host, reason, self.blocked_timeout_s, written=written)


class BoundedChannel(AmqpTaskChannel, pyamqp.Channel):
    """A channel of such a connection."""

    def __init__(self, connection: Any, *args: Any, **options: Any) -> None:
        self.confirms = Confirms()
        super().__init__(connection, *args, **options)

    def wait(self, method: Any, *args: Any, **options: Any) -> Any:
        """Wait for the answer to a method of the channel."""
        return _bounded(self.connection, super().wait, method, *args, **options)

    # -- publishing ----------------------------------------------------------------------

    def _basic_publish(self, *args: Any, **options: Any) -> Any:
        """Publish a message, without waiting for its confirm."""
        done = super()._basic_publish(*args, **options)
        self.confirms.published()
        return done

    basic_publish = _basic_publish

    def basic_publish_confirm(self, *args: Any, **options: Any) -> None:
        """Publish a message and wait until the broker has it."""
        timeout = options.pop("confirm_timeout", None) or options.get("timeout")
        self.confirm_select_once()
        self.await_unblocked()
        with self.confirms.watched() as nacked:
            self._basic_publish(*args, **options)
            number = self.confirms.last
            self.await_confirms(number, number, timeout)
            if number in nacked:
                raise Nacked((0,), 1, 1)

    def await_unblocked(self) -> None:
        """Wait until the broker takes messages on this connection, if it is known not to."""
        connection = self.live()
        if connection.blocked is not None:
            by = time.monotonic() + connection.blocked_timeout_s
            connection.await_unblocked(by, written=False)

    # -- confirms ------------------------------------------------------------------------

    def confirm_select(self, nowait: bool = False) -> Any:
        """Let the broker confirm what is published from now on."""
        done = super().confirm_select(nowait)
        self._confirm_selected = True
        self.confirms.begin()
        return done

    def confirm_select_once(self) -> None:
        """The same, unless that was done before."""
        if not self._confirm_selected:
            self.confirm_select()

    def await_confirms(self, first: int, last: int, timeout: float | None = None) -> None:
        """Wait until all of these are confirmed or refused."""
        connection = self.live()
        patience_s = connection.answer_timeout_s if timeout is None else timeout
        began = time.monotonic()
        unblocked_by, deadline = began + connection.blocked_timeout_s, began + patience_s
        while not self.confirms.settled(first, last):
            if connection.blocked is not None:
                connection.await_unblocked(unblocked_by, written=True)
                deadline = time.monotonic() + patience_s
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"the broker has not confirmed within {patience_s:g} s")
            try:
                connection.drain_events(timeout=left_s)
            except TimeoutError:
                continue
            if self.connection is None:
                raise RecoverableConnectionError("connection already closed")
        if connection.alarm.reason is not None:
            connection.alarm.end(connection.host)

    def _on_basic_ack(self, delivery_tag: int, multiple: bool) -> None:
        self.confirms.confirmed(delivery_tag, multiple)
        super()._on_basic_ack(delivery_tag, multiple)

    def _on_basic_nack(self, delivery_tag: int, multiple: bool) -> None:
        self.confirms.refused(delivery_tag, multiple)
        super()._on_basic_nack(delivery_tag, multiple)

    # -- the end -------------------------------------------------------------------------

    def live(self, otherwise: str = "connection already closed") -> Any:
        """The connection, if it is still there."""
        connection = self.connection
        if connection is None:
            raise RecoverableConnectionError(otherwise)
        return connection

    def _on_close(self, *args: Any) -> None:
        self.confirms.end()  # py-amqp opens it again, and its numbers begin anew
        super()._on_close(*args)

    def collect(self) -> None:
        """Let everything go."""
        self.confirms.end()
        super().collect()


BoundedConnection.Channel = BoundedChannel


def bound(connection: Connection, timeout_s: float) -> None:
    """Change how long an open connection waits for each answer."""
    established = getattr(connection, "_connection", None)
    if isinstance(established, BoundedConnection):
        established.answer_timeout_s = timeout_s


def share_alarm(connection: Connection, alarm: blocking.Alarm, timeout_s: float) -> None:
    """Share an alarm between open connections, and set how long they wait for its end."""
    established = getattr(connection, "_connection", None)
    if isinstance(established, BoundedConnection):
        established.alarm, established.blocked_timeout_s = alarm, timeout_s


def _bounded(established: Any, wait: Any, method: Any, *args: Any, **options: Any) -> Any:
    # Messages are handled while one waits, and may wait for something in turn.
    if established is None or established.answer_by is not None or options.get("timeout"):
        return wait(method, *args, **options)
    established.answer_by = time.monotonic() + established.answer_timeout_s
    try:
        return wait(method, *args, **options)
    finally:
        established.answer_by = None
