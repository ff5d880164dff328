"""The sockets of AMQP connections, read in chunks and written by one thread at a time.

py-amqp's transports open, secure and close them. Reading is another: `receive` gives what is there,
waits at most as long as it is told for something to be there, and leaves the time-out of the socket
alone where it can, which another thread may be writing to at that moment. It can not with TLS, nor
where gevent has put its own sockets in the place of the system's.
"""

from __future__ import annotations

import _socket
import errno
import select
import socket
import threading
from typing import Any, Final

from amqp.transport import SSLTransport, TCPTransport

# More than fits into most socket buffers is not waited for; less would mean more calls.
CHUNK_BYTES: Final = 2**16
CHUNK_BYTES_MAX: Final = 2**20
_NOTHING_YET: Final = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR, errno.ENOENT}


class _Chunks:
    """What both have in common."""

    sock: Any
    connected: bool
    _write: Any
    _lock: threading.Lock | None = None
    _poller: Any = None  # where the socket is the system's

    def _set_up(self) -> None:
        self._lock = threading.Lock()  # made here, after gevent has patched it
        if isinstance(self.sock, _socket.socket):
            self._poller = select.poll()
            self._poller.register(self.sock.fileno(), select.POLLIN)

    def is_quiet(self) -> bool:
        """Whether there is surely nothing to receive; cheaper than to try."""
        try:
            return self._poller is not None and not self._poller.poll(0)
        except RuntimeError:  # another thread waits with it: what comes is its own to read
            return True

    def write(self, data: Any) -> None:
        """Write all of it, not mixed with what other threads write."""
        assert self._lock is not None
        with self._lock:
            super().write(data)  # type: ignore[misc]

    def receive(self, wanted: int, timeout_s: float | None) -> bytes:
        """Something that came, of about `wanted` bytes; raises `TimeoutError` if nothing did."""
        if self.sock is None:
            raise OSError(errno.ENOTCONN, "the connection is closed")
        size = min(max(CHUNK_BYTES, wanted), CHUNK_BYTES_MAX)
        try:
            data = self._receive(size, timeout_s)
        except TimeoutError as exc:
            if exc.errno != errno.ETIMEDOUT:
                raise
            self.connected = False  # the kernel has given up
            raise ConnectionAbortedError("the broker took nothing for too long") from exc
        except OSError as exc:
            if exc.errno in _NOTHING_YET or "timed out" in str(exc):
                raise TimeoutError("nothing came") from None
            self.connected = False
            raise
        if not data:
            self.connected = False
            raise OSError("Server unexpectedly closed connection")
        return data

    def _receive(self, size: int, timeout_s: float | None) -> bytes:
        raise NotImplementedError


class TCPChunks(_Chunks, TCPTransport):
    """A plain socket."""

    def _setup_transport(self) -> None:
        super()._setup_transport()
        self._set_up()

    def _receive(self, size: int, timeout_s: float | None) -> bytes:
        sock = self.sock
        if self._poller is None:  # gevent's
            with self.having_timeout(timeout_s):
                return bytes(sock.recv(size))
        if timeout_s is None:
            return bytes(sock.recv(size))
        if timeout_s > 0 and not self._poller.poll(timeout_s * 1000):
            raise TimeoutError("nothing came")
        return bytes(sock.recv(size, socket.MSG_DONTWAIT))


class TLSChunks(_Chunks, SSLTransport):
    """A socket with TLS, which may have read more than it was asked for."""

    def _setup_transport(self) -> None:
        super()._setup_transport()
        self._set_up()

    def _receive(self, size: int, timeout_s: float | None) -> bytes:
        sock = self.sock
        with self.having_timeout(timeout_s):
            data = bytes(sock.recv(size))
        # All of it: a poller does not see what is left in there.
        parts = [data]
        while data and sock.pending():
            data = bytes(sock.recv(sock.pending()))
            parts.append(data)
        return b"".join(parts)


def patience_of_socket(seconds: float) -> dict[int, int]:
    """For how long the other side may take nothing before the kernel gives the connection up.

    py-amqp says a second. A broker that is busy, or short of memory, takes nothing for longer, and
    whoever sends much meanwhile would lose the connection, and what was under way on it.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux has it
    return {} if option is None else {option: int(seconds * 1000)}


def transport_for(host: str, *, ssl: Any = False, **options: Any) -> TCPChunks | TLSChunks:
    """An unconnected transport, as `amqp.transport.Transport`."""
    kind = TLSChunks if ssl else TCPChunks
    return kind(host, ssl=ssl, **options)
