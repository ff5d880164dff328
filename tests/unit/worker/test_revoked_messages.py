"""What is held of a revoked task is found wherever it waits, and settled once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.unit.worker.parts import Message, finish_asides, idle_worker, task_message
from umbel import Umbel
from umbel.cluster.revocations import Revocations
from umbel.worker.delivery.states import State
from umbel.worker.runtime import revoked_messages
from umbel.worker.runtime.delivery_driver import TaskDelivery
from umbel.worker.runtime.worker import Worker


@pytest.fixture
def app() -> Umbel:
    app = Umbel(
        "unit",
        broker="memory://",
        backend="cache+memory://",
        set_as_current=False,
        worker_parked_task_limit=2,
    )
    app.task(name="plain")(lambda: None)
    app.task(name="limited", rate_limit="1/h")(lambda: None)
    return app


@pytest.fixture
def worker(app: Umbel) -> Iterator[Worker]:
    worker = idle_worker(app)
    worker.stop_wanted.set()  # nothing is dispatched: requests stay where a test can see them
    yield worker
    worker._aside.shutdown()
    worker.inbox.close()
    app.close()


def receive(worker: Worker, name: str, **fields: Any) -> Message:
    message = task_message(name, **fields)
    worker.receiver(message)
    finish_asides(worker)
    return message


def tomorrow() -> str:
    return (datetime.now(UTC) + timedelta(days=1)).isoformat()


def revoke(worker: Worker, *messages: Message) -> None:
    ids = [message.headers["id"] for message in messages]
    worker.learn_revoked(worker.revocations.revoke(ids, worker.wall()), "revoke", ids)
    finish(worker)


def finish(worker: Worker) -> None:
    for _ in range(3):
        worker.inbox.run()
        finish_asides(worker)


def test_every_place_in_which_a_message_waits_is_left_and_counted_off(worker: Worker) -> None:
    window = worker.deliveries.prefetch.window
    receive(worker, "limited")  # takes the token
    waiting = [
        receive(worker, "plain"),
        receive(worker, "plain", eta=tomorrow()),
        *(receive(worker, "limited") for _ in range(4)),  # two of them are surplus
    ]
    kept = receive(worker, "plain")
    assert (
        worker.deliveries.prefetch.held,
        worker.deliveries.prefetch.parked,
        len(worker.deliveries.limits.surplus),
    ) == (1, 4, 2)
    revoke(worker, *waiting)
    assert [message.fate for message in waiting] == [["ack"]] * 6
    assert (
        worker.deliveries.prefetch.held,
        worker.deliveries.prefetch.parked,
        len(worker.deliveries.limits.surplus),
    ) == (0, 0, 0)
    assert worker.deliveries.prefetch.window == window
    assert [request.message for request in worker.deliveries.ready][1:] == [kept]
    assert len(worker.deliveries.reserved) == 2
    scheduled = [argument for _, _, entry in worker.timer.queue for argument in entry.args]
    assert not any(isinstance(one, TaskDelivery) for one in scheduled)
    revoke(worker, *waiting)  # once more
    assert [message.fate for message in waiting] == [["ack"]] * 6


def test_messages_of_one_id_are_settled_together_and_forgotten_one_by_one(worker: Worker) -> None:
    first, second = receive(worker, "plain", eta=tomorrow()), task_message("plain", eta=tomorrow())
    second.headers["id"] = first.headers["id"]
    worker.receiver(second)
    one, other = worker.deliveries.of(first.headers["id"])
    worker.deliveries.discard(one, "expired")
    assert worker.deliveries.of(first.headers["id"]) == (other,)
    third = task_message("plain", eta=tomorrow())
    third.headers["id"] = first.headers["id"]
    worker.receiver(third)
    revoke(worker, first)
    assert first.fate == second.fate == third.fate == ["ack"]
    assert worker.deliveries.of(first.headers["id"]) == ()


def test_a_task_that_runs_is_left_alone(worker: Worker) -> None:
    message = receive(worker, "plain")
    (request,) = worker.deliveries.ready
    worker.deliveries.ready.clear()
    request.state = State.IN_POOL
    worker.deliveries.began(request)
    message.fate.clear()  # acknowledged early
    revoke(worker, message)
    assert message.fate == []
    assert worker.deliveries.reserved == {id(request): request}


def test_a_revoke_of_more_than_are_remembered_settles_all_that_are_held(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revoked_messages, "CHUNK", 4)
    worker.revocations = Revocations(worker.wall, count_max=5)
    messages = [receive(worker, "plain", eta=tomorrow()) for _ in range(10)]
    revoke(worker, *messages)
    assert [message.fate for message in messages] == [["ack"]] * 10
    assert len(worker.revocations) == 5


@pytest.mark.parametrize("told", ["tasks", "headers", "ids"])
def test_what_other_nodes_tell_is_settled_as_well(worker: Worker, told: str) -> None:
    stamps = {"stamped_headers": ["team"], "stamps": {"team": ["red"]}}
    message = receive(worker, "plain", eta=tomorrow(), **stamps)
    spared = receive(worker, "plain", eta=tomorrow())
    task_id, now = message.headers["id"], worker.wall()
    life = [now, now + 3600]
    if told == "ids":
        changed = worker.revocations.merge_ids([task_id], now)
    else:
        key = task_id if told == "tasks" else '["team","red"]'
        changed = worker.revocations.merge({told: {key: life}}, now)
    worker.learn_revoked(changed, "mingle")
    finish(worker)
    assert (message.fate, spared.fate) == (["ack"], [])
    assert worker.deliveries.prefetch.held == 1
