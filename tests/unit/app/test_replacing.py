"""`self.replace`: another call, or a whole composition, in the place of the running task."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.app.pump import messages, pump, run
from umbel.app import replacing
from umbel.app.canvas import chain, chord, group
from umbel.app.task import Task
from umbel.app.umbel import Umbel
from umbel.exceptions import ImproperlyConfigured

Make = Callable[[Umbel], Any]


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel(
        "replacing",
        broker="memory://",
        backend=f"cache+memory://{uuid.uuid4()}",
        task_default_queue=f"q{uuid.uuid4().hex}",
        set_as_current=False,
    )

    @made.task(name="add")
    def add(x: Any, y: Any = 0) -> Any:
        return x + y

    @made.task(name="total")
    def total(numbers: Any, *more: Any) -> Any:
        return sum(map(total, numbers)) if isinstance(numbers, (list, tuple)) else numbers

    @made.task(name="fail")
    def failing(*args: Any) -> None:
        raise ValueError("bad")

    yield made
    made.close()


def go(app: Umbel) -> list[tuple[str, str]]:
    return pump(app, app.conf.task_default_queue)


def replaced_by(app: Umbel, make: Make, how: str = "raise") -> Task:
    @app.task(bind=True, name="first")
    def first(self: Task, *args: Any) -> Any:
        if how == "return":
            return self.replace(make(app))
        raise self.replace(make(app))

    task: Task = first
    return task


def s(app: Umbel, name: str, *args: Any) -> Any:
    return app.tasks[name].s(*args)


REPLACEMENTS: dict[str, tuple[Make, Any]] = {
    "task": (lambda app: s(app, "add", 2, 3), 5),
    "chain": (lambda app: chain(s(app, "add", 1, 1), s(app, "add", 3)), 5),
    "group": (lambda app: group([s(app, "add", 2, 2), s(app, "add", 1)]), [4, 1]),
    "group of one": (lambda app: group([s(app, "add", 5, 0)]), [5]),
    "chord": (lambda app: chord([s(app, "add", 1, 1), s(app, "add", 3)], s(app, "total")), 5),
    "chain ending in a group": (
        lambda app: chain(s(app, "add", 1, 1), group([s(app, "add", 1), s(app, "add", 2)])),
        [3, 4],
    ),
    "chain with a chord inside": (
        lambda app: chain(
            s(app, "add", 1, 0), group([s(app, "add", 1), s(app, "add", 2)]), s(app, "total")
        ),
        5,
    ),
    "group of chains": (
        lambda app: group([chain(s(app, "add", 1, 1), s(app, "add", 2)), s(app, "add", 1)]),
        [4, 1],
    ),
}
KINDS = pytest.mark.parametrize("kind", list(REPLACEMENTS))


@KINDS
@pytest.mark.parametrize("how", ["raise", "return"])
def test_whoever_waits_for_the_task_gets_the_replacements_value(
    app: Umbel, kind: str, how: str
) -> None:
    make, value = REPLACEMENTS[kind]
    result = replaced_by(app, make, how).apply_async(task_id="i")
    assert go(app)[0] == ("first", "IGNORED")
    assert result.get(timeout=5) == value


@KINDS
@pytest.mark.parametrize("how", ["raise", "return"])
def test_it_is_the_same_inline(app: Umbel, kind: str, how: str) -> None:
    make, value = REPLACEMENTS[kind]
    result = replaced_by(app, make, how).apply(task_id="i")
    assert (result.id, result.state, list_of(result.get())) == ("i", "SUCCESS", list_of(value))


def list_of(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


@KINDS
def test_the_rest_of_the_chain_follows_the_replacement(app: Umbel, kind: str) -> None:
    make, value = REPLACEMENTS[kind]
    first = replaced_by(app, make)
    result = chain(s(app, "add", 0, 0), first.s(), s(app, "total"), s(app, "add", 100)).delay()
    ids = [one.id for one in (result, result.parent, result.parent.parent)]
    go(app)
    expected = (sum(value) if isinstance(value, list) else value) + 100
    assert result.get(timeout=5) == expected
    assert [app.AsyncResult(i).state for i in ids] == ["SUCCESS"] * 3


@KINDS
def test_the_chord_gets_the_replacements_value_in_its_place(app: Umbel, kind: str) -> None:
    make, value = REPLACEMENTS[kind]
    first = replaced_by(app, make)

    @app.task(name="echo")
    def echo(values: Any) -> Any:
        return values

    result = chord([s(app, "add", 7, 0), first.s(), s(app, "add", 9, 0)], echo.s()).delay()
    states = go(app)
    assert result.get(timeout=5) == [7, value, 9]
    assert [name for name, _ in states].count("echo") == 1


@KINDS
def test_the_body_of_a_chord_may_be_replaced(app: Umbel, kind: str) -> None:
    make, value = REPLACEMENTS[kind]
    first = replaced_by(app, make)
    result = chord([s(app, "add", 1), s(app, "add", 2)], first.s()).delay()
    go(app)
    assert result.get(timeout=5) == value


@KINDS
def test_callbacks_run_once_with_the_replacements_value(app: Umbel, kind: str) -> None:
    make, value = REPLACEMENTS[kind]
    seen: list[Any] = []

    @app.task(name="note")
    def note(x: Any, mark: str = "") -> None:
        seen.append((list_of(x), mark))

    first = replaced_by(app, make)
    links = [note.s("one"), note.s("two")]
    first.apply_async(link=links)
    go(app)
    assert sorted(seen, key=lambda pair: pair[1]) == [(value, "one"), (value, "two")]
    seen.clear()
    first.apply(link=links)
    assert sorted(seen, key=lambda pair: pair[1]) == [(value, "one"), (value, "two")]


def test_errbacks_hear_of_the_replacements_failure(app: Umbel) -> None:
    seen: list[str] = []

    @app.task(name="errback")
    def errback(failed: str) -> None:
        seen.append(failed)

    first = replaced_by(app, lambda app: s(app, "fail"))
    result = first.apply_async(task_id="i", link_error=errback.s())
    go(app)
    assert seen == ["i"]
    assert isinstance(result.result, ValueError)
    seen.clear()
    assert first.apply(task_id="j", link_error=errback.s()).state == "FAILURE"
    assert seen == ["j"]


def test_a_failing_replacement_fails_the_rest_of_the_chain(app: Umbel) -> None:
    first = replaced_by(app, lambda app: s(app, "fail"))
    result = chain(first.s(), s(app, "add", 1), s(app, "add", 2)).delay()
    go(app)
    assert result.state == "FAILURE"
    assert result.parent.state == "FAILURE"


def test_replacements_may_be_replaced(app: Umbel) -> None:
    nestings = []

    @app.task(bind=True, name="down")
    def down(self: Task, n: int) -> Any:
        nestings.append(self.request.replaced_task_nesting)
        if n:
            raise self.replace(down.s(n - 1))
        return "bottom"

    result = down.delay(3)
    go(app)
    assert result.get(timeout=5) == "bottom"
    assert nestings == [0, 1, 2, 3]
    nestings.clear()
    assert down.apply((3,)).get() == "bottom"


def test_groups_may_be_replaced_by_groups_inside_a_chord(app: Umbel) -> None:
    @app.task(bind=True, name="split")
    def split(self: Task, n: int) -> Any:
        if n <= 1:
            return n
        raise self.replace(group([split.s(n // 2), split.s(n - n // 2)]))

    result = chord([split.s(5), split.s(3)], s(app, "total")).delay()
    go(app)
    assert result.get(timeout=5) == 8


def test_an_endless_chain_of_replacements_is_ended(
    app: Umbel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacing, "REPLACE_DEPTH_MAX", 5)

    @app.task(bind=True, name="loop")
    def loop(self: Task) -> Any:
        raise self.replace(loop.s())

    result = loop.delay()
    assert [state for _, state in go(app)] == ["IGNORED"] * 5 + ["FAILURE"]
    assert "was replaced 6 times" in str(result.result)


def test_the_replacement_keeps_id_root_group_and_reply(app: Umbel) -> None:
    first = replaced_by(app, lambda app: s(app, "add", 1, 1))
    first.apply_async(
        task_id="i", root_id="r", parent_id="p", group_id="g", group_index=4, reply_to="me"
    )
    (message,) = messages(app, app.conf.task_default_queue)
    run(app, message)
    (after,) = messages(app, app.conf.task_default_queue)
    found = {name: after.headers[name] for name in ("id", "root_id", "group", "group_index")}
    assert found == {"id": "i", "root_id": "r", "group": "g", "group_index": 4}
    assert after.headers["replaced_task_nesting"] == 1
    assert after.properties["reply_to"] == "me"


def test_the_signature_given_is_left_as_it_was(app: Umbel) -> None:
    sig = s(app, "add", 1, 1)
    before = dict(sig)
    first = replaced_by(app, lambda app: sig)
    first.apply_async(link=s(app, "total"))
    go(app)
    assert dict(sig) == before


@pytest.mark.parametrize("empty", [lambda app: group([]), lambda app: chain()])
def test_nothing_can_not_take_a_tasks_place(app: Umbel, empty: Make) -> None:
    result = replaced_by(app, empty).delay()
    assert go(app) == [("first", "FAILURE")]
    assert isinstance(result.result, (ImproperlyConfigured, ValueError))


def test_a_task_can_not_be_replaced_when_it_is_called_as_a_function(app: Umbel) -> None:
    first = replaced_by(app, lambda app: s(app, "add", 1, 1))
    with pytest.raises(RuntimeError, match="first was called as a function"):
        first()
    assert messages(app, app.conf.task_default_queue) == []
