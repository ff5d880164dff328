"""`autoretry_for`: which errors, how often, and how long in between."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.unit.app.pump import messages, pump, run
from umbel.app.autoretry import backoff_s
from umbel.app.task import Task
from umbel.app.umbel import Umbel
from umbel.exceptions import Ignore, Reject, Retry


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel(
        "autoretry",
        broker="memory://",
        backend=f"cache+memory://{uuid.uuid4()}",
        task_default_queue=f"q{uuid.uuid4().hex}",
        set_as_current=False,
    )
    yield made
    made.close()


def go(app: Umbel) -> list[str]:
    return [state for _, state in pump(app, app.conf.task_default_queue)]


def raising(app: Umbel, error: BaseException, asynchronous: bool = False, **options: Any) -> Task:
    def body() -> None:
        raise error

    async def async_body() -> None:
        raise error

    task: Task = app.task(name="t", **options)(async_body if asynchronous else body)
    return task


@pytest.mark.parametrize("asynchronous", [False, True])
def test_listed_errors_are_retried_until_the_limit_and_then_are_the_outcome(
    app: Umbel, asynchronous: bool
) -> None:
    task = raising(
        app, KeyError("k"), asynchronous, autoretry_for=(LookupError,), max_retries=2,
        default_retry_delay=0,
    )  # fmt: skip
    result = task.delay()
    assert go(app) == ["RETRY", "RETRY", "FAILURE"]
    assert isinstance(result.result, KeyError)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (ValueError("other"), "FAILURE"),
        (IndexError("excluded"), "FAILURE"),
        (Ignore("left alone"), "IGNORED"),
        (Reject("given back"), "REJECTED"),
        (Retry("by hand"), "RETRY"),
    ],
)
def test_other_errors_and_outcomes_pass(app: Umbel, error: BaseException, state: str) -> None:
    task = raising(
        app, error, autoretry_for=(LookupError, Ignore, Reject, Retry),
        dont_autoretry_for=(IndexError,), default_retry_delay=0,
    )  # fmt: skip
    task.delay()
    assert go(app) == [state]


def test_everything_may_be_listed(app: Umbel) -> None:
    raising(app, ValueError("x"), autoretry_for=(Exception,), retry_kwargs={"countdown": 0}).delay()
    assert go(app) == ["RETRY"] * 3 + ["FAILURE"]


def test_the_limit_may_come_with_the_retry_options(app: Umbel) -> None:
    task = raising(
        app, KeyError(), autoretry_for=(KeyError,), retry_kwargs={"max_retries": 5, "countdown": 0}
    )
    task.delay()
    assert go(app) == ["RETRY"] * 5 + ["FAILURE"]


def test_a_retry_by_hand_inside_such_a_task_is_one_retry(app: Umbel) -> None:
    @app.task(bind=True, name="t", autoretry_for=(Exception,), max_retries=1)
    def task(self: Task) -> None:
        raise self.retry(exc=KeyError("by hand"), countdown=0)

    task.delay()
    assert go(app) == ["RETRY", "FAILURE"]


def test_called_as_a_function_the_error_is_the_error(app: Umbel) -> None:
    with pytest.raises(KeyError, match="k"):
        raising(app, KeyError("k"), autoretry_for=(KeyError,))()


def waits(app: Umbel, retries: int, **options: Any) -> float:
    task = raising(app, KeyError(), autoretry_for=(KeyError,), max_retries=None, **options)
    task.apply_async(retries=retries)
    run(app, messages(app, app.conf.task_default_queue)[0])
    (again,) = messages(app, app.conf.task_default_queue)
    app.tasks.pop("t")
    if again.headers["eta"] is None:
        return 0.0
    return (datetime.fromisoformat(again.headers["eta"]) - datetime.now(UTC)).total_seconds()


def test_the_wait_doubles_up_to_a_bound(app: Umbel) -> None:
    plain = {"retry_backoff": True, "retry_jitter": False}
    assert waits(app, 0, **plain) == pytest.approx(1, abs=0.5)
    assert waits(app, 3, **plain) == pytest.approx(8, abs=0.5)
    assert waits(app, 30, **plain) == pytest.approx(600, abs=1)
    assert waits(app, 5, **plain, retry_backoff_max=7) == pytest.approx(7, abs=0.5)
    assert waits(app, 2, **{**plain, "retry_backoff": 5}) == pytest.approx(20, abs=0.5)


def test_without_backoff_the_wait_is_the_tasks_or_the_options(app: Umbel) -> None:
    assert waits(app, 4) == pytest.approx(180, abs=1)
    assert waits(app, 4, retry_kwargs={"countdown": 11}) == pytest.approx(11, abs=1)
    backed = {"retry_backoff": 2, "retry_jitter": False, "retry_kwargs": {"countdown": 99}}
    assert waits(app, 1, **backed) == pytest.approx(4, abs=0.5)


def test_jitter_spreads_the_wait_from_nothing_to_all_of_it() -> None:
    found = [backoff_s(1, 6, 600, True) for _ in range(300)]
    assert all(0 <= wait <= 64 for wait in found)
    assert min(found) < 10
    assert max(found) > 50


def test_a_number_of_retries_beyond_all_reason_costs_nothing() -> None:
    assert backoff_s(1, 10**9, 600, False) == 600


def test_it_works_inline_too(app: Umbel) -> None:
    runs = []

    @app.task(name="third_time", autoretry_for=(ConnectionError,), retry_backoff=True)
    def third_time() -> str:
        runs.append(1)
        if len(runs) < 3:
            raise ConnectionError
        return "lucky"

    assert third_time.apply().get() == "lucky"
    assert len(runs) == 3
