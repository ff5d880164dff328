"""What a worker tells when it learns of revocations, and with which time it notes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.worker.parts import finish_asides, idle_worker
from umbel import Umbel
from umbel.cluster.revocations import SKEW_MAX_S, Revocations
from umbel.worker.control.commands import BUILTIN
from umbel.worker.control.panel import CommandState
from umbel.worker.runtime.worker import Worker


class Told:
    """A dispatcher that remembers."""

    def __init__(self, groups: set[str]) -> None:
        self.groups = groups
        self.events: list[dict[str, Any]] = []

    def sends(self, group: str) -> bool:
        return group in self.groups

    def send(self, kind: str, /, **fields: Any) -> None:
        assert kind == "worker-revocation"
        self.events.append(fields)


@pytest.fixture
def worker() -> Iterator[Worker]:
    app = Umbel("unit", broker="memory://", backend="cache+memory://", set_as_current=False)
    worker = idle_worker(app)
    worker.stop_wanted.set()
    worker.events = Told({"worker"})  # type: ignore[assignment]
    yield worker
    worker._aside.shutdown()
    worker.inbox.close()
    app.close()


def run(worker: Worker, name: str, **arguments: Any) -> list[dict[str, Any]]:
    """Run a command; what was told since."""
    told: Any = worker.events
    seen = len(told.events)
    command = BUILTIN.get(name)
    assert command is not None
    command.run(CommandState(worker), **arguments)
    finish_asides(worker)
    return told.events[seen:]


def test_a_revoke_is_told_with_its_ids_its_stamp_and_how_it_came(worker: Worker) -> None:
    at = time.time() - 1
    assert run(worker, "revoke", task_id=["b", "a"], stamp=at) == [
        {"ids": ["a", "b"], "stamp": at, "method": "revoke"}
    ]
    (event,) = run(worker, "revoke", task_id="c", terminate=True, stamp=at)
    assert (event["ids"], event["method"]) == (["c"], "terminate")
    (event,) = run(worker, "terminate", task_id="d", signal="TERM", stamp=at)
    assert (event["ids"], event["stamp"], event["method"]) == (["d"], at, "terminate")
    (event,) = run(worker, "revoke_by_stamped_headers", headers={"team": ["x", 7]}, stamp=at)
    assert event == {
        "ids": [],
        "stamp": at,
        "headers": [["team", "x"], ["team", 7]],
        "method": "revoke_by_stamped_headers",
    }


def test_what_others_tell_is_told_as_learned_by_mingling(worker: Worker) -> None:
    now = time.time()
    told = {"tasks": {"old": [now - 20, now + 99], "new": [now - 10, now + 99]}, "headers": {}}
    worker.learn_revoked(worker.revocations.merge(told, now), "mingle")
    (event,) = worker.events.events  # type: ignore[union-attr]
    stamps = dict(zip(event["ids"], event["stamps"], strict=True))
    assert stamps == {"old": now - 20, "new": now - 10}
    assert event["stamp"] == now - 10
    assert event["method"] == "mingle"


def test_nothing_is_told_of_what_was_known(worker: Worker) -> None:
    at = time.time() - 1
    assert len(run(worker, "revoke", task_id="a", stamp=at)) == 1
    assert run(worker, "revoke", task_id="a", stamp=at) == []


def test_very_many_are_told_in_parts_and_up_to_a_bound(worker: Worker) -> None:
    events = run(worker, "revoke", task_id=[f"{n:05}" for n in range(7_000)])
    assert [len(event["ids"]) for event in events] == [500] * 10


@pytest.mark.parametrize("events", [None, Told({"task"})])
def test_nothing_is_told_where_events_of_workers_are_off(worker: Worker, events: Any) -> None:
    worker.events = events
    command = BUILTIN.get("revoke")
    assert command is not None
    command.run(CommandState(worker), task_id="a")
    finish_asides(worker)
    assert "a" in worker.revocations
    assert events is None or events.events == []


@pytest.mark.parametrize("name", ["revoke", "revoke_by_stamped_headers"])
def test_all_who_hear_of_one_revoke_agree_at_once(name: str) -> None:
    app = Umbel("unit", broker="memory://", backend="disabled://", set_as_current=False)
    workers = [idle_worker(app, hostname=f"{n}@test") for n in range(2)]
    what: dict[str, Any] = {"task_id": "a"} if name == "revoke" else {"headers": {"k": "v"}}
    at = time.time() - 2
    for worker in workers:
        worker.stop_wanted.set()
        command = BUILTIN.get(name)
        assert command is not None
        command.run(CommandState(worker), stamp=at, **what)
        finish_asides(worker)
    first, second = (worker.revocations for worker in workers)
    assert first.agrees(second.digest())
    assert [one.stamp for one in first.all()] == [at]
    for worker in workers:
        worker._aside.shutdown()
        worker.inbox.close()
    app.close()


@pytest.mark.parametrize(
    "stamp",
    [None, "soon", True, -1, float("nan"), float("inf"), [], 0, 1e300,
     SKEW_MAX_S + 1_000_010, 1_000_000 - SKEW_MAX_S - 1],
)  # fmt: skip
def test_a_stamp_that_can_not_be_true_is_taken_as_now(stamp: Any) -> None:
    now = 1_000_000.0
    revocations = Revocations(lambda: now)
    (made,) = revocations.revoke("a", now, stamp)
    assert (made.stamp, made.until) == (now, now + revocations.expires_s)
    (made,) = revocations.revoke_headers({"k": "v"}, now, stamp)
    assert made.stamp == now


@pytest.mark.parametrize("apart_s", [-299.0, -1.0, 0.0, 1.0, 299.0])
def test_a_stamp_near_now_is_the_time_of_the_revoke(apart_s: float) -> None:
    now = 1_000_000.0
    revocations = Revocations(lambda: now)
    (made,) = revocations.revoke("a", now, now + apart_s)
    assert (made.stamp, made.until) == (now + apart_s, now + apart_s + revocations.expires_s)
