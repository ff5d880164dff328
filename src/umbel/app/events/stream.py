"""On Redis: events are published and kept, in one round trip.

Pub/sub forgets what it has delivered, and delivers nothing to who is away. A recorder must miss
nothing, so the same events also go to a stream, `event_stream`, one entry for each message:

    XADD umbel.events NOMKSTREAM MAXLEN ~ 20000 * e <the event as JSON, or a list of them>

The first recorder makes the stream (NOMKSTREAM: nobody else does), so where nothing is recorded
nothing is kept. What is beyond `event_stream_max` is dropped by the server, the oldest first; the
recorder sees that as gaps in the sequence numbers.

What monitors get is byte for byte what kombu publishes. A server that refuses the entry, for lack
of a permission, of memory, or because it is too old, is said so once; events go out all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from kombu.utils.json import dumps
from redis.exceptions import ResponseError

logger = logging.getLogger("umbel.events")

FIELD: Final = "e"


def stream_key(channel: Any, name: str) -> str:
    """The key of a stream, after the prefix that the transport puts before all keys."""
    return f"{channel.global_keyprefix}{name}"


class EventStream:
    """Where the events of one process are kept; safe to use from any thread."""

    def __init__(self, name: str, entries_max: int) -> None:
        self.name = name
        self.entries_max = entries_max
        self.refused_count = 0  # messages that the server would not keep

    def takes(self, channel: Any) -> bool:
        """Whether what is published on this channel is kept in a stream."""
        transport = getattr(channel, "connection", None)
        return bool(self.name) and getattr(transport, "driver_type", None) == "redis"

    def publish(
        self,
        channel: Any,
        body: bytes,
        *,
        exchange: str,
        routing_key: str,
        headers: Mapping[str, Any],
        content_type: str,
        content_encoding: str,
        properties: Mapping[str, Any],
    ) -> None:
        """Publish to a fanout exchange and keep it; raises when it was not published."""
        message = channel.prepare_message(
            body,
            priority=0,
            content_type=content_type,
            content_encoding=content_encoding,
            headers=dict(headers),
            properties=dict(properties),
        )
        channel._inplace_augment_message(message, exchange, routing_key)
        payload = _payload(message)
        topics = topics_of(channel, exchange, routing_key)
        with channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
            for topic in topics:
                pipe.publish(topic, payload)
            pipe.xadd(
                stream_key(channel, self.name),
                {FIELD: body},
                maxlen=self.entries_max,
                approximate=True,
                nomkstream=True,
            )
            *published, kept = pipe.execute(raise_on_error=False)
        for answer in published:
            if isinstance(answer, Exception):
                raise answer
        if isinstance(kept, ResponseError):
            self._refused(kept)
        elif isinstance(kept, Exception):
            raise kept

    def _refused(self, exc: Exception) -> None:
        self.refused_count += 1
        if self.refused_count == 1:
            logger.warning(
                "events are published, but not kept for recorders: the server refuses the "
                "stream %s (%s); allow it, or set event_stream to nothing",
                self.name, exc,
            )  # fmt: skip


def _payload(message: dict[str, Any]) -> str:
    """As kombu writes it; in base64, which is nearly all of it, nothing is to be escaped."""
    head = '{"body": "'
    text: str = dumps({**message, "body": ""})
    if message["properties"].get("body_encoding") != "base64" or not text.startswith(head):
        return str(dumps(message))
    return f"{head}{message['body']}{text[len(head) :]}"


def topics_of(channel: Any, exchange: str, routing_key: str) -> list[str]:
    """The channels of pub/sub that kombu publishes to; newer ones may know several."""
    several = getattr(channel, "_get_publish_topics", None)
    if several is not None:
        found: list[str] = several(exchange, routing_key)
        return found
    return [channel._get_publish_topic(exchange, routing_key)]
