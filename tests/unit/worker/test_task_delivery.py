"""One message, one answer: at the right time, on the right connection, once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.worker.parts import Message, finish_asides, idle_worker, task_message
from umbel import Umbel
from umbel.worker.delivery.machine import LOSSES_MAX
from umbel.worker.delivery.states import MessageState, State
from umbel.worker.execution.jobs import JobResult
from umbel.worker.execution.pools.base import notify
from umbel.worker.runtime.delivery_driver import TaskDelivery
from umbel.worker.runtime.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    app = Umbel("unit", broker="memory://", backend="cache+memory://", set_as_current=False)
    for name, options in {
        "early": {},
        "late": {"acks_late": True},
        "late-unacked": {"acks_late": True, "acks_on_failure_or_timeout": False},
        "late-once": {"acks_late": True, "reject_on_worker_lost": False},
    }.items():
        app.task(name=name, **options)(lambda: None)
    worker = idle_worker(app)
    worker.stop_wanted.set()
    yield worker
    worker._aside.shutdown()
    worker.inbox.close()
    app.close()


def received(worker: Worker, name: str) -> tuple[TaskDelivery, Message]:
    message = task_message(name, channel=object())
    worker.consumer.channel = message.channel
    worker.receiver(message)
    request = worker.deliveries.ready.pop()
    request.state = State.IN_POOL
    worker.deliveries.in_pool += 1
    return request, message


def result(state: str, **fields: object) -> JobResult:
    return JobResult(state, 0.1, "text", "traceback", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "result", "at_start", "at_end"),
    [
        ("early", result("SUCCESS"), ["ack"], ["ack"]),
        ("early", result("FAILURE"), ["ack"], ["ack"]),
        ("late", result("SUCCESS"), [], ["ack"]),
        ("late", result("FAILURE"), [], ["ack"]),
        ("late", result("RETRY"), [], ["ack"]),
        ("late", result("IGNORED"), [], ["ack"]),
        ("late", result("REJECTED", requeue=True), [], ["requeue"]),
        ("late", result("REJECTED"), [], ["reject"]),
        ("late-unacked", result("SUCCESS"), [], ["ack"]),
        ("late-unacked", result("FAILURE"), [], ["reject"]),
    ],
)
def test_a_message_is_settled_as_the_task_and_its_result_say(
    worker: Worker, name: str, result: JobResult, at_start: list[str], at_end: list[str]
) -> None:
    request, message = received(worker, name)
    request.accepted(1, 0.0)
    assert message.fate == at_start
    request.finished(result)
    assert message.fate == at_end
    assert not worker.deliveries.reserved
    assert not worker.busy


def test_a_message_of_a_lost_connection_is_left_alone(worker: Worker) -> None:
    request, message = received(worker, "late")
    request.accepted(1, 0.0)
    worker.driver.connection_lost()
    request.finished(result("SUCCESS"))
    assert message.fate == []


def test_an_answer_that_does_not_arrive_has_the_connection_rebuilt(worker: Worker) -> None:
    request, message = received(worker, "late")
    request.accepted(1, 0.0)
    message.error = worker.connection_errors[0]("gone")
    request.finished(result("SUCCESS"))
    assert worker.consumer.failure is message.error


def test_an_answer_on_an_old_connection_does_not_break_the_new_one(worker: Worker) -> None:
    request, message = received(worker, "late")
    request.accepted(1, 0.0)
    worker.consumer.channel = object()
    message.error = worker.connection_errors[0]("gone long ago")
    request.finished(result("SUCCESS"))
    assert worker.consumer.failure is None


@pytest.mark.parametrize("name", ["early", "late"])
@pytest.mark.parametrize(
    ("how", "said"), [("ran", (1, 0.0, result("SUCCESS"))), ("lost", ("signal 9 (SIGKILL)",))]
)
def test_a_request_is_released_whatever_fails_on_the_way(
    worker: Worker, name: str, how: str, said: tuple[object, ...]
) -> None:
    request, message = received(worker, name)
    message.error = RuntimeError("MISCONF the server stores nothing now")
    notify(getattr(request, how), *said)
    assert not worker.deliveries.reserved
    assert not worker.deliveries.active
    assert worker.counters.finished == 1
    finish_asides(worker)
    assert not worker.busy


def test_a_late_task_whose_process_died_goes_back_until_it_is_taken_for_the_cause(
    worker: Worker,
) -> None:
    request, message = received(worker, "late")
    fates = []
    for _ in range(LOSSES_MAX + 1):
        message.fate.clear()
        request.state, request.message_state = State.IN_POOL, MessageState.OURS
        request.lost("signal 9 (SIGKILL)")
        finish_asides(worker)
        fates += message.fate
        worker.deliveries.in_pool += 1
    assert fates == ["requeue"] * LOSSES_MAX + ["ack"]
    meta = worker.app.backend.get_meta(request.id)
    assert meta["status"] == "FAILURE"
    assert type(meta["result"]).__name__ == "WorkerLostError"


@pytest.mark.parametrize("name", ["early", "late-once"])
def test_a_task_that_must_not_run_twice_fails_when_its_process_died(
    worker: Worker, name: str
) -> None:
    request, message = received(worker, name)
    request.accepted(1, 0.0)
    request.lost("exit code 3")
    finish_asides(worker)
    assert message.fate == ["ack"]
    assert worker.app.backend.get_meta(request.id)["status"] == "FAILURE"


def test_a_worker_is_busy_until_a_failure_is_stored_and_the_message_settled(
    worker: Worker,
) -> None:
    request, message = received(worker, "late")
    request.accepted(1, 0.0)
    request.hard_limit(5.0)
    assert worker.busy
    finish_asides(worker)
    assert not worker.busy
    assert message.fate == ["ack"]
