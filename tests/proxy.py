"""A TCP proxy whose connections can go half-open: one direction is read and thrown away.

`swallow` does that to the connections that exist; later ones pass. Both ends stay connected and
hear nothing of it: not even the end of the other side goes through a swallowed direction. A
silence like that is what a lost route, or a firewall that forgot a connection, looks like.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from types import TracebackType
from typing import Self

CHUNK = 65_536


class _Way:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, *, to_server: bool) -> None:
        self.source = source
        self.sink = sink
        self.to_server = to_server
        self.swallowed = False
        self.swallowed_bytes = 0


class Proxy:
    """Listens on `port` and passes everything on to `target_port`, until told otherwise."""

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ways: dict[socket.socket, _Way] = {}
        self._refuses = False
        self._lock = threading.Lock()
        self._wake_r, self._wake_w = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def swallow(self, *, to_server: bool) -> int:
        """Swallow one direction of every connection there is; how many those are."""
        with self._lock:
            ways = [way for way in self._ways.values() if way.to_server == to_server]
            for way in ways:
                way.swallowed = True
        return len(ways)

    def refuse(self, refused: bool) -> None:
        """End connections as soon as they are made, or let them pass again."""
        self._refuses = refused

    def cut(self) -> None:
        """End every connection there is, on both sides."""
        with self._lock:
            sockets = list(self._ways)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        os.write(self._wake_w, b"\0")
        self._thread.join(10)
        self._selector.close()
        for one in (self._listener, *self._ways):
            one.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- on its thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._wake_r:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._pass_on(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self._refuses:
            client.close()
            return
        try:
            server = socket.create_connection(self._target, timeout=10)
        except OSError:
            client.close()
            return
        with self._lock:
            self._ways[client] = _Way(client, server, to_server=True)
            self._ways[server] = _Way(server, client, to_server=False)
        for one in (client, server):
            one.settimeout(10)
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> None:
        way = self._ways.get(source)
        if way is None:
            return  # it ended with its other side, in this very turn
        try:
            data = self._read(source)
        except OSError:
            data = b""
        if way.swallowed:
            way.swallowed_bytes += len(data)
            if not data:
                self._selector.unregister(source)
            return
        if data:
            with contextlib.suppress(OSError):
                way.sink.sendall(data)
                return
        self._end(way)

    def _read(self, source: socket.socket) -> bytes:
        return source.recv(CHUNK)

    def _end(self, way: _Way) -> None:
        """Nothing comes from there any more: tell the other side, which may not know it yet."""
        other = self._ways[way.sink]
        with self._lock:
            for one in (way, other):
                self._ways.pop(one.source, None)
        for one in (way.source, way.sink):
            with contextlib.suppress(KeyError):
                self._selector.unregister(one)
            one.close()
