"""Connections that are lost at any moment: every message is settled, and none runs too often.

A model of RabbitMQ delivers messages, forgets the acknowledgements that it had not read when a
connection is lost, and delivers those messages again. The requests and the rules for what comes
again are the worker's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.sizes import size
from umbel.cluster.revocations import Revocations
from umbel.wire.tasks import TaskHeader
from umbel.worker.delivery.effects import ACK, COPIED, REQUEUE, Delivery
from umbel.worker.delivery.machine import Deliveries
from umbel.worker.delivery.prefetch import Prefetch
from umbel.worker.delivery.redelivery import Key


class Lost(Exception):
    """The connection is gone."""


class Channel:
    """What the broker has delivered on one connection, and what the worker has written there."""

    def __init__(self) -> None:
        self.unacknowledged: dict[int, Message] = {}
        self.written: list[tuple[int, str]] = []
        self.is_open = True
        self.qos = None  # messages are tied to it


class Message:
    """One delivery."""

    def __init__(self, channel: Channel, tag: int, header: TaskHeader, redelivered: bool) -> None:
        self.channel, self.delivery_tag, self.header = channel, tag, header
        self.redelivered = redelivered

    def ack(self) -> None:
        self._write("ack")

    def reject(self, requeue: bool = False) -> None:
        self._write("requeue" if requeue else "reject")

    def _write(self, how: str) -> None:
        if not self.channel.is_open:
            raise Lost
        self.channel.written.append((self.delivery_tag, how))


class Broker:
    """One queue."""

    def __init__(self) -> None:
        self.queue: list[tuple[TaskHeader, bool]] = []
        self.dead: list[Key] = []
        self._tag = 0

    def deliver(self, channel: Channel) -> Message | None:
        if not self.queue:
            return None
        header, redelivered = self.queue.pop(0)
        self._tag += 1
        message = Message(channel, self._tag, header, redelivered)
        channel.unacknowledged[self._tag] = message
        return message

    def read(self, channel: Channel, count: int | None = None) -> None:
        """Read what was written, in order: all of it, or so much."""
        for tag, how in channel.written[:count]:
            message = channel.unacknowledged.pop(tag)  # once: an error in AMQP
            if how == "requeue":
                self.queue.insert(0, (message.header, True))
            elif how == "reject":
                self.dead.append(Key.of(message.header))
        del channel.written[:count]

    def lose(self, channel: Channel, read: int) -> None:
        self.read(channel, read)
        channel.is_open = False
        again = [(message.header, True) for message in channel.unacknowledged.values()]
        self.queue[:0] = again
        channel.unacknowledged.clear()


class Policy:
    """The tasks of this model: their ids say whether they are acknowledged late."""

    name = "t"
    acks_on_failure = requeue_lost = True

    def __init__(self, acks_late: bool) -> None:
        self.acks_late = acks_late

    def keeps_result(self, header: TaskHeader) -> bool:
        return False


class Worker:
    """The machine of a worker, with a pool in which everything begins at once."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.channel = Channel()
        effects: Any = self
        self.machine = Deliveries(
            effects, Prefetch(8, 4), Revocations(float),
            parked_max=1, clock=float, wall=float, is_stopping=lambda: False,
        )  # fmt: skip
        self.machine.connection_back(tied=True)
        self.runs: dict[Key, int] = {}
        self.running: list[Delivery] = []

    # effects
    def settle(self, message: Message, how: str) -> bool:
        try:
            message.ack() if how in (ACK, COPIED) else message.reject(requeue=how == REQUEUE)
        except Lost:
            return False
        return True

    def fill_pool(self, ready: Iterator[Delivery]) -> None:
        for delivery in ready:
            self.running.append(delivery)
            key = Key.of(delivery.header)
            self.runs[key] = self.runs.get(key, 0) + 1
            self.machine.began(delivery)

    def recall(self) -> list[Delivery]:
        return []

    def return_behind(self, delivery: Delivery) -> None:
        """A test says what comes of it."""

    received = adopted = return_behind

    def already_settled(self, header: TaskHeader, how: str) -> None:
        """Nobody reads the log."""

    def drop_timers(self) -> None:
        """There are none."""

    # what a test does
    def take(self) -> Delivery | None:
        """The next message that is not adopted."""
        message = self.broker.deliver(self.channel)
        if message is None:
            return None
        header = message.header
        if message.redelivered and self.machine.came_again(message, header):
            return None
        return Delivery(Policy(header.id.startswith("late")), message, header)

    def receive(self) -> None:
        delivery = self.take()
        if delivery is not None:
            self.machine.arrived(delivery)

    def end(self, delivery: Delivery, how: str) -> None:
        self.running.remove(delivery)
        self.machine.ended(delivery, how)

    def lose(self, read: int) -> None:
        self.broker.lose(self.channel, read)
        self.machine.connection_lost(cancel=False, reduce=True)
        self.channel = Channel()
        self.machine.connection_back(tied=True)


class Play:
    """A broker and a worker, and how often each message has to run."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.broker = Broker()
        self.worker = Worker(self.broker)
        self.expected: dict[Key, int] = {}
        self.returned: set[str] = set()  # ids of tasks that may be there twice

    def send(self) -> None:
        kind = self.dice.choice(["early", "late"])
        self._send(TaskHeader(task="t", id=f"{kind}-{len(self.expected)}"))

    def _send(self, header: TaskHeader) -> None:
        self.expected[Key.of(header)] = 1
        self.broker.queue.append((header, False))

    def receive(self) -> None:
        self.worker.receive()

    def give_back(self) -> None:
        """A message goes behind the others, as a copy; it may be cut off before the other goes."""
        delivery, machine = self.worker.take(), self.worker.machine
        if delivery is not None:
            size = machine.prefetch.concurrency
            machine.prefetch.concurrency = 0  # it waits for the pool
            machine.arrived(delivery)
            machine.prefetch.concurrency = size
            machine.return_waiting([delivery])
            self.returned.add(delivery.id)
            self.broker.queue.append((delivery.header, False))
            if self.dice.random() < 0.8:
                machine.copied(delivery)
            else:
                self.lose()
                machine.copied(delivery)  # the confirmation comes too late

    def end(self) -> None:
        if not self.worker.running:
            return
        delivery = self.dice.choice(self.worker.running)
        header, late = delivery.header, delivery.policy.acks_late
        retries, nesting = header.retries or 0, header.replaced_task_nesting or 0
        how = self.dice.choice(
            ["ack", "ack", "retry", "replace", "again", *(["reject", "requeue"] * late)]
        )
        if how == "requeue":
            self.expected[Key.of(header)] += 1
        elif how == "again":  # the same id, sent once more
            self._send(structs.replace(header, umbel_sent=len(self.expected)))
        elif how == "retry" and retries < 3:
            self._send(structs.replace(header, retries=retries + 1))
        elif how == "replace" and nesting < 3:
            self._send(structs.replace(header, retries=0, replaced_task_nesting=nesting + 1))
        self.worker.end(delivery, how if how in ("reject", "requeue") else "ack")

    def read(self) -> None:
        self.broker.read(self.worker.channel)

    def lose(self) -> None:
        self.worker.lose(self.dice.randint(0, len(self.worker.channel.written)))

    def finish(self) -> None:
        while self.broker.queue or self.worker.running or self.worker.channel.written:
            self.receive()
            if not self.broker.queue:
                self.end()
            self.read()


MOVES = st.sampled_from([Play.send, Play.receive, Play.end, Play.read, Play.lose, Play.give_back])


@settings(max_examples=size(1000, 10_000))
@given(st.lists(MOVES, max_size=80), st.integers(0, 2**32))
def test_every_task_runs_once_however_often_the_connection_is_lost(
    moves: list[Callable[[Play], None]], seed: int
) -> None:
    play = Play(seed)
    for move in moves:
        move(play)
    play.finish()
    worker = play.worker
    dead = [key for key in play.broker.dead if key.id not in play.returned]
    assert worker.runs.keys() == play.expected.keys(), "nothing is lost"
    for key, count in play.expected.items():
        # A copy and its original may both be there; both run then.
        at_least = key.id in play.returned and worker.runs[key] >= count
        assert at_least or worker.runs[key] == count, key
    assert not worker.channel.unacknowledged
    assert len(dead) == len(set(dead)), "nothing is dead-lettered twice"
    assert (worker.machine.prefetch.debtors, worker.machine.prefetch.adopted) == (0, 0)
    assert worker.machine.prefetch.window == worker.machine.prefetch.base
    assert not worker.machine.redeliveries.adopted
    assert not worker.machine.redeliveries._running
    assert not worker.machine.reserved
    assert not worker.machine.leaving
