"""Workers on either AMQP transport, in either loop: everything runs once and is settled."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.inside import Inside
from tests.servers import RabbitMQServer, wait_until
from umbel import Umbel
from umbel.broker.amqp.connection import BufferedConnection
from umbel.broker.sessions import connections

LONG_S = 30.0
COUNT = 300


class Place:
    """A worker, what it ran, and what the broker has."""

    def __init__(self, url: str, server: RabbitMQServer, **options: Any) -> None:
        self.ran: list[int] = []
        self._lock = threading.Lock()
        self._server, self._vhost = server, urlsplit(url).path[1:]
        settings = {
            "broker_url": url,
            "result_backend": "disabled://",
            "broker_amqp_transport": options.pop("transport"),
            "worker_prefetch_multiplier": 20,
        }
        self.inside = Inside(settings, self._tasks, **options).start()

    def _tasks(self, app: Umbel) -> None:
        @app.task(name="early")
        def early(number: int) -> None:
            self._note(number)

        @app.task(name="late", acks_late=True)
        def late(number: int) -> None:
            self._note(number)

    def _note(self, number: int) -> None:
        with self._lock:
            self.ran.append(number)

    def is_settled(self) -> bool:
        waiting = self._server.queue_length("celery", self._vhost)
        return not waiting and not self._server.unacknowledged("celery", self._vhost)


@pytest.fixture(params=["hub", "sync"])
def sync(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "sync")


@pytest.fixture(params=["umbel", "pyamqp"])
def place(
    request: pytest.FixtureRequest, amqp_url: str, rabbitmq_server: RabbitMQServer, sync: bool
) -> Iterator[Place]:
    made = Place(amqp_url, rabbitmq_server, transport=request.param, sync=sync)
    yield made
    made.inside.close()


def test_every_task_runs_once_and_is_settled_while_the_worker_lives(place: Place) -> None:
    client = place.inside.client
    for number in range(COUNT):
        client.send_task("late" if number % 3 else "early", (number,))
    wait_until(lambda: len(place.ran) >= COUNT, LONG_S, "all tasks to run")
    wait_until(place.is_settled, LONG_S, "all messages to be settled")
    assert sorted(place.ran) == list(range(COUNT))


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_message_whose_properties_can_not_be_read_is_refused(
    amqp_url: str, rabbitmq_server: RabbitMQServer, pool: str
) -> None:
    """It would come again and again to a worker that hangs up on it."""
    place = Place(amqp_url, rabbitmq_server, transport="umbel", pool=pool)
    try:
        with connections.connect(amqp_url) as connection:
            channel: Any = connection.channel()
            items = b"\1aT" + b"\x7f" + b"\xff" * 7  # a date that is none
            table = struct.pack(">I", len(items)) + items
            frames = [channel.writer.address("", "celery")]
            channel.writer.add(frames, b"\x20\0" + table, b"x", 131_072)
            established: Any = connection.connection
            assert isinstance(established, BufferedConnection)
            established.write_frames(b"".join(frames))
            channel.queue_declare("celery", passive=True)
        place.inside.client.send_task("early", (1,))
        wait_until(lambda: place.ran == [1], LONG_S, "the other task to run")
        wait_until(place.is_settled, LONG_S, "both messages to be settled")
        counters = place.inside.worker.counters
        assert sum(counters.refused.values()) == 1
        assert counters.connections_lost == 0
    finally:
        place.inside.close()
