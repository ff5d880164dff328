"""The barrier between broker and worker: whatever arrives is answered, nothing is raised."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.unit.worker.parts import Message, finish_asides, idle_worker, task_message
from umbel import Umbel
from umbel.worker.runtime.worker import Worker


@pytest.fixture
def app() -> Umbel:
    app = Umbel("unit", broker="memory://", backend="cache+memory://", set_as_current=False)

    @app.task(name="add")
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(name="late", acks_late=True, time_limit=9, soft_time_limit=3)
    def late() -> None:
        """Nothing."""

    return app


@pytest.fixture
def worker(app: Umbel) -> Iterator[Worker]:
    worker = idle_worker(app)
    worker.stop_wanted.set()  # nothing is dispatched: requests stay where a test can see them
    yield worker
    worker._aside.shutdown()
    worker.inbox.close()
    app.close()


def test_a_good_message_becomes_a_request_that_is_ready(worker: Worker) -> None:
    message = task_message("add", 2, 2)
    worker.receiver(message)
    assert [request.id for request in worker.deliveries.ready] == [message.headers["id"]]
    assert message.fate == []


@pytest.mark.parametrize(
    "changes",
    [
        {"body": None},
        {"body": 7},
        {"body": ["list"]},
        {"headers": None},
        {"headers": {"task": "add"}},
        {"headers": {"task": 7, "id": "x"}},
        {"content_type": ["application/json"]},
        {"content_type": None},
        {"content_encoding": 8},
        {"properties": {"reply_to": 7}, "headers": {"task": "none", "id": "x"}},
        {"delivery_info": {}, "headers": {"task": "none", "id": "x"}},
    ],
    ids=repr,
)
def test_no_message_gets_through_the_barrier_without_an_answer(
    worker: Worker, changes: dict[str, Any]
) -> None:
    message = Message(**{"body": b"{}", **changes})
    worker.receiver(message)
    finish_asides(worker)
    assert message.fate in (["reject"], ["ack"])
    assert not worker.deliveries.reserved
    assert worker.counters.refused.total() == 1


def test_an_error_that_nobody_foresaw_is_answered_too(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, *args: Any) -> Any:
        raise KeyError("ours to mend")  # which Redis counts among its connection errors

    monkeypatch.setattr(type(worker.receiver), "_job", broken)
    message = task_message("add", 2, 2)
    worker.receiver(message)
    finish_asides(worker)
    assert message.fate == ["reject"]


def test_an_unregistered_task_is_rejected_and_its_caller_told(worker: Worker) -> None:
    message = task_message("no.such.task")
    worker.receiver(message)
    finish_asides(worker)
    assert message.fate == ["reject"]
    meta = worker.app.backend.get_meta(message.headers["id"])
    assert meta["status"] == "FAILURE"
    assert worker.counters.refused["unregistered"] == 1


def test_a_task_that_is_not_due_is_held_and_widens_the_window(worker: Worker) -> None:
    eta = datetime.now(UTC) + timedelta(hours=1)
    before = worker.deliveries.prefetch.window
    worker.receiver(task_message("add", 2, 2, eta=eta.isoformat()))
    assert worker.deliveries.prefetch.window == before + 1
    assert not worker.deliveries.ready
    worker.deliveries.give_back()
    assert worker.deliveries.prefetch.window == before


def test_messages_that_are_given_back_go_newest_first(worker: Worker) -> None:
    messages = [task_message("add", n, n) for n in range(3)]
    order: list[int] = []
    for number, message in enumerate(messages):
        message.reject = lambda requeue, n=number: order.append(n)  # type: ignore[method-assign]
        worker.receiver(message)
    worker.deliveries.give_back()
    assert order == [2, 1, 0]
    assert not worker.deliveries.reserved


def test_an_expired_task_is_revoked(worker: Worker) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    message = task_message("add", 2, 2, expires=past.isoformat())
    worker.receiver(message)
    finish_asides(worker)
    assert message.fate == ["ack"]
    assert worker.app.backend.get_meta(message.headers["id"])["status"] == "REVOKED"


def test_limits_of_the_call_go_over_those_of_the_task(worker: Worker) -> None:
    worker.receiver(task_message("late"))
    worker.receiver(task_message("late", time_limit=7))
    plain, called = worker.deliveries.ready
    assert plain.policy.limits(plain.header) == (3, 9)
    assert called.policy.limits(called.header) == (3, 7)


def test_what_is_expected_of_a_task_is_the_mean_of_the_last_ones(worker: Worker) -> None:
    worker.receiver(task_message("late"))
    strategy = worker.deliveries.ready[0].policy
    assert strategy.typical_s is None
    strategy.took(0.001)
    assert strategy.typical_s == 0.001
    strategy.took(0.005)  # a pause of the machine
    assert strategy.typical_s < 0.002
    strategy.took(2.0)
    assert strategy.typical_s > 0.1
    for _ in range(100):
        strategy.took(0.001)
    assert strategy.typical_s < 0.002


class Hand:
    """A pool of one that takes three and begins none of them."""

    size, blocks_loop = 1, False

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def fill(self, jobs: Any) -> None:
        self.taken += [watcher for _, watcher, *_ in itertools.islice(jobs, 3 - len(self.taken))]

    def has_room(self) -> bool:
        return len(self.taken) < 3

    def recall(self) -> list[Any]:
        taken, self.taken = self.taken, []
        return taken


def test_what_was_revoked_in_hand_is_not_begun(worker: Worker) -> None:
    hand: Any = Hand()
    worker.pool = hand
    worker.stop_wanted.clear()
    for _ in range(5):
        worker.receiver(task_message("late"))
    worker.deliveries.dispatch()  # as before the loop waits
    first, second, third = hand.taken
    assert len(worker.deliveries.ready) == 2
    assert worker.busy
    assert worker.saturated
    changed = worker.revocations.revoke([second.id], time.time())
    worker.learn_revoked(changed, "revoke")
    worker.inbox.run()
    assert hand.taken[:2] == [first, third]
    assert len(hand.taken) == 3
    assert len(worker.deliveries.ready) == 1
    finish_asides(worker)
    assert second.message.fate == ["ack"]


def test_what_is_in_hand_is_given_back(worker: Worker) -> None:
    hand: Any = Hand()
    worker.pool = hand
    worker.stop_wanted.clear()
    messages = [task_message("late") for _ in range(4)]
    for message in messages:
        worker.receiver(message)
    worker.deliveries.give_back()
    assert [message.fate for message in messages] == [["requeue"]] * 4
    assert not worker.busy
    assert not worker.deliveries.reserved
