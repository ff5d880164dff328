"""py-amqp's connection, which reads in chunks.

`drain_events` handles one event, as it always did: who waits for an answer gets it before anything
behind it is handled. `handle` is for event loops, and handles what is there for a moment.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import Any, Final

from amqp.exceptions import RecoverableConnectionError, UnexpectedFrame
from amqp.method_framing import frame_writer

from umbel.broker.amqp.bounded import NOT_WRITTEN, BoundedConnection
from umbel.broker.amqp.channel import BufferedChannel
from umbel.broker.amqp.frames import DELIVER, Event, Reader
from umbel.broker.amqp.sockets import patience_of_socket, transport_for

# Before the handshake has said what holds: the first frame tells a lot.
FRAME_BYTES_FIRST: Final = 2**17
# So much is handled before the loop looks at something else.
EVENTS_MAX, HANDLE_S = 64, 0.005


class BufferedConnection(BoundedConnection):
    """A connection on a socket that is read in chunks."""

    Channel = BufferedChannel

    def __init__(self, *args: Any, **options: Any) -> None:
        self.reader = Reader(FRAME_BYTES_FIRST)
        self._leftover: Leftover | None = None
        # Before anything is waited for.
        self.gathering: set[BufferedChannel] = set()
        super().__init__(*args, frame_handler=_no_handler, frame_writer=frame_writer, **options)

    def Transport(  # noqa: N802 - py-amqp's name
        self, host: str, connect_timeout: Any, ssl: Any, read: Any, write: Any, **options: Any
    ) -> Any:
        """Made when the connection is opened; nothing of an earlier one is left."""
        self.reader = Reader(max(FRAME_BYTES_FIRST, self.frame_max))
        options |= {"connect_timeout": connect_timeout, "read_timeout": read}
        options["socket_settings"] = {
            **patience_of_socket(self.answer_timeout_s),
            **(options.get("socket_settings") or {}),
        }
        return transport_for(host, ssl=ssl, write_timeout=write, **options)

    def _on_tune(self, *args: Any, **options: Any) -> None:
        super()._on_tune(*args, **options)
        self.reader.frame_max = self.frame_max

    # -- reading -------------------------------------------------------------------------

    def drain_events(self, timeout: float | None = None) -> None:
        """Handle one event; raises `TimeoutError` if none comes in time."""
        event = self.reader.read()
        if event is None:
            event = self._await(timeout)
        try:
            self._dispatch(event)
        finally:
            self._tell_leftover()

    def blocking_read(self, timeout: float | None = None) -> bool:
        """For callers of py-amqp's API: an event is handled when it returns."""
        self.drain_events(timeout)
        return True

    def _await(self, timeout: float | None) -> Event:
        """The next event, read from the socket."""
        if self.gathering:
            self.flush_acks()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._fill(timeout)
            event = self.reader.read()
            if event is not None:
                return event
            if deadline is not None:
                # Heartbeats and parts of messages do not prolong it.
                timeout = max(0.0, deadline - time.monotonic())

    def await_input(self, wake_fd: int, timeout: float | None) -> None:
        """Wait until there is something to handle or to read, or `wake_fd` is readable."""
        transport = self._transport
        if self.reader.ready or transport is None:
            return
        self.flush_acks()
        pending = getattr(transport.sock, "pending", int)  # of TLS, which no poller sees
        if not pending():
            # Looked up at each call: gevent may have put its own there.
            select.select([transport.sock, wake_fd], [], [], self.patience_s(timeout))

    def _fill(self, timeout: float | None) -> None:
        transport = self._transport
        if transport is None:
            raise RecoverableConnectionError("connection already closed")
        self.reader.feed(transport.receive(self.reader.wanted, self.patience_s(timeout)))
        self.bytes_recv += 1  # which py-amqp counts as a sign of life

    def _dispatch(self, event: Event) -> None:
        channels = self.channels
        if channels is None:
            raise RecoverableConnectionError("Connection already closed")
        # Here too: what comes behind it is not read while it takes long to handle what was.
        self.bytes_recv += 1
        channel = channels.get(event.channel_id)
        if channel is None:
            raise UnexpectedFrame(
                f"method {event.signature} for channel {event.channel_id}, which is not open"
            )
        if event.signature == DELIVER and channel is not self:
            channel.deliver(event)
        else:
            channel.dispatch_method(event.signature, event.payload, event.message)

    def on_readable(self) -> None:
        """For event loops, when the socket is readable: read it, and handle for a moment."""
        if not self.reader.ready:
            with contextlib.suppress(TimeoutError):
                self._fill(0)
        self.handle()

    def handle(self) -> None:
        """Handle what was read, for a moment; the rest makes the leftover readable."""
        read, dispatch = self.reader.read, self._dispatch
        until = time.monotonic() + HANDLE_S
        try:
            for _ in range(EVENTS_MAX):
                event = read()
                if event is None:
                    break
                dispatch(event)
                if time.monotonic() > until:
                    break
        finally:
            self._tell_leftover()

    def has_input(self) -> bool:
        """Whether something has come, without waiting; it is read, and not handled."""
        reader, transport = self.reader, self._transport
        if not reader.ready and not (transport is not None and transport.is_quiet()):
            with contextlib.suppress(TimeoutError):
                self._fill(0)
                self._tell_leftover()
        return reader.ready

    # -- event loops ---------------------------------------------------------------------

    def leftover(self) -> Leftover:
        """A descriptor that is readable while there is something to handle that was read."""
        if self._leftover is None:
            self._leftover = Leftover()
            self._tell_leftover()
        return self._leftover

    def _tell_leftover(self) -> None:
        if self._leftover is not None:
            self._leftover.tell(self.reader.ready)

    # -- writing -------------------------------------------------------------------------

    def write_frames(self, frames: bytes) -> None:
        """Write whole frames."""
        transport = self._transport
        if transport is None:
            raise RecoverableConnectionError("connection already closed")
        try:
            transport.write(frames)
        except NOT_WRITTEN as exc:
            raise self.not_written(exc) from exc
        self.bytes_sent += 1

    def flush_acks(self) -> None:
        """Write the acks that the channels have gathered."""
        for channel in list(self.gathering):
            channel.flush_acks()

    # -- the end -------------------------------------------------------------------------

    def close(self, *args: Any, **options: Any) -> Any:
        """Say good-bye, after what was settled."""
        try:
            if self._transport is not None:
                self.flush_acks()
        except OSError:
            self.collect()
            raise
        return super().close(*args, **options)

    def collect(self) -> None:
        """Let everything go; acks that were not written belong to nobody."""
        self.gathering.clear()
        leftover, self._leftover = self._leftover, None
        if leftover is not None:
            leftover.close()
        super().collect()


class Leftover:
    """A pair of sockets that stands in for bytes which a poller can not see any more."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._told = False

    def fileno(self) -> int:
        """For pollers."""
        return self._near.fileno()

    def tell(self, something: bool) -> None:
        """Be readable, or not."""
        if something is not self._told:
            self._told = something
            if something:
                self._far.send(b"\0")
            else:
                self._near.recv(1)

    def close(self) -> None:
        """Let both go."""
        self._near.close()
        self._far.close()


def _no_handler(_connection: Any, _callback: Any) -> Any:
    """In the place of py-amqp's, which is given frame by frame."""
    return None
