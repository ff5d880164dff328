"""Publishing many messages: few writes, and one wait for the confirms of each part.

While the broker confirms one part, the next is written. The channel is the one that single
messages are sent on too, so that the order is kept; it stays in confirm mode, and the confirms of
single messages, for which nobody waits, are read with the next that is published.

On a channel of py-amqp itself the messages follow each other, and are confirmed, one by one, where
the connection is set to that (`confirm_publish`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from amqp.basic_message import Message as Content
from amqp.exceptions import ChannelError, MessageNacked

from umbel.broker.amqp import tables
from umbel.broker.amqp.channel import BufferedChannel

if TYPE_CHECKING:
    from umbel.broker.batches import Parcel

# Twice as many are unconfirmed at most.
PART: Final = 500
# So much is written at once.
WRITE_BYTES: Final = 2**18
# kombu's defaults, for parcels that do not say.
_DEFAULTS: Final = {"delivery_mode": 2, "priority": 0}
# What most messages have; a correlation id of so many characters always fits.
_USUAL: Final = frozenset({"correlation_id", "delivery_mode", "priority", "reply_to"})
_ID_CHARS_MAX: Final = 63
NAMED_MAX: Final = 10


class Nacked(MessageNacked):
    """The broker has refused some of the messages; of the first `written` the others are there."""

    def __init__(self, indexes: Sequence[int], count: int, written: int) -> None:
        super().__init__(_told("refused by the broker", indexes, count))
        self.indexes = list(indexes)
        self.written = written


class Unroutable(ChannelError):
    """Some of the messages go to no queue, and had to; of the first `written` the others do."""

    def __init__(self, indexes: Sequence[int], count: int, written: int, cause: Any) -> None:
        reason = getattr(cause, "reply_text", "NO_ROUTE")
        super().__init__(_told(f"returned ({reason})", indexes, count))
        self.indexes = list(indexes)
        self.written = written


def publish(channel: Any, parcels: Sequence[Parcel], *, mandatory: bool = False) -> Iterator[int]:
    """Publish all in order; tells after each part how many, from the first, the broker has.

    Raises `Nacked` or `Unroutable`, which name those that it has not, or connection errors; then
    the messages of the two parts that were under way may be there or not.
    """
    if not isinstance(channel, BufferedChannel):
        for parcel in parcels:
            _publish(channel, parcel, mandatory)
        yield len(parcels)
        return
    yield from _Batch(channel, parcels, mandatory).publish()


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
    told = parcel.properties
    id_ = told.get("correlation_id")
    if type(id_) is str and len(id_) <= _ID_CHARS_MAX and told.keys() <= _USUAL:
        with contextlib.suppress(TypeError):  # no key of a dictionary: said below what it is
            before, between, behind = tables.around(
                parcel.content_type,
                parcel.content_encoding,
                told.get("delivery_mode", _DEFAULTS["delivery_mode"]),
                told.get("priority", _DEFAULTS["priority"]),
                told.get("reply_to"),
            )
            return b"".join((before, tables.closed(items), between, tables.short_text(id_), behind))
    values = {**_DEFAULTS, **told}
    values["content_type"] = parcel.content_type
    values["content_encoding"] = parcel.content_encoding
    return tables.properties(values, tables.closed(items))


class _Part(NamedTuple):
    """Messages that were written and not confirmed yet."""

    end: int  # of the parcels
    first: int  # number of a message on the channel
    last: int


class _Batch:
    """One call of `publish`."""

    def __init__(
        self, channel: BufferedChannel, parcels: Sequence[Parcel], mandatory: bool
    ) -> None:
        self._channel = channel
        self._parcels = parcels
        self._mandatory = mandatory
        self._written: list[_Part] = []
        self._returned: list[Any] = []

    def publish(self) -> Iterator[int]:
        """See `publish`: while the broker confirms one part, the next is written."""
        channel = self._channel
        channel.confirm_select_once()
        channel.look()
        returns = channel.events["basic_return"]
        returns.add(self._on_return)
        try:
            with channel.confirms.watched() as nacked:
                for start in range(0, len(self._parcels), PART):
                    self._write(start)
                    if start:
                        yield self._confirmed(self._written[-2], nacked)
                if self._written:
                    yield self._confirmed(self._written[-1], nacked)
        finally:
            returns.discard(self._on_return)

    def _confirmed(self, part: _Part, nacked: set[int]) -> int:
        channel = self._channel
        channel.await_confirms(part.first, part.last)
        if not self._returned and not nacked:
            return part.end
        latest = self._written[-1]
        channel.await_confirms(latest.first, latest.last)  # to name them all
        count = len(self._parcels)
        if self._returned:
            lost = _which(self._parcels, self._returned)
            raise Unroutable(lost, count, latest.end, self._returned[0][0])
        refused = [
            one.end - 1 - (one.last - number)
            for one in self._written
            for number in sorted(nacked)
            if one.first <= number <= one.last
        ]
        if refused:
            raise Nacked(refused, count, latest.end)
        return part.end  # it was single messages, for which nobody waits

    def _write(self, start: int) -> None:
        channel, mandatory = self._channel, self._mandatory
        connection: Any = channel.connection
        writer, frame_max = channel.writer, connection.frame_max
        part = self._parcels[start : start + PART]
        first = channel.confirms.last + 1
        frames: list[bytes] = []
        size = count = 0
        for parcel in part:
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
        self._written.append(_Part(start + len(part), first, channel.confirms.last))

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
