"""Half-open connections: one direction is swallowed, and neither end is told.

Nothing ends and nothing fails, so only a question that stays unanswered tells. The worker finds
out within twice the heartbeat, connects anew and loses nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.inside import Inside
from tests.proxy import Proxy
from tests.servers import RedisServer, wait_until
from umbel import Umbel
from umbel.broker.sessions.probes import Probe
from umbel.worker.runtime.counters import Counters
from umbel.worker.runtime.errors import ConnectionFailed
from umbel.worker.runtime.watchdog import LOOKS, questioning

HEARTBEAT_S = 2.0
# RabbitMQ takes a silent client for dead after two to three heartbeats, and only then gives what
# it had sent there to others.
REDELIVERED_S = 3 * HEARTBEAT_S + 5


class Bench:
    """A worker behind a proxy, and a client that is not."""

    def __init__(self, broker_url: str, backend_url: str, **options: Any) -> None:
        port = urlsplit(broker_url).port
        assert port is not None
        self.proxy = Proxy(port)
        self.begun, self.gate = threading.Event(), threading.Event()
        self.inside = Inside(
            {
                "broker_url": broker_url.replace(f":{port}/", f":{self.proxy.port}/"),
                "result_backend": backend_url,
                "broker_heartbeat": HEARTBEAT_S,
            },
            self._tasks,
            **options,
        )
        self.worker = self.inside.worker
        self.client = Umbel("client", broker=broker_url, backend=backend_url, set_as_current=False)

    def _tasks(self, app: Umbel) -> None:
        @app.task(name="note")
        def note(token: str) -> str:
            return token

        @app.task(name="late", acks_late=True)
        def late(token: str) -> str:
            self.begun.set()
            assert self.gate.wait(30)
            return token

    def send(self, task: str, token: str) -> Any:
        return self.client.send_task(task, (token,))

    def close(self) -> None:
        self.gate.set()
        self.inside.close()
        self.client.close()
        self.proxy.close()


Make = Callable[..., Bench]


@pytest.fixture
def make(broker_url: str, redis_server: RedisServer) -> Iterator[Make]:
    made: list[Bench] = []

    def start(**options: Any) -> Bench:
        bench = Bench(broker_url, redis_server.url_of(0), **options)
        made.append(bench)
        bench.inside.start()
        return bench

    yield start
    for bench in made:
        bench.close()


class Losses(logging.Handler):
    """When the worker noticed that its connection was lost."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "lost" in record.getMessage():
            self.at.append(time.monotonic())


@pytest.fixture
def losses() -> Iterator[Losses]:
    handler = Losses()
    logging.getLogger("umbel.consumer").addHandler(handler)
    yield handler
    logging.getLogger("umbel.consumer").removeHandler(handler)


DIRECTIONS = pytest.mark.parametrize("to_server", [True, False], ids=["to-server", "to-client"])


@DIRECTIONS
@pytest.mark.parametrize("sync", [False, True], ids=["asynloop", "synloop"])
def test_a_half_open_connection_is_found_within_twice_the_heartbeat(
    make: Make, losses: Losses, to_server: bool, sync: bool
) -> None:
    bench = make(sync=sync, concurrency=4)
    worker, counters = bench.worker, bench.worker.counters
    flying = bench.send("late", "flying")
    assert bench.begun.wait(10)
    assert bench.send("note", "before").get(timeout=30) == "before"
    began = time.monotonic()
    assert bench.proxy.swallow(to_server=to_server) >= 1
    meanwhile = bench.send("note", "meanwhile")
    wait_until(lambda: losses.at, 4 * HEARTBEAT_S, "the loss to be noticed")
    found_s = losses.at[0] - began
    assert found_s < 2 * HEARTBEAT_S, f"found after {found_s:.2f} s"
    bench.inside.wait_until_ready()
    rebuilt_s = time.monotonic() - began
    assert rebuilt_s < 2 * HEARTBEAT_S + 1, f"rebuilt after {rebuilt_s:.2f} s"
    bench.gate.set()
    assert meanwhile.get(timeout=REDELIVERED_S) == "meanwhile"
    assert flying.get(timeout=REDELIVERED_S) == "flying"
    after = [bench.send("note", f"after-{n}") for n in range(5)]
    assert [r.get(timeout=REDELIVERED_S) for r in after] == [f"after-{n}" for n in range(5)]
    assert counters.connections_lost == len(losses.at) == 1, "the new connection lasts"
    wait_until(lambda: not worker.deliveries.reserved, REDELIVERED_S, "everything to be settled")
    assert worker.deliveries.prefetch.window == worker.deliveries.prefetch.base


@DIRECTIONS
def test_a_worker_ends_soon_although_nobody_answers(make: Make, to_server: bool) -> None:
    bench = make()
    bench.proxy.swallow(to_server=to_server)
    began = time.monotonic()
    assert bench.inside.stop() == 0
    assert time.monotonic() - began < 4 * HEARTBEAT_S


@DIRECTIONS
def test_the_acknowledgement_of_a_task_that_ends_meanwhile_does_not_stop_the_worker(
    make: Make, to_server: bool
) -> None:
    bench = make()
    flying = bench.send("late", "flying")
    assert bench.begun.wait(10)
    bench.proxy.swallow(to_server=to_server)
    bench.gate.set()
    assert flying.get(timeout=REDELIVERED_S) == "flying"
    wait_until(lambda: bench.worker.counters.connections_lost, 4 * HEARTBEAT_S, "the loss")
    assert bench.send("note", "after").get(timeout=REDELIVERED_S) == "after"
    assert bench.worker.counters.connections_lost == 1


@DIRECTIONS
def test_a_message_that_could_not_be_settled_is_settled_on_the_next_connection(
    redis_url: str, redis_server: RedisServer, to_server: bool
) -> None:
    """Of a pool that runs tasks on the loop's own thread, so that nothing looks meanwhile."""
    notes = redis_server.client(int(redis_url.rsplit("/", 1)[1]))
    bench = Bench(redis_url, redis_server.url_of(0), pool="solo")
    try:
        bench.inside.start()
        flying = bench.send("late", "flying")
        assert bench.begun.wait(10)
        bench.proxy.swallow(to_server=to_server)
        bench.gate.set()
        assert flying.get(timeout=30) == "flying"
        assert bench.send("note", "after").get(timeout=30) == "after"
        wait_until(lambda: notes.hlen("unacked") == 0, what="every message to be settled")
        wait_until(lambda: bench.worker.counters.finished >= 2, what="both to be counted")
        assert bench.worker.counters.connections_lost == 1
        wait_until(lambda: bench.worker.counters.finished >= 2, what="the end of both")
        assert bench.worker.counters.finished == 2, "each has run once"
    finally:
        bench.close()


def test_a_broker_that_said_it_listens_to_nobody_is_not_taken_for_dead() -> None:
    """RabbitMQ that is short of memory or disk; one that says nothing is given a heartbeat."""
    established = SimpleNamespace(on_blocked=None, on_unblocked=None)
    asked: list[Any] = []
    channel = SimpleNamespace(_callbacks={}, send_method=lambda *call: asked.append(call))
    consumer: Any = SimpleNamespace(worker=SimpleNamespace(counters=Counters()))
    look = questioning(consumer, Probe(established, channel))
    look()
    established.on_blocked("short of memory")
    for _ in range(5 * LOOKS):
        look()
    established.on_unblocked()
    look()
    assert len(asked) == 2, "it is asked again when it listens again"
    (answer,) = channel._callbacks.values()
    answer(True)
    for _ in range(LOOKS):
        look()
    with pytest.raises(ConnectionFailed, match="does not answer"):
        look()
    assert consumer.worker.counters.rebuilt_by_watchdog == 1
