"""Replies on Redis, in a list that vanishes with its reader.

kombu's replies are pushed to a list that a member of a set, the table of bindings, leads to.
Neither list nor member has an expiry: of a client that is killed both stay, and every reply that is
still on its way makes the list again. The publisher may be a Celery worker, which can not be taught
better. So the client takes care beforehand that whatever is left of it expires by itself:

- The list is never empty. One element, the *lease*, keeps it in being, and with it the expiry that
  the client has set; whoever pushes to a list that exists leaves its expiry alone. The client
  renews it while it lives.
- The member is in a table of our own, under an exchange of our own: `umbel.reply.<prefix>.pidbox`.
  Workers reply to whatever exchange the request names. That table has an expiry too, which the
  clients renew; an expiry on the table that kombu's clients share would cut those off. While other
  clients keep the table, each of them sweeps: it removes members whose lists have no lease, and
  what came to such a list after its expiry.

After a client's death nothing is left when the expiries have passed, also if a reply comes between
or after. All of it is plain commands in transactions, no script is needed.

Waiting is not popping, since there is always something to pop. The transaction ends by reading the
length of the list, which makes the server tell this connection when the list changes (client-side
caching, Redis 6 and newer). Looking and asking to be told are one step, so nothing is missed. A
server that does not do this is asked every few milliseconds while somebody waits.
"""

from __future__ import annotations

import binascii
import contextlib
import logging
import time
from typing import Any, Final, NamedTuple

from kombu import Connection
from redis.exceptions import ResponseError

from umbel.broker import base64text
from umbel.broker.broadcast.mailboxes import Mailboxes
from umbel.wire.control import CONTROL_LIMITS, ReplyTo, leased_exchange_name, reply_queue_name
from umbel.wire.jsontext import loads_json
from umbel.wire.limits import UNDECODABLE, Refusal

logger = logging.getLogger(__name__)

LEASE: Final = b"umbel-lease"
# How long the table of bindings outlives the last client that renewed it. A list lives no shorter:
# while a way leads to it, it has to have an expiry.
TABLE_EXPIRES_S: Final = 10.0
# Renewed so often, whether or not anything came.
RENEW_S: Final = 1.0
ASK_S: Final = 0.01
SWEEP_S: Final = 3.0
SWEPT_MAX: Final = 50
# An envelope has its body in base64, a third longer than the body.
_ENVELOPE_BYTES_MAX: Final = CONTROL_LIMITS.body_bytes * 2


class Received(NamedTuple):
    """A message as it came; nothing in it has been looked at."""

    body: Any
    content_type: Any
    content_encoding: Any
    headers: Any


def table_key(channel: Any, exchange: str) -> str:
    """The table of bindings of an exchange."""
    return f"{channel.global_keyprefix}{channel.keyprefix_queue % (exchange,)}"


class ReplyList:
    """The inbox of one client; raises connection errors of redis-py."""

    def __init__(self, connection: Connection, mailboxes: Mailboxes, routing_key: str) -> None:
        channel = connection.channel()
        exchange = leased_exchange_name(mailboxes.prefix)
        queue = reply_queue_name(routing_key, mailboxes.prefix)
        self.reply_to = ReplyTo(exchange, routing_key)
        self._list = f"{channel.global_keyprefix}{queue}"
        self._prefix = channel.global_keyprefix
        self._separator = channel.sep
        self._table = table_key(channel, exchange)
        self._member = channel.sep.join([routing_key, "", queue])
        self._expires_s = max(mailboxes.expires_s or 0, TABLE_EXPIRES_S)
        self._pool, self._connection, self._is_told = _connect(channel)
        self._swept_at = self._looked_at = 0.0
        self._found = self._look()

    def wait(self, timeout_s: float) -> list[Received]:
        """The replies that have come; waits for the first, not longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._found:
            now = time.monotonic()
            if now >= deadline:
                return []
            if self._hears(deadline - now) or self._is_due():
                self._found = self._look()
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        """Take away the list and the way to it."""
        with contextlib.suppress(Exception):
            self._run(("SREM", self._table, self._member), ("DEL", self._list))
            self._sweep()
        with contextlib.suppress(Exception):
            self._pool.disconnect()

    def _hears(self, left_s: float) -> bool:
        """Wait; whether the list may have changed."""
        if not self._is_told:
            time.sleep(min(left_s, ASK_S))
            return True
        due_s = max(self._looked_at + RENEW_S - time.monotonic(), 0)
        if not self._connection.can_read(timeout=min(left_s, due_s)):
            return False
        self._connection.read_response(push_request=True)
        return True

    def _is_due(self) -> bool:
        return time.monotonic() >= self._looked_at + RENEW_S

    def _look(self) -> list[Received]:
        self._looked_at = time.monotonic()
        milliseconds = int(self._expires_s * 1000)
        answers = self._run(
            ("LRANGE", self._list, 0, -1),
            ("DEL", self._list),
            ("RPUSH", self._list, LEASE),
            ("PEXPIRE", self._list, milliseconds),
            ("SADD", self._table, self._member),
            ("PEXPIRE", self._table, int(TABLE_EXPIRES_S * 1000)),
            ("LLEN", self._list),
        )
        if self._looked_at >= self._swept_at + SWEEP_S:
            self._swept_at = self._looked_at
            self._sweep()
        # The newest is at the left.
        return [_opened(item) for item in reversed(answers[0]) if item != LEASE]

    def _sweep(self) -> None:
        """Remove what is left of some clients that are dead."""
        (members,) = self._run(("SRANDMEMBER", self._table, SWEPT_MAX))
        others = [member for member in map(text, members) if member != self._member]
        if not others:
            return
        lists = [f"{self._prefix}{member.rpartition(self._separator)[2]}" for member in others]
        last = self._run(*(("LINDEX", name, -1) for name in lists))
        dead = [number for number, item in enumerate(last) if item != LEASE]
        if dead:
            self._run(
                ("SREM", self._table, *(others[number] for number in dead)),
                ("DEL", *(lists[number] for number in dead)),
            )

    def _run(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Run commands as one transaction."""
        connection = self._connection
        all_commands = [("MULTI",), *commands, ("EXEC",)]
        connection.send_packed_command(connection.pack_commands(all_commands))
        answers, failure = [], None
        for _ in all_commands:
            try:
                answers.append(connection.read_response())
            except ResponseError as exc:  # the others' answers come all the same
                failure = failure or exc
        if failure is not None:
            raise failure
        results: list[Any] = answers[-1]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def _connect(channel: Any) -> tuple[Any, Any, bool]:
    """A connection that is told of changes, or a plain one."""
    for protocol in (3, 2):
        pool = channel._get_pool()  # also knows how to find the master behind sentinels
        pool.connection_kwargs["protocol"] = protocol
        try:
            connection: Any = pool.get_connection()
            if protocol == 3:
                connection.send_command("CLIENT", "TRACKING", "ON", "NOLOOP")
                connection.read_response()
        except ResponseError as exc:
            pool.disconnect()
            if protocol == 2:
                raise
            logger.info("the server does not tell of changes: %s", exc)
        except BaseException:
            pool.disconnect()
            raise
        else:
            return pool, connection, protocol == 3
    raise AssertionError("a plain connection either works or raises")


def _opened(item: bytes) -> Received:
    """What an envelope holds; what is none becomes a message that will be refused."""
    try:
        if len(item) > _ENVELOPE_BYTES_MAX:
            raise Refusal(UNDECODABLE, "the envelope is too big")
        envelope = loads_json(item)
        body, properties = envelope["body"], envelope["properties"]
        if properties.get("body_encoding") == "base64":
            body = base64text.decode(body)
        headers = envelope.get("headers")
        return Received(
            body, envelope.get("content-type"), envelope.get("content-encoding"), headers
        )
    except (Refusal, KeyError, TypeError, AttributeError, ValueError, binascii.Error):
        return Received(item, None, None, None)


def text(value: Any) -> str:
    """What the server gave, as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
