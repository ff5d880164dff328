"""Models of RabbitMQ and Redis, as far as deliveries are about them.

What a worker writes, and what is delivered to it, takes some time and keeps its order. When a
connection is cut, what was still on its way is lost:

| on its way                          | RabbitMQ                | Redis                         |
| ----------------------------------- | ----------------------- | ----------------------------- |
| from the worker: a settled message  | it is delivered again   | settled on the next channel   |
| to the worker: a message            | is delivered again      | delivered on the next channel |

RabbitMQ delivers what was not acknowledged as soon as the connection is gone. Redis keeps a note of
each message that was taken; one that nobody renews goes back after the visibility timeout.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from umbel.sim.deliveries.tasks import Letter, Stored, Task
from umbel.worker.delivery.effects import ACK, COPIED, REJECT, REQUEUE, RETURN

if TYPE_CHECKING:
    from umbel.sim.deliveries.plays import Play
    from umbel.sim.deliveries.workers import SimWorker

LATENCY_S: Final = 0.002
SLOW: Final = 60.0  # times the latency of a slow broker
VISIBILITY_S: Final = 3.0
LOOK_S: Final = 0.7
# A copy and its original look the same: both run, and if both come again one of them is recognised.
COPY_EXCUSES: Final = 2


class Channel:
    """A connection of one worker."""

    __slots__ = (
        "consuming",
        "is_open",
        "is_silent",
        "received_at",
        "returned",
        "unacked",
        "window",
        "worker",
        "writing",
        "written_at",
    )

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.is_open = True
        self.is_silent = False  # cut, and writing to it does not fail
        self.consuming: dict[str, None] = {}  # in order
        self.window = 1
        self.unacked: dict[int, Letter] = {}  # as the broker sees it
        self.writing: dict[int, tuple[Letter, str]] = {}  # settled, and not there yet
        self.returned = 0  # the number of the letter that was given back last in a warm stop
        self.written_at = self.received_at = 0.0


class Broker:
    """What both brokers have in common."""

    name = ""
    tied = True  # messages belong to their connection

    def __init__(self, play: Play) -> None:
        self._play = play
        self._world = play.world
        self.queues: dict[str, deque[Stored]] = {}
        self.channels: list[Channel] = []
        self.is_down = False
        self.slow_until = 0.0
        self._tag = 0

    def send(self, task: Task) -> None:
        """A client sends a task."""
        self.queues[task.queue].append(Stored(task))
        self.pump()

    def connect(self, worker: SimWorker) -> Channel | None:
        """Open a connection; None while the broker is down."""
        if self.is_down:
            return None
        channel = Channel(worker)
        self.channels.append(channel)
        return channel

    def write(self, letter: Letter, how: str) -> None:
        """A worker settles a message on its channel."""
        channel = letter.channel
        channel.writing[letter.tag] = (letter, how)
        channel.written_at = at = max(channel.written_at, self._world.now + self._latency())
        self._world.at(at, self._read, channel, (letter, how))

    def _read(self, channel: Channel, written: tuple[Letter, str]) -> None:
        letter, how = written
        if channel.is_open and channel.writing.pop(letter.tag, None) is not None:
            self._execute(channel, letter, how)
            self.pump()

    def _execute(self, channel: Channel, letter: Letter, how: str) -> None:
        raise NotImplementedError

    def _settle(self, channel: Channel, letter: Letter, how: str) -> None:
        """Do with an unacknowledged message what a worker says."""
        stored, queue = letter.stored, self.queues[letter.stored.task.queue]
        if how == REJECT:
            self._play.rejected(stored.task)
        elif how == RETURN:
            if letter.is_last_word:
                if 0 < channel.returned < letter.number:
                    self._play.checks.order(letter)
                channel.returned = letter.number
            stored.redelivered = True
            queue.appendleft(stored)
        elif how == REQUEUE:
            stored.redelivered = True
            self._requeue(queue, stored)
            if letter.copied:
                stored.task.excuses += 1
        else:
            assert how in (ACK, COPIED)

    def _requeue(self, queue: deque[Stored], stored: Stored) -> None:
        raise NotImplementedError

    def cut(self, channel: Channel) -> None:
        """A connection breaks; its worker does not know yet."""
        raise NotImplementedError

    def close(self, channel: Channel) -> None:
        """A worker closes its connection in order: all that it wrote is read before."""
        for letter, how in list(channel.writing.values()):
            self._execute(channel, letter, how)
        channel.writing.clear()
        channel.is_open = False
        self.channels.remove(channel)

    def pump(self) -> None:
        """Deliver what can be delivered."""
        if self.is_down:
            return
        world = self._world
        for channel in self.channels:
            unacked, window = channel.unacked, channel.window
            for name in channel.consuming:
                queue = self.queues[name]
                while queue and (window == 0 or len(unacked) < window):
                    self._tag += 1
                    letter = Letter(channel, self._tag, queue.popleft())
                    unacked[self._tag] = letter
                    self._taken(letter)
                    at = max(channel.received_at, world.now + self._latency())
                    channel.received_at = at
                    world.at(at, self._deliver, channel, letter)

    def _taken(self, letter: Letter) -> None:
        """A message was taken from its queue."""

    def _deliver(self, channel: Channel, letter: Letter) -> None:
        channel.worker.receive(channel, letter)

    def _latency(self) -> float:
        world = self._world
        slow = SLOW if world.now < self.slow_until else 1.0
        return LATENCY_S * slow * world.dice()

    def is_empty(self) -> bool:
        """Whether there is no message any more."""
        return not any(self.queues.values()) and not any(one.unacked for one in self.channels)


class AmqpModel(Broker):
    """RabbitMQ."""

    name = "RabbitMQ"

    def _execute(self, channel: Channel, letter: Letter, how: str) -> None:
        if channel.unacked.pop(letter.tag, None) is None:
            self._play.checks.settled_twice(letter, how)
            return
        self._settle(channel, letter, how)

    def _requeue(self, queue: deque[Stored], stored: Stored) -> None:
        queue.appendleft(stored)

    def cut(self, channel: Channel) -> None:
        """All that was not acknowledged is delivered again."""
        self.channels.remove(channel)
        self._give_back(channel)

    def close(self, channel: Channel) -> None:
        """The same, after all was read that the worker has written."""
        super().close(channel)
        self._give_back(channel)

    def _give_back(self, channel: Channel) -> None:
        channel.is_open = False
        for letter in reversed(list(channel.unacked.values())):
            stored = letter.stored
            stored.redelivered = True
            if letter.copied:
                stored.task.excuses += COPY_EXCUSES
            self.queues[stored.task.queue].appendleft(stored)
        channel.unacked.clear()
        self.pump()

    def copy(self, letter: Letter) -> None:
        """A worker publishes a copy of a message, on a connection of its own."""
        letter.copied = True
        self.send(letter.stored.task)


class RedisModel(Broker):
    """Redis, with our own transport."""

    name = "Redis"
    tied = False

    def __init__(self, play: Play) -> None:
        super().__init__(play)
        self._notes: dict[int, tuple[Letter, float]] = {}  # taken messages, and when renewed
        self._world.at(LOOK_S, self._look)

    def _taken(self, letter: Letter) -> None:
        self._notes[letter.tag] = (letter, self._world.now)

    def _execute(self, channel: Channel, letter: Letter, how: str) -> None:
        channel.unacked.pop(letter.tag, None)
        if self._notes.pop(letter.tag, None) is not None:  # else it went back because of its age
            self._settle(channel, letter, how)

    def _requeue(self, queue: deque[Stored], stored: Stored) -> None:
        queue.append(stored)

    def move(self, letter: Letter) -> None:
        """Move a message behind the others, at once; a worker waits for the answer."""
        self._execute(letter.channel, letter, REQUEUE)
        self.pump()

    def renew(self, tags: list[int]) -> None:
        """A worker still has these."""
        for tag in tags:
            note = self._notes.get(tag)
            if note is not None:
                self._notes[tag] = (note[0], self._world.now)

    def _look(self, _a: Any, _b: Any) -> None:
        """Give back what nobody has renewed for long."""
        now = self._world.now
        for tag, (letter, renewed_at) in list(self._notes.items()):
            if renewed_at < now - VISIBILITY_S and not self.is_down:
                del self._notes[tag]
                letter.channel.unacked.pop(tag, None)
                letter.stored.redelivered = True
                self._play.gone_back(letter)
                self.queues[letter.stored.task.queue].append(letter.stored)
        self._world.at(now + LOOK_S, self._look)
        self.pump()

    def cut(self, channel: Channel) -> None:
        """The notes stay. What was on its way is seen to on the next connection of the worker."""
        channel.is_open = False
        self.channels.remove(channel)

    def resume(self, before: Channel, channel: Channel) -> None:
        """A worker connects again: what it had written is written, what it took is delivered."""
        for letter, how in list(before.writing.values()):
            self._execute(before, letter, how)
        before.writing.clear()
        for tag, letter in before.unacked.items():
            channel.unacked[tag] = letter
            if letter.channel is before and tag not in before.worker.seen:
                letter.channel = channel
                self._world.at(self._world.now + LATENCY_S, self._deliver, channel, letter)

    def close(self, channel: Channel) -> None:
        """What the worker has taken and not settled goes back, in order."""
        super().close(channel)
        for tag, letter in reversed(list(channel.unacked.items())):
            if self._notes.pop(tag, None) is not None:
                letter.stored.redelivered = True
                self.queues[letter.stored.task.queue].appendleft(letter.stored)
        channel.unacked.clear()
        self.pump()

    def is_empty(self) -> bool:
        """Whether there is no message any more."""
        return not any(self.queues.values()) and not self._notes
