"""Publishing many messages in one go.

On Redis a batch for plain queues is one pipeline of pushes: one round trip, all or nothing
(MULTI), in the order given. On other transports the messages follow each other on one channel.
A batch that fails half-way may have been published in part; the caller sends it again and the
duplicates carry the same task ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kombu import Producer
from kombu.utils.json import dumps


class Parcel(NamedTuple):
    """One message with its address."""

    body: bytes
    headers: dict[str, Any]
    properties: dict[str, Any]
    content_type: str
    content_encoding: str
    exchange: str
    routing_key: str


def publish(producer: Producer, parcels: Sequence[Parcel], chunk: int = 500) -> None:
    """Publish all `parcels` in order."""
    channel = producer.channel
    plain = all(parcel.exchange == "" for parcel in parcels)
    if plain and getattr(channel.connection, "driver_type", None) == "redis":
        for start in range(0, len(parcels), chunk):
            _push(channel, parcels[start : start + chunk])
        return
    for parcel in parcels:
        publish_one(producer, parcel)


def publish_one(producer: Producer, parcel: Parcel) -> None:
    """Publish one message."""
    properties = dict(parcel.properties)
    if "expiration" in properties:
        # kombu takes seconds here and cuts them to milliseconds: half a one against its rounding.
        properties["expiration"] = (int(properties["expiration"]) + 0.5) / 1000
    producer.publish(
        parcel.body,
        exchange=parcel.exchange,
        routing_key=parcel.routing_key,
        headers=parcel.headers,
        content_type=parcel.content_type,
        content_encoding=parcel.content_encoding,
        **properties,
    )


def _push(channel: Any, parcels: Sequence[Parcel]) -> None:
    with channel.conn_or_acquire() as client, client.pipeline(transaction=True) as pipe:
        for parcel in parcels:
            properties = dict(parcel.properties)
            priority = properties.pop("priority", None) or 0
            message = channel.prepare_message(
                parcel.body,
                priority=priority,
                content_type=parcel.content_type,
                content_encoding=parcel.content_encoding,
                headers=parcel.headers,
                properties=properties,
            )
            channel._inplace_augment_message(message, parcel.exchange, parcel.routing_key)
            step = channel._get_message_priority(message, reverse=False)
            pipe.lpush(channel._q_for_pri(parcel.routing_key, step), dumps(message))
        pipe.execute()
