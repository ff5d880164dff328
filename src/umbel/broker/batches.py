"""A message with its address, as every way of publishing takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

from kombu import Producer

from umbel.wire.outgoing import Letterhead, all_headers


class Parcel(NamedTuple):
    """One message with its address."""

    body: bytes
    own: dict[str, Any]  # headers that are not in the letterhead
    properties: dict[str, Any]
    content_type: str
    content_encoding: str
    exchange: str
    routing_key: str
    letterhead: Letterhead | None = None

    @property
    def headers(self) -> dict[str, Any]:
        """All headers."""
        return all_headers(self.letterhead, self.own)


def publish_one(producer: Producer, parcel: Parcel) -> None:
    """Publish one message with what kombu offers on every transport."""
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
