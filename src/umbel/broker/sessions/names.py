"""One worker per node name.

Commands, revocations and elections name nodes, so two workers with one name would each take the
other's. Whoever starts claims its name before it says a word, and who finds it taken does not
start. Whether a holder is there is asked, not guessed: a name may be held by a worker that was
killed a moment ago.

| broker   | the name is held by                               | its holder is there if          |
| -------- | ------------------------------------------------- | ------------------------------- |
| Redis    | a key with an expiry that a thread renews         | it answers, or renews the key   |
| Redis    | the binding of its control queue (Celery workers) | it answers                      |
| RabbitMQ | its control queue, which belongs to a connection  | it answers                      |
| others   | nothing: their workers live in one process        |                                 |

A free name costs one round trip. A holder that does not answer is waited for: on Redis for as long
as a living one needs to renew its key, then the name is taken over; on RabbitMQ for some seconds,
as the broker may not have noticed yet that a connection is gone. Longer than that the start is not
held up: the control queue is opened when the broker lets go of it.

Only the start asks. Afterwards a name that is gone with the data of a broker is claimed again, and
one that somebody has taken over meanwhile is an error in the log and no reason to end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

import redis
from kombu import Connection
from redis.exceptions import ResponseError, WatchError

from umbel.broker.broadcast.mailboxes import Mailboxes
from umbel.broker.broadcast.reply_lists import table_key, text
from umbel.broker.sessions.connections import driver
from umbel.exceptions import ImproperlyConfigured
from umbel.wire.control import exchange_name, node_queue_name

logger = logging.getLogger("umbel.names")

# Of the key on Redis. The longer it lives, the longer a broker may be away without its loss.
LEASE_S: Final = 10.0
RENEW_S: Final = 1.0
# A holder that has not renewed its key for so long is dead.
SILENCE_S: Final = 2.0
# How long an answer is waited for; the start is delayed by it where the holder is dead.
ASK_S: Final = 1.0
LOOK_S: Final = 0.2
# How long RabbitMQ may take to let go of a queue before the start goes on without it.
PATIENCE_S: Final = 5.0
JOIN_S: Final = 2.0
LOST_JOIN_S: Final = 0.2
_RESOURCE_LOCKED: Final = 405
_JITTER_S: Final = 0.3

# Whether the node answers within so many seconds.
Ask = Callable[[float], bool]
# Wait so long; true when there is no use in waiting any more.
Pause = Callable[[float], bool]


class NodeNameTaken(ImproperlyConfigured):
    """Another worker has this name, and lives."""

    def __init__(self, hostname: str) -> None:
        super().__init__(
            f"a worker with the node name {hostname} is running already: "
            "give this one a name of its own, such as -n w2@%h"
        )


class Name:
    """A node's name where brokers keep nothing."""

    def __init__(self, hostname: str) -> None:
        self.hostname = hostname

    def claim(self, ask: Ask, pause: Pause) -> bool:
        """Take the name; raises `NodeNameTaken`, and connection errors as they are.

        False when it is held by somebody who may be gone, and the start should go on.
        """
        return True

    def release(self, *, lost: bool = False) -> None:
        """Let go of the name; never raises. `lost` if the broker is not there to hear of it."""


def new_token() -> str:
    """By what one life of a worker knows that a name is its own."""
    return f"{os.getpid()}.{uuid.uuid4().hex}"


def name_for(
    connection: Connection, mailboxes: Mailboxes, hostname: str, token: str, *, listens_here: bool
) -> Name:
    """The name of a node on this broker; `listens_here` if this connection has its queue."""
    kind = driver(connection)
    if kind == "redis":
        return LeasedName(connection, mailboxes, hostname, token)
    if kind == "amqp":
        return LockedName(connection, mailboxes, hostname, listens_here=listens_here)
    return Name(hostname)


def is_locked(exc: BaseException) -> bool:
    """Whether the broker says that a queue belongs to another connection."""
    return getattr(exc, "reply_code", None) == _RESOURCE_LOCKED


# -- RabbitMQ --------------------------------------------------------------------------------


class LockedName(Name):
    """A name whose control queue belongs to one connection."""

    def __init__(
        self, connection: Connection, mailboxes: Mailboxes, hostname: str, *, listens_here: bool
    ) -> None:
        super().__init__(hostname)
        self._connection = connection
        self._queue = mailboxes.node_queue(hostname)
        self._declares = listens_here and mailboxes.exclusive

    def claim(self, ask: Ask, pause: Pause) -> bool:
        """See `Name`. Where the queue will be this connection's, it is from now on."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_free():
            if ask(ASK_S):
                raise NodeNameTaken(self.hostname)
            if time.monotonic() >= deadline:
                logger.warning(
                    "the control queue of %s belongs to a connection that does not answer: "
                    "commands are obeyed as soon as the broker has closed it",
                    self.hostname,
                )
                return False
            if pause(LOOK_S):
                return False
        return True

    def _is_free(self) -> bool:
        # A channel of its own: the broker closes it with the refusal.
        channel = self._connection.channel()
        try:
            if self._declares:
                self._queue(channel).queue_declare()
                return True
            found = channel.queue_declare(self._queue.name, passive=True)
        except self._connection.channel_errors as exc:
            if is_locked(exc):
                return False
            if getattr(exc, "reply_code", None) == 404:
                return True
            raise
        else:
            return not found.consumer_count
        finally:
            with contextlib.suppress(Exception):
                channel.close()


# -- Redis -----------------------------------------------------------------------------------


class LeasedName(Name):
    """A name in a key that expires; a thread renews it while the process lives."""

    def __init__(
        self, connection: Connection, mailboxes: Mailboxes, hostname: str, token: str
    ) -> None:
        super().__init__(hostname)
        self._token = token
        queue = node_queue_name(hostname, mailboxes.prefix)
        with contextlib.closing(connection.channel()) as channel:
            self.key = f"{channel.global_keyprefix}umbel.node.{hostname}"
            self._table = table_key(channel, exchange_name(mailboxes.prefix))
            self._member = channel.sep.join(["", "", queue])
            # A connection of its own: the thread uses it when it likes.
            self._pool = channel._get_pool()
        self._client: Any = redis.Redis(connection_pool=self._pool)
        self._held = False
        self._ended = threading.Event()
        self._keeper: threading.Thread | None = None

    def claim(self, ask: Ask, pause: Pause) -> bool:
        """See `Name`; a server that forbids it to us is left alone."""
        try:
            self._held = self._claim(ask, pause)
        except ResponseError as exc:
            logger.warning("whether the name %s is free can not be told: %s", self.hostname, exc)
        except BaseException:
            self._pool.disconnect()
            raise
        if not self._held:
            self._pool.disconnect()
            return False
        self._keeper = threading.Thread(
            target=self._keep, name=f"umbel-name-{self.hostname}", daemon=True
        )
        self._keeper.start()
        return True

    def release(self, *, lost: bool = False) -> None:
        """See `Name`. The thread does it, so that a server which hangs does not hold us up."""
        self._ended.set()
        keeper, self._keeper = self._keeper, None
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join(LOST_JOIN_S if lost else JOIN_S)

    # -- at the start ------------------------------------------------------------------

    def _claim(self, ask: Ask, pause: Pause) -> bool:
        """Whether it is ours now; it is not when there was no use in waiting."""
        with self._client.pipeline(transaction=True) as pipe:
            self._set(pipe, nx=True)
            pipe.sismember(self._table, self._member)
            taken, is_bound = pipe.execute()
        if not taken:
            return self._wait_for_end(ask, pause)
        if is_bound and ask(ASK_S):
            self._delete()
            raise NodeNameTaken(self.hostname)
        return True

    def _wait_for_end(self, ask: Ask, pause: Pause) -> bool:
        """Somebody holds it: take it over, unless there is a sign of life."""
        holder, left_s = self._look()
        began = time.monotonic()
        if holder != self._token and ask(ASK_S):
            raise NodeNameTaken(self.hostname)
        while holder not in (None, self._token) and time.monotonic() - began < SILENCE_S:
            if pause(LOOK_S):
                return False
            found, seen_s = self._look()
            elapsed_s = time.monotonic() - began
            if found != holder:
                break
            if seen_s > left_s - elapsed_s + _JITTER_S:
                raise NodeNameTaken(self.hostname)  # it was renewed
        if not self._take_over(holder):
            raise NodeNameTaken(self.hostname)  # by somebody who waited like us
        return True

    def _look(self) -> tuple[str | None, float]:
        """Whose it is, and for how many seconds."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.get(self.key)
            pipe.pttl(self.key)
            value, left_ms = pipe.execute()
        return None if value is None else text(value), left_ms / 1000

    def _take_over(self, holder: str | None) -> bool:
        with self._client.pipeline(transaction=True) as pipe:
            pipe.watch(self.key)
            value = pipe.get(self.key)
            if value is not None and text(value) != holder:
                return False
            pipe.multi()
            self._set(pipe)
            try:
                pipe.execute()
            except WatchError:
                return False
        return True

    def _set(self, client: Any, *, nx: bool = False) -> Any:
        return client.set(self.key, self._token, nx=nx, px=int(LEASE_S * 1000))

    def _delete(self) -> None:
        """If it is ours."""
        with self._client.pipeline(transaction=True) as pipe, contextlib.suppress(WatchError):
            pipe.watch(self.key)
            if text(pipe.get(self.key) or b"") == self._token:
                pipe.multi()
                pipe.delete(self.key)
                pipe.execute()

    # -- the thread --------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self._renew()
            except Exception as exc:  # noqa: BLE001 - every other part tells of a lost server
                logger.debug("the name %s was not renewed: %s", self.hostname, exc)
        with contextlib.suppress(Exception):
            self._delete()
        with contextlib.suppress(Exception):
            self._pool.disconnect()

    def _renew(self) -> None:
        if not self._held:
            self._regain()
            return
        value = self._client.get(self.key)
        if value is None:
            self._held = False
            self._regain()
        elif text(value) == self._token:
            self._client.pexpire(self.key, int(LEASE_S * 1000))
        else:
            self._held = False
            logger.error(
                "another worker has taken over the node name %s: commands reach both, and events "
                "of both look like those of one; restart one of them with another name",
                self.hostname,
            )

    def _regain(self) -> None:
        if self._set(self._client, nx=True):
            self._held = True
