"""Publishing messages, one or many: few writes, and one wait for the confirms of each part.

While the broker confirms one part of a batch, the next is written. Single messages and batches go
over one channel, so that the order is kept, and the channel stays in confirm mode.

A message that reaches no queue is returned by the broker and reported as `Unroutable`, except where
it is `optional` that somebody listens. One that the broker refuses is reported as `Nacked`. Both
leave the connection as it was.

`hand_over` writes a message and does not wait for anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from amqp.basic_message import Message as Content

from umbel.broker.amqp import tables
from umbel.broker.amqp.bounded import BoundedChannel
from umbel.broker.amqp.channel import BufferedChannel
from umbel.broker.sessions.errors import Nacked, Unroutable

if TYPE_CHECKING:
    from umbel.broker.tasks.batches import Parcel

# Twice as many are unconfirmed at most.
PART: Final = 500
# So much is written at once.
WRITE_BYTES: Final = 2**18
# kombu's defaults, for parcels that do not say.
_DEFAULTS: Final = {"delivery_mode": 2, "priority": 0}
# What most messages have; a correlation id of so many characters always fits.
_USUAL: Final = frozenset({"correlation_id", "delivery_mode", "priority", "reply_to"})
_ID_CHARS_MAX: Final = 63
_NOTHING: Final[frozenset[tuple[str, str]]] = frozenset()


def publish(
    channel: BoundedChannel,
    parcels: Sequence[Parcel],
    *,
    mandatory: bool = False,
    optional: Collection[tuple[str, str]] = _NOTHING,
) -> Iterator[int]:
    """Publish all in order; tells after each part how many, from the first, the broker has.

    With `mandatory` all have to reach a queue, except those to an address in `optional`. Raises
    `Nacked` or `Unroutable`, which name those that the broker has not, or connection errors; then
    the messages of the two parts that were under way may be there or not.
    """
    yield from _Batch(channel, parcels, mandatory, optional).publish()


def publish_one(channel: BoundedChannel, parcel: Parcel, *, mandatory: bool = False) -> None:
    """Publish one message; returns when it is confirmed, and raises what `publish` raises."""
    for _ in _Batch(channel, (parcel,), mandatory, _NOTHING).publish():
        pass


def hand_over(channel: BoundedChannel, parcel: Parcel) -> None:
    """Publish one message, and do not wait for its confirm."""
    if not isinstance(channel, BufferedChannel):
        _publish(channel, parcel)
        return
    connection = channel.live("basic_publish: connection closed")
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
        self,
        channel: BoundedChannel,
        parcels: Sequence[Parcel],
        mandatory: bool,
        optional: Collection[tuple[str, str]],
    ) -> None:
        self._channel = channel
        self._parcels = parcels
        self._mandatory = mandatory
        self._optional = optional
        self._written: list[_Part] = []
        self._returned: list[Any] = []

    def publish(self) -> Iterator[int]:
        """See `publish`: while the broker confirms one part, the next is written."""
        channel = self._channel
        channel.confirm_select_once()
        returns = channel.events["basic_return"]
        returns |= {_ignore, self._on_return}
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
        lost = _which(self._parcels, self._returned)
        refused = [
            one.end - 1 - (one.last - number)
            for one in self._written
            for number in nacked
            if one.first <= number <= one.last
        ]
        if refused:
            raise Nacked(sorted({*refused, *lost}), count, latest.end)
        if lost:
            first = self._parcels[lost[0]]
            reason = str(getattr(self._returned[0][0], "reply_text", "NO_ROUTE"))
            address = (first.exchange, first.routing_key)
            raise Unroutable(lost, count, latest.end, reason, address)
        return part.end  # it was messages of before, for which nobody waits any more

    def _write(self, start: int) -> None:
        channel = self._channel
        part = self._parcels[start : start + PART]
        first = channel.confirms.last + 1
        if isinstance(channel, BufferedChannel):
            self._write_frames(channel, part)
        else:
            for parcel in part:
                channel.await_unblocked()
                _publish(channel, parcel, self._must_arrive(parcel))
        self._written.append(_Part(start + len(part), first, channel.confirms.last))

    def _write_frames(self, channel: BufferedChannel, part: Sequence[Parcel]) -> None:
        writer, frame_max = channel.writer, channel.live().frame_max
        frames: list[bytes] = []
        size = count = 0
        for parcel in part:
            properties = written(parcel)
            mandatory = self._must_arrive(parcel)
            frames.append(writer.address(parcel.exchange, parcel.routing_key, mandatory))
            writer.add(frames, properties, parcel.body, frame_max)
            size += len(properties) + len(parcel.body)
            count += 1
            if size >= WRITE_BYTES:
                _flush(channel, frames, count)
                size = count = 0
        if frames:
            _flush(channel, frames, count)

    def _must_arrive(self, parcel: Parcel) -> bool:
        if not self._optional:
            return self._mandatory
        return self._mandatory and (parcel.exchange, parcel.routing_key) not in self._optional

    def _on_return(self, *told: Any) -> None:
        self._returned.append(told)


def _ignore(*_told: Any) -> None:
    """A message came back for which nobody waits any more; without this, reading it would raise."""


def _flush(channel: BufferedChannel, frames: list[bytes], count: int) -> None:
    """Write frames of `count` messages, unless the broker has said that it takes none."""
    channel.look()
    channel.await_unblocked()
    channel.confirms.published(count)
    channel.live().write_frames(b"".join(frames))
    frames.clear()


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
    # Not the method that waits for each confirm, as options of the transport may say.
    channel._basic_publish(
        content, exchange=parcel.exchange, routing_key=parcel.routing_key, mandatory=mandatory
    )
