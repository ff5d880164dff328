"""Models of brokers: who gets which messages, in which order, and how often.

A node has a *link* to the broker, a client has none and is always connected. What one publisher
sends arrives at the broker in its order, after some milliseconds.

| model        | order at a receiver          | to one that is not connected                       |
| ------------ | ---------------------------- | -------------------------------------------------- |
| `RedisModel` | the same for all: pub/sub    | lost, and what was on its way to it too            |
| `AmqpModel`  | that of each publisher alone | kept for `TTL_S` and delivered when it comes back, |
|              |                              | the last ones that it had already got once more    |

*Noise* is what the faults of messages add while it lasts: loss, duplication, delay, reordering
(which neither broker does to one connection, but a node has several). Links break, and can be
*deaf* or *mute*: half-open, nothing comes in or goes out, and the node does not know.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final

from umbel.sim.messages import BEAT, EVENT_LAST, Message
from umbel.sim.world import World

if TYPE_CHECKING:
    from umbel.sim.nodes import Node

LATENCY_MIN_S, LATENCY_MAX_S = 0.0005, 0.003
# Of events in a queue (`worker_gossip_queue_ttl`): so short that a stall loses some.
TTL_S: Final = 1.0
KEPT_MAX: Final = 1_000
REDELIVERED_COUNT: Final = 3


class Noise:
    """How messages are mistreated, as probabilities and seconds."""

    __slots__ = ("delay_s", "dup", "loss", "reorders", "until")

    def __init__(self, until: float) -> None:
        self.loss = self.dup = self.delay_s = 0.0
        self.reorders = False
        self.until = until  # by when everything that is still on its way arrives


class Link:
    """The connection of one node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.up = True
        self.deaf = self.mute = False
        self.epoch = 0  # how often it has broken
        self.arrived_at = 0.0  # when the last message of this node got to the broker
        self.delivered_at: dict[int, float] = {}  # the same for messages to it, by their stream
        self.outbox: list[Message] = []  # what the node wanted to say while it was not connected
        self.kept: deque[tuple[float, Message]] = deque(maxlen=KEPT_MAX)
        self.got: deque[Message] = deque(maxlen=REDELIVERED_COUNT)


class Broker:
    """What both models share; the classes below say how they differ."""

    __slots__ = ("_world", "delivered_count", "links", "lost_count", "noise")

    name = ""
    ttl_s = math.inf  # of events that wait for a node that stands still

    def __init__(self, world: World) -> None:
        self._world = world
        self.links: list[Link] = []  # by the index of the node
        self.noise: Noise | None = None
        self.delivered_count = self.lost_count = 0

    # -- publishing --------------------------------------------------------------------

    def publish(self, link: Link | None, message: Message, to: int | None = None) -> None:
        """Send a message to all nodes or to one; while not connected events wait in the node."""
        world = self._world
        when = world.now + LATENCY_MIN_S + (LATENCY_MAX_S - LATENCY_MIN_S) * world.dice()
        noise = self.noise
        if link is None:
            if noise is not None and world.dice() < noise.dup:  # the client was not sure
                again = min(when + world.dice(), max(noise.until, when))
                world.at(again, self._arrive, message, to)
        elif not link.up:
            if message.kind <= EVENT_LAST and message.kind != BEAT:
                link.outbox.append(message)
            return
        elif link.mute:
            self.lost_count += 1
            return
        else:
            if noise is not None and noise.delay_s:
                when = min(when + world.dice() ** 4 * noise.delay_s, max(noise.until, when))
            if noise is None or not noise.reorders:
                when = link.arrived_at = max(when, link.arrived_at)
        world.at(when, self._arrive, message, to)

    def _arrive(self, message: Message, to: int | None) -> None:
        if to is not None:
            self._carry(self.links[to], message)
            return
        links = self.links
        first = self._world.event_count % len(links)  # nobody is always the first
        way = self._carry if self.noise is not None else self._pass_on
        for link in links[first:]:
            way(link, message)
        for link in links[:first]:
            way(link, message)

    # -- delivery ----------------------------------------------------------------------

    def _pass_on(self, link: Link, message: Message) -> None:
        """To one node, when all is quiet."""
        if link.up and not link.deaf:
            self.delivered_count += 1
            link.node.receive(message)
        else:
            self._miss(link, message)

    def _carry(self, link: Link, message: Message) -> None:
        """To one node, with all that can happen on the way."""
        noise, world = self.noise, self._world
        if noise is None or not link.up or link.deaf:
            self._pass_on(link, message)
            return
        chance = world.dice()
        if chance < noise.loss:
            self.lost_count += 1
            return
        when = now = world.now
        if noise.delay_s:
            when = min(now + world.dice() ** 4 * noise.delay_s, max(noise.until, now))
        if not noise.reorders:
            stream = self._stream(message)
            when = max(when, link.delivered_at.get(stream, 0.0))
            link.delivered_at[stream] = when
        if when == now:
            self._pass_on(link, message)
        else:
            world.at(when, self._deliver, link, (link.epoch, message))
        if chance > 1 - noise.dup:
            again = min(when + 2 * world.dice(), max(noise.until, when))
            world.at(again, self._deliver, link, (link.epoch, message))

    def _deliver(self, link: Link, sent: tuple[int, Message]) -> None:
        epoch, message = sent
        if epoch == link.epoch:
            self._pass_on(link, message)
        else:
            self._miss(link, message)

    def _miss(self, link: Link, message: Message) -> None:
        self.lost_count += 1

    def _stream(self, message: Message) -> int:
        """Messages of one stream keep their order on the way to a node."""
        return 0

    # -- connections -------------------------------------------------------------------

    def cut(self, link: Link) -> None:
        """The connection breaks."""
        if link.up:
            link.up = False
            link.epoch += 1

    def mend(self, link: Link) -> bool:
        """The connection is there again, if it was broken; the node must be told."""
        if link.deaf or link.mute:
            link.deaf = link.mute = False
            self.cut(link)  # half-open: it is found out now
        if link.up:
            return False
        link.up = True
        link.delivered_at.clear()
        return True


class RedisModel(Broker):
    """Redis pub/sub: one order for all, and nothing for those who are not there."""

    __slots__ = ()

    name = "redis"


class AmqpModel(Broker):
    """AMQP queues: the order of each publisher, and redelivery after a break."""

    __slots__ = ()

    name = "amqp"
    ttl_s = TTL_S

    def _stream(self, message: Message) -> int:
        return -1 if message.sender is None else message.sender.index

    def _pass_on(self, link: Link, message: Message) -> None:
        if link.up and not link.deaf:
            self.delivered_count += 1
            link.got.append(message)
            link.node.receive(message)
        else:
            self._miss(link, message)

    def _miss(self, link: Link, message: Message) -> None:
        self.lost_count += 1
        link.kept.append((self._world.now, message))

    def mend(self, link: Link) -> bool:
        if not super().mend(link):
            return False
        now = self._world.now
        kept = [message for at, message in link.kept if at > now - TTL_S]
        link.kept.clear()
        for message in [*link.got, *kept]:
            self._world.at(now, self._deliver, link, (link.epoch, message))
        return True
