"""`@app.task`: names, options, refusals, registration, rates, annotations."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.unit.app.pump import pump
from umbel.app.declaring import annotate, parse_rate
from umbel.app.task import Task
from umbel.app.umbel import Umbel
from umbel.exceptions import AlreadyRegistered, ImproperlyConfigured, NotRegistered


@pytest.fixture
def app() -> Umbel:
    return Umbel(
        "declaring",
        broker="memory://",
        backend=f"cache+memory://{uuid.uuid4()}",
        task_default_queue=f"q{uuid.uuid4().hex}",
        set_as_current=False,
    )


OPTIONS = {
    "queue": "money", "exchange": "e", "routing_key": "k", "priority": 3, "serializer": "yaml",
    "compression": "gzip", "expires": 30, "acks_late": True, "reject_on_worker_lost": True,
    "acks_on_failure_or_timeout": False, "rate_limit": "10/m", "time_limit": 20,
    "soft_time_limit": 10.5, "ignore_result": True, "store_errors_even_if_ignored": True,
    "track_started": True, "max_retries": 7, "default_retry_delay": 5, "retry_backoff": 2,
    "retry_backoff_max": 60, "retry_jitter": False, "autoretry_for": (KeyError,),
    "dont_autoretry_for": (IndexError,), "retry_kwargs": {"countdown": 3}, "throws": (OSError,),
    "typing": False, "send_events": False, "resultrepr_maxsize": 64, "delivery_mode": 1,
}  # fmt: skip


def test_every_option_becomes_an_attribute_of_the_task(app: Umbel) -> None:
    @app.task(**OPTIONS)
    def job() -> None:
        """Does a job."""

    assert {name: getattr(job, name) for name in OPTIONS} == OPTIONS
    assert job.__doc__ == "Does a job."


def test_a_task_without_options_follows_the_settings(app: Umbel) -> None:
    @app.task
    def job() -> None:
        """Does a job."""

    assert job.acks_late is None
    assert job.option("acks_late", "task_acks_late") is False
    app.conf.update(task_acks_late=True, task_ignore_result=True)
    assert job.option("acks_late", "task_acks_late") is True
    assert job.ignores_result
    assert (job.max_retries, job.default_retry_delay, job.typing) == (3, 180, True)


def test_a_task_is_named_after_its_module_unless_it_is_given_a_name(app: Umbel) -> None:
    @app.task
    def job() -> None:
        """Does a job."""

    @app.task(name="other")
    def named() -> None:
        """Does another."""

    assert job.name == f"{__name__}.job"
    assert app.tasks["other"] is named
    assert sorted(app.tasks.own()) == sorted([f"{__name__}.job", "other"])


def test_a_task_of_the_main_module_is_named_after_the_application(app: Umbel) -> None:
    def job() -> None:
        """Does a job."""

    job.__module__ = "__main__"
    assert app.task(job).name == "declaring.job"


def test_a_task_stays_callable_as_the_function_it_was(app: Umbel) -> None:
    @app.task
    def double(x: int) -> int:
        return 2 * x

    @app.task(bind=True)
    def own_name(self: Task, suffix: str = "") -> str:
        return self.name.rpartition(".")[2] + suffix

    assert double(4) == 8
    assert own_name("!") == "own_name!"
    assert repr(double) == f"<@task: {__name__}.double of declaring>"


def test_only_keyword_options_are_taken(app: Umbel) -> None:
    with pytest.raises(TypeError, match="keyword options only"):
        app.task("name")


def test_an_unknown_name_in_the_registry_is_an_unregistered_task(app: Umbel) -> None:
    with pytest.raises(NotRegistered, match=r"no\.such"):
        app.tasks["no.such"]


def refused(app: Umbel, match: str, **options: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match=match):
        app.task(**{"name": "bad", **options})(lambda: None)
    assert "bad" not in app.tasks


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_retires": 3}, "option max_retires=3: there is no such option; did you mean 'max_r"),
        ({"acks_late": "yes"}, "option acks_late='yes': give True or False"),
        ({"max_retries": "3"}, "option max_retries='3': give a whole number"),
        ({"priority": 1.5}, "give a whole number"),
        ({"time_limit": "10"}, "give seconds as a number"),
        ({"soft_time_limit": -1}, "give seconds as a number that is not negative"),
        ({"default_retry_delay": True}, "give seconds as a number"),
        ({"rate_limit": "fast"}, "rate limit 'fast'"),
        ({"retry_backoff": "2"}, "option retry_backoff='2'"),
        ({"autoretry_for": (ValueError, "x")}, "'x'.: give a tuple of exception classes"),
        ({"autoretry_for": ValueError}, "option autoretry_for=<class 'ValueError'>: give a tuple"),
        ({"throws": KeyError}, "option throws=<class 'KeyError'>: give a tuple of exception"),
        ({"dont_autoretry_for": [int]}, "give a tuple of exception classes"),
        ({"time_limit": 5, "soft_time_limit": 6}, "soft_time_limit=6: it never comes before"),
    ],
)
def test_a_wrong_option_is_refused_with_the_way_out(
    app: Umbel, options: dict[str, Any], match: str
) -> None:
    refused(app, match, **options)


def test_options_of_a_base_class_of_ones_own_are_taken(app: Umbel) -> None:
    class Priced(Task):
        price = 0

    @app.task(base=Priced, price=3)
    def job() -> None:
        """Does a job."""

    assert isinstance(job, Priced)
    assert job.price == 3


def test_two_functions_of_one_name_are_refused_and_both_places_named(app: Umbel) -> None:
    @app.task(name="same")
    def first() -> None:
        """One."""

    with pytest.raises(AlreadyRegistered, match=r"'same': .*test_declaring.py:\d+ and .*:\d+"):

        @app.task(name="same")
        def second() -> None:
            """Another."""


def test_one_function_declared_twice_is_one_task(app: Umbel) -> None:
    def job() -> None:
        """Does a job."""

    assert app.task(job) is app.task(job)


# -- classes of one's own ------------------------------------------------------------------


class Flaky(Task):
    name = "flaky"
    autoretry_for = (ConnectionError,)
    retry_kwargs = {"countdown": 0}
    max_retries = 2
    runs = 0

    def run(self, x: int) -> int:
        type(self).runs += 1
        raise ConnectionError(x)


def test_a_hand_written_class_is_registered_with_its_automatic_retries(app: Umbel) -> None:
    task = app.register_task(Flaky)
    assert app.tasks["flaky"] is task
    Flaky.runs = 0
    result = task.apply((1,))
    assert Flaky.runs == 3
    assert isinstance(result.result, ConnectionError)


def test_a_hand_written_class_without_a_name_gets_that_of_its_place(app: Umbel) -> None:
    class Job(Task):
        def run(self) -> str:
            return "done"

    task = app.register_task(Job())
    assert task.name == f"{__name__}.Job"
    task.delay()
    assert pump(app, app.conf.task_default_queue) == [(task.name, "SUCCESS")]


def test_the_options_of_a_hand_written_class_are_checked(app: Umbel) -> None:
    class Bad(Task):
        name = "bad.class"
        acks_late = "yes"  # type: ignore[assignment]

        def run(self) -> None:
            """Does nothing."""

    with pytest.raises(ImproperlyConfigured, match="acks_late='yes'"):
        app.register_task(Bad())


def test_a_class_without_a_body_says_so(app: Umbel) -> None:
    class Empty(Task):
        name = "empty"

    with pytest.raises(ImproperlyConfigured, match=r"task 'empty' has no body: define run\(\)"):
        app.register_task(Empty())()


def test_an_application_has_a_task_class_of_its_own(app: Umbel) -> None:
    class Mine(Task):
        """The base of all tasks of one application."""

    mine = Umbel("mine", broker="memory://", task_cls=Mine, set_as_current=False)
    assert isinstance(mine.task(name="x")(lambda: None), Mine)


# -- rates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "per_second"),
    [
        (None, 0),
        ("", 0),
        (0, 0),
        (2.5, 2.5),
        ("10", 10),
        ("10/s", 10),
        ("6/m", 0.1),
        ("36/h", 0.01),
    ],
)
def test_a_rate_is_read_per_second(rate: Any, per_second: float) -> None:
    assert parse_rate(rate) == pytest.approx(per_second)


@pytest.mark.parametrize("rate", ["x", "1/d", "-1/s", "inf/s", "nan", True, [1], "1/s/s"])
def test_a_wrong_rate_is_refused(rate: Any) -> None:
    with pytest.raises(ValueError, match="rate limit"):
        parse_rate(rate)


# -- annotations ---------------------------------------------------------------------------


def test_annotations_overwrite_options_by_name_or_of_all(app: Umbel) -> None:
    a = app.task(name="a")(lambda: None)
    b = app.task(name="b", rate_limit="1/s")(lambda: None)
    app.conf.task_annotations = {"*": {"rate_limit": "5/s"}, "b": {"time_limit": 9}, "c": {}}
    annotate(app)
    assert (a.rate_limit, b.rate_limit, b.time_limit, a.time_limit) == ("5/s", "5/s", 9, None)


def test_an_annotation_that_is_a_function_becomes_a_method(app: Umbel) -> None:
    seen = []

    def on_failure(self: Task, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        seen.append((self.name, str(exc), task_id))

    @app.task(name="failing")
    def failing() -> None:
        raise ValueError("bad")

    app.conf.task_annotations = {"*": {"on_failure": on_failure}}
    annotate(app)
    failing.apply(task_id="i")
    assert seen == [("failing", "bad", "i")]


def test_an_object_may_choose_annotations_by_task(app: Umbel) -> None:
    class Choice:
        def annotate(self, task: Task) -> dict[str, Any] | None:
            return {"rate_limit": "2/s"} if task.name.startswith("slow.") else None

    slow = app.task(name="slow.one")(lambda: None)
    fast = app.task(name="fast.one")(lambda: None)
    app.conf.task_annotations = [Choice(), {"fast.one": {"priority": 1}}]
    annotate(app)
    assert (slow.rate_limit, fast.rate_limit, fast.priority) == ("2/s", None, 1)


def test_a_wrong_annotation_is_refused(app: Umbel) -> None:
    app.task(name="a")(lambda: None)
    app.conf.task_annotations = {"a": {"rate_limit": "often"}}
    with pytest.raises(ImproperlyConfigured, match="task 'a': option rate_limit='often'"):
        annotate(app)
