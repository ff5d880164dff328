"""Running inline: `apply`, `task_always_eager`, and how errors come out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.app.pump import messages
from umbel.app.canvas import chain, chord, group
from umbel.app.results import EagerResult
from umbel.app.task import Task
from umbel.app.umbel import Umbel
from umbel.exceptions import Ignore, MaxRetriesExceededError, Reject


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel(
        "eager",
        broker="memory://",
        backend=f"cache+memory://{uuid.uuid4()}",
        task_default_queue=f"q{uuid.uuid4().hex}",
        set_as_current=False,
    )

    @made.task(name="add")
    def add(x: Any, y: Any = 0) -> Any:
        return x + y

    @made.task(name="total")
    def total(numbers: Any) -> Any:
        return sum(numbers)

    @made.task(name="fail")
    def failing(*args: Any) -> None:
        raise ValueError("bad")

    yield made
    made.close()


def taken(app: Umbel) -> list[Any]:
    return messages(app, app.conf.task_default_queue)


# -- apply ---------------------------------------------------------------------------------


def test_a_task_is_run_here_and_gives_a_result_that_is_ready(app: Umbel) -> None:
    result = app.tasks["add"].apply((1,), {"y": 2}, task_id="i")
    assert isinstance(result, EagerResult)
    assert (result.id, result.state, result.get(), result.ready()) == ("i", "SUCCESS", 3, True)
    assert taken(app) == []
    assert app.backend.get_meta("i")["status"] == "PENDING"


def test_the_request_says_that_it_is_inline(app: Umbel) -> None:
    @app.task(bind=True, name="look", time_limit=9)
    def look(self: Task, x: int) -> Any:
        request = self.request
        return [
            request.is_eager, request.called_directly, request.id, request.root_id, request.retries,
            request.args, request.headers, request.delivery_info["priority"],
            request.delivery_info["is_eager"], request.timelimit,
        ]  # fmt: skip

    found = look.apply((1,), task_id="i", headers={"a": 1}, priority=3, time_limit=7).get()
    assert found == [True, False, "i", "i", 0, (1,), {"a": 1}, 3, True, (7, None)]


def test_a_failure_is_kept_or_raised_as_asked(app: Umbel) -> None:
    task = app.tasks["fail"]
    result = task.apply()
    assert result.state == "FAILURE"
    assert isinstance(result.result, ValueError)
    assert "ValueError: bad" in result.traceback
    with pytest.raises(ValueError, match="bad"):
        result.get()
    assert isinstance(result.get(propagate=False), ValueError)
    with pytest.raises(ValueError, match="bad"):
        task.apply(throw=True)
    app.conf.task_eager_propagates = True
    with pytest.raises(ValueError, match="bad"):
        task.apply()
    assert task.apply(throw=False).state == "FAILURE"


@pytest.mark.parametrize("propagates", [False, True])
def test_outcomes_that_are_no_errors_are_not_raised(app: Umbel, propagates: bool) -> None:
    app.conf.task_eager_propagates = propagates

    @app.task(name="steers")
    def steers(how: str) -> None:
        raise Ignore("x") if how == "ignore" else Reject("x")

    assert steers.apply(("ignore",)).state == "IGNORED"
    assert steers.apply(("reject",)).state == "REJECTED"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_the_caller_and_not_just_the_task(
    app: Umbel, error: type[BaseException]
) -> None:
    @app.task(name="interrupted")
    def interrupted() -> None:
        raise error

    @app.task(name="async_interrupted")
    async def async_interrupted() -> None:
        raise error

    with pytest.raises(error):
        interrupted.apply()
    with pytest.raises(error):
        async_interrupted.apply()


def test_retries_are_run_at_once_with_their_number_and_arguments(app: Umbel) -> None:
    seen = []

    @app.task(bind=True, name="again", max_retries=5)
    def again(self: Task, x: int) -> int:
        seen.append((self.request.retries, x, self.request.id))
        if len(seen) < 3:
            raise self.retry(args=(x + 1,), countdown=1000)
        return x

    result = again.apply((1,), task_id="i")
    assert (result.get(), result.id) == (3, "i")
    assert seen == [(0, 1, "i"), (1, 2, "i"), (2, 3, "i")]
    assert taken(app) == []


def test_retries_past_the_limit_are_a_failure(app: Umbel) -> None:
    @app.task(bind=True, name="never", max_retries=3)
    def never(self: Task, exc: Any = None) -> None:
        raise self.retry(exc=exc, countdown=0)

    assert isinstance(never.apply().result, MaxRetriesExceededError)
    assert isinstance(never.apply((KeyError("k"),)).result, KeyError)
    with pytest.raises(MaxRetriesExceededError):
        never.apply(throw=True)


def test_very_many_retries_do_not_exhaust_the_stack(app: Umbel) -> None:
    @app.task(bind=True, name="often", max_retries=None)
    def often(self: Task) -> int:
        if self.request.retries < 2000:
            raise self.retry(countdown=0)
        return self.request.retries

    assert often.apply().get() == 2000


def test_links_run_inline_with_the_value_and_errbacks_with_the_failure(app: Umbel) -> None:
    seen: list[Any] = []

    @app.task(name="note")
    def note(x: Any, y: Any = None) -> None:
        seen.append((x, y))

    @app.task(name="by_id")
    def by_id(failed: str) -> None:
        seen.append(failed)

    app.tasks["add"].apply((1, 2), link=[note.s("first"), note.s("second")])
    assert seen == [(3, "first"), (3, "second")]
    seen.clear()
    app.tasks["fail"].apply(task_id="i", link=note.s(), link_error=by_id.s())
    assert seen == ["i"]
    assert taken(app) == []


def test_a_retried_task_calls_its_links_once(app: Umbel) -> None:
    seen: list[Any] = []

    @app.task(name="note")
    def note(x: Any) -> None:
        seen.append(x)

    @app.task(bind=True, name="second")
    def second(self: Task) -> str:
        if not self.request.retries:
            raise self.retry(countdown=0)
        return "done"

    second.apply(link=note.s())
    assert seen == ["done"]


def test_hooks_run_inline_too(app: Umbel) -> None:
    seen = []

    class Noted(Task):
        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            seen.append((retval, task_id))

    app.task(base=Noted, name="noted")(lambda: 4).apply(task_id="i")
    assert seen == [(4, "i")]


def test_an_async_body_runs_inline_also_inside_a_running_loop(app: Umbel) -> None:
    @app.task(bind=True, name="double")
    async def double(self: Task, x: int) -> Any:
        await asyncio.sleep(0)
        return [self.request.id, 2 * x]

    assert double.apply((2,), task_id="i").get() == ["i", 4]

    async def caller() -> Any:
        return double.apply((3,), task_id="j").get()

    assert asyncio.run(caller()) == ["j", 6]


def test_results_are_stored_where_the_setting_says_so(app: Umbel) -> None:
    app.conf.task_store_eager_result = True
    app.tasks["add"].apply((1, 2), task_id="kept")
    app.tasks["fail"].apply(task_id="failed")
    app.task(name="quiet", ignore_result=True)(lambda: 1).apply(task_id="quiet")
    app.tasks["add"].apply((1, 2), task_id="told", ignore_result=True)
    assert app.AsyncResult("kept").get(timeout=5) == 3
    assert app.AsyncResult("failed").state == "FAILURE"
    assert app.AsyncResult("quiet").state == "PENDING"
    assert app.AsyncResult("told").state == "PENDING"


def test_compositions_run_inline(app: Umbel) -> None:
    add, total = app.tasks["add"], app.tasks["total"]
    assert chain(add.s(1, 1), add.s(2), add.s(3)).apply().get() == 7
    assert group([add.s(1, 1), add.s(2, 2)]).apply().get() == [2, 4]
    assert chord([add.s(1, 1), add.s(2, 2)], total.s()).apply().get() == 6
    assert (add.s(1, 1) | group([add.s(1), add.s(2)]) | total.s()).apply().get() == 7
    assert add.map([1, 2]).apply().get() == [1, 2]


# -- always --------------------------------------------------------------------------------


def test_everything_runs_inline_when_the_setting_says_so(app: Umbel) -> None:
    app.conf.task_always_eager = True
    add, total = app.tasks["add"], app.tasks["total"]
    assert add.delay(1, 2).get() == 3
    assert add.apply_async((1, 2), countdown=100, queue="anywhere", priority=3).get() == 3
    assert add.s(1).delay(2).get() == 3
    assert chain(add.s(1, 1), add.s(2)).apply_async().get() == 4
    assert group([add.s(1, 1), add.s(2)]).apply_async().get() == [2, 2]
    assert chord([add.s(1, 1), add.s(2, 2)])(total.s()).get() == 6
    assert taken(app) == []


def test_arguments_are_checked_inline_as_well(app: Umbel) -> None:
    app.conf.task_always_eager = True
    with pytest.raises(TypeError, match="too many positional arguments"):
        app.tasks["add"].delay(1, 2, 3)


def test_a_call_by_name_is_sent_even_then(app: Umbel) -> None:
    app.conf.task_always_eager = True
    app.send_task("add", (1, 2))
    assert len(taken(app)) == 1


def test_errors_are_raised_in_the_caller_when_both_settings_say_so(app: Umbel) -> None:
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    with pytest.raises(ValueError, match="bad"):
        app.tasks["fail"].delay()
    with pytest.raises(ValueError, match="bad"):
        chain(app.tasks["add"].s(1, 1), app.tasks["fail"].s()).delay()


def test_tasks_inside_tasks_run_inline_and_know_their_parents(app: Umbel) -> None:
    app.conf.task_always_eager = True

    @app.task(bind=True, name="inner")
    def inner(self: Task) -> Any:
        return [self.request.parent_id, self.request.root_id]

    @app.task(bind=True, name="outer")
    def outer(self: Task) -> Any:
        return inner.delay().get()

    assert outer.apply_async(task_id="o").get() == ["o", "o"]
