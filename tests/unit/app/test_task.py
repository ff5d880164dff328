"""What a task can do from inside: retry, request, update_state, add_to_chord; and being called."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from tests.unit.app.pump import messages, pump, run
from umbel.app.canvas import chord
from umbel.app.context import current_request, current_task
from umbel.app.task import Task
from umbel.app.umbel import Umbel
from umbel.exceptions import MaxRetriesExceededError, Reject, Retry


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel(
        "tasks",
        broker="memory://",
        backend=f"cache+memory://{uuid.uuid4()}",
        task_default_queue=f"q{uuid.uuid4().hex}",
        set_as_current=False,
    )
    yield made
    made.close()


def taken(app: Umbel) -> list[Any]:
    return messages(app, app.conf.task_default_queue)


def go(app: Umbel) -> list[tuple[str, str]]:
    return pump(app, app.conf.task_default_queue)


def once(app: Umbel, task: Task, *args: Any, **options: Any) -> tuple[Any, list[Any]]:
    """Send, run the message once, and give what it was and what it left in the queue."""
    task.apply_async(args, **options)
    (message,) = taken(app)
    run(app, message)
    return message, taken(app)


# -- the request ---------------------------------------------------------------------------


def test_a_running_task_knows_its_call(app: Umbel) -> None:
    seen: dict[str, Any] = {}

    @app.task(bind=True, name="look")
    def look(self: Task, x: int, y: int = 0) -> None:
        request = self.request
        names = ("id", "task", "args", "kwargs", "retries", "root_id", "parent_id", "reply_to")
        seen.update({name: getattr(request, name) for name in names})
        seen.update(
            hostname=request.hostname,
            eager=request.is_eager,
            direct=request.called_directly,
            headers=request.headers["tenant"],
            timelimit=request.timelimit,
            key=request.delivery_info["routing_key"],
            current=current_task() is self and current_request() is request,
        )

    look.apply_async(
        (1,), {"y": 2}, task_id="i", root_id="r", parent_id="p", headers={"tenant": "blue"},
        time_limit=10,
    )  # fmt: skip
    go(app)
    assert seen == {
        "id": "i", "task": "look", "args": [1], "kwargs": {"y": 2}, "retries": 0, "root_id": "r",
        "parent_id": "p", "reply_to": app.reply_to, "hostname": "pump@here", "eager": False,
        "direct": False, "headers": "blue", "timelimit": (10, None),
        "key": app.conf.task_default_queue, "current": True,
    }  # fmt: skip


def test_outside_of_an_execution_the_request_is_bare(app: Umbel) -> None:
    @app.task(bind=True, name="look")
    def look(self: Task, x: int) -> Any:
        return self.request.id, self.request.called_directly, self.request.args

    assert look.request.id is None
    assert look.request.called_directly
    assert look(7) == (None, True, (7,))
    assert current_task() is None
    assert current_request() is None


def test_a_task_that_calls_itself_as_a_function_has_a_request_per_call(app: Umbel) -> None:
    seen = []

    @app.task(bind=True, name="down")
    def down(self: Task, n: int) -> None:
        seen.append((self.request.id, self.request.called_directly))
        if n:
            down(n - 1)
        seen.append((self.request.id, self.request.called_directly))

    down.apply_async((1,), task_id="i")
    go(app)
    assert seen == [("i", False), (None, True), (None, True), ("i", False)]


def test_tasks_run_inline_inside_tasks_each_see_their_own_request(app: Umbel) -> None:
    @app.task(bind=True, name="inner")
    def inner(self: Task) -> Any:
        return [self.request.id, self.request.parent_id, self.request.root_id]

    @app.task(bind=True, name="outer")
    def outer(self: Task) -> Any:
        return [self.request.id, inner.apply(task_id="in").get(), self.request.id]

    result = outer.apply_async(task_id="out", root_id="root")
    go(app)
    assert result.get(timeout=5) == ["out", ["in", "out", "root"], "out"]


def test_a_task_can_not_be_pickled_but_says_what_to_do(app: Umbel) -> None:
    task = app.task(name="t")(lambda: None)
    with pytest.raises(TypeError, match="send its name, 't', instead"):
        pickle.dumps(task)


# -- states of one's own -------------------------------------------------------------------


def test_a_task_may_store_states_of_its_own(app: Umbel) -> None:
    seen = []

    @app.task(bind=True, name="work")
    def work(self: Task) -> None:
        self.update_state(state="PROGRESS", meta={"done": 3})
        seen.append(app.AsyncResult(self.request.id).info)
        self.update_state(task_id="another", state="HALF", meta="x")

    result = work.delay()
    go(app)
    assert seen == [{"done": 3}]
    assert result.state == "SUCCESS"
    assert (app.AsyncResult("another").state, app.AsyncResult("another").info) == ("HALF", "x")


def test_a_state_needs_a_name_and_an_execution(app: Umbel) -> None:
    task = app.task(name="t")(lambda: None)
    with pytest.raises(ValueError, match="update_state of t needs a state"):
        task.update_state(meta=1)
    with pytest.raises(ValueError, match="outside of an execution needs a task_id"):
        task.update_state(state="PROGRESS")


# -- retry ---------------------------------------------------------------------------------


def retrying(app: Umbel, **retry_options: Any) -> Task:
    @app.task(bind=True, name="again", max_retries=2)
    def again(self: Task, x: int, y: int = 0) -> None:
        raise self.retry(**retry_options)

    task: Task = again
    return task


def test_a_retry_sends_the_same_call_again_with_everything_it_had(app: Umbel) -> None:
    again = retrying(app, countdown=10)
    link = again.si(1)
    before, after = once(
        app, again, 1, kwargs={"y": 2}, task_id="i", root_id="r", parent_id="p", shadow="shade",
        priority=4, headers={"tenant": "blue"}, link=link, link_error=link, expires=3600,
        time_limit=20, soft_time_limit=10, group_id="g", group_index=3, ignore_result=False,
        chord=dict(again.si(9)), chain=[dict(again.si(8))], replaced_task_nesting=2,
        stamped_headers=["colour"], colour="blue",
    )  # fmt: skip
    (after,) = after
    changed = {"retries", "eta", "umbel_clock", "umbel_sent"}
    first = {k: v for k, v in before.headers.items() if k not in changed}
    second = {k: v for k, v in after.headers.items() if k not in changed}
    assert second == first
    assert (before.headers["retries"], after.headers["retries"]) == (0, 1)
    assert before.headers["eta"] is None
    assert after.headers["eta"] is not None
    assert after.body == before.body
    for name in ("correlation_id", "reply_to", "priority", "delivery_mode"):
        assert after.properties[name] == before.properties[name]
    assert after.delivery_info["routing_key"] == before.delivery_info["routing_key"]


def test_a_retried_call_that_had_no_parent_names_itself(app: Umbel) -> None:
    _, (after,) = once(app, retrying(app), 1, task_id="i")
    assert after.headers["parent_id"] == "i"


def test_a_retry_waits_for_the_tasks_delay_unless_told_otherwise(app: Umbel) -> None:
    def wait_s(**options: Any) -> float | None:
        app.tasks.pop("again", None)
        _, (after,) = once(app, retrying(app, **options), 1)
        eta = after.headers["eta"]
        if eta is None:
            return None
        return (datetime.fromisoformat(eta) - datetime.now(UTC)).total_seconds()

    assert wait_s() == pytest.approx(180, abs=2)
    assert wait_s(countdown=7) == pytest.approx(7, abs=2)
    assert wait_s(countdown=0) is None
    assert wait_s(eta=datetime.now(UTC) + timedelta(hours=1)) == pytest.approx(3600, abs=2)


def test_a_retry_may_change_arguments_and_options(app: Umbel) -> None:
    _, (after,) = once(app, retrying(app, args=(5,), kwargs={"y": 6}, priority=9), 1, priority=2)
    assert after.payload[0:2] == [[5], {"y": 6}]
    assert after.properties["priority"] == 9


@pytest.mark.parametrize(
    ("first", "retry", "second"),
    [
        (((1,), {"y": 2}), {"args": (5,)}, [[5], {"y": 2}]),
        (((), {"x": 1, "y": 2}), {"args": (5,)}, [[5], {"y": 2}]),
        (((1,), {"y": 2}), {"kwargs": {"y": 6}}, [[1], {"y": 6}]),
        (((1, 2), {}), {"kwargs": {"y": 6}}, [[1, 6], {}]),
        (((1,), {}), {"kwargs": {"x": 6}}, [[6], {}]),
    ],
)
def test_what_a_retry_does_not_change_is_kept_where_it_still_fits(
    app: Umbel, first: Any, retry: dict[str, Any], second: Any
) -> None:
    task = retrying(app, **retry)
    task.apply_async(*first)
    (message,) = taken(app)
    assert run(app, message).state == "RETRY"
    (after,) = taken(app)
    assert after.payload[0:2] == second


def test_a_retry_may_go_to_another_queue(app: Umbel) -> None:
    elsewhere = f"q{uuid.uuid4().hex}"
    _, left = once(app, retrying(app, queue=elsewhere, countdown=0), 1)
    assert left == []
    assert [m.headers["task"] for m in messages(app, elsewhere)] == ["again"]


def test_a_retry_may_go_to_another_exchange(app: Umbel) -> None:
    name = uuid.uuid4().hex
    app.queues.add(Queue(name, Exchange(f"x{name}", type="direct"), routing_key="k"))
    app.send_task("declares", queue=name)
    messages(app, name)
    task = retrying(app, exchange=f"x{name}", routing_key="k", countdown=0)
    _, left = once(app, task, 1)
    assert left == []
    assert [m.headers["task"] for m in messages(app, name)] == ["again"]


def test_a_retry_stays_in_the_queue_it_came_from(app: Umbel) -> None:
    elsewhere = f"q{uuid.uuid4().hex}"
    retrying(app, countdown=0).apply_async((1,), queue=elsewhere)
    (message,) = messages(app, elsewhere)
    run(app, message)
    assert [m.headers["retries"] for m in messages(app, elsewhere)] == [1]
    assert taken(app) == []


def test_past_the_limit_the_cause_is_raised_or_else_that_it_was_too_often(app: Umbel) -> None:
    @app.task(bind=True, name="with_cause", max_retries=2)
    def with_cause(self: Task) -> None:
        try:
            raise KeyError("lost")
        except KeyError as exc:
            raise self.retry(exc=exc, countdown=0) from exc

    @app.task(bind=True, name="without", max_retries=1)
    def without(self: Task) -> None:
        raise self.retry(countdown=0)

    one, two = with_cause.delay(), without.delay()
    assert sorted(go(app)) == [
        ("with_cause", "FAILURE"), ("with_cause", "RETRY"), ("with_cause", "RETRY"),
        ("without", "FAILURE"), ("without", "RETRY"),
    ]  # fmt: skip
    assert isinstance(one.result, KeyError)
    assert isinstance(two.result, MaxRetriesExceededError)
    assert "Can't retry without[" in str(two.result)


def test_the_limit_may_be_none_or_given_for_one_retry(app: Umbel) -> None:
    runs = []

    @app.task(bind=True, name="forever", max_retries=None)
    def forever(self: Task) -> str:
        runs.append(self.request.retries)
        if len(runs) < 20:
            raise self.retry(countdown=0)
        return "enough"

    @app.task(bind=True, name="limited", max_retries=None)
    def limited(self: Task) -> None:
        raise self.retry(countdown=0, max_retries=1)

    result = forever.delay()
    go(app)
    assert result.get(timeout=5) == "enough"
    assert runs == list(range(20))
    limited.delay()
    assert [state for _, state in go(app)] == ["RETRY", "FAILURE"]


def test_a_retry_that_does_not_throw_lets_the_task_go_on(app: Umbel) -> None:
    @app.task(bind=True, name="on")
    def on(self: Task) -> str:
        if self.request.retries:
            return "second"
        outcome = self.retry(throw=False, countdown=0)
        assert isinstance(outcome, Retry)
        return "first"

    on.delay()
    assert go(app) == [("on", "SUCCESS"), ("on", "SUCCESS")]


def test_while_it_waits_the_state_is_retry_with_the_cause(app: Umbel) -> None:
    @app.task(bind=True, name="wait")
    def wait(self: Task) -> None:
        raise self.retry(exc=ValueError("not yet"))

    result = wait.delay()
    run(app, taken(app)[0])
    assert result.state == "RETRY"
    assert isinstance(result.info, ValueError)


def test_called_as_a_function_a_retry_is_the_error_itself(app: Umbel) -> None:
    @app.task(bind=True, name="direct")
    def direct(self: Task, how: str) -> None:
        if how == "given":
            raise self.retry(exc=KeyError("given"))
        if how == "none":
            raise self.retry()
        try:
            raise IndexError("raised")
        except IndexError:
            raise self.retry() from None

    with pytest.raises(KeyError, match="given"):
        direct("given")
    with pytest.raises(IndexError, match="raised"):
        direct("raised")
    with pytest.raises(Retry, match="Task can be retried"):
        direct("none")
    assert taken(app) == []


@pytest.mark.parametrize(("late", "state"), [(True, "REJECTED"), (False, "FAILURE")])
def test_a_retry_that_can_not_be_sent_gives_a_late_message_back(
    app: Umbel, monkeypatch: pytest.MonkeyPatch, late: bool, state: str
) -> None:
    @app.task(bind=True, name="stuck", acks_late=late)
    def stuck(self: Task) -> None:
        raise self.retry(countdown=0)

    result = stuck.delay()
    (message,) = taken(app)

    def broken(*_: Any) -> None:
        raise OperationalError("the broker is away")

    monkeypatch.setattr(app.publisher, "send", broken)
    outcome = run(app, message)
    assert (outcome.state, outcome.requeue) == (state, late)
    assert result.state == ("RETRY" if late else "FAILURE")


def test_reject_says_what_it_was_made_with() -> None:
    assert repr(Reject("why", requeue=True)) == "reject requeue=True: why"


# -- joining a chord -----------------------------------------------------------------------


def chord_with(app: Umbel, lazy: bool) -> Any:
    @app.task(name="total")
    def total(numbers: Any) -> Any:
        return sorted(numbers)

    @app.task(name="one")
    def one(x: int) -> int:
        return x

    @app.task(bind=True, name="joins")
    def joins(self: Task) -> int:
        joined = self.add_to_chord(one.s(100), lazy=lazy)
        if lazy:
            joined.delay()
        return 1

    return chord([joins.s(), one.s(2)], total.s()).apply_async()


@pytest.mark.parametrize("lazy", [False, True])
def test_a_part_of_a_chord_may_add_another_part(app: Umbel, lazy: bool) -> None:
    result = chord_with(app, lazy)
    go(app)
    assert result.get(timeout=5) == [1, 2, 100]


def test_only_a_part_of_a_chord_may_add_one(app: Umbel) -> None:
    task = app.task(name="t")(lambda: None)
    with pytest.raises(ValueError, match="t is not part of a chord"):
        task.add_to_chord(task.s())
