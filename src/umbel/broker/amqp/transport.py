"""kombu's AMQP transport, on connections that read in chunks."""

from __future__ import annotations

from typing import Any, Final

from amqp.exceptions import RecoverableConnectionError
from kombu.transport import pyamqp

from umbel.broker.amqp.connection import BufferedConnection


class Transport(pyamqp.Transport):
    """For amqp:// and its aliases."""

    Connection = BufferedConnection
    _wake_fd: int | None = None

    def wake_on(self, fd: int) -> None:
        """Let `drain_events` end its wait when this descriptor is readable."""
        self._wake_fd = fd

    def drain_events(self, connection: Any, **options: Any) -> Any:
        """Handle one event; raises `TimeoutError` if none comes in time, or when woken."""
        if self._wake_fd is not None:
            connection.await_input(self._wake_fd, options.get("timeout"))
            options["timeout"] = 0
        return connection.drain_events(**options)

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Be called when the socket is readable, when something is left over, before it waits."""
        loop.add_reader(connection.sock, self.on_readable, connection, loop)
        loop.add_reader(connection.leftover().fileno(), self.on_leftover, connection)
        loop.on_tick.add(connection.flush_acks)

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        """Not be called any more."""
        loop.on_tick.discard(connection.flush_acks)
        loop.remove_reader(connection.leftover().fileno())
        loop.remove_reader(connection.sock.fileno())

    def on_readable(self, connection: Any, loop: Any) -> None:
        """Read once and handle what is whole."""
        _check(connection)
        connection.on_readable()

    @staticmethod
    def on_leftover(connection: Any) -> None:
        """Handle more of what was read."""
        _check(connection)
        connection.handle()


class SSLTransport(Transport):
    """For amqps://."""

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        if not client.ssl:
            client.ssl = True


def _check(connection: Any) -> None:
    if not connection.connected:
        raise RecoverableConnectionError("Socket was disconnected")


# By kombu's classes, which addresses are resolved to.
OURS: Final[dict[Any, Any]] = {
    pyamqp.Transport: Transport,
    pyamqp.SSLTransport: SSLTransport,
}
