"""A kombu channel on Redis whose messages are taken by a `Fetcher`.

Everything about exchanges, bindings, fanout, purging and sizes is kombu's. A channel that consumes
nothing from lists, as a publisher's, has no fetcher and costs what kombu's does, but keeps its
client.

When acknowledgements reach the server:

| they are made                                   | they are sent                             |
| ----------------------------------------------- | ----------------------------------------- |
| on a channel that gathers (`gather_acks`)       | with the next request, or after a moment  |
| in the callback of a message, on any channel    | the same                                  |
| on a channel that hurries (`acks_at_once`)      | at once, and their arrival not waited for |
| elsewhere                                       | at once, and their arrival waited for     |
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis
from kombu.message import Message
from kombu.transport import redis as kombu_redis
from kombu.utils.json import dumps
from redis.exceptions import RedisError, ResponseError

from umbel.broker.redis.fetching import BATCH_MAX, Fetcher, untouched
from umbel.broker.redis.ledger import Arrival, Ledger, Return
from umbel.broker.redis.messages import ListMessage, redelivered
from umbel.broker.redis.qos import QoS
from umbel.broker.redis.scripts import GIVE
from umbel.broker.server_time import server_time
from umbel.broker.tasks.task_channel import RedisTaskChannel

logger = logging.getLogger("umbel.broker")

# So many messages go back in one call; a larger one would stop the server for too long.
GIVE_MAX = 500


class Channel(RedisTaskChannel, kombu_redis.Channel):
    """See the module's text."""

    QoS = QoS
    can_move = True
    _sentinel_manager: Any = None

    def __init__(self, *args: Any, **options: Any) -> None:
        self.fetcher: Fetcher | None = None
        self.ledger = Ledger()
        self.consumers: dict[str, tuple[Callable[[Any], Any], bool]] = {}
        self.inflates = True  # compressed bodies, as kombu does
        self.receiver: Callable[[Any], None] | None = None  # of messages, past kombu's consumers
        self.batch_min = 0  # room that is worth a request
        self.heard_count: int | None = None  # subscribers of the last message to all
        self._gathers = self._hurries = False
        self._protocol: int | None = None
        self._managers: list[Any] = []  # of sentinels, for the fetcher
        self._reused: Any = None
        self._plain: Any = None
        self._give: Any = None
        super().__init__(*args, **options)
        self.shares = self.queue_order_strategy == "round_robin"

    # -- what a worker asks for ----------------------------------------------------------------

    def use(self, ledger: Ledger) -> None:
        """Go on where an earlier channel was cut off; before anything is consumed."""
        assert self.fetcher is None
        self.ledger = ledger

    def take_tasks(
        self, receiver: Callable[[Any], None], ledger: Ledger, *, acks_at_once: bool
    ) -> None:
        """Give messages to `receiver`; acknowledgements are not waited for."""
        self.use(ledger)
        self.receiver = receiver
        self.gather_acks()
        self._hurries = acks_at_once

    def leave_compressed(self) -> None:
        """Hand out messages whose bodies are still compressed, from lists and to all."""
        self.inflates = False
        super().leave_compressed()

    def gather_acks(self) -> None:
        """Acknowledgements may wait for the next request, or for a moment."""
        self._gathers = True

    def flush_acks(self) -> None:
        """Have every acknowledgement on the server."""
        if self.fetcher is not None:
            self.fetcher.flush()

    def disown(self) -> None:
        """Send nothing any more, and put nothing back: the ledger goes on elsewhere."""
        super().disown()
        fetcher, self.fetcher = self.fetcher, None
        self.ledger = Ledger()
        if fetcher is not None:
            fetcher.close()

    def settle(self, tag: str) -> None:
        """A message is done with; see the module's text."""
        fetcher, delivered = self.fetcher, self.qos._delivered
        if fetcher is not None and (self._gathers or fetcher.delivering):
            delivered.pop(tag, None)
            fetcher.ack(tag)
        else:
            self.forget([tag])
            delivered.pop(tag, None)

    # -- giving back ---------------------------------------------------------------------------

    def put_back(self, message: Any) -> None:
        """Return a message to its queue, as the next one to be delivered."""
        self.qos.put_back(message)
        message._state = "REQUEUED"

    def move(self, messages: Sequence[Any]) -> list[bool]:
        """Move messages to the tails of their queues; returns which ones it did."""
        own = [message for message in messages if isinstance(message, ListMessage)]
        try:
            if own:
                self.give([self.unseen(message) for message in own])
        except ResponseError:
            return [False] * len(messages)
        for message in own:
            self.qos._delivered.pop(message.delivery_tag, None)
            message._state = "REQUEUED"
        return [isinstance(message, ListMessage) for message in messages]

    def give_back(self, way: Return) -> None:
        """Put a message back, unless its note is gone; it waits where acknowledgements do."""
        self.ledger.returns.append(way)
        if not self._gathers:
            self.flush_returns()

    def flush_returns(self) -> None:
        """Give back what waits for it; what fails is tried again. Raises connection errors."""
        waiting = self.ledger.returns
        while waiting:
            chunk = waiting[:GIVE_MAX]
            self.give(chunk)
            del waiting[: len(chunk)]

    def give(self, returns: Sequence[Return], ceiling: str = "") -> list[bool]:
        """Put messages into lists right away, unless their notes are gone, or too young."""
        numbers: dict[str, int] = {}
        arguments: list[Any] = [ceiling]
        for tag, key, command, raw in returns:
            arguments += [tag, numbers.setdefault(key, len(numbers)), command, raw]
        plain = self.plain
        if self._give is None:
            self._give = plain.register_script(GIVE)
        keys = [self.key(self.unacked_key), self.key(self.unacked_index_key), *numbers]
        return [bool(one) for one in self._give(keys=keys, args=arguments)]

    def forget(self, tags: Sequence[str]) -> None:
        """Remove the notes of messages that are done with, and wait for it."""
        if not tags:
            return
        # No transaction: an index without its note is cleaned up by whoever finds it.
        pipe = self.plain.pipeline(transaction=False)
        pipe.hdel(self.key(self.unacked_key), *tags)
        pipe.zrem(self.key(self.unacked_index_key), *tags)
        pipe.execute()

    def note(self, tag: str, note: bytes | str) -> None:
        """Note a message that was popped without it."""
        now = server_time(self.plain)
        pipe = self.plain.pipeline(transaction=True)
        pipe.zadd(self.key(self.unacked_index_key), {tag: now})
        pipe.hset(self.key(self.unacked_key), tag, note)
        pipe.execute()

    @staticmethod
    def unseen(message: ListMessage) -> Return:
        """The way of a message to behind the others of its list, as if nobody had had it."""
        return Return(message.delivery_tag, message.key, "LPUSH", message.raw)

    # -- consuming -----------------------------------------------------------------------------

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **options: Any
    ) -> Any:
        """Consume from `queue`."""
        self.consumers[queue] = (callback, no_ack)
        done = super().basic_consume(queue, no_ack, callback, consumer_tag, **options)
        if self.ack_emulation and self.active_queues and self.fetcher is None:
            self.fetcher = Fetcher(self, self.ledger)
            self.fetcher.at_once = self._hurries
            self.connection.cycle.prepare(self.fetcher)
            self._update_queue_cycle()
        return done

    def basic_cancel(self, consumer_tag: str) -> Any:
        """Consume no more; what was taken and not delivered goes back."""
        if self.fetcher is None:
            return super().basic_cancel(consumer_tag)
        return self._basic_cancel(consumer_tag)

    def _basic_cancel(self, consumer_tag: str) -> Any:
        queue = self._tag_to_queue.get(consumer_tag)
        done = super()._basic_cancel(consumer_tag)
        if queue not in self._active_queues:
            self.consumers.pop(queue, None)
        return done

    def basic_qos(
        self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False
    ) -> None:
        """How many messages may be here that are not acknowledged."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        if self.slack is None:
            self.batch_min = min(prefetch_count, BATCH_MAX) // 2
        else:
            self.batch_min = min(self.slack // 2, BATCH_MAX // 4)

    def message_to_python(self, raw_message: Any) -> Any:
        """A message; most are made already."""
        if isinstance(raw_message, Message):
            return raw_message
        return super().message_to_python(raw_message)

    def _update_queue_cycle(self) -> None:
        super()._update_queue_cycle()
        if self.fetcher is not None:
            self.fetcher.set_queues(self.active_queues)

    def maybe_reauth(self) -> None:
        """Renew credentials on connections that are never given back to their pool."""
        super().maybe_reauth()
        if self.fetcher is not None:
            self.fetcher.refresh_credentials()

    # -- publishing ----------------------------------------------------------------------------

    def _put_fanout(self, exchange: str, message: Any, routing_key: str, **options: Any) -> None:
        """Publish to every subscriber; the server answers how many there are."""
        if options.get("_publish_batch") is not None:  # its answers are not read
            super()._put_fanout(exchange, message, routing_key, **options)
            return
        payload = dumps(message)
        with self.conn_or_acquire() as client:
            topics = self._get_publish_topics(exchange, routing_key)
            self.heard_count = sum(int(client.publish(topic, payload)) for topic in topics)

    # -- names on the server -------------------------------------------------------------------

    def key(self, name: str) -> str:
        """A key as it is on the server."""
        return f"{self.global_keyprefix}{name}"

    def list_key(self, queue: str, priority: int) -> str:
        """The key of the list for messages of this priority."""
        return self.key(self._q_for_pri(queue, priority))

    def check_queue(self, name: str) -> None:
        """Raise if a list of this queue is none: one script takes from all, and would fail."""
        keys = [self.list_key(name, step) for step in self.priority_steps]
        pipe = self.plain.pipeline(transaction=False)
        for key in keys:
            pipe.type(key)
        for key, kind in zip(keys, pipe.execute(), strict=True):
            if kind not in (b"list", b"none", "list", "none"):
                shown = kind.decode() if isinstance(kind, bytes) else kind
                raise ResponseError(f"WRONGTYPE: the key {key!r} is a {shown}, not a list")

    def arrival(self, tag: str, note: bytes) -> Arrival:
        """What one of our notes tells."""
        cut = note.rfind(b',"","')
        queue = json.loads(note[cut + 4 : -1])
        raw = note[1:cut]
        try:
            priority = self._get_message_priority(json.loads(raw), reverse=False)
        except (ValueError, TypeError):
            priority = self.default_priority
        return Arrival(tag, queue, self.list_key(queue, priority), raw)

    # -- connections ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """A client to talk to the server with; the same one every time."""
        if client is None:
            client = self._reused
            if client is None:
                client = self._reused = self._create_client()
        yield client

    @property
    def plain(self) -> Any:
        """A client that takes keys as they are on the server."""
        if self._plain is None:
            self._plain = redis.Redis(connection_pool=self.pool)
        return self._plain

    def own_pool(self, protocol: int) -> Any:
        """A pool of connections that speak this version of the protocol."""
        self._protocol, manager = protocol, self._sentinel_manager
        try:
            return self._get_pool()
        finally:
            self._protocol = None
            if self._sentinel_manager is not manager:
                self._managers.append(self._sentinel_manager)
                self._sentinel_manager = manager

    def _connparams(self, asynchronous: bool = False) -> Any:
        parameters = super()._connparams(asynchronous)
        if self._protocol is not None:
            parameters["protocol"] = self._protocol
        return parameters

    def _disconnect_pools(self) -> None:
        self._reused = self._plain = self._give = None
        if self.fetcher is not None:
            self.fetcher.close()
        managers, self._managers = self._managers, []
        for manager in managers:
            if hasattr(manager, "close"):
                manager.close()
        super()._disconnect_pools()

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Say what is to be said, and give back everything that is not acknowledged, in order."""
        if not self.closed and self.fetcher is not None:
            try:
                self._finish(self.fetcher)
            except (RedisError, OSError) as exc:
                self.is_lost = True
                logger.warning("messages could not be given back now: %s", exc)
            finally:
                self.connection.cycle.dismiss(self.fetcher)
                self.fetcher.close()
                self.fetcher = None
        super().close()

    def _finish(self, fetcher: Fetcher) -> None:
        for tag in list(self._consumers):
            self._basic_cancel(tag)
        delivered = self.qos._delivered
        self.ledger.returns[:0] = untouched(fetcher.finish())
        fetcher.flush()
        back = []
        for tag, message in reversed(list(delivered.items())):
            if isinstance(message, ListMessage):
                back.append(Return(tag, message.key, "RPUSH", redelivered(message.raw)))
                del delivered[tag]
        self.ledger.returns += back
        self.flush_returns()


class SentinelChannel(Channel, kombu_redis.SentinelChannel):
    """The same, where sentinels know the server."""
