"""The messages that a channel has delivered and that are not settled."""

from __future__ import annotations

import json
import logging
from typing import Any

from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.json import dumps
from redis.exceptions import RedisError

from umbel.broker.redis.ledger import Return
from umbel.broker.redis.messages import ListMessage, mark, redelivered
from umbel.broker.server_time import server_time

logger = logging.getLogger("umbel.broker")

# So many messages of others are restored in one call.
RESTORE_MAX = 500


class QoS(kombu_redis.QoS):
    """kombu's, whose settling goes through the fetcher of the channel where there is one."""

    def append(self, message: Any, delivery_tag: str) -> None:
        """Remember a message; what was taken by a script is noted already."""
        if isinstance(message, ListMessage):
            self._delivered[delivery_tag] = message
            return
        info = message.delivery_info
        note = dumps([message._raw, info["exchange"], info["routing_key"]])
        self.channel.note(delivery_tag, note)  # kombu would by the clock of this machine
        virtual.QoS.append(self, message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """The message is done with."""
        self.channel.settle(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """The message goes behind all others of its queue, or away."""
        if not requeue:
            self.ack(delivery_tag)
            return
        message = self._delivered.get(delivery_tag)
        if isinstance(message, ListMessage):
            self._give_back(message, "LPUSH")
        else:
            self.restore_by_tag(delivery_tag, leftmost=True)
            self._delivered.pop(delivery_tag, None)

    def put_back(self, message: Any) -> None:
        """The message becomes the next one of its queue. Of several, the newest goes first."""
        if isinstance(message, ListMessage):
            self._give_back(message, "RPUSH")
        else:
            self.restore_by_tag(message.delivery_tag)
            self._delivered.pop(message.delivery_tag, None)

    def _give_back(self, message: ListMessage, command: str) -> None:
        tag = message.delivery_tag
        self.channel.give_back(Return(tag, message.key, command, redelivered(message.raw)))
        self._delivered.pop(tag, None)

    def restore_unacked(self, client: Any = None) -> None:
        """Give back everything, the newest first."""
        for tag in reversed(list(self._delivered)):
            self.restore_by_tag(tag, client=client)
        self._delivered.clear()

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """At the end of the channel, or of the process: say what is to be said, then the same."""
        channel = self.channel
        if channel.fetcher is not None and channel.connection is not None:
            try:
                channel.flush_acks()
            except (RedisError, OSError) as exc:
                logger.warning("acknowledgements could not be sent: %s", exc)
        super().restore_unacked_once(stderr)

    # -- by tag, from anybody's notes ----------------------------------------------------------

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:
        """Give back a message of which only the note is known, if that is still there."""
        name = tag.decode() if isinstance(tag, bytes) else tag
        self._restore([name], "LPUSH" if leftmost else "RPUSH")

    def restore_visible(self, start: int = 0, num: int | None = None, interval: int = 10) -> None:
        """Give back what nobody has settled or renewed for the visibility time-out."""
        self._vrestore_count += 1
        if (self._vrestore_count - 1) % (interval or 1):
            return
        key, expire_s = self.unacked_mutex_key, self.unacked_mutex_expire
        with self.channel.conn_or_acquire() as client:
            try:
                with kombu_redis.Mutex(client, key, expire_s):
                    self._restore_overdue(start, num)
            except kombu_redis.MutexHeld:
                pass

    def _restore_overdue(self, start: int, num: int | None) -> None:
        ceiling = self._ceiling()
        while True:
            tags = self._overdue(ceiling, start, num)
            done = self._restore(tags, "RPUSH", ceiling)
            if num or not done or len(tags) < RESTORE_MAX:
                return

    def _ceiling(self) -> float:
        """The latest time of a note that is overdue."""
        return server_time(self.channel.plain) - float(self.visibility_timeout)

    def _overdue(self, ceiling: float, start: int, num: int | None) -> list[str]:
        """The newest first: the oldest is to be the next one of its queue."""
        channel, size = self.channel, min(num or RESTORE_MAX, RESTORE_MAX)
        tags = channel.plain.zrange(
            channel.key(self.unacked_index_key), ceiling, 0,
            desc=True, byscore=True, offset=start, num=size,
        )  # fmt: skip
        return [tag.decode() for tag in tags]

    def _restore(self, tags: list[str], command: str, ceiling: float | None = None) -> int:
        """How many notes are gone now."""
        channel = self.channel
        if not tags:
            return 0
        notes = channel.plain.hmget(channel.key(self.unacked_key), tags)
        stale = [tag for tag, note in zip(tags, notes, strict=True) if note is None]
        channel.forget(stale)
        returns: list[Return] = []
        odd: list[str] = []
        for tag, note in zip(tags, notes, strict=True):
            if note is not None:
                way = self._way_back(tag, note, command)
                returns.append(way) if way is not None else odd.append(tag)
        for tag in odd:  # to several queues, or to none any more: kombu's transaction can do that
            self._restore_one(tag, leftmost=command == "LPUSH")
        given = channel.give(returns, "" if ceiling is None else repr(ceiling)) if returns else []
        return len(stale) + len(odd) + sum(given)

    def _way_back(self, tag: str, note: bytes, command: str) -> Return | None:
        channel = self.channel
        try:
            envelope, exchange, routing_key = json.loads(note)
            mark(envelope)
            queues = channel._lookup(exchange, routing_key)
            priority = channel._get_message_priority(envelope, reverse=False)
        except (ValueError, TypeError, KeyError):
            return None
        if len(queues) != 1:
            return None
        key = channel.list_key(queues[0], priority)
        return Return(tag, key, command, json.dumps(envelope).encode())

    def _restore_one(self, tag: str, leftmost: bool) -> None:
        try:
            super().restore_by_tag(tag, leftmost=leftmost)
        except (ValueError, TypeError) as exc:
            logger.error("the note of message %s could not be read and was dropped: %s", tag, exc)
            self.channel.forget([tag])
