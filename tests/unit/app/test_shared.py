"""`@shared_task`: one declaration, a task in every application."""

from __future__ import annotations

import copy
import inspect
import itertools
import threading
import uuid
from typing import Any

import pytest

from tests.unit.app.pump import pump
from umbel.app.canvas import chain
from umbel.app.shared import shared_task
from umbel.app.task import Task
from umbel.app.umbel import Umbel

_numbers = itertools.count()


def app_with(**options: Any) -> Umbel:
    return Umbel(
        "shared",
        broker="memory://",
        backend=f"cache+memory://{uuid.uuid4()}",
        task_default_queue=f"q{uuid.uuid4().hex}",
        **options,
    )


def fresh_name() -> str:
    return f"shared.add{next(_numbers)}"


def make(**options: Any) -> Any:
    @shared_task(name=fresh_name(), **options)
    def add(x: int, y: int = 0) -> int:
        """Adds."""
        return x + y

    return add


def test_applications_made_before_and_after_know_the_task() -> None:
    before, aside = app_with(), app_with(set_as_current=False)
    add = make()
    after, apart = app_with(), app_with(set_as_current=False)
    for app in (before, aside, after, apart):
        assert app.tasks[add.name].app is app


def test_a_call_goes_to_the_application_that_is_current_at_that_moment() -> None:
    add = make()
    first, second = app_with(), app_with()
    one = add.delay(1, 2)
    first.set_current()
    two = add.delay(3, 4)
    assert pump(second, second.conf.task_default_queue) == [(add.name, "SUCCESS")]
    assert pump(first, first.conf.task_default_queue) == [(add.name, "SUCCESS")]
    assert (one.app, two.app) == (second, first)
    assert (one.get(timeout=5), two.get(timeout=5)) == (3, 7)


def test_it_can_be_used_like_the_task_itself() -> None:
    app = app_with()
    add = make(max_retries=9)
    assert add(1, 2) == 3
    assert add.max_retries == 9
    assert add.__doc__ == "Adds."
    assert add.apply((1, 5)).get() == 6
    assert chain(add.s(1, 1), add.s(2)).apply().get() == 4
    add.rate_limit = "1/s"
    assert app.tasks[add.name].rate_limit == "1/s"
    assert repr(add) == f"<shared task {add.name}>"


def test_a_bound_one_gets_the_task_of_its_application() -> None:
    app = app_with()

    @shared_task(bind=True, name=fresh_name())
    def who(self: Task) -> str:
        return self.app.main

    assert who() == app.main


def test_it_works_with_and_without_brackets_and_with_async() -> None:
    app_with()

    @shared_task
    def bare_shared() -> int:
        return 1

    @shared_task()
    def empty_shared() -> int:
        return 2

    @shared_task
    async def async_shared() -> int:
        return 3

    assert bare_shared.name == f"{__name__}.bare_shared"
    assert [t.apply().get() for t in (bare_shared, empty_shared, async_shared)] == [1, 2, 3]


def test_only_keyword_options_are_taken() -> None:
    with pytest.raises(TypeError, match="keyword options only"):
        shared_task("name")


def test_the_stand_in_can_be_copied_and_looked_into() -> None:
    app_with()
    add = make()
    assert copy.copy(add).name == add.name
    assert copy.deepcopy({"task": add})["task"].delay is not None
    assert list(inspect.signature(add.run).parameters) == ["x", "y"]
    assert inspect.unwrap(add).__name__ == "add"


def test_threads_that_make_applications_while_tasks_are_shared_miss_none() -> None:
    apps: list[Umbel] = []
    tasks: list[Any] = []
    start = threading.Barrier(2)

    def make_apps() -> None:
        start.wait()
        apps.extend(app_with() for _ in range(20))

    def share() -> None:
        start.wait()
        tasks.extend(make() for _ in range(20))

    threads = [threading.Thread(target=make_apps), threading.Thread(target=share)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(task.name in app.tasks for app in apps for task in tasks)
