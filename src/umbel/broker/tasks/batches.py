"""Publishing one message with what kombu offers on every transport."""

from __future__ import annotations

from kombu import Producer

from umbel.wire.outgoing import Parcel

__all__ = ["Parcel", "publish_one"]


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
