"""The lengths of queues for heartbeats: how often they are asked for, and what waits for them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.servers import wait_until
from umbel import Umbel
from umbel.worker.runtime import queue_watch
from umbel.worker.runtime.queue_watch import EVERY_S, RAREST_S, QueueWatch


def worker_of(app: Umbel | None = None, peers: int = 0) -> Any:
    gossip = SimpleNamespace(membership=SimpleNamespace(established_count=peers))
    return SimpleNamespace(app=app, gossip=gossip, task_events=SimpleNamespace(on=True))


@pytest.mark.parametrize(
    ("peers", "pace_s"), [(0, EVERY_S), (4, EVERY_S), (9, 20), (999, RAREST_S)]
)
def test_many_workers_together_do_not_ask_more_often_than_a_few(peers: int, pace_s: float) -> None:
    assert QueueWatch(worker_of(peers=peers))._pace_s() == pace_s


def test_an_old_answer_is_not_told() -> None:
    watch = QueueWatch(worker_of())
    assert watch.lengths is None
    watch._answer = (time.monotonic() + 60, {"celery": 3})
    assert watch.lengths == {"celery": 3}
    watch._answer = (time.monotonic() - 1, {"celery": 3})
    assert watch.lengths is None


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_watch, "FIRST_S", 0.01)
    monkeypatch.setattr(queue_watch, "EVERY_S", 0.01)


@pytest.mark.usefixtures("quick")
def test_a_broker_that_cannot_tell_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Umbel("x", broker="memory://", set_as_current=False)
    monkeypatch.setattr(queue_watch, "lengths_of", lambda *_: pytest.fail("it was asked"))
    watch = QueueWatch(worker_of(app))
    watch.start()
    assert watch._thread is not None
    watch._thread.join(20)
    assert not watch._thread.is_alive()
    assert watch.lengths is None


@pytest.mark.usefixtures("quick")
def test_failures_are_outlived_and_a_broker_that_hangs_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Umbel("x", broker="redis://127.0.0.1:1/0", set_as_current=False)
    asked, hanging, answers = [0], threading.Event(), threading.Event()

    def ask(connection: Any, queues: Any) -> dict[str, int | None]:
        asked[0] += 1
        if asked[0] < 3:
            raise ConnectionError("gone")
        hanging.set()
        assert answers.wait(20)
        return {"celery": 7, "gone": None}

    monkeypatch.setattr(queue_watch, "lengths_of", ask)
    watch = QueueWatch(worker_of(app))
    watch.start()
    assert hanging.wait(20)
    assert watch.lengths is None  # at once
    monkeypatch.setattr(queue_watch, "EVERY_S", 60.0)
    answers.set()
    wait_until(lambda: asked[0] >= 3, what="the answer")
    watch.stop()
    assert watch._thread is not None
    watch._thread.join(20)
    assert not watch._thread.is_alive()
