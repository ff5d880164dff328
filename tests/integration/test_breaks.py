"""Fifty breaks in a row: connections cut by the broker, brokers killed, restarted and frozen.

After each of them a new task runs soon after the broker's return and tasks that were in flight
run to their end. After all of them nothing is lost and nothing is left over. The brokers are
private to this module; results are in a Redis that stays up.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kombu.exceptions import OperationalError

from tests.inside import Inside
from tests.servers import Missing, RabbitMQServer, RedisServer, wait_until
from tests.sizes import size
from umbel import Umbel
from umbel.app.results import AsyncResult
from umbel.cluster.backoff import Backoff
from umbel.worker.runtime import consumer as consuming

BREAKS = size(8, 50)
DESCRIPTORS = Path("/proc/self/fd")
BACK_WITHIN_S = 5.0
FROZEN_S = 5.0


class Left(NamedTuple):
    """What a worker could leave over."""

    descriptors: int
    threads: int
    timers: int
    window: int


class Bench:
    """A worker with tasks that can be kept in flight, and a count of their runs."""

    def __init__(self, broker_url: str, backend_url: str, **settings: Any) -> None:
        self.runs: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.gates: dict[str, threading.Event] = {}
        self.sent: list[str] = []
        self.late: set[str] = set()
        self.slowest_s = 0.0
        self.only_late_ones_open: Callable[[], bool] = lambda: True
        self.inside = Inside(
            {"broker_url": broker_url, "result_backend": backend_url, **settings},
            self._tasks,
            concurrency=4,
            prefetch_multiplier=4,
        ).start()
        self.worker = self.inside.worker

    def _tasks(self, app: Umbel) -> None:
        @app.task(name="note")
        def note(token: str) -> str:
            self.runs[token] += 1
            self.ended[token] += 1
            return token

        @app.task(name="early")
        def early(token: str) -> str:
            return self._stay(token)

        @app.task(name="late", acks_late=True)
        def late(token: str) -> str:
            return self._stay(token)

    def _stay(self, token: str) -> str:
        self.runs[token] += 1
        if self.runs[token] == 1:  # a second run must not keep the pool busy
            assert self.gates[token].wait(30)
        self.ended[token] += 1
        return token

    def send(self, task: str, token: str, deadline: float | None = None) -> AsyncResult:
        """Send; while the broker is away a client is told, and asks again."""
        self.sent.append(token)
        if task == "late":
            self.late.add(token)
        while True:
            try:
                result: AsyncResult = self.inside.send(task, token)
            except OperationalError:
                if deadline is None or time.monotonic() > deadline:
                    raise
            else:
                return result

    def survive(self, number: int, cut: Callable[[], None]) -> None:
        """One break, which is over when `cut` returns."""
        tokens = [f"early-{number}", f"late-{number}"]
        for token in tokens:
            self.gates[token] = threading.Event()
        flying = [self.send(token.split("-")[0], token, time.monotonic() + 5) for token in tokens]
        wait_until(lambda: all(self.runs[token] for token in tokens), what="tasks in flight")
        wait_until(self.only_late_ones_open, what="the early acknowledgement to arrive")
        cut()
        back = time.monotonic()
        new = self.send("note", f"note-{number}", back + BACK_WITHIN_S)
        assert new.get(timeout=BACK_WITHIN_S * 2) == f"note-{number}"
        took_s = time.monotonic() - back
        self.slowest_s = max(self.slowest_s, took_s)
        assert took_s < BACK_WITHIN_S, f"break {number} ({cut.__name__}): {took_s:.1f} s"
        for token in tokens:
            self.gates[token].set()
        assert [result.get(timeout=30) for result in flying] == tokens

    def left(self) -> Left:
        return Left(
            len(list(DESCRIPTORS.iterdir())),
            threading.active_count(),
            len(self.worker.timer),
            self.worker.deliveries.prefetch.window,
        )

    def settle(self, before: Left | None = None) -> Left:
        """Wait until nothing moves: no running task, and the same counts as `before`."""
        deliveries = self.worker.deliveries
        wait_until(
            lambda: not deliveries.reserved and not self.worker.busy, 20, "the last task's end"
        )
        self.inside.client.close()  # its links to the broker are not the worker's affair
        if before is None:
            return self.left()
        try:
            wait_until(lambda: self.left() == before, 5, "nothing left over")
        except AssertionError:
            names = sorted(f"{path.name}: {_name(path.name)}" for path in DESCRIPTORS.iterdir())
            threads = [thread.name for thread in threading.enumerate()]
            raise AssertionError(f"{before} became {self.left()}: {names}, {threads}") from None
        return before

    def assert_nothing_lost(self) -> None:
        assert set(self.sent) == set(self.ended)
        assert self.runs == self.ended, "what began has ended"

    def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self.inside.close()


def _name(descriptor: str) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return "closed meanwhile"


def _warm_up(bench: Bench) -> Left:
    """Every thread of the pool has run, and what they keep open is open."""
    tokens = [f"early-w{n}" for n in range(4)]
    for token in tokens:
        bench.gates[token] = threading.Event()
    results = [bench.send("early", token) for token in tokens]
    wait_until(lambda: all(bench.runs[token] for token in tokens), what="four tasks at once")
    for token in tokens:
        bench.gates[token].set()
    assert [result.get(timeout=30) for result in results] == tokens
    return bench.settle()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that do not last are rebuilt with pauses, of which other tests know."""
    monkeypatch.setattr(consuming, "DAMP", Backoff(0.05, 0.05))


def _run(kind: Any, directory: Path) -> Iterator[Any]:
    try:
        server = kind(directory)
    except Missing as exc:
        pytest.skip(f"{exc} is not installed: run 'make setup'")
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    yield from _run(RedisServer, tmp_path)


@pytest.fixture
def own_rabbitmq(tmp_path: Path) -> Iterator[RabbitMQServer]:
    yield from _run(RabbitMQServer, tmp_path)


def _freeze(server: RedisServer | RabbitMQServer) -> None:
    server.pause()
    threading.Event().wait(FROZEN_S)  # the thing tested is what so long a silence does
    server.resume()
    assert server.answers()


@pytest.mark.slow
def test_many_breaks_on_redis_lose_nothing_and_leave_nothing_over(
    own_redis: RedisServer, redis_url: str
) -> None:
    server = own_redis

    def cut() -> None:
        server.client().client_kill_filter(_type="normal", skipme=True)

    def crash() -> None:
        server.kill()
        server.start()

    def freeze() -> None:
        _freeze(server)

    bench = Bench(server.url, redis_url)
    try:
        client = server.client()
        bench.only_late_ones_open = lambda: client.hlen("unacked") == 1
        before = _warm_up(bench)
        assert before.window == bench.worker.deliveries.prefetch.base
        for number in range(BREAKS):
            how = freeze if number in (5, 37) else crash if number % 6 == 3 else cut
            bench.survive(number, how)
        bench.settle(before)
        bench.assert_nothing_lost()
        twice = {token: runs for token, runs in bench.runs.items() if runs > 1}
        assert twice == {}, "on Redis nothing runs twice"
        assert bench.worker.counters.connections_lost >= BREAKS - 2
        # Acknowledgements go with the next request, or within 50 ms.
        wait_until(lambda: client.hlen("unacked") == 0, 5, "the last acknowledgements")
        assert client.llen("celery") == 0
        assert bench.inside.stop() == 0
    finally:
        bench.close()


@pytest.mark.slow
def test_many_breaks_on_rabbitmq_lose_nothing_and_leave_nothing_over(
    own_rabbitmq: RabbitMQServer, redis_url: str
) -> None:
    server = own_rabbitmq

    def cut() -> None:
        server.close_connections()

    def restart() -> None:
        server.restart()
        server.evaluate('""')  # its shell is open again, as it was when descriptors were counted

    def freeze() -> None:
        _freeze(server)

    server.evaluate('""')
    # A client that does not ask for confirmations may lose what it sends while it is cut off.
    confirmed = {"broker_transport_options": {"confirm_publish": True}}
    bench = Bench(server.url, redis_url, **confirmed)
    try:
        bench.only_late_ones_open = lambda: server.unacknowledged("celery") == 1
        before = _warm_up(bench)
        assert before.window == bench.worker.deliveries.prefetch.base
        for number in range(BREAKS):
            how = freeze if number == 25 else restart if number in (4, 40) else cut
            bench.survive(number, how)
        bench.settle(before)
        bench.assert_nothing_lost()
        twice = {token for token, runs in bench.runs.items() if runs > 1}
        assert twice <= bench.late, "only what is acknowledged late may run again"
        assert max(bench.runs.values()) <= 2
        assert bench.worker.counters.connections_lost >= BREAKS - 1
        assert server.queue_length("celery") == 0
        assert bench.inside.stop() == 0
    finally:
        bench.close()
