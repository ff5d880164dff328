"""From a job to a result, whatever the job holds and the task does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.worker.parts import idle_worker, task_message
from umbel import Umbel
from umbel.app.context import current_request
from umbel.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from umbel.worker.execution.coroutines import drive
from umbel.worker.execution.jobs import Job, JobResult
from umbel.worker.execution.pools.base import JobEnded
from umbel.worker.runtime.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    app = Umbel("unit", broker="memory://", backend="cache+memory://", set_as_current=False)
    worker = idle_worker(app)
    worker.stop_wanted.set()
    yield worker
    worker._aside.shutdown()
    worker.inbox.close()
    app.close()


def job_for(worker: Worker, fun: Callable[..., Any], *args: Any) -> Job:
    worker.app.task(name="probe")(fun)
    worker.receiver(task_message("probe", *args))
    return worker.deliveries.ready.pop().job


def run(worker: Worker, fun: Callable[..., Any], *args: Any) -> tuple[JobResult, str]:
    """The result, and the state that is stored."""
    job = job_for(worker, fun, *args)
    result = worker.runner(job)
    return result, worker.app.backend.get_meta(job.id)["status"]


def raiser(exc: BaseException) -> Callable[[], None]:
    def fun() -> None:
        raise exc

    return fun


@pytest.mark.parametrize(
    ("exc", "state", "stored"),
    [
        (ValueError("no"), "FAILURE", "FAILURE"),
        (SystemExit(3), "FAILURE", "FAILURE"),
        (KeyboardInterrupt(), "FAILURE", "FAILURE"),
        (MemoryError(), "FAILURE", "FAILURE"),
        (asyncio.CancelledError(), "FAILURE", "FAILURE"),
        (Ignore(), "IGNORED", "PENDING"),
        (Reject("no", requeue=True), "REJECTED", "PENDING"),
    ],
    ids=repr,
)
def test_what_a_task_raises_becomes_its_result(
    worker: Worker, exc: BaseException, state: str, stored: str
) -> None:
    result, found = run(worker, raiser(exc))
    assert (result.state, found) == (state, stored)


def test_a_body_of_the_wrong_shape_is_reported_with_its_reason(worker: Worker) -> None:
    job = job_for(worker, lambda: None)
    job.body = b'"text"'
    result = worker.runner(job)
    assert (result.state, result.detail) == ("UNDECODABLE", "invalid-task")


def test_a_job_that_the_pool_has_ended_leaves_no_trace(worker: Worker) -> None:
    job = job_for(worker, raiser(JobEnded()))
    with pytest.raises(JobEnded):
        worker.runner(job)
    assert worker.app.backend.get_meta(job.id)["status"] == "PENDING"


def test_a_coroutine_is_run_to_its_end(worker: Worker) -> None:
    async def add(x: int, y: int) -> int:
        await asyncio.sleep(0)
        return x + y

    result, stored = run(worker, add, 20, 22)
    assert (result.state, result.text, stored) == ("SUCCESS", "42", "SUCCESS")


def test_a_cancellation_that_a_coroutine_made_itself_is_its_failure(worker: Worker) -> None:
    async def cancel() -> None:
        raise asyncio.CancelledError("mine")

    result, stored = run(worker, cancel)
    assert (result.state, stored) == ("FAILURE", "FAILURE")


def test_a_limit_that_strikes_a_waiting_loop_reaches_the_coroutine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a pool raises it: in the thread, wherever that happens to be."""

    async def wait() -> str:
        loop = asyncio.get_running_loop()
        select, struck = loop._selector.select, threading.Event()  # type: ignore[attr-defined]

        def strike(timeout: float | None) -> Any:
            if not struck.is_set():
                struck.set()
                raise SoftTimeLimitExceeded
            return select(timeout)

        monkeypatch.setattr(loop._selector, "select", strike)  # type: ignore[attr-defined]
        try:
            await asyncio.sleep(60)
        except SoftTimeLimitExceeded:
            return "told"
        return "not told"

    assert drive(wait) == "told"


def test_a_task_sees_every_field_of_its_request(worker: Worker) -> None:
    seen: list[Any] = []
    job = job_for(worker, lambda: seen.append(current_request()))
    assert job.header is not None
    job.header.root_id, job.header.retries, job.header.group = None, 3, "g"
    job.headers["mine"] = 7
    job.routing_key, job.reply_to, job.priority = "key", "me", 5
    assert worker.runner(job).state == "SUCCESS"
    request = seen[0]
    assert (request.id, request.task, request.root_id) == (job.id, "probe", job.id)
    assert (request.retries, request.group, request.eta, request.mine) == (3, "g", None, 7)
    assert request.delivery_info["routing_key"] == "key"
    assert request.delivery_info["priority"] == 5
    assert request.delivery_info is request.delivery_info
    assert (request.reply_to, request.properties["reply_to"]) == ("me", "me")
    assert (request.hostname, request.called_directly) == (worker.plan.hostname, False)
    request.retries = 4
    assert request.retries == 4
    assert request.get("nothing") is None
    assert "'content_type': 'application/json'" in repr(request)


@pytest.mark.parametrize(("told", "text"), [(True, "[1, 2]"), (False, "")])
def test_a_result_is_made_a_text_only_for_somebody(worker: Worker, told: bool, text: str) -> None:
    job = job_for(worker, lambda: [1, 2])
    job.told = told
    result = worker.runner(job)
    assert (result.state, result.text) == ("SUCCESS", text)
    assert worker.app.backend.get_meta(job.id)["result"] == [1, 2]
