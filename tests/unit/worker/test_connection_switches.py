"""Connecting and reconnecting: how often, how patiently, and when it is over."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from umbel import Umbel
from umbel.worker.runtime import consumer as module
from umbel.worker.runtime.consumer import (
    DAMP,
    LASTING_S,
    RETRY,
    SHORT_LIVES_FREE,
    Consumer,
    fatal_if_no_files,
)
from umbel.worker.runtime.errors import BrokerUnreachable, ConnectionFailed
from umbel.worker.runtime.options import WorkerOptions
from umbel.worker.runtime.worker import Worker


class Patience:
    """The worker's wish to stop, which counts how long it was waited for."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []
        self.wanted = False

    def is_set(self) -> bool:
        return self.wanted

    def set(self) -> None:
        self.wanted = True

    def wait(self, timeout_s: float) -> bool:
        self.waits_s.append(timeout_s)
        return self.wanted


class Broker:
    """Connections that are refused so many times."""

    def __init__(self, refusals: int, failure: Callable[[], Exception]) -> None:
        self.left, self.failure, self.tries = refusals, failure, 0

    def connection(self, *args: Any, **options: Any) -> Any:
        return SimpleNamespace(alt=[], ensure_connection=self._open, channel_errors=())

    def _open(self, **options: Any) -> None:
        self.tries += 1
        if self.left:
            self.left -= 1
            raise self.failure()


Make = Callable[..., tuple[Consumer, Patience]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    apps: list[Umbel] = []

    def made(broker: Broker | None = None, **settings: Any) -> tuple[Consumer, Patience]:
        app = Umbel(
            "a", broker="memory://", backend="disabled://", set_as_current=False, **settings
        )
        apps.append(app)
        worker = Worker(app, WorkerOptions(pool="solo"))
        patience: Any = Patience()
        worker.stop_wanted = patience
        if broker is not None:
            monkeypatch.setattr(app, "connection", broker.connection)
        return worker.consumer, patience

    yield made
    for app in apps:
        app.close()


def refused() -> Exception:
    return ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def test_the_pauses_double_up_to_a_ceiling_and_are_never_the_same(make: Make) -> None:
    broker = Broker(12, refused)
    consumer, patience = make(broker)
    assert consumer.connect() is not None
    ceilings_s = [min(RETRY.first_s * 2**n, RETRY.longest_s) for n in range(12)]
    for wait_s, ceiling_s in zip(patience.waits_s, ceilings_s, strict=True):
        assert ceiling_s / 2 <= wait_s <= ceiling_s
    last = patience.waits_s[6:]
    assert len(set(last)) == len(last), "without jitter a cluster comes back all at once"


def test_a_worker_that_is_told_to_stop_tries_no_more(make: Make) -> None:
    broker = Broker(1000, refused)
    consumer, patience = make(broker)
    patience.wait = lambda timeout_s: patience.set()  # type: ignore[method-assign]
    assert consumer.connect() is None
    assert broker.tries == 1


@pytest.mark.parametrize(
    ("settings", "tries"),
    [
        ({"broker_connection_retry_on_startup": False}, 1),
        ({"broker_connection_retry": False}, 1),
        ({"broker_connection_retry": False, "broker_connection_retry_on_startup": True}, 8),
        ({"broker_connection_max_retries": 3}, 4),
        ({"broker_connection_max_retries": 0}, 8),
        ({"broker_connection_max_retries": None}, 8),
    ],
    ids=str,
)
def test_how_often_the_first_connection_is_tried(
    make: Make, settings: dict[str, Any], tries: int
) -> None:
    broker = Broker(7, refused)
    consumer, _ = make(broker, **settings)
    if tries == 8:
        assert consumer.connect() is not None
    else:
        with pytest.raises(BrokerUnreachable, match=r"cannot connect to memory.*refused"):
            consumer.connect()
    assert broker.tries == tries


@pytest.mark.parametrize(("again", "tries"), [(True, 3), (False, 1)])
def test_the_next_connections_have_a_switch_of_their_own(
    make: Make, again: bool, tries: int
) -> None:
    broker = Broker(0, refused)
    consumer, _ = make(
        broker, broker_connection_retry=again, broker_connection_retry_on_startup=not again
    )
    assert consumer.connect() is not None
    broker.left, broker.tries = 2, 0
    if again:
        assert consumer.connect() is not None
    else:
        with pytest.raises(BrokerUnreachable):
            consumer.connect()
    assert broker.tries == tries


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_fatal_however_deep_the_reason_is(make: Make, number: int) -> None:
    def failure() -> Exception:
        outer = ConnectionError("could not connect")
        outer.__cause__ = ConnectionError("wrapped once more")
        outer.__cause__.__context__ = OSError(number, "too many")
        return outer

    broker = Broker(5, failure)
    consumer, patience = make(broker)
    with pytest.raises(BrokerUnreachable, match=r"too many open files \(the limit is \d+.*ulimit"):
        consumer.connect()
    assert (broker.tries, patience.waits_s) == (1, [])
    fatal_if_no_files(refused())  # nothing of the kind


class Failing:
    """A blueprint whose connection lives so long, again and again."""

    def __init__(self, lives_s: list[float], patience: Patience, clock: list[float]) -> None:
        self.lives_s, self.patience, self.clock = list(lives_s), patience, clock

    def start(self, parent: Any) -> None:
        self.clock[0] += self.lives_s.pop(0)
        if not self.lives_s:
            self.patience.set()
        raise ConnectionFailed("broken")

    def stop(self, parent: Any, *, terminate: bool = False) -> None:
        """Nothing to stop."""


def damped(make: Make, monkeypatch: pytest.MonkeyPatch, lives_s: list[float]) -> list[float]:
    consumer, patience = make()
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    blueprint: Any = Failing(lives_s, patience, clock)
    consumer.blueprint = blueprint
    consumer.run()
    assert consumer.worker.counters.connections_lost == len(lives_s)
    return patience.waits_s


def test_connections_that_break_at_once_are_rebuilt_slower_and_slower(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s = damped(make, monkeypatch, [0.0] * (SHORT_LIVES_FREE + 7))
    expected = [DAMP.first_s * 2 ** min(n, 4) for n in range(7)]
    assert waits_s == pytest.approx(expected)


def test_a_connection_that_lasts_makes_good_for_short_ones(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives_s = [*([0.0] * (SHORT_LIVES_FREE + 2)), LASTING_S, *([0.0] * SHORT_LIVES_FREE)]
    assert len(damped(make, monkeypatch, lives_s)) == 2


def test_a_loss_ends_the_worker_where_reconnecting_is_off(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, patience = make(broker_connection_retry=False)
    blueprint: Any = Failing([0.0, 0.0], patience, [0.0])
    consumer.blueprint = blueprint
    with pytest.raises(BrokerUnreachable, match=r"was lost: broken; broker_connection_retry is"):
        consumer.run()
    assert patience.waits_s == []


def test_too_many_open_files_end_a_worker_that_was_connected(make: Make) -> None:
    consumer, patience = make()

    class NoFiles(Failing):
        def start(self, parent: Any) -> None:
            raise ConnectionFailed("broken") from OSError(errno.EMFILE, "too many")

    blueprint: Any = NoFiles([], patience, [0.0])
    consumer.blueprint = blueprint
    with pytest.raises(BrokerUnreachable, match="too many open files"):
        consumer.run()
