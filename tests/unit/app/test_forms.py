"""Forms: made once, and made anew when what they rest on has changed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Exchange, Queue

from umbel.app import forms
from umbel.app.calls import prepare
from umbel.app.forms import Form
from umbel.app.umbel import Umbel
from umbel.wire.outgoing import Parcel


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel("forms", broker="memory://", backend="disabled://", set_as_current=False)

    @made.task(name="add")
    def add(x: Any = 0, y: Any = 0) -> None:
        """Is never run."""

    yield made
    made.close()


def form(app: Umbel, name: str = "add", **options: Any) -> Form:
    return app.forms.find(name, (), {}, options, app.tasks.get(name))


def parcel(app: Umbel, name: str = "add", **options: Any) -> Parcel:
    return prepare(app, name, (1,), {}, options, app.tasks.get(name)).message


def test_calls_that_differ_in_themselves_only_share_a_form(app: Umbel) -> None:
    first = form(app, task_id="a", countdown=3, headers={"a": 1}, group_id="g")
    assert form(app) is first
    assert form(app, queue=None, task_id="b") is first
    assert form(app, queue="other") is not first


def test_messages_of_one_shape_share_a_letterhead_that_says_what_they_do_not(app: Umbel) -> None:
    one, two, late = parcel(app), parcel(app), parcel(app, countdown=5)
    assert one.letterhead is two.letterhead
    for made in (one, two, late):
        assert made.letterhead is not None
        assert not made.letterhead.headers.keys() & made.own.keys()
        assert made.headers == {**made.letterhead.headers, **made.own}
    assert late.headers["eta"] is not None
    assert one.headers["eta"] is None
    assert one.headers.keys() == late.headers.keys()


def test_a_changed_setting_counts_at_once(app: Umbel) -> None:
    assert parcel(app).routing_key == "celery"
    app.conf.task_routes = {"add": "video"}
    assert parcel(app).routing_key == "video"
    app.conf.task_routes = {"add": {"queue": "audio", "priority": 4, "countdown": 9}}
    made = parcel(app)
    assert (made.routing_key, made.properties["priority"]) == ("audio", 4)
    assert made.headers["eta"] is not None
    # What a route says of one call's options is not that call's: the next one has it too.
    assert parcel(app, countdown=0).headers["eta"] is None
    assert parcel(app).headers["eta"] is not None
    app.conf.task_serializer = "msgpack"
    assert parcel(app).content_type == "application/x-msgpack"
    app.conf.task_default_priority = 2
    assert parcel(app, "unknown").properties["priority"] == 2


def test_a_changed_attribute_of_a_task_counts_at_once(app: Umbel) -> None:
    task = app.tasks["add"]
    assert parcel(app).headers["timelimit"] == [None, None]
    task.time_limit = 5
    assert parcel(app).headers["timelimit"] == [5, None]
    task.queue = "video"
    assert parcel(app).routing_key == "video"
    task.expires = 60
    assert parcel(app).headers["expires"] is not None
    type(task).priority = 3
    assert parcel(app).properties["priority"] == 3


def test_a_queue_that_is_declared_later_counts_at_once(app: Umbel) -> None:
    app.conf.task_create_missing_queues = True
    assert parcel(app, queue="video").exchange == ""
    app.queues.add(Queue("video", Exchange("media", type="topic"), routing_key="video.#"))
    assert parcel(app, queue="video").exchange == "media"
    del app.queues["video"]
    assert parcel(app, queue="video").exchange == ""


def test_equal_options_of_other_types_are_not_mixed_up(app: Umbel) -> None:
    assert parcel(app, priority=1).properties["priority"] == 1
    with pytest.raises(ValueError, match="priority=True"):
        parcel(app, priority=True)
    assert repr(parcel(app, time_limit=10).headers["timelimit"]) == "[10, None]"
    assert repr(parcel(app, time_limit=10.0).headers["timelimit"]) == "[10.0, None]"


def test_a_wrong_option_is_refused_every_time(app: Umbel) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="can not be negative"):
            parcel(app, time_limit=-1)


def test_a_route_that_is_a_function_is_asked_for_every_call(app: Umbel) -> None:
    asked: list[Any] = []

    def route(name: str, args: Any, kwargs: Any, options: Any, task: Any = None) -> Any:
        asked.append((args, options.get("headers")))
        return {"queue": f"q{len(asked)}"}

    app.conf.task_routes = [route, {"add": "never"}]
    assert parcel(app).routing_key == "q1"
    assert parcel(app, headers={"a": 1}).routing_key == "q2"
    assert asked == [((1,), None), ((1,), {"a": 1})]


def test_what_can_not_be_a_key_is_worked_out_anew(app: Umbel) -> None:
    queue = Queue(uuid.uuid4().hex)
    assert parcel(app, queue=queue).routing_key == queue.name
    assert parcel(app, timelimit=[4, 3]).headers["timelimit"] == [4, 3]
    task: Any = app.tasks["add"]
    task.routing_key = ["no key"]
    assert parcel(app).routing_key == "celery"
    assert app.forms._kept.forms == {}


def test_made_up_names_do_not_fill_the_memory(app: Umbel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "FORMS_MAX", 10)
    for number in range(50):
        assert parcel(app, f"t{number}").headers["task"] == f"t{number}"
    assert len(app.forms._kept.forms) <= 11


def test_arguments_of_a_known_shape_are_not_bound_again(app: Umbel) -> None:
    task = app.tasks["add"]
    for _ in range(2):
        task.check_arguments((1, 2), {})
        task.check_arguments((1,), {"y": 2})
        with pytest.raises(TypeError, match="too many positional"):
            task.check_arguments((1, 2, 3), {})
        with pytest.raises(TypeError, match="multiple values"):
            task.check_arguments((1, 2), {"y": 2})
        with pytest.raises(TypeError, match="unexpected keyword"):
            task.check_arguments((1,), {"z": 2})
    for number in range(100):
        with pytest.raises(TypeError):
            task.check_arguments((), {f"z{number}": 2})
    assert task._shapes == {(2,), (1, "y")}
