"""A node that only answers control requests: what a client of remote control talks to in tests.

It speaks the wire format on a real broker, in a thread. `handlers` maps a method to a function of
the request's arguments; a handler that returns `SILENCE` leaves the request unanswered. `hold()`
makes it keep the requests that come, `let_go()` answers them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Self

from kombu import Consumer

from tests.servers import wait_until
from umbel import Umbel
from umbel.app.control.mailbox import mailboxes_for
from umbel.broker.broadcast.mailboxes import bind, take_away
from umbel.broker.broadcast.replies import publish_reply
from umbel.broker.sessions.connections import hang_up
from umbel.wire.control import Request, is_for, read_request

SILENCE = object()
Handler = Callable[[dict[str, Any]], Any]


class Responder:
    """One node; `seen` are the requests that were for it, with their headers."""

    def __init__(
        self, app: Umbel, hostname: str, handlers: Mapping[str, Handler] | None = None
    ) -> None:
        self.app = app
        self.hostname = hostname
        self.handlers: dict[str, Handler] = {
            "ping": lambda _: {"ok": "pong"},
            "echo": lambda arguments: arguments,
            **(handlers or {}),
        }
        self.seen: list[tuple[Request, dict[str, Any]]] = []
        self.raw: list[tuple[bytes, dict[str, Any], str]] = []
        self.published = 0  # replies that went out
        self.dropped = 0  # replies for which nobody was there any more
        self._held: list[Request] | None = None
        self._due: deque[Request] = deque()
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._listening = threading.Event()
        self._channel: Any = None
        self._mailboxes = mailboxes_for(app)
        self._thread = threading.Thread(target=self._run, name=hostname, daemon=True)
        self._thread.start()
        assert self._listening.wait(10), f"{hostname} does not listen"

    def methods(self) -> list[str]:
        return [request.method for request, _ in self.seen]

    def hold(self) -> None:
        self._held = []

    def let_go(self) -> None:
        """Answer what was held; from now on requests are answered as they come."""
        with self._lock:
            held, self._held = self._held or [], None
            for request in held:
                self._answer(request)

    def wait_until_holding(self, count: int = 1) -> None:
        wait_until(lambda: len(self._held or ()) >= count, what=f"{count} requests at the node")

    def close(self) -> None:
        self._closing.set()
        self._thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        connection = self.app.connection(heartbeat=0)
        try:
            connection.connect()
            self._channel = connection.channel()
            queue = bind(self._mailboxes.node_queue(self.hostname), self._channel)
            with Consumer(
                self._channel,
                [queue],
                on_message=self._take,
                no_ack=True,
                accept=None,
                auto_declare=False,
            ):
                while not self._closing.is_set():
                    try:
                        connection.drain_events(timeout=0.02)
                    except TimeoutError:
                        self._listening.set()
                    self._answer_all()
            if connection.transport.driver_type != "amqp":
                take_away(queue)
        finally:
            hang_up(connection)

    def _take(self, message: Any) -> None:
        body = message.body.encode() if isinstance(message.body, str) else bytes(message.body)
        self.raw.append((body, dict(message.headers), message.content_type))
        request = read_request(
            message.body,
            message.content_type,
            message.content_encoding,
            message.headers,
            accept=self.app.accept,
        )
        if not is_for(request, self.hostname):
            return
        with self._lock:
            self.seen.append((request, dict(message.headers)))
            (self._due if self._held is None else self._held).append(request)

    def _answer_all(self) -> None:
        # Not while a message is delivered: py-amqp delivers the next one inside of a publish.
        with self._lock:
            while self._due:
                self._answer(self._due.popleft())

    def _answer(self, request: Request) -> None:
        handler = self.handlers.get(request.method)
        value = handler(request.arguments) if handler else {"error": repr(KeyError(request.method))}
        if value is SILENCE or request.reply_to is None:
            return
        if self.reply(request, value):
            self.published += 1
        else:
            self.dropped += 1

    def reply(self, request: Request, value: Any, **options: Any) -> bool:
        """Send one reply, whether or not one was asked for."""
        prefix = self._mailboxes.prefix
        return publish_reply(self._channel, request, self.hostname, value, prefix=prefix, **options)
