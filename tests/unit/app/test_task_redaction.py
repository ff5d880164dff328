"""How settings, tasks and calls say what is hidden."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from umbel import Umbel
from umbel.app.calls import prepare, prepare_signature
from umbel.app.declaring import annotate
from umbel.app.task import Task
from umbel.exceptions import ImproperlyConfigured


@pytest.fixture
def app() -> Iterator[Umbel]:
    with Umbel("unit", broker="memory://", backend="disabled://", set_as_current=False) as app:
        yield app


def texts(app: Umbel, task: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    headers = prepare(app, task.name, args, kwargs, {}, task).message.headers
    return headers["argsrepr"], headers["kwargsrepr"]


def login(user: str, password: str, **more: Any) -> None: ...


def test_a_changed_setting_counts_from_the_next_call_on(app: Umbel) -> None:
    task = app.task(login)
    assert texts(app, task, "bob", "x") == ("('bob', '**')", "{}")
    app.conf.task_redact_names = ["user"]
    assert texts(app, task, "bob", "x", y=1) == ("('**', 'x')", "{'y': 1}")
    app.conf.task_redact_names = []
    assert texts(app, task, "bob", "x") == ("('bob', 'x')", "{}")
    assert task.redaction is task.redaction


def test_a_bound_task_does_not_count_itself(app: Umbel) -> None:
    @app.task(bind=True)
    def bound(self: Any, user: str, password: str) -> None: ...

    assert texts(app, bound, "bob", "x") == ("('bob', '**')", "{}")


def test_an_annotation_may_switch(app: Umbel) -> None:
    task = app.task(login)
    app.conf.task_annotations = {"*": {"redact": True}}
    annotate(app)
    assert task.redaction.hides_all
    assert texts(app, task, "bob", "x", a=1) == ("(**)", "{**}")


def test_a_task_that_is_not_known_here_is_hidden_by_names_alone(app: Umbel) -> None:
    headers = prepare(app, "far.away", ("bob", "x"), {"token": 1}, {}, None).message.headers
    assert (headers["argsrepr"], headers["kwargsrepr"]) == ("('bob', 'x')", "{'token': '**'}")


def test_signatures_are_hidden_like_calls(app: Umbel) -> None:
    task = app.task(login)
    headers = prepare_signature(app, task.s("bob", "x")).message.headers
    assert headers["argsrepr"] == "('bob', '**')"


def test_what_a_map_calls_is_hidden_as_its_task_says(app: Umbel) -> None:
    task = app.task(login)
    headers = prepare_signature(app, task.starmap([("bob", "hunter2")])).message.headers
    assert "hunter2" not in headers["kwargsrepr"]
    assert "'it': '**'" in headers["kwargsrepr"]


def test_what_the_caller_writes_is_sent_as_it_is(app: Umbel) -> None:
    task = app.task(redact=True)(login)
    options = {"argsrepr": "(bob, x)", "kwargsrepr": ""}
    headers = prepare(app, task.name, ("bob", "x"), {}, options, task).message.headers
    assert (headers["argsrepr"], headers["kwargsrepr"]) == ("(bob, x)", "")


@pytest.mark.parametrize("redact", ["card", 1, ["card", None]])
def test_a_switch_that_makes_no_sense_is_refused(app: Umbel, redact: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"option redact=.+hide nothing"):
        app.task(redact=redact)(login)

    class Own(Task):
        name = "own"

        def run(self) -> None: ...

    Own.redact = redact
    with pytest.raises(ImproperlyConfigured, match="option redact="):
        app.register_task(Own)


def test_a_body_that_does_not_tell_its_parameters_is_hidden_by_names(app: Umbel) -> None:
    task = app.task(name="opaque", typing=False)(max)
    assert task.redaction.kwargs_repr({"token": "x"}) == "{'token': '**'}"


@pytest.mark.parametrize("args", ["text", 7, {"a": 1}])
def test_arguments_of_the_wrong_kind_are_refused_as_ever(app: Umbel, args: Any) -> None:
    with pytest.raises(TypeError, match="must be a list or tuple"):
        prepare(app, "any", args, {}, {}, None)


def test_a_hidden_result_is_hidden_in_its_text_only(app: Umbel) -> None:
    from umbel.app.context import Context
    from umbel.app.trace import Tracer

    task = app.task(name="result", redact=True, ignore_result=True)(lambda: "secret")
    traced = Tracer(task, app, "host")(Context(id="1"), (), {})
    assert (traced.value, traced.text) == ("secret", "'**'")
    assert task.apply().get() == "secret"


def test_a_retry_too_many_tells_no_secret(app: Umbel) -> None:
    @app.task(bind=True, max_retries=0)
    def again(self: Any, password: str) -> None:
        raise self.retry()

    error = again.apply(("hunter2",)).result
    assert "args:('**',) kwargs:{}" in str(error)
    assert error.task_args == ("hunter2",)
