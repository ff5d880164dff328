"""Publishing many messages: few writes, and one wait for the confirms of each part.

A part is as many messages as may be unconfirmed at a time. The channel is the one that single
messages are sent on too, so that the order is kept; it stays in confirm mode, and the confirms of
single messages, for which nobody waits, are read with the next that is published.

On a channel of py-amqp itself the messages follow each other, and are confirmed, one by one, where
the connection is set to that (`confirm_publish`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from amqp.basic_message import Message as Content
from amqp.exceptions import ChannelError, MessageNacked

from umbel.broker.amqp import tables
from umbel.broker.amqp.channel import BufferedChannel

if TYPE_CHECKING:
    from umbel.broker.batches import Parcel

UNCONFIRMED_MAX: Final = 1_000
# So much is written at once.
WRITE_BYTES: Final = 2**18
# kombu's defaults, for parcels that do not say.
_DEFAULTS: Final = {"delivery_mode": 2, "priority": 0}
NAMED_MAX: Final = 10


class Nacked(MessageNacked):
    """The broker has refused some of the messages; the others of the part are there."""

    def __init__(self, indexes: Sequence[int], count: int) -> None:
        super().__init__(_told("refused by the broker", indexes, count))
        self.indexes = list(indexes)


class Unroutable(ChannelError):
    """Some of the messages go to no queue, and had to."""

    def __init__(self, indexes: Sequence[int], count: int, cause: Any) -> None:
        reason = getattr(cause, "reply_text", "NO_ROUTE")
        super().__init__(_told(f"returned ({reason})", indexes, count))
        self.indexes = list(indexes)


def publish(channel: Any, parcels: Sequence[Parcel], *, mandatory: bool = False) -> Iterator[int]:
    """Publish all in order; tells after each part how many, from the first, the broker has.

    Raises `Nacked` or `Unroutable`, which name those that it has not, or connection errors; then
    the messages of the part that was under way may be there or not.
    """
    if not isinstance(channel, BufferedChannel):
        for parcel in parcels:
            _publish(channel, parcel, mandatory)
        yield len(parcels)
        return
    batch = _Batch(channel, mandatory)
    for start in range(0, len(parcels), UNCONFIRMED_MAX):
        part = parcels[start : start + UNCONFIRMED_MAX]
        batch.publish(part, start, len(parcels))
        yield start + len(part)


def publish_one(channel: Any, parcel: Parcel) -> None:
    """Publish one message; waits for its confirm only where the connection is set to."""
    connection = channel.connection
    if not isinstance(channel, BufferedChannel) or connection is None or connection.confirm_publish:
        _publish(channel, parcel)
        return
    channel.look()
    frames = [channel.writer.address(parcel.exchange, parcel.routing_key)]
    channel.writer.add(frames, written(parcel), parcel.body, connection.frame_max)
    channel.confirms.published()
    connection.write_frames(b"".join(frames))


def written(parcel: Parcel) -> bytes:
    """The properties of a parcel's message, as they are on the wire."""
    letterhead: Any = getattr(parcel, "letterhead", None)
    if letterhead is None:
        items = tables.table_items(parcel.headers.items())
    else:
        items = letterhead.forms.get("amqp")
        if items is None:
            items = letterhead.forms["amqp"] = tables.table_items(letterhead.headers.items())
        items += tables.table_items(getattr(parcel, "own", {}).items())
    values = {**_DEFAULTS, **parcel.properties}
    values["content_type"] = parcel.content_type
    values["content_encoding"] = parcel.content_encoding
    return tables.properties(values, tables.closed(items))


class _Batch:
    """One call of `publish`: what is said on the channel meanwhile is about its messages."""

    def __init__(self, channel: BufferedChannel, mandatory: bool) -> None:
        self._channel = channel
        self._mandatory = mandatory
        self._returned: list[Any] = []

    def publish(self, parcels: Sequence[Parcel], start: int, count: int) -> None:
        """Publish these, of which the first is number `start` of `count`, and wait."""
        channel = self._channel
        channel.confirm_select_once()
        channel.look()
        returns = channel.events["basic_return"]
        self._returned.clear()
        returns.add(self._on_return)
        try:
            with channel.confirms.watched() as nacked:
                first = channel.confirms.last + 1
                self._write(parcels)
                channel.await_confirms(first, channel.confirms.last)
        finally:
            returns.discard(self._on_return)
        if self._returned:
            lost = _which(parcels, self._returned)
            raise Unroutable([start + number for number in lost], count, self._returned[0][0])
        # Numbers before the first are of single messages, for which nobody waits.
        refused = sorted(start + number - first for number in nacked if number >= first)
        if refused:
            raise Nacked(refused, count)

    def _write(self, parcels: Sequence[Parcel]) -> None:
        channel, mandatory = self._channel, self._mandatory
        connection: Any = channel.connection
        writer, frame_max = channel.writer, connection.frame_max
        frames: list[bytes] = []
        size = count = 0
        for parcel in parcels:
            properties = written(parcel)
            frames.append(writer.address(parcel.exchange, parcel.routing_key, mandatory))
            writer.add(frames, properties, parcel.body, frame_max)
            size += len(properties) + len(parcel.body)
            count += 1
            if size >= WRITE_BYTES:
                channel.confirms.published(count)
                connection.write_frames(b"".join(frames))
                frames.clear()
                size = count = 0
        if frames:
            channel.confirms.published(count)
            connection.write_frames(b"".join(frames))

    def _on_return(self, *told: Any) -> None:
        self._returned.append(told)


def _which(parcels: Sequence[Parcel], returned: Sequence[Any]) -> list[int]:
    """Which parcels these are: the broker gives them back in order, and says nothing else."""
    found: list[int] = []
    left = list(enumerate(parcels))
    for _, exchange, routing_key, message in returned:
        wanted = message.properties.get("correlation_id")
        for place, (number, parcel) in enumerate(left):
            address = (parcel.exchange, parcel.routing_key)
            same = parcel.properties.get("correlation_id") == wanted
            if address == (exchange, routing_key) and same:
                found.append(number)
                del left[: place + 1]
                break
    return found


def _publish(channel: Any, parcel: Parcel, mandatory: bool = False) -> None:
    content = Content(
        parcel.body,
        content_type=parcel.content_type,
        content_encoding=parcel.content_encoding,
        application_headers=parcel.headers,
        **{**_DEFAULTS, **parcel.properties},
    )
    channel.basic_publish(
        content, exchange=parcel.exchange, routing_key=parcel.routing_key, mandatory=mandatory
    )


def _told(what: str, indexes: Sequence[int], count: int) -> str:
    named = ", ".join(str(index) for index in indexes[:NAMED_MAX])
    more = ", ..." if len(indexes) > NAMED_MAX else ""
    return f"{len(indexes)} of {count} messages were {what}: {named}{more}"
