"""A port that answers the questions of supervisors and monitors over HTTP.

It has a thread of its own, so that a stuck loop can be told from a busy one. One connection is one
question: GET or HEAD of a path that it knows, nothing else. Whatever a client sends, or does not,
costs at most one of `CONNECTIONS_MAX` places for `CLIENT_TIMEOUT_S`, and for `ANSWER_TIMEOUT_S`
while it reads what it asked for; when all are taken the oldest is dropped. An answer that fails is
a 500, logged once per path until it works again. While the process has no files left nothing is
accepted for `PAUSE_S` at a time; that is logged once until it works again.

A place that is not to be had is refused with `ImproperlyConfigured` at the start.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from umbel.exceptions import ImproperlyConfigured

logger = logging.getLogger("umbel.endpoint")

LOOPBACK = "127.0.0.1"
CONNECTIONS_MAX = 16
CLIENT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 10.0
REQUEST_BYTES_MAX = 4_096
PAUSE_S = 1.0
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(slots=True, frozen=True)
class Answer:
    """What a client gets."""

    status: HTTPStatus
    content: bytes
    content_type: str


Routes = Mapping[str, Callable[[], Answer]]


def json_answer(status: HTTPStatus, body: dict[str, Any]) -> Answer:
    """A line of JSON."""
    return Answer(status, json.dumps(body).encode() + b"\n", "application/json")


@dataclass(slots=True)
class _Client:
    sock: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    unsent: memoryview | None = None


class Endpoint:
    """Answers at one address and port; `what` it is about is in messages."""

    def __init__(self, what: str, port: int, routes: Routes, address: str = LOOPBACK) -> None:
        self._what = what
        self._routes = routes
        self._failed: set[str] = set()
        self.address = address
        self.port = port
        self._clients: dict[socket.socket, _Client] = {}  # oldest first
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._accepts_again_at: float | None = None
        self._is_out_of_files = False

    def start(self) -> None:
        """Listen; port 0 takes a free one, which `port` tells afterwards."""
        self._listener = self._listen()
        self.port = int(self._listener.getsockname()[1])
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        name = f"umbel-{self._what}-port"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
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

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.address, self.port))
            listener.listen(CONNECTIONS_MAX)
            listener.setblocking(False)
        except (OSError, OverflowError, UnicodeError) as exc:
            listener.close()
            reason = exc.strerror if isinstance(exc, OSError) else exc
            place = "" if self.address == LOOPBACK else f" of {self.address}"
            raise ImproperlyConfigured(
                f"{self._what} port {self.port}{place} can not be opened: {reason}; choose another"
            ) from None
        return listener

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            logger.exception("the %s port stopped answering", self._what)
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            self._selector.close()
            for sock in (self._listener, self._waker, self._woken):
                sock.close()

    def _turn(self) -> None:
        # Nobody connected: sleep until somebody is.
        deadlines = [client.deadline for client in self._clients.values()]
        if self._accepts_again_at is not None:
            deadlines.append(self._accepts_again_at)
        deadline = min(deadlines, default=None)
        wait_s = None if deadline is None else max(deadline - time.monotonic(), 0)
        for key, _ in self._selector.select(wait_s):
            client = key.data
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(client, _Client) and client.sock in self._clients:
                self._read(client) if client.unsent is None else self._write(client)
        now = time.monotonic()
        if self._accepts_again_at is not None and self._accepts_again_at <= now:
            self._accepts_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for client in list(self._clients.values()):
            if client.deadline <= now:
                self._drop(client)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as exc:
            if exc.errno in _NO_FILES:
                self._pause(exc)
            return  # or gone again
        self._is_out_of_files = False
        sock.setblocking(False)
        if len(self._clients) >= CONNECTIONS_MAX:
            self._drop(next(iter(self._clients.values())))
        client = _Client(sock, time.monotonic() + CLIENT_TIMEOUT_S)
        self._clients[sock] = client
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _pause(self, exc: OSError) -> None:
        """Who waits stays readable: without a pause this thread would turn without end."""
        if not self._is_out_of_files:
            logger.error("the %s port accepts nobody for now: %s", self._what, exc.strerror)
        self._is_out_of_files = True
        self._selector.unregister(self._listener)
        self._accepts_again_at = time.monotonic() + PAUSE_S
        if self._clients:
            self._drop(next(iter(self._clients.values())))

    def _read(self, client: _Client) -> None:
        try:
            data = client.sock.recv(REQUEST_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.received += data
        complete = b"\r\n\r\n" in client.received or b"\n\n" in client.received
        if complete or len(client.received) > REQUEST_BYTES_MAX:
            client.unsent = memoryview(self._answer(bytes(client.received)))
            client.deadline = time.monotonic() + ANSWER_TIMEOUT_S
            self._selector.modify(client.sock, selectors.EVENT_WRITE, client)
            self._write(client)
        elif not data:
            self._drop(client)

    def _write(self, client: _Client) -> None:
        assert client.unsent is not None, "there is an answer before it is written"
        try:
            sent = client.sock.send(client.unsent)
            client.unsent = client.unsent[sent:]
            if client.unsent:
                return
            client.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return
        except OSError:
            pass  # gone: nobody waits for the rest
        self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.sock, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.sock)
        client.sock.close()

    def _answer(self, request: bytes) -> bytes:
        words = request.split(b"\n", 1)[0].split()
        if len(words) < 2 or not words[-1].startswith(b"HTTP/") or len(request) > REQUEST_BYTES_MAX:
            return _response(json_answer(HTTPStatus.BAD_REQUEST, {"error": "not a request"}))
        if words[0] not in (b"GET", b"HEAD"):
            wrong = {"error": "use GET or HEAD"}
            return _response(json_answer(HTTPStatus.METHOD_NOT_ALLOWED, wrong))
        path = words[1].split(b"?", 1)[0].decode("latin-1")
        return _response(self._ask(path), head_only=words[0] == b"HEAD")

    def _ask(self, path: str) -> Answer:
        ask = self._routes.get(path)
        if ask is None:
            known = {"error": f"ask for {' or '.join(self._routes)}"}
            return json_answer(HTTPStatus.NOT_FOUND, known)
        try:
            answer = ask()
        except Exception:
            if path not in self._failed:
                logger.exception("%s could not be answered", path)
            self._failed.add(path)
            return json_answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "see the worker's log"})
        self._failed.discard(path)
        return answer


def _response(answer: Answer, *, head_only: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.content)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    ).encode()
    return head if head_only else head + answer.content
