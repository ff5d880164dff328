"""When things happened, as events of tasks tell it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from umbel.worker.control.commands import views
from umbel.worker.observe import task_events

WALL_AHEAD_S = 1_800_000_000.0
HELD_UP_S = 0.005


class HeldUp:
    """Clocks of a process that has to wait for a processor after each look at one of them."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        self.now += HELD_UP_S
        return self.now

    def time(self) -> float:
        return self.monotonic() + WALL_AHEAD_S


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> HeldUp:
    made = HeldUp()
    monkeypatch.setattr(task_events, "time", made.time)
    monkeypatch.setattr(task_events, "monotonic", made.monotonic)
    monkeypatch.setattr(time, "time", made.time)
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    return made


def test_a_task_has_begun_neither_before_it_has_nor_after_now(clocks: HeldUp) -> None:
    kept: list[Any] = []
    stamper = SimpleNamespace(
        hostname="w@h", pid=1, utcoffset=0, inc=1, count=lambda clock=None: (1, clock or 1)
    )
    events = SimpleNamespace(stamper=stamper, keep=kept.append, sends=lambda kind: True)
    conf = SimpleNamespace(worker_code_version=None)
    worker: Any = SimpleNamespace(events=events, app=SimpleNamespace(conf=conf))
    request: Any = SimpleNamespace(
        policy=SimpleNamespace(tells=True),
        job=SimpleNamespace(clock=7),
        header=SimpleNamespace(id="t"),
        queue="celery",
        accepted_at=clocks.now,
    )
    began = clocks.now + WALL_AHEAD_S
    told = task_events.TaskEvents(worker)
    told.refresh()
    told.started(request, request.accepted_at)
    assert began <= kept[0].timestamp <= clocks.now + WALL_AHEAD_S
    shown = views._started_at(request)
    assert shown is not None
    assert began <= shown <= clocks.now + WALL_AHEAD_S
