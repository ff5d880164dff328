"""How control messages reach a worker's panel.

`Pidbox` listens on the consumer's own connection, and the loop reads it: for workers whose loop is
free while tasks run. `GreenPidbox` has a connection and a loop of its own, in a greenlet next to
those of tasks; `ThreadPidbox` is the same in a thread, for the solo pool, whose loop stands still
while a task runs. Both reconnect by themselves, with growing pauses.

After a command that failed the ear is changed: a new channel begins to listen, then the old one is
closed. So whatever a command did to its channel does not outlive it, and no message falls into a
gap. On Redis both ears may hear a message; it is obeyed once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from kombu import Connection, Consumer, Queue
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

from umbel.app.control.mailbox import mailboxes_for
from umbel.broker.broadcast.mailboxes import Mailboxes
from umbel.broker.broadcast.replies import publish_reply
from umbel.broker.sessions.connections import driver
from umbel.broker.sessions.names import is_locked
from umbel.broker.sessions.session import Outage, Session
from umbel.broker.tasks.task_channel import task_channel
from umbel.cluster.backoff import Backoff
from umbel.wire.control import Request, Written
from umbel.wire.signing import REPLY

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.control.panel import Panel

logger = logging.getLogger("umbel.control")

RETRY = Backoff(0.1, 3.0)
TURN_S = 0.5
CHECK_S = 2.0
START_S, JOIN_S, LOST_JOIN_S = 3.0, 1.0, 0.2
ANSWER_S = 5.0
# How long a message that one ear heard may take to reach the next one.
ECHO_S = 5.0


class Ear:
    """One channel that hears the queue of this node."""

    def __init__(
        self, connection: Connection, queue: Queue, on_message: Any, on_rubbish: Any
    ) -> None:
        self.channel = connection.channel()
        self._exchange = queue.exchange.name
        self._on_rubbish = on_rubbish
        task_channel(self.channel).leave_compressed()
        self._consumer = Consumer(
            self.channel, [queue], on_message=on_message, no_ack=True, accept=None
        )
        self._consumer.consume()
        self._subscribes = queue.name in getattr(self.channel, "active_fanout_queues", ())
        if self._subscribes:
            self.channel.handlers["LISTEN"] = self._read
            self._subscribe()

    def _subscribe(self) -> None:
        """Now, and confirmed: kombu would subscribe when its loop turns."""
        client = self.channel.subclient
        if client.connection is None:
            client.connection = client.connection_pool.get_connection()
        self.channel._subscribe()
        if client.parse_response(block=False, timeout=ANSWER_S) is None:
            raise ConnectionError(f"the subscription was not confirmed within {ANSWER_S:g} s")

    def drain(self) -> None:
        """Hand on what was sent to this ear so far, where closing would forget it."""
        client = self.channel.subclient if self._subscribes else None
        if client is None or client.connection is None:
            return
        # All of it comes before the answer to a question.
        client.connection.send_command("PING", client.HEALTH_CHECK_MESSAGE, check_health=False)
        client.health_check_response_counter += 1
        deadline = time.monotonic() + ANSWER_S
        while client.health_check_response_counter > 0:
            if time.monotonic() >= deadline:
                raise ConnectionError("the control subscription does not answer")
            self._read_one(client)

    def _read(self) -> bool:
        """Hand on what can be read; a bad word does not keep the next from being heard."""
        client = self.channel.subclient
        self._read_one(client)
        while client.connection is not None and client.connection.can_read(timeout=0):
            self._read_one(client)
        return True

    def _read_one(self, client: Any) -> None:
        try:
            words = client.parse_response(block=False, timeout=ANSWER_S)
        except self.channel.connection_errors:
            self.channel._in_listen = None
            raise
        if not words:
            return
        heard = self.channel._handle_message(client, words)
        if bytes_to_str(heard["type"]).endswith("message"):
            try:
                message = loads(bytes_to_str(heard["data"]))
                self.channel._deliver_fanout_message(message, self._exchange)
            except Exception as exc:  # noqa: BLE001 - nothing that is sent to us ends this
                self._on_rubbish(exc)

    def check(self) -> None:
        """Ask a subscription that may be gone without a word."""
        if self._subscribes:
            subscription = self.channel.subclient
            if subscription.health_check_response_counter >= 2:
                raise ConnectionError("the control subscription does not answer")
            subscription.check_health()

    def close(self) -> None:
        """Listen no more; harmless on a broken connection."""
        with contextlib.suppress(Exception):
            self._consumer.cancel()
        with contextlib.suppress(Exception):
            self.channel.close()

    def make_way(self) -> None:
        """Close for another ear that hears the same queue already, on the same connection."""
        name = self._consumer.queues[0].name
        # Transports without a server know one listener per queue and connection, and delete the
        # queue with its last one on the channel.
        callbacks = getattr(self.channel.connection, "_callbacks", None)
        following = callbacks.get(name) if callbacks is not None else None
        getattr(self.channel, "auto_delete_queues", set()).discard(name)
        self.close()
        if callbacks is not None and following is not None:
            callbacks[name] = following


class Pidbox:
    """Control messages on the consumer's connection."""

    def __init__(self, app: Umbel, hostname: str, panel: Panel) -> None:
        self.app = app
        self.hostname = hostname
        self.panel = panel
        self.mailboxes: Mailboxes = mailboxes_for(app)
        self.resets = 0
        self._ear: Ear | None = None
        self._connection: Connection | None = None
        self._echoes: Counter[tuple[Any, ...]] = Counter()
        self._echoes_until = 0.0
        self._draining = False
        self._reset_due = False
        self._opened_at = time.monotonic()
        self._keeps = False  # messages that were sent before it was opened

    def start(self, connection: Connection) -> None:
        """Listen on this connection; whatever is published from now on is heard."""
        self._connection = connection
        self._keeps = driver(connection) == "amqp" and not self.mailboxes.exclusive
        self._opened_at = time.monotonic()
        self._ear = self._new_ear(connection)

    def stop(self, *, lost: bool = False) -> None:
        """Listen no more; a lost connection takes the ear with it."""
        ear, self._ear = self._ear, None
        self._connection = None
        if ear is not None and not lost:
            ear.close()

    def waited_s(self) -> float | None:
        """How long a message that is handled now can have waited unread; None: nobody knows."""
        looked_at, now = self._looked_at(), time.monotonic()
        if looked_at >= self._opened_at:
            return now - looked_at
        return None if self._keeps else now - self._opened_at

    def _looked_at(self) -> float:
        """When everything had been read that had come before, for the last time."""
        return self.panel.looked_at

    def reset(self) -> None:
        """Change the ear without missing a word."""
        if self._connection is None or self._ear is None:
            return
        self.resets += 1
        old = self._ear
        self._ear = self._new_ear(self._connection)
        self._echoes.clear()
        self._echoes_until = time.monotonic() + ECHO_S
        self._draining = True
        try:
            old.drain()
        finally:
            self._draining = False
            old.make_way()

    def _new_ear(self, connection: Connection) -> Ear:
        queue = self.mailboxes.node_queue(self.hostname)
        return Ear(connection, queue, self._on_message, self.panel.unreadable)

    def _on_message(self, message: Any) -> None:
        if self._is_echo(message):
            return
        if not self.panel.handle(message, self._answer) and not self._draining:
            self._on_failure()

    def _on_failure(self) -> None:
        """Change the ear, soon: more messages may come while the broker is waited for."""
        if not self._reset_due:
            self._reset_due = True
            self.panel.soon(self._reset_now)

    def _reset_now(self) -> None:
        self._reset_due = False
        self.reset()

    def _is_echo(self, message: Any) -> bool:
        """Whether the ear before this one has heard it; only just after a change."""
        if not self._draining and (not self._echoes or time.monotonic() > self._echoes_until):
            return False
        headers = message.headers if isinstance(message.headers, dict) else {}
        key = (bytes(_encoded(message.body)), repr(headers.get("clock")),
               repr(headers.get("expires")))  # fmt: skip
        if self._draining:
            self._echoes[key] += 1
            return False
        if self._echoes[key] > 0:
            self._echoes[key] -= 1
            return True
        return False

    def _answer(self, request: Request, value: Any) -> None:
        if request.reply_to is None or self._ear is None:
            return
        publish_reply(
            self._ear.channel,
            request,
            self.hostname,
            value,
            prefix=self.mailboxes.prefix,
            serializer=self.app.conf.task_serializer,
            clock=self.app.clock.value,
            signed=self._signed,
        )

    def _signed(self, reply: Written, exchange: str) -> Written:
        return self.panel.trust.signed(reply, exchange, REPLY)


class OwnPidbox(Pidbox):
    """Control messages on a connection and a loop of its own."""

    def __init__(self, app: Umbel, hostname: str, panel: Panel) -> None:
        super().__init__(app, hostname, panel)
        self.locked = False  # the node's queue belongs to another connection
        self._has_listened = False
        self._tried = threading.Event()  # to listen, with or without success
        self._session: Session | None = None
        self._turns = (self._opened_at, self._opened_at)  # when the last two began

    def start(self, connection: Connection) -> None:
        """Begin, called on the loop; `connection` is the consumer's and is left alone."""
        self.panel.carry_over(blind=self._is_blind(connection))
        if self._session is not None:
            return
        self._tried.clear()
        self._session = Session(
            self.app.connection, self._use, Outage(logger, "receive control messages", RETRY),
            name=f"umbel-control-{self.hostname}", on_failure=self._note_failure,
        )  # fmt: skip
        self._session.start()
        self._tried.wait(START_S)

    def _is_blind(self, connection: Connection) -> bool:
        """Whether the loop waits for the broker alone."""
        transport = connection.transport
        return not (transport.implements.asynchronous or hasattr(transport, "wake_on"))

    def stop(self, *, lost: bool = False) -> None:
        """End, and wait for it; not for long when the broker is not there."""
        session, self._session = self._session, None
        if session is not None:
            session.stop(LOST_JOIN_S if lost else JOIN_S)

    def reset(self) -> None:
        """The loop changes the ear at its next turn."""
        self.resets += 1

    _on_failure = reset

    def _looked_at(self) -> float:
        return self._turns[0]

    def _use(self, connection: Connection, session: Session) -> None:
        try:
            super().start(connection)
            self.locked, self._has_listened = False, True
            session.began()
            self._tried.set()
            self._listen(connection, session)
        finally:
            super().stop(lost=True)

    def _note_failure(self, exc: Exception) -> bool:
        self.locked = is_locked(exc)
        if self.locked:
            self._tried.set()
        # Why a worker that starts is locked out is for the step of the worker to say.
        return self._has_listened or not self.locked

    def _listen(self, connection: Connection, session: Session) -> None:
        seen, check_at = self.resets, time.monotonic() + CHECK_S
        while not session.stopping.is_set():
            self._turns = (self._turns[1], time.monotonic())
            with contextlib.suppress(TimeoutError):
                connection.drain_events(timeout=TURN_S)
            if seen != self.resets:
                count, seen = self.resets, self.resets
                super().reset()
                self.resets = seen = count
            if time.monotonic() >= check_at:
                check_at = time.monotonic() + CHECK_S
                if connection.supports_heartbeats and connection.heartbeat:
                    connection.heartbeat_check()
                if self._ear is not None:
                    self._ear.check()


class GreenPidbox(OwnPidbox):
    """For pools of greenlets, where a thread of the patched process is one."""

    def _is_blind(self, connection: Connection) -> bool:
        return not hasattr(connection.transport, "wake_on")


class ThreadPidbox(OwnPidbox):
    """For the solo pool, whose loop stands still while a task runs."""


def pidbox_for(pool: Any) -> type[Pidbox]:
    """The kind that fits a pool."""
    if pool.green:
        return GreenPidbox
    return ThreadPidbox if pool.blocks_loop else Pidbox


def _encoded(body: Any) -> bytes:
    return body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)
