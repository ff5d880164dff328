"""Redis: the stream that dispatchers feed, shared by the recorders as one consumer group.

Each recorder is a consumer. What it has read is *pending* for it until it is acknowledged, also
over a lost connection and a restart of the server, so tokens stay valid: a token is the id of an
entry. After every new connection it reads its own pending entries first, without those that it
still holds: the answer that brought them may have been lost with the connection.

A recorder that dies leaves its pending entries behind. A living one looks for pending entries of
its own every `ALIVE_S`, whether it can use any or not, and the server knows when it last did; to
wait for new ones does not count on servers before 7.2. Who was silent for `CLAIM_AFTER_S` is taken
for dead: its entries go to whoever claims them first, then it is removed. If it was only paused,
some events are written twice.

What all have acknowledged is taken out of the stream, unless others read it too (a group of their
own): it would stay in the server's memory up to the bound of the stream.

The server drops what is beyond that bound, recorded or not. A pending entry that was
dropped is acknowledged and counted; its events show as gaps in the sequence numbers.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import redis
from kombu import Connection
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from umbel.app.events.stream import FIELD, stream_key
from umbel.broker.sessions.connections import hang_up
from umbel.broker.sessions.session import opening
from umbel.recorder.sources.messages import Message
from umbel.recorder.sources.peers import Peers
from umbel.wire.events import CONTENT_ENCODING, CONTENT_TYPE, encode

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

logger = logging.getLogger("umbel.recorder")

GROUP: Final = "umbel.recorders"
# Longer leaves the entries of a dead recorder lying; shorter takes a slow one for dead.
CLAIM_AFTER_S: Final = 15.0
ALIVE_S: Final = 2.0
BLOCK_S: Final = 0.5
# So much is read in one answer, as far as the size of entries can be foreseen.
ANSWER_BYTES: Final = 4 * 2**20
ANSWER_ENTRIES_MAX: Final = 500
ACK_COUNT_MAX: Final = 1_000
TRIM_S: Final = 2.0
PEERS_MAX: Final = 200
GONE: Final = ("NOGROUP", "no such key")
NOWHERE: Final = "18446744073709551615-18446744073709551614"  # behind every entry

# KEYS: the stream. ARGV: group, consumer. It may come back to life between a look and the removal,
# and what is pending for it then would be gone.
REMOVE: Final = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
"""


class StreamSource:
    """See the module's text, and `Source`."""

    is_exhausted = False  # there is no bound on what may be pending

    def __init__(self, app: Umbel, name: str, *, claim_after_s: float = CLAIM_AFTER_S) -> None:
        self._app = app
        self._name = name
        self._claim_after_s = claim_after_s
        self._stream = app.events.stream.name
        self._peers = Peers(app, unnumbered_only=bool(self._stream))
        self._connection: Connection | None = None
        self._client: Any = None
        self._key = ""
        self._held: set[bytes] = set()  # given to the recorder, not acknowledged
        self._done: list[bytes] = []  # to be acknowledged at the server
        self._own_after: bytes | None = None  # own pending entries behind this one come first
        self._entry_bytes = 10_000.0
        self._alive_at = self._claim_at = self._trim_at = 0.0
        self._dropped_count = 0

    @property
    def dropped_count(self) -> int:
        """Entries that the stream dropped before they were written, and messages of peers."""
        return self._dropped_count + self._peers.dropped_count

    # -- life --------------------------------------------------------------------------

    def open(self) -> None:
        """Connect, and make the stream and the group where they are missing."""
        self.hang_up()
        connection = self._app.connection()
        try:
            with opening(connection):
                channel = connection.channel()
                channel.async_pool.disconnect()  # of which kombu has opened one to see if it can
                pool = channel._get_pool()  # also knows how to find the master behind sentinels
                # Nothing may be asked twice behind our back: an answer that is lost has entries.
                pool.connection_kwargs.update(retry=Retry(NoBackoff(), 0), protocol=2)
                self._client = redis.Redis(connection_pool=pool)
                self._key = stream_key(channel, self._stream)
                self._connection = connection
                with self._asking():
                    self._make_group()
                    self._flush()
        except BaseException as exc:
            self.hang_up()
            if isinstance(exc, Exception):  # a broker on its way down can raise anything
                raise _lost(exc) from exc
            raise
        self._own_after = b"0-0"
        self._claim_at = time.monotonic()
        self._peers.start()

    def hang_up(self) -> None:
        """The connection is lost; tokens stay valid."""
        connection, self._connection = self._connection, None
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                client.connection_pool.disconnect()
        if connection is not None:
            hang_up(connection, lost=True)

    def close(self) -> None:
        """Leave; a consumer with nothing pending is removed."""
        self._peers.stop()
        if self._client is not None and self._stream:
            with contextlib.suppress(ConnectionError), self._asking():
                self._flush()
                self._remove(self._name)
        self.hang_up()

    def _make_group(self) -> None:
        if not self._stream:
            return
        try:
            self._client.xgroup_create(self._key, GROUP, "0", mkstream=True)
        except ResponseError as exc:
            if not str(exc).startswith("BUSYGROUP"):
                raise

    # -- taking ------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[Message]:
        """See `Source`."""
        found = self._peers.take(PEERS_MAX)
        if not self._stream:
            return found or self._wait_for_peers(timeout_s)
        with self._asking():
            self._flush()
            self._show_life()
            if self._own_after is not None:
                found += self._own()
            elif time.monotonic() >= self._claim_at:
                found += self._claimed()
            if not found or self._own_after is None:
                found += self._new(0.0 if found else min(timeout_s, BLOCK_S))
        return found

    def idle(self) -> None:
        """See `Source`."""
        if self._client is not None and self._stream:
            with self._asking():
                self._show_life()

    def lag(self) -> int | None:
        """Entries that nobody has read yet; older servers do not tell."""
        if self._client is None or not self._stream:
            return None
        with self._asking():
            for group in self._client.xinfo_groups(self._key):
                if _text(group["name"]) == GROUP:
                    lag = group.get("lag")
                    return None if lag is None else int(lag)
        return None

    def _wait_for_peers(self, timeout_s: float) -> list[Message]:
        with self._asking():
            self._client.ping()
        deadline = time.monotonic() + timeout_s
        while not (found := self._peers.take(PEERS_MAX)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _new(self, block_s: float) -> list[Message]:
        count = max(1, min(ANSWER_ENTRIES_MAX, int(ANSWER_BYTES / self._entry_bytes)))
        return self._messages(self._read(">", count, max(1, int(block_s * 1000))))

    def _own(self) -> list[Message]:
        """The next of our pending entries that are not held."""
        entries = self._read(_text(self._own_after), ANSWER_ENTRIES_MAX, None)
        self._own_after = entries[-1][0] if entries else None
        return self._messages(entries)

    def _show_life(self) -> None:
        now = time.monotonic()
        if now >= self._alive_at:
            self._alive_at = now + min(ALIVE_S, self._claim_after_s / 4)
            self._read(NOWHERE, 1, None)

    def _read(self, after: str, count: int, block_ms: int | None) -> list[Any]:
        answer = self._client.xreadgroup(
            GROUP, self._name, {self._key: after}, count=count, block=block_ms
        )
        return answer[0][1] if answer else []

    def _messages(self, entries: Iterable[Any]) -> list[Message]:
        found: list[Message] = []
        for entry in entries:
            id_, fields = entry if entry is not None else (None, None)
            if id_ is None or id_ in self._held:
                continue
            if not fields:  # the bound of the stream has dropped it
                self._dropped_count += 1
                self._done.append(id_)
                continue
            self._held.add(id_)
            found.append(_message(id_, fields))
            self._entry_bytes += (len(found[-1].body) - self._entry_bytes) / 16
        return found

    # -- done --------------------------------------------------------------------------

    def acknowledge(self, tokens: Iterable[Any]) -> None:
        """See `Source`; what can not be told to the server now is told later."""
        self._done += [token for token in tokens if token is not None]
        if self._client is not None:
            with self._asking():
                self._flush()
                self._trim()

    def _flush(self) -> None:
        while self._done:
            part = self._done[:ACK_COUNT_MAX]
            self._client.xack(self._key, GROUP, *part)
            self._held.difference_update(part)
            del self._done[: len(part)]

    def _trim(self) -> None:
        """Take out of the stream what is written, now and then."""
        now = time.monotonic()
        groups = self._client.xinfo_groups(self._key) if now >= self._trim_at else []
        if len(groups) != 1:
            return
        self._trim_at = now + TRIM_S
        first = groups[0]["last-delivered-id"]
        if groups[0]["pending"]:
            first = self._client.xpending(self._key, GROUP)["min"] or "0-0"
        self._client.xtrim(self._key, minid=_text(first), approximate=False)

    # -- others ------------------------------------------------------------------------

    def _claimed(self) -> list[Message]:
        """Entries that dead recorders left behind, some at a time."""
        self._claim_at = time.monotonic() + max(self._claim_after_s / 3, BLOCK_S)
        found: list[Message] = []
        for consumer in self._client.xinfo_consumers(self._key, GROUP):
            name, silent_ms = _text(consumer["name"]), int(consumer["idle"])
            if name == self._name or silent_ms < self._claim_after_s * 1000:
                continue
            if consumer["pending"]:
                found += self._claim(name)
                self._claim_at = 0.0  # there may be more
            elif self._remove(name):
                logger.info("recorder %s is gone: it was silent for %d s", name, silent_ms / 1000)
            if found:
                break
        return found

    def _claim(self, name: str) -> list[Message]:
        pending = self._client.xpending_range(
            self._key, GROUP, "-", "+", ANSWER_ENTRIES_MAX, consumername=name
        )
        ids = [one["message_id"] for one in pending]
        if not ids:
            return []
        idle_ms = int(self._claim_after_s * 1000)
        entries = self._client.xclaim(self._key, GROUP, self._name, idle_ms, ids)
        logger.info("took over %d entries of recorder %s", len(entries), name)
        return self._messages(entries)

    def _remove(self, name: str) -> bool:
        try:
            return bool(self._client.eval(REMOVE, 1, self._key, GROUP, name))
        except ResponseError as exc:
            logger.debug("consumer %s was not removed: %s", name, exc)
            return False

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Raise what means a lost connection as `ConnectionError`."""
        if self._client is None:
            raise ConnectionError("there is no connection")
        try:
            yield
        except ResponseError as exc:
            if not str(exc).startswith(GONE):
                raise _lost(exc) from exc
            # Somebody has deleted the stream; what was in it is gone.
            logger.warning("the stream %s was deleted: made anew", self._key)
            self._held.clear()
            self._done.clear()
            with contextlib.suppress(RedisError):
                self._make_group()
            raise _lost(exc) from exc
        except (RedisError, OSError) as exc:
            raise _lost(exc) from exc


def _message(id_: bytes, fields: Any) -> Message:
    body = fields.get(FIELD.encode())
    if body is None:  # nobody of us has put it there
        shown = {_text(key): _text(value) for key, value in fields.items()}
        return Message(encode(shown), None, None, None, id_)
    return Message(body, CONTENT_TYPE, CONTENT_ENCODING, None, id_)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _lost(exc: BaseException) -> ConnectionError:
    return ConnectionError(f"{type(exc).__name__}: {exc}")
