"""Requests as they go over the wire. What is the same in all of them is packed once."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from hashlib import sha1
from typing import TYPE_CHECKING

from umbel.broker.redis.scripts import POP

if TYPE_CHECKING:
    from umbel.broker.redis.channel import Channel
    from umbel.broker.redis.ledger import Asked

_POP_SHA = sha1(POP.encode(), usedforsecurity=False).hexdigest().encode()


class Requests:
    """What can be asked of the server about these queues."""

    def __init__(self, channel: Channel, names: Sequence[str]) -> None:
        self._notes = channel.key(channel.unacked_key).encode()
        self._index = channel.key(channel.unacked_index_key).encode()
        self._shared = b"1" if channel.shares else b"0"
        self._queues_count = len(names)
        steps = channel.priority_steps
        # The queue and the key of each list, as the script counts them.
        self.lists = [(name, channel.list_key(name, step)) for step in steps for name in names]
        keys = [self._notes, self._index, *(key.encode() for _, key in self.lists)]
        rest = [f',"",{json.dumps(name)}]'.encode() for name in names]
        fixed = [b"%d" % len(keys), *keys, b"%d" % len(names), *rest]
        self._fixed_count = 2 + len(fixed)
        tail = b"".join(map(_bulk, fixed))
        self._by_sha = _bulk(b"EVALSHA") + _bulk(_POP_SHA) + tail
        self._in_full = _bulk(b"EVAL") + _bulk(POP.encode()) + tail

    def pop(self, asked: Asked, prefix: str, begin: int, *, in_full: bool = False) -> bytes:
        """Take messages, beginning with this queue, and acknowledge others."""
        fields = [
            repr(time.time()).encode(),  # used where the server refuses TIME
            prefix.encode(),
            b"%d" % asked.first,
            b"%d" % asked.count,
            b"%d" % begin,
            self._shared,
            *[tag.encode() for tag in asked.acks],
        ]
        head = self._in_full if in_full else self._by_sha
        count = self._fixed_count + len(fields)
        return b"".join((b"*%d\r\n" % count, head, *map(_bulk, fields)))

    def acknowledge(self, tags: Sequence[str]) -> bytes:
        """Two commands, and two answers."""
        encoded = [tag.encode() for tag in tags]
        return _command(b"HDEL", self._notes, *encoded) + _command(b"ZREM", self._index, *encoded)

    def wait(self, begin: int, timeout_s: float) -> bytes:
        """Wait for one message, beginning with this queue."""
        queues = self._queues_count
        keys = [
            self.lists[first + (begin + n) % queues][1].encode()
            for first in range(0, len(self.lists), queues)
            for n in range(queues)
        ]
        return _command(b"BRPOP", *keys, b"%g" % timeout_s)

    def next_after(self, begin: int) -> int:
        """The queue to begin with after one that had its turn."""
        return (begin + 1) % self._queues_count if self._shared == b"1" else 0


def _bulk(part: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(part), part)


def _command(*parts: bytes) -> bytes:
    return b"".join((b"*%d\r\n" % len(parts), *map(_bulk, parts)))
