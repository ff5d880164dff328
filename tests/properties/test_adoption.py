"""Connections that are lost at any moment: every message is settled, and none runs too often.

A model of RabbitMQ delivers messages, forgets the acknowledgements that it had not read when a
connection is lost, and delivers those messages again. The requests and the rules for what comes
again are the worker's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.sizes import size
from umbel.wire.tasks import TaskHeader
from umbel.worker.jobs import Job
from umbel.worker.prefetch import Prefetch
from umbel.worker.request import Request
from umbel.worker.salvage import Key, Salvage
from umbel.worker.tally import Tally


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


class Worker:
    """As much of a worker as requests know of."""

    connection_errors = (Lost,)
    metrics = None

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.tally = Tally()
        self.prefetch = Prefetch(8, 4)
        conf = SimpleNamespace(
            worker_cancel_long_running_tasks_on_connection_loss=False,
            worker_enable_prefetch_count_reduction=True,
        )
        self.app = SimpleNamespace(conf=conf)
        self.task_events = SimpleNamespace(on=False)
        self.timer = SimpleNamespace(queue=[], clear=lambda: None)
        self.salvage = Salvage(self)  # type: ignore[arg-type]
        self.consumer = SimpleNamespace(channel=Channel(), failure=None)
        self.salvage.reclaim(self.consumer.channel)
        self.runs: dict[Key, int] = {}
        self.running: list[Request] = []

    def take_unbegun(self) -> list[Request]:
        return []

    def settle(self, message: Any, how: str) -> None:
        message.ack() if how == "ack" else message.reject(requeue=False)

    def take(self) -> Request | None:
        """The next message that is not adopted."""
        message = self.broker.deliver(self.consumer.channel)
        if message is None:
            return None
        header = message.header
        if message.redelivered and self.salvage.adopt(message, header):
            return None
        strategy: Any = SimpleNamespace(worker=self, acks_late=header.id.startswith("late"))
        job = Job(header.id, header.task, {}, b"", "", "")
        return Request(strategy, message, header, job)

    def receive(self) -> None:
        request = self.take()
        if request is None:
            return
        self.tally.reserved[id(request)] = request
        self.running.append(request)
        key = Key.of(request.header)
        self.runs[key] = self.runs.get(key, 0) + 1
        if not request.strategy.acks_late:
            request.ack()

    def end(self, request: Request, how: str) -> None:
        self.running.remove(request)
        if how == "ack":
            request.ack()
        else:
            request.reject(requeue=how == "requeue")
        self.tally.reserved.pop(id(request))
        if request.owed:
            self.salvage.owe_no_more(request)
        if request.void or self.salvage.adopted:
            self.salvage.ended(request)

    def lose(self, read: int) -> None:
        self.broker.lose(self.consumer.channel, read)
        self.salvage.deliveries_void()
        self.consumer.channel = Channel()
        self.salvage.reclaim(self.consumer.channel)


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
        request = self.worker.take()
        if request is not None:
            self.returned.add(request.id)
            self.broker.queue.append((request.header, False))
            if self.dice.random() < 0.8:
                request.ack_copied()
            else:
                self.lose()

    def end(self) -> None:
        if not self.worker.running:
            return
        request = self.dice.choice(self.worker.running)
        header, late = request.header, request.strategy.acks_late
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
        self.worker.end(request, how if how in ("reject", "requeue") else "ack")

    def read(self) -> None:
        self.broker.read(self.worker.consumer.channel)

    def lose(self) -> None:
        self.worker.lose(self.dice.randint(0, len(self.worker.consumer.channel.written)))

    def finish(self) -> None:
        while self.broker.queue or self.worker.running or self.worker.consumer.channel.written:
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
    assert not worker.consumer.channel.unacknowledged
    assert len(dead) == len(set(dead)), "nothing is dead-lettered twice"
    assert (worker.prefetch.debtors, worker.prefetch.adopted) == (0, 0)
    assert worker.prefetch.window == worker.prefetch.base
    assert not worker.salvage.adopted
    assert not worker.salvage._running
