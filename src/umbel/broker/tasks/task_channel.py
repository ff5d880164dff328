"""What a worker needs of the channel that its task messages arrive on, on every broker.

Our channels on Redis and on RabbitMQ are task channels themselves; `task_channel` gives one for any
channel of kombu's. The defaults are right for a broker that ties a message to its connection.

On Redis a message that is not acknowledged within the visibility timeout counts as lost and goes to
another worker, even if it merely waits for its eta or still runs. The lease of a message is its
score in the index of unacknowledged ones; renewing it sets the score to now by the server's clock,
for members that are still there. For the same reason the end of a connection ends no lease there:
what arrived on an old channel is settled, or put back, on a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from kombu.transport import pyamqp, virtual

from umbel.broker.server_time import server_time
from umbel.broker.tasks.messages import compressed_kind

if TYPE_CHECKING:
    from umbel.broker.redis.ledger import Ledger

# Leases that are renewed in one command.
CHUNK = 1_000


class TaskChannel:
    """A channel as a worker uses it."""

    can_move = False  # messages, to the tails of their queues
    is_lost = False  # the broker did not answer when the channel was closed
    slack: int | None = None  # messages that may be missing without anything idling

    @property
    def channel(self) -> Any:
        """The channel as kombu knows it."""
        return self

    @property
    def lease_s(self) -> float | None:
        """Seconds after which the broker takes a message without an answer for lost; None: never.

        Where there are leases, messages outlive their connection.
        """
        return None

    def take_tasks(
        self, receiver: Callable[[Any], None], ledger: Ledger, *, acks_at_once: bool
    ) -> None:
        """Prepare for task messages, whose bodies stay bytes; before anything is consumed.

        `receiver` takes them past kombu's consumer where that is possible. `ledger` is that of the
        channel before this one, on Redis. Acknowledgements are gathered, unless `acks_at_once`.
        """

    def leave_compressed(self) -> None:
        """Hand out messages whose bodies are still compressed."""
        self.channel.Message = compressed_kind(self.channel.Message)

    def flush_acks(self) -> None:
        """Send the acknowledgements that were gathered. Raises connection errors."""

    def renew(self, tags: Iterable[str]) -> int:
        """Renew the leases of these deliveries; returns the number of commands that took."""
        return 0

    def disown(self) -> None:
        """Put nothing back, neither on closing nor on being freed: the channel is lost."""

    def adopt(self, message: Any) -> None:
        """Let a message of a lost channel be settled on this one."""

    def put_back(self, message: Any) -> None:
        """Return a message that was not begun to its queue, as the next one to be delivered.

        Brokers with a server put rejected messages there. Of several, put back the newest first.
        """
        message.reject(requeue=True)

    def move(self, messages: Sequence[Any]) -> list[bool]:
        """Move messages to the tails of their queues; returns which ones it did.

        The others are as they were. Raises connection errors; then it may be tried again.
        """
        return [False] * len(messages)

    def check_queue(self, name: str) -> None:
        """Raise what the broker would answer when messages are taken from this queue."""

    def length_of(self, name: str) -> int | None:
        """The number of messages that lie in this queue, where that is known."""
        return None


class KombuChannel(TaskChannel):
    """Any channel of kombu's."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    @property
    def channel(self) -> Any:
        """The channel as kombu knows it."""
        return self._channel

    def length_of(self, name: str) -> int | None:
        """The number of messages that lie in this queue, where that is known."""
        is_virtual = isinstance(self.channel, virtual.Channel)
        return int(self.channel._size(name)) if is_virtual else None


class AmqpTaskChannel(TaskChannel):
    """What is the same for our channel on RabbitMQ and for py-amqp's."""

    def take_tasks(
        self, receiver: Callable[[Any], None], ledger: Ledger, *, acks_at_once: bool
    ) -> None:
        """Leave bodies as bytes."""
        self.channel.auto_decode = False

    def length_of(self, name: str) -> int | None:
        """The number of messages in this queue; if it is missing, the broker closes the channel."""
        return int(self.channel.queue_declare(queue=name, passive=True).message_count)


class RedisTaskChannel(TaskChannel):
    """What is the same for our channel on Redis and for kombu's."""

    @property
    def lease_s(self) -> float | None:
        """The visibility timeout."""
        return float(self.channel.visibility_timeout)

    def renew(self, tags: Iterable[str]) -> int:
        """Renew the leases of these deliveries; returns the number of commands that took."""
        channel, rest, commands = self.channel, iter(tags), 0
        while chunk := list(islice(rest, CHUNK)):
            with channel.conn_or_acquire() as client:
                now = server_time(client)
                client.zadd(channel.unacked_index_key, dict.fromkeys(chunk, now), xx=True)
            commands += 1
        return commands

    def disown(self) -> None:
        """Put nothing back, neither on closing nor on being freed: the channel is lost."""
        self.channel.qos._delivered.clear()
        self.channel.qos._dirty.clear()

    def adopt(self, message: Any) -> None:
        """Let a message of a lost channel be settled on this one."""
        message.channel = self.channel
        virtual.QoS.append(self.channel.qos, message, message.delivery_tag)

    def put_back(self, message: Any) -> None:
        """Return a message to its queue as the next one; rejected, it would go behind the others.

        The message may be of a lost channel.
        """
        self.channel.qos.restore_by_tag(message.delivery_tag)
        self.channel.qos._delivered.pop(message.delivery_tag, None)
        message._state = "REQUEUED"

    def length_of(self, name: str) -> int | None:
        """The number of messages in the lists of this queue."""
        channel = self.channel
        with channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
            for step in channel.priority_steps:
                pipe.llen(channel._q_for_pri(name, step))
            return sum(int(length) for length in pipe.execute())


class KombuAmqpChannel(AmqpTaskChannel, KombuChannel):
    """kombu's own channel on RabbitMQ."""


class KombuRedisChannel(RedisTaskChannel, KombuChannel):
    """kombu's own channel on Redis."""


def task_channel(channel: Any) -> TaskChannel:
    """This channel if it is one of ours, else what makes it usable as one."""
    if isinstance(channel, TaskChannel):
        return channel
    if isinstance(channel, pyamqp.Channel):
        return KombuAmqpChannel(channel)
    if isinstance(channel, virtual.Channel) and channel.connection.driver_type == "redis":
        return KombuRedisChannel(channel)
    return KombuChannel(channel)


def put_back(message: Any) -> None:
    """Return a message that was not begun to its queue, as the next one to be delivered."""
    task_channel(message.channel).put_back(message)
