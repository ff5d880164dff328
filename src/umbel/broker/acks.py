"""Acknowledgements on Redis, gathered and sent together.

There an acknowledgement is two commands and a wait for their answers, which costs more than
everything else that a worker does for a small task. So the tags are gathered while the loop turns
and sent together before it waits again. The window is free at once.

Tags are valid beyond a connection: those that were gathered when it broke are sent on the next
one. Until then nobody else gets the messages, unless their lease runs out. A process that is killed
in between leaves messages that are delivered again, as if it had been killed a moment earlier.
"""

from __future__ import annotations

from typing import Any

from umbel.broker.leases import CHUNK, lease_s


class Acks:
    """The acknowledgements of one consumer, over all of its connections."""

    def __init__(self) -> None:
        self._channel: Any = None
        self._client: Any = None
        self._tags: list[str] = []

    def attach(self, channel: Any) -> None:
        """Gather what is acknowledged on this channel, where it pays."""
        if lease_s(channel) is None:
            self._channel, self._tags = None, []  # another kind of broker: it delivers again
            return
        self._channel = channel
        self._client = channel._create_client()  # which costs more than what it is used for
        channel.qos.ack = self._gather

    def _gather(self, tag: str) -> None:
        # Right away, where kombu would keep the message until the next one comes.
        self._channel.qos._delivered.pop(tag, None)
        self._tags.append(tag)

    def flush(self) -> None:
        """Send what was gathered; what does not arrive is kept. Raises connection errors."""
        channel, tags = self._channel, self._tags
        while tags and channel is not None:
            chunk = tags[:CHUNK]
            # No transaction: an index without its message is cleaned up by whoever finds it.
            pipe = self._client.pipeline(transaction=False)
            pipe.hdel(channel.unacked_key, *chunk)
            pipe.zrem(channel.unacked_index_key, *chunk)
            pipe.execute()
            del tags[: len(chunk)]

    def __len__(self) -> int:
        return len(self._tags)
