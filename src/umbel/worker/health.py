"""Whether a worker is well, for whoever supervises it.

*Live*: the loop has turned within `PATIENCE_S`; a worker that is not should be restarted. *Ready*:
it takes messages. A worker that waits for its broker is live and not ready.

Two ways to ask, each with a thread of its own so that a stuck loop can be told:

- a file that is renewed every `INTERVAL_S` while the worker is both, and is gone otherwise, so
  that either its existence or its age may be tested; it never exists half-written;
- `/live` and `/ready` on a port of 127.0.0.1: 200 or 503 with a line of JSON. Whatever a client
  sends, or does not, costs at most one of `CONNECTIONS_MAX` places for `CLIENT_TIMEOUT_S`;
  when all are taken the oldest is dropped.

Both are refused with `ImproperlyConfigured` at the start if the place is not to be had.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from umbel.exceptions import ImproperlyConfigured

logger = logging.getLogger("umbel.health")

PATIENCE_S = 60.0
INTERVAL_S = 2.0
ADDRESS = "127.0.0.1"
CONNECTIONS_MAX = 16
CLIENT_TIMEOUT_S = 2.0
REQUEST_BYTES_MAX = 4_096
_MARK = '{"umbel_health"'


class Patient(Protocol):
    """The part of a worker that health is about."""

    def is_live(self, patience_s: float) -> bool:
        """Whether the loop turns."""

    def is_ready(self) -> bool:
        """Whether messages are taken."""


class HealthFile:
    """Keeps a file while the worker is live and ready."""

    def __init__(
        self,
        worker: Patient,
        path: str,
        *,
        interval_s: float = INTERVAL_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._worker = worker
        self._path = Path(path)
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._wake = threading.Event()
        self._stopping = False
        self._failed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Claim the path; what another worker left there is removed."""
        self._claim()
        self._thread = threading.Thread(target=self._run, name="umbel-health-file", daemon=True)
        self._thread.start()

    def renew(self, _worker: Any = None) -> None:
        """Look now rather than at the next interval: for `worker.on_ready`."""
        self._wake.set()

    def stop(self) -> None:
        """Remove the file."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(self._interval_s + 1.0)
            self._thread = None
        self._remove()

    def _claim(self) -> None:
        try:
            self._refuse_foreign()
            self._write()
            self._path.unlink()
        except OSError as exc:
            raise ImproperlyConfigured(
                f"health file {str(self._path)!r} can not be written: "
                f"{exc.strerror or exc}; give a path that can"
            ) from None

    def _refuse_foreign(self) -> None:
        if not self._path.exists():
            return
        if self._path.is_file():
            with self._path.open("rb") as file:
                begin = file.read(len(_MARK))
            if begin in (b"", _MARK.encode()):
                return
        raise ImproperlyConfigured(
            f"health file {str(self._path)!r} exists and is no health file: remove it or give "
            "another path"
        )

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._look()
                self._failed = False
            except OSError as exc:
                if not self._failed:  # told once, until it works again
                    logger.error("health file %s: %s", self._path, exc)
                self._failed = True
            self._wake.wait(self._interval_s)
            self._wake.clear()

    def _look(self) -> None:
        worker = self._worker
        if worker.is_live(self._patience_s) and worker.is_ready():
            self._write()
        else:
            self._remove()

    def _write(self) -> None:
        text = json.dumps({"umbel_health": "ready", "pid": os.getpid(), "at": time.time()})
        descriptor, temporary = tempfile.mkstemp(prefix=".umbel-health-", dir=self._path.parent)
        try:
            os.fchmod(descriptor, 0o644)
            os.write(descriptor, f"{text}\n".encode())
        finally:
            os.close(descriptor)
        try:
            Path(temporary).replace(self._path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


@dataclass(slots=True)
class _Client:
    sock: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class HealthServer:
    """Answers `/live` and `/ready` over HTTP on the loopback interface."""

    def __init__(self, worker: Patient, port: int, *, patience_s: float = PATIENCE_S) -> None:
        self._worker = worker
        self._patience_s = patience_s
        self.port = port
        self._clients: dict[socket.socket, _Client] = {}  # oldest first
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self) -> None:
        """Listen; port 0 takes a free one, which `port` tells afterwards."""
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((ADDRESS, self.port))
            self._listener.listen(CONNECTIONS_MAX)
        except (OSError, OverflowError) as exc:
            self._listener.close()
            reason = exc.strerror if isinstance(exc, OSError) else "it must be below 65536"
            raise ImproperlyConfigured(
                f"health port {self.port} can not be opened: {reason}; choose another"
            ) from None
        self.port = int(self._listener.getsockname()[1])
        self._listener.setblocking(False)
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="umbel-health-port", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and drop every client."""
        if self._thread is None:
            return
        self._stopping = True
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        self._thread.join(CLIENT_TIMEOUT_S)
        self._thread = None

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            logger.exception("the health port stopped answering")
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            self._selector.close()
            for sock in (self._listener, self._waker, self._woken):
                sock.close()

    def _turn(self) -> None:
        # Nobody connected: sleep until somebody is.
        oldest = next(iter(self._clients.values()), None)
        wait_s = None if oldest is None else max(oldest.deadline - time.monotonic(), 0)
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Client):
                self._read(key.data)
        now = time.monotonic()
        for client in list(self._clients.values()):
            if client.deadline <= now:
                self._drop(client)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # gone again, or out of files: the next one may have more luck
        sock.setblocking(False)
        if len(self._clients) >= CONNECTIONS_MAX:
            self._drop(next(iter(self._clients.values())))
        client = _Client(sock, time.monotonic() + CLIENT_TIMEOUT_S)
        self._clients[sock] = client
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _read(self, client: _Client) -> None:
        if client.sock not in self._clients:
            return  # dropped earlier in this turn
        try:
            data = client.sock.recv(REQUEST_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.received += data
        complete = b"\r\n\r\n" in client.received or b"\n\n" in client.received
        if complete or len(client.received) > REQUEST_BYTES_MAX:
            # Short enough for any socket buffer; who does not read it is not waited for.
            with contextlib.suppress(OSError):
                client.sock.send(self._answer(bytes(client.received)))
                client.sock.shutdown(socket.SHUT_WR)
            self._drop(client)
        elif not data:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.sock, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.sock)
        client.sock.close()

    def _answer(self, request: bytes) -> bytes:
        words = request.split(b"\n", 1)[0].split()
        if len(words) < 2 or not words[-1].startswith(b"HTTP/") or len(request) > REQUEST_BYTES_MAX:
            return _response(HTTPStatus.BAD_REQUEST, {"error": "not a request"}, b"GET")
        method, path = words[0], words[1].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "use GET or HEAD"}, method)
        live = self._worker.is_live(self._patience_s)
        if path == b"/live":
            return _response(_status(live), {"live": live}, method)
        if path == b"/ready":
            ready = live and self._worker.is_ready()
            return _response(_status(ready), {"ready": ready}, method)
        return _response(HTTPStatus.NOT_FOUND, {"error": "ask for /live or /ready"}, method)


def _status(well: bool) -> HTTPStatus:
    return HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE


def _response(status: HTTPStatus, body: dict[str, Any], method: bytes) -> bytes:
    content = json.dumps(body).encode() + b"\n"
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    ).encode()
    return head if method == b"HEAD" else head + content
