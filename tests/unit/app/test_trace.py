"""Around the body: outcomes, hooks, their order, and what happens when they fail."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.app.pump import messages, pump, run
from umbel.app.canvas import chain, chord
from umbel.app.context import Context, current_frame
from umbel.app.task import Task
from umbel.app.trace import Tracer, fail
from umbel.app.umbel import Umbel
from umbel.exceptions import Ignore, Reject, Retry


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel(
        "trace",
        broker="memory://",
        backend=f"cache+memory://{uuid.uuid4()}",
        task_default_queue=f"q{uuid.uuid4().hex}",
        set_as_current=False,
    )

    @made.task(name="after")
    def after(x: Any = None) -> Any:
        return ["after", x]

    yield made
    made.close()


def go(app: Umbel) -> list[tuple[str, str]]:
    return pump(app, app.conf.task_default_queue)


def once(app: Umbel, task: Task, *args: Any, **options: Any) -> Any:
    """Send a call and execute its message; gives the outcome."""
    task.apply_async(args, **options)
    return run(app, messages(app, app.conf.task_default_queue)[0])


class Hooked(Task):
    """Notes every hook that is called."""

    calls: list[Any] = []

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.calls.append(("before_start", task_id, list(args), kwargs))

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self.calls.append(("on_success", retval, task_id))

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.calls.append(("on_failure", repr(exc), task_id))
        assert einfo.exception is exc
        assert einfo.type is type(exc)
        assert str(einfo)

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.calls.append(("on_retry", repr(exc), task_id))

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        self.calls.append(("after_return", status, task_id))


@pytest.fixture
def hooked(app: Umbel) -> type[Hooked]:
    class Fresh(Hooked):
        calls: list[Any] = []

    return Fresh


# -- hooks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("how", "calls", "state"),
    [
        ("return", [("on_success", 5, "i"), ("after_return", "SUCCESS", "i")], "SUCCESS"),
        (
            "fail",
            [("on_failure", "ValueError('bad')", "i"), ("after_return", "FAILURE", "i")],
            "FAILURE",
        ),
        ("retry", [("on_retry", "KeyError('k')", "i")], "RETRY"),
        ("ignore", [], "IGNORED"),
        ("reject", [], "REJECTED"),
    ],
)
def test_hooks_are_called_in_order(
    app: Umbel, hooked: type[Hooked], how: str, calls: list[Any], state: str, asynchronous: bool
) -> None:
    def body(self: Task, how: str) -> Any:
        if how == "fail":
            raise ValueError("bad")
        if how == "retry":
            raise self.retry(exc=KeyError("k"))
        if how == "ignore":
            raise Ignore
        if how == "reject":
            raise Reject("why", requeue=True)
        return 5

    async def async_body(self: Task, how: str) -> Any:
        await asyncio.sleep(0)
        return body(self, how)

    task = app.task(base=hooked, bind=True, name="t")(async_body if asynchronous else body)
    outcome = once(app, task, how, task_id="i")
    assert outcome.state == state
    assert hooked.calls == [("before_start", "i", [how], {}), *calls]
    assert outcome.requeue is (how == "reject")


def test_an_error_before_the_start_is_a_failure_and_the_body_does_not_run(app: Umbel) -> None:
    ran = []

    class Unwilling(Task):
        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            raise RuntimeError("not today")

    task = app.task(base=Unwilling, name="t")(lambda: ran.append(1))
    result = task.delay()
    assert go(app) == [("t", "FAILURE")]
    assert isinstance(result.result, RuntimeError)
    assert ran == []


@pytest.mark.parametrize("hook", ["on_success", "after_return"])
def test_an_error_in_a_hook_after_success_is_logged_and_changes_nothing(
    app: Umbel, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Any, *_: Any) -> None:
        raise RuntimeError("broken hook")

    base = type("Broken", (Task,), {hook: broken})
    task = app.task(base=base, name="t")(lambda: 5)
    result = chain(task.s(), app.tasks["after"].s()).apply_async()
    errors: list[Any] = []

    @app.task(name="errback")
    def errback(failed: str) -> None:
        errors.append(failed)

    task.apply_async(link_error=errback.s(), task_id="plain")
    assert sorted(go(app)) == [("after", "SUCCESS"), ("t", "SUCCESS"), ("t", "SUCCESS")]
    assert result.get(timeout=5) == ["after", 5]
    assert app.AsyncResult("plain").get(timeout=5) == 5
    assert errors == []
    assert "broken hook" in caplog.text


@pytest.mark.parametrize("hook", ["on_failure", "on_retry", "after_return"])
def test_an_error_in_a_hook_after_a_failure_hides_nothing(
    app: Umbel, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Any, *_: Any) -> None:
        raise RuntimeError("broken hook")

    base = type("Broken", (Task,), {hook: broken})

    @app.task(base=base, bind=True, name="t", max_retries=1)
    def task(self: Task) -> None:
        raise self.retry(exc=ValueError("bad"), countdown=0)

    result = task.delay()
    assert go(app) == [("t", "RETRY"), ("t", "FAILURE")]
    assert isinstance(result.result, ValueError)
    assert "broken hook" in caplog.text


def test_an_overridden_call_runs_instead_of_the_body_and_keeps_the_request(app: Umbel) -> None:
    class Counted(Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return [self.request.id, super().__call__(*args, **kwargs)]

    @app.task(base=Counted, bind=True, name="t")
    def task(self: Task, x: int) -> Any:
        return [self.request.id, x]

    @app.task(base=Counted, bind=True, name="a")
    async def asynchronous(self: Task, x: int) -> Any:
        return x

    result = task.apply_async((3,), task_id="i")
    go(app)
    assert result.get(timeout=5) == ["i", ["i", 3]]
    assert task(4) == [None, [None, 4]]


# -- outcomes ------------------------------------------------------------------------------


def test_a_body_that_exits_fails_in_a_worker(app: Umbel) -> None:
    @app.task(name="quits")
    def quits() -> None:
        raise SystemExit(3)

    result = quits.delay()
    assert go(app) == [("quits", "FAILURE")]
    assert result.state == "FAILURE"


def test_an_async_body_that_cancels_itself_fails(app: Umbel) -> None:
    @app.task(name="cancels")
    async def cancels() -> None:
        raise asyncio.CancelledError("given up")

    result = cancels.delay()
    assert go(app) == [("cancels", "FAILURE")]
    assert result.state == "FAILURE"


def test_an_async_execution_that_is_cancelled_from_outside_is_cancelled(app: Umbel) -> None:
    @app.task(name="sleeps")
    async def sleeps() -> None:
        await asyncio.Event().wait()

    async def cancel() -> None:
        tracer = Tracer(sleeps, app, "here")
        running = asyncio.create_task(
            tracer.run_async(Context(id="i", called_directly=False), (), {})
        )
        await asyncio.sleep(0)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert app.AsyncResult("i").state == "PENDING"


def test_a_function_around_an_async_one_may_run_it_itself_or_hand_it_on(app: Umbel) -> None:
    def runs_it(fun: Any) -> Any:
        @functools.wraps(fun)
        def wrapper(*args: Any) -> Any:
            return asyncio.run(fun(*args))

        return wrapper

    def hands_it_on(fun: Any) -> Any:
        @functools.wraps(fun)
        def wrapper(*args: Any) -> Any:
            return fun(*args)

        return wrapper

    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    one = app.task(name="one")(runs_it(double))
    two = app.task(name="two")(hands_it_on(double))
    three = app.task(name="three")(double)
    results = [task.delay(4) for task in (one, two, three)]
    assert [state for _, state in go(app)] == ["SUCCESS"] * 3
    assert [result.get(timeout=5) for result in results] == [8, 8, 8]
    assert [task.apply((4,)).get() for task in (one, two, three)] == [8, 8, 8]


def test_a_value_that_can_not_be_stored_is_a_failure(app: Umbel) -> None:
    task = app.task(name="t")(object)
    result = task.delay()
    assert go(app) == [("t", "FAILURE")]
    assert result.state == "FAILURE"
    assert "object" in str(result.result)


def test_a_callback_that_can_not_be_sent_is_a_failure(app: Umbel) -> None:
    task = app.task(name="t")(lambda: {1, 2} and object())
    result = task.apply_async(link=app.tasks["after"].s())
    assert go(app) == [("t", "FAILURE")]
    assert result.state == "FAILURE"


def test_a_result_that_is_not_stored_does_not_fail_steps_that_were_sent(
    app: Umbel, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = app.task(name="t")(lambda: 5)
    store = app.backend.store

    def refuse_success(task_id: str, result: Any, state: str, **more: Any) -> None:
        if state == "SUCCESS" and task_id == "first":
            raise ValueError("not this one")
        store(task_id, result, state, **more)

    monkeypatch.setattr(app.backend, "store", refuse_success)
    result = chain(task.s().set(task_id="first"), app.tasks["after"].s()).apply_async()
    first, *_ = messages(app, app.conf.task_default_queue)
    assert run(app, first).state == "FAILURE"
    assert result.state == "PENDING"
    assert go(app) == [("after", "SUCCESS")]
    assert result.get(timeout=5) == ["after", 5]


def test_an_error_that_can_not_show_itself_is_a_failure_all_the_same(app: Umbel) -> None:
    class Shy(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

        __repr__ = __str__

    @app.task(name="shy")
    def shy() -> None:
        raise Shy

    result = shy.delay()
    assert go(app) == [("shy", "FAILURE")]
    assert result.state == "FAILURE"


def test_retry_raised_by_hand_is_a_retry_that_nobody_sends(app: Umbel) -> None:
    @app.task(name="t")
    def task() -> None:
        raise Retry("by hand")

    result = task.delay()
    assert go(app) == [("t", "RETRY")]
    assert result.state == "RETRY"


def test_an_ignored_outcome_leaves_no_state_and_sends_nothing(app: Umbel) -> None:
    @app.task(name="t", track_started=False)
    def task() -> None:
        raise Ignore("somebody else will")

    result = task.apply_async(link=app.tasks["after"].s(), link_error=app.tasks["after"].s())
    assert go(app) == [("t", "IGNORED")]
    assert result.state == "PENDING"


# -- results and their absence -------------------------------------------------------------


def test_started_is_stored_where_it_is_tracked(app: Umbel) -> None:
    seen = []

    @app.task(bind=True, name="t", track_started=True)
    def task(self: Task) -> None:
        meta = app.backend.get_meta(self.request.id)
        seen.append((meta["status"], sorted(meta["result"]), meta["result"]["hostname"]))

    task.delay()
    go(app)
    assert seen == [("STARTED", ["hostname", "pid"], "pump@here")]


def test_a_task_that_ignores_its_result_stores_nothing_but_maybe_errors(app: Umbel) -> None:
    def failing(x: int) -> int:
        if x:
            raise ValueError(x)
        return x

    quiet = app.task(name="quiet", ignore_result=True)(failing)
    heard = app.task(name="heard", ignore_result=True, store_errors_even_if_ignored=True)(failing)
    results = [task.delay(x) for task in (quiet, heard) for x in (0, 1)]
    results.append(quiet.apply_async((0,), ignore_result=False))
    go(app)
    assert [app.backend.get_meta(r.id)["status"] for r in results] == [
        "PENDING", "PENDING", "PENDING", "FAILURE", "SUCCESS",
    ]  # fmt: skip


def test_nothing_of_an_execution_is_left_behind(app: Umbel) -> None:
    task = app.task(name="t")(lambda: 1 / 0)
    once(app, task)
    assert current_frame.get() is None


def test_a_failure_outside_of_the_body_is_recorded_like_one_inside(
    app: Umbel, hooked: type[Hooked]
) -> None:
    task = app.task(base=hooked, name="t")(lambda: None)
    errors: list[str] = []

    @app.task(name="errback")
    def errback(failed: str) -> None:
        errors.append(failed)

    body = app.tasks["after"].s().set(task_id="body")
    step = app.tasks["after"].s().set(task_id="step")
    app.backend.start_chord("g", 1)
    request = Context(
        id="i", task="t", args=(), kwargs={}, called_directly=False, errbacks=[errback.s()],
        chain=[step], group="g", group_index=0, chord=body,
    )  # fmt: skip
    fail(app, task, request, TimeoutError("too slow"), "text of the traceback")
    go(app)
    assert app.AsyncResult("i").traceback == "text of the traceback"
    assert [app.AsyncResult(i).state for i in ("i", "step", "body")] == ["FAILURE"] * 3
    assert errors == ["i"]
    assert [call[0] for call in hooked.calls] == ["on_failure"]


def test_a_part_of_a_chord_reports_also_when_its_result_is_ignored(app: Umbel) -> None:
    part = app.task(name="part", ignore_result=True)(lambda: 2)
    result = chord([part.s(), part.s()], app.tasks["after"].s()).apply_async()
    go(app)
    assert result.get(timeout=5) == ["after", [2, 2]]
