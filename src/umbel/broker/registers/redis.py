"""Registers on Redis: a key with an expiry, written by the script that also sends.

    umbel.election.<id> = <token>, for a day

The script looks, pushes and writes in one step that nothing comes between: no node can win and die
before it has sent. What may fail comes before what binds: if the list can not be pushed to, nothing
is claimed. The same script with the same token finds its own token, and pushes nothing.

A message for an exchange goes to the queues that are bound to it when the claim is made. An
exchange of the type fanout has none on Redis, and can not be sent to in this way.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any, Final

import redis
from kombu import Connection
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from umbel.broker.broadcast.reply_lists import table_key, text
from umbel.broker.registers.claims import (
    TTL_S,
    Claim,
    milliseconds,
    own_connection,
    read,
    register_name,
    unanswered,
    written,
)
from umbel.broker.sessions.connections import hang_up
from umbel.broker.sessions.session import opened
from umbel.broker.tasks.batches import Parcel

# KEYS: the register, lists. ARGV: token, milliseconds, message. Returns the token that is there.
CLAIM: Final = """
local winner = redis.call('GET', KEYS[1])
if winner then return winner end
for i = 2, #KEYS do redis.call('LPUSH', KEYS[i], ARGV[3]) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
"""


class RedisRegister:
    """See `claims.Register`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = own_connection(connection)
        self._opening = threading.Lock()
        self._channel: Any = None

    def claim(
        self, election_id: str, token: str, *, ttl_s: float = TTL_S, parcel: Parcel | None = None
    ) -> Claim:
        """See `claims.Register`."""
        name, kept, ttl_ms = register_name(election_id), written(token), milliseconds(ttl_s)
        with self._asking(name) as channel:
            lists, message = _enveloped(channel, parcel) if parcel is not None else ([], b"")
            keys = [f"{channel.global_keyprefix}{key}" for key in (name, *lists)]
            client = _client(channel)
            winner = text(client.eval(CLAIM, len(keys), *keys, kept, ttl_ms, message))
        won = winner == kept
        return Claim(won, token if won else read(winner), sent=won)

    def winner(self, election_id: str) -> str | None:
        """See `claims.Register`."""
        name = register_name(election_id)
        with self._asking(name) as channel:
            found = _client(channel).get(f"{channel.global_keyprefix}{name}")
        return None if found is None else read(text(found))

    def close(self) -> None:
        """See `claims.Register`."""
        hang_up(self._connection)
        self._channel = None

    @contextlib.contextmanager
    def _asking(self, name: str) -> Iterator[Any]:
        try:
            with self._opening:
                channel = self._channel = self._channel or self._open()
            yield channel
        except (RedisError, OSError, OperationalError, *self._connection.connection_errors) as exc:
            raise unanswered(self._connection, name, exc) from exc

    def _open(self) -> Any:
        channel = opened(self._connection).channel()
        channel.async_pool.disconnect()  # of which kombu has opened one to see whether it can
        # A claim may be asked twice: a connection that was cut is replaced, and that is all the
        # patience there is.
        channel.pool.connection_kwargs["retry"] = Retry(NoBackoff(), 1)
        return channel


def _client(channel: Any) -> Any:
    # kombu's client would put the prefix of keys before some commands' keys only.
    return redis.Redis(connection_pool=channel.pool)


def _enveloped(channel: Any, parcel: Parcel) -> tuple[list[str], str]:
    """The lists that a message goes to, and the text of it, as kombu would push it."""
    properties = dict(parcel.properties)
    message = channel.prepare_message(
        parcel.body,
        priority=properties.pop("priority", None) or 0,
        content_type=parcel.content_type,
        content_encoding=parcel.content_encoding,
        headers=parcel.headers,
        properties=properties,
    )
    channel._inplace_augment_message(message, parcel.exchange, parcel.routing_key)
    step = channel._get_message_priority(message, reverse=False)
    queues = _bound(channel, parcel) if parcel.exchange else [parcel.routing_key]
    return [channel._q_for_pri(queue, step) for queue in queues], dumps(message)


def _bound(channel: Any, parcel: Parcel) -> list[str]:
    found = set()
    for member in _client(channel).smembers(table_key(channel, parcel.exchange)):
        key, pattern, queue = text(member).split(channel.sep)
        if re.match(pattern, parcel.routing_key) if pattern else key == parcel.routing_key:
            found.add(queue)
    if not found:
        raise OperationalError(
            f"no queue is bound to exchange {parcel.exchange!r} with {parcel.routing_key!r}"
        )
    return sorted(found)
