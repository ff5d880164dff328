"""Publishing messages, one or many, on one channel.

An `Outlet` publishes in the order given. `publish` tells after each part of a batch how many of
its messages the broker surely has, so that whoever sends it again begins there, and can say what
was sent when it gives up.

| broker | a batch                                                | what counts as there     |
| ------ | ------------------------------------------------------ | ------------------------ |
| Redis  | parts, each of them one step, all or nothing: one push | a part that was answered |
|        | per list, in a transaction if there are several lists  |                          |
| AMQP   | parts, as many messages as may be unconfirmed at a     | what was confirmed       |
|        | time                                                   |                          |
| others | message after message                                  | what was handed over     |

The messages of a part that failed may have been published all the same; they are sent again and
the duplicates carry the same task ids.

On AMQP a message that is `mandatory` has to reach a queue (`Unroutable`). Elsewhere messages are
put into the queues by whoever sends them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from kombu import Producer

from umbel.broker.amqp import batches as amqp_batches
from umbel.broker.amqp.bounded import BoundedChannel
from umbel.broker.amqp.channel import BufferedChannel
from umbel.broker.base64text import quicken
from umbel.broker.tasks import batches
from umbel.broker.tasks.batches import Parcel
from umbel.broker.tasks.envelopes import BODY_ENCODING, envelope

# What goes to Redis in one step, during which it serves nobody else.
PART_COUNT_MAX: Final = 500
PART_BYTES_MAX: Final = 8 * 1024 * 1024


def outlet_for(channel: Any, kind: str, *, confirm: bool = True) -> Outlet:
    """The outlet for a channel of a kind of transport: `redis`, `amqp`, `memory`, ...

    With `confirm`, a message counts as sent when an AMQP broker has confirmed it.
    """
    if kind == "redis" and channel.body_encoding == BODY_ENCODING:
        return RedisOutlet(channel)
    return AmqpOutlet(channel, confirm) if kind == "amqp" else Outlet(channel)


class Outlet:
    """Publishes with what kombu offers on every transport."""

    def __init__(self, channel: Any) -> None:
        quicken(channel)
        self.producer = Producer(channel, auto_declare=False)

    def await_unblocked(self) -> None:
        """Wait until the broker takes messages on this channel, if it is known not to."""

    def publish_one(self, parcel: Parcel, *, mandatory: bool = False) -> None:
        """Publish one message; returns when the broker has it, where it can tell."""
        batches.publish_one(self.producer, parcel)

    def hand_over(self, parcel: Parcel) -> None:
        """Publish one message, without waiting for a confirm."""
        self.publish_one(parcel)

    def publish(
        self, parcels: Sequence[Parcel], *, optional: Collection[tuple[str, str]] = ()
    ) -> Iterator[int]:
        """Publish all `parcels` in order; tells, again and again, how many of them are there.

        `optional` are addresses, exchange and routing key, where nobody need listen.
        """
        for count, parcel in enumerate(parcels, 1):
            self.publish_one(parcel)
            yield count


class RedisOutlet(Outlet):
    """Pushes to lists itself, on a client that is kept."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        self._channel = channel
        self._client = channel._create_client()  # of the channel's own pool

    def publish_one(self, parcel: Parcel, *, mandatory: bool = False) -> None:
        """Publish one message."""
        queues = self._queues(parcel.exchange, parcel.routing_key)
        if queues is None:
            super().publish_one(parcel)
        else:
            part = _Part(self._channel)
            part.add(queues, parcel, envelope(parcel))
            part.push(self._client)

    def publish(
        self, parcels: Sequence[Parcel], *, optional: Collection[tuple[str, str]] = ()
    ) -> Iterator[int]:
        """Nothing is published if one of them cannot be encoded."""
        found: dict[tuple[str, str], list[str] | None] = {}
        for parcel in parcels:
            to = (parcel.exchange, parcel.routing_key)
            if to not in found:
                found[to] = self._queues(*to)
        if None in found.values():
            yield from super().publish(parcels)
            return
        part, count = _Part(self._channel), 0
        whole = [envelope(parcel) for parcel in parcels]
        for parcel, text in zip(parcels, whole, strict=True):
            part.add(found[parcel.exchange, parcel.routing_key] or (), parcel, text)
            count += 1
            if part.count >= PART_COUNT_MAX or part.size >= PART_BYTES_MAX:
                part.push(self._client)
                yield count
                part = _Part(self._channel)
        if part.count:
            part.push(self._client)
            yield count

    def _queues(self, exchange: str, routing_key: str) -> list[str] | None:
        """The queues that an address means now; None if it is for kombu to know."""
        if not exchange:
            return [routing_key]
        channel = self._channel
        if channel.deadletter_queue or channel.typeof(exchange).type == "fanout":
            return None
        return [queue for queue in channel._lookup(exchange, routing_key) if queue]


class AmqpOutlet(Outlet):
    """Writes frames itself where the channel is one of ours; waits for confirms.

    Without `confirm` single messages are written and not waited for. Batches are confirmed all the
    same where that costs little: on channels of ours.
    """

    def __init__(self, channel: BoundedChannel, confirm: bool) -> None:
        super().__init__(channel)
        self._channel = channel
        self._confirm = confirm

    def await_unblocked(self) -> None:
        """Raises `ConnectionBlocked` if that takes too long; not asked for without confirms."""
        if self._confirm:
            self._channel.await_unblocked()

    def publish_one(self, parcel: Parcel, *, mandatory: bool = False) -> None:
        """Publish one message."""
        if self._confirm:
            amqp_batches.publish_one(self._channel, parcel, mandatory=mandatory)
        else:
            amqp_batches.hand_over(self._channel, parcel)

    def hand_over(self, parcel: Parcel) -> None:
        """Publish one message, without waiting for its confirm."""
        amqp_batches.hand_over(self._channel, parcel)

    def publish(
        self, parcels: Sequence[Parcel], *, optional: Collection[tuple[str, str]] = ()
    ) -> Iterator[int]:
        """Each part is confirmed before it counts."""
        if self._confirm or isinstance(self._channel, BufferedChannel):
            return amqp_batches.publish(
                self._channel, parcels, mandatory=self._confirm, optional=optional
            )
        return super().publish(parcels)


class _Part:
    """What is pushed in one step."""

    __slots__ = ("_channel", "_keys", "_lists", "count", "size")

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._keys: dict[tuple[str, Any], str] = {}
        self._lists: dict[str, list[bytes]] = {}
        self.count = self.size = 0

    def add(self, queues: Sequence[str], parcel: Parcel, text: bytes) -> None:
        """Add one message, for all these queues."""
        self.count += 1
        priority = parcel.properties.get("priority")
        for place, queue in enumerate(queues):
            key = self._keys.get((queue, priority))
            if key is None:
                key = self._keys[queue, priority] = self._key(queue, parcel)
                self._lists.setdefault(key, [])
            # The tag under which a consumer holds it must not be that of another one's.
            copy = envelope(parcel) if place else text
            self._lists[key].append(copy)
            self.size += len(copy)

    def _key(self, queue: str, parcel: Parcel) -> str:
        channel = self._channel
        step = channel._get_message_priority({"properties": parcel.properties}, reverse=False)
        key: str = channel._q_for_pri(queue, step)
        return key

    def push(self, client: Any) -> None:
        """Push everything: all of it, or nothing."""
        channel, lists = self._channel, self._lists
        expiring = {queue for queue, _ in self._keys if queue in channel._expires}
        if len(lists) == 1 and not expiring:
            for key, texts in lists.items():
                client.lpush(key, *texts)
            return
        with client.pipeline(transaction=True) as pipe:
            for key, texts in lists.items():
                pipe.lpush(key, *texts)
            for queue in expiring:
                for step in channel.priority_steps:
                    pipe.pexpire(channel._q_for_pri(queue, step), channel._expires[queue])
            pipe.execute()
