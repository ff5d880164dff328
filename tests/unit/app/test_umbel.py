"""The application object: where settings come from, what it makes, and when."""

from __future__ import annotations

import types
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

import umbel
from tests.unit.app.pump import messages
from umbel.app.umbel import Umbel
from umbel.exceptions import ImproperlyConfigured


def app_with(*args: Any, **options: Any) -> Umbel:
    return Umbel(*args, **{"set_as_current": False, **options})


# -- settings ------------------------------------------------------------------------------


def test_name_broker_and_backend_are_given_by_place_or_name() -> None:
    app = app_with("shop", "redis://one/1", "redis://two/2")
    assert (app.main, app.conf.broker_url, app.conf.result_backend) == (
        "shop", "redis://one/1", "redis://two/2",
    )  # fmt: skip
    named = app_with("shop", broker=["redis://a", "redis://b"], backend="rpc://")
    assert list(named.conf.broker_url) == ["redis://a", "redis://b"]
    assert repr(named) == "<Umbel shop>"


def test_settings_are_given_by_name_and_checked() -> None:
    app = app_with("shop", task_acks_late=True, worker_concurrency=3)
    assert app.conf.task_acks_late is True
    assert app.conf.worker_concurrency == 3
    with pytest.raises(ImproperlyConfigured, match="did you mean 'task_acks_late'"):
        app_with("shop", task_ack_late=True)
    with pytest.raises(ImproperlyConfigured, match="worker_concurrency"):
        app_with("shop", worker_concurrency="many")


def test_the_broker_is_the_embedded_one_unless_one_is_named() -> None:
    app = app_with("shop")
    assert app.conf.broker_url == "embedded://"
    assert app.result_url == "embedded://"
    assert app_with("shop", broker="memory://").result_url == "disabled://"
    assert app_with("shop", backend="disabled://").result_url == "disabled://"


def test_a_module_an_object_a_dictionary_or_a_dotted_name_configure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"settings_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text("task_acks_late = True\ntimezone = 'Europe/Berlin'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    app = app_with("shop")
    app.config_from_object(name)
    assert (app.conf.task_acks_late, app.conf.timezone) == (True, "Europe/Berlin")
    app.config_from_object({"task_acks_late": False})
    assert app.conf.task_acks_late is False
    app.config_from_object(types.SimpleNamespace(task_default_queue="q"))
    assert app.conf.task_default_queue == "q"
    given = app_with("shop", config_source=name)
    assert given.conf.task_acks_late is True


def test_a_namespace_reads_the_settings_of_a_larger_project() -> None:
    class Django:
        CELERY_BROKER_URL = "redis://there/3"
        CELERY_TASK_ALWAYS_EAGER = True
        DEBUG = True

    app = app_with("shop")
    app.config_from_object(Django, namespace="CELERY")
    assert app.conf.broker_url == "redis://there/3"
    assert app.conf.task_always_eager is True
    made = app_with("shop", config_source=Django, namespace="CELERY")
    assert made.conf.broker_url == "redis://there/3"


def test_code_wins_over_the_environment_and_that_over_an_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UMBEL_BROKER_URL", "redis://environment/0")
    monkeypatch.setenv("UMBEL_TASK_DEFAULT_QUEUE", "from_environment")
    monkeypatch.setenv("CELERY_RESULT_BACKEND", "redis://celery/9")
    app = app_with("shop")
    app.config_from_object({"broker_url": "redis://object/0", "timezone": "Asia/Tokyo"})
    assert app.conf.broker_url == "redis://environment/0"
    assert app.conf.result_backend == "redis://celery/9"
    assert app.conf.timezone == "Asia/Tokyo"
    app.conf.update(task_default_queue="from_code")
    assert app.conf.task_default_queue == "from_code"
    assert app_with("shop", broker="redis://code/0").conf.broker_url == "redis://code/0"


def test_settings_changed_after_tasks_were_declared_count() -> None:
    app = app_with("shop", broker="memory://")
    task = app.task(name="t")(lambda: None)
    queue = f"q{uuid.uuid4().hex}"
    app.conf.task_default_queue = queue
    task.delay()
    assert len(messages(app, queue)) == 1


# -- time ----------------------------------------------------------------------------------


def test_time_is_utc_unless_told_otherwise() -> None:
    app = app_with("shop")
    assert app.timezone is UTC
    assert abs(app.now() - datetime.now(UTC)) < timedelta(seconds=5)
    app.conf.timezone = "Asia/Tokyo"
    assert app.timezone == ZoneInfo("Asia/Tokyo")
    assert app.now().utcoffset() == timedelta(0)
    app.conf.enable_utc = False
    assert app.now().utcoffset() == timedelta(hours=9)


# -- what it makes -------------------------------------------------------------------------


def test_making_one_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = app_with("shop")
    app.task(name="t")(lambda: None).s(1)
    assert list(tmp_path.iterdir()) == []
    assert app._made == {}


def test_it_can_be_closed_and_used_again() -> None:
    queue = f"q{uuid.uuid4().hex}"
    with app_with("shop", broker="memory://", task_default_queue=queue) as app:
        app.send_task("one")
        publisher = app.publisher
        app.close()
        app.send_task("two")
        assert app.publisher is not publisher
    app.close()
    assert [m.headers["task"] for m in messages(app, queue)] == ["one", "two"]


def test_a_connection_is_made_from_the_settings_and_not_opened() -> None:
    app = app_with(
        "shop",
        broker="amqp://user:secret@host:5673/vhost",
        broker_connection_timeout=1.5,
        broker_heartbeat=30,
        broker_login_method="PLAIN",
        broker_transport_options={"confirm_publish": True},
    )
    connection = app.connection()
    assert not connection.connected
    assert (connection.hostname, connection.port, connection.virtual_host) == (
        "host", 5673, "vhost",
    )  # fmt: skip
    assert (connection.connect_timeout, connection.heartbeat) == (1.5, 30)
    assert connection.login_method == "PLAIN"
    assert connection.transport_options["confirm_publish"] is True
    assert app.connection("redis://elsewhere/3").transport_cls == "redis"


def test_reading_and_writing_may_use_different_brokers() -> None:
    app = app_with(
        "shop", broker="redis://both", broker_read_url="redis://in", broker_write_url="redis://out"
    )
    assert (app.read_url, app.write_url) == ("redis://in", "redis://out")
    assert app.connection().hostname == "in"
    plain = app_with("shop", broker="redis://both")
    assert (plain.read_url, plain.write_url) == ("redis://both", "redis://both")


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("nosuch://host", "unknown transport 'nosuch': choose one of embedded,"),
        ("redis:/host", "must be an address such as"),
        ("redis://host:port/0", "Port could not be cast"),
        ("", "broker_url"),
    ],
)
def test_a_wrong_address_is_refused_before_anything_is_opened(url: str, match: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=match):
        app_with("shop", broker=url).connection()


def test_a_refused_address_shows_no_password() -> None:
    app = app_with("shop", broker="nosuch://user:secret@host")
    with pytest.raises(ImproperlyConfigured) as caught:
        app.connection()
    assert "secret" not in str(caught.value)


def test_results_are_found_by_id() -> None:
    app = app_with("shop", broker="memory://", backend=f"cache+memory://{uuid.uuid4()}")
    task = app.task(name="t")(lambda: None)
    app.backend.store("i", 5, "SUCCESS")
    assert app.AsyncResult("i").get(timeout=5) == 5
    assert task.AsyncResult("i").get(timeout=5) == 5
    assert app.GroupResult("g", [app.AsyncResult("i")]).get(timeout=5) == [5]


def test_a_signature_of_the_application_belongs_to_it() -> None:
    app = app_with("shop", broker="memory://")
    sig = app.signature("far.away", (1,), {"k": 2}, countdown=3)
    assert sig.app is app
    assert (sig.task, sig.args, sig.options) == ("far.away", (1,), {"countdown": 3})


def test_limits_and_accepted_formats_come_from_the_settings() -> None:
    app = app_with(
        "shop", accept_content=["json", "msgpack"], task_message_max_bytes=4096,
        task_message_max_depth=10, task_message_max_integer_digits=20,
    )  # fmt: skip
    assert app.accept == {"application/json", "application/x-msgpack"}
    limits = app.limits
    assert (limits.body_bytes, limits.depth, limits.integer_digits) == (4096, 10, 20)


def test_everything_promised_is_exported() -> None:
    assert umbel.Umbel is Umbel
    for name in umbel.__all__:
        assert getattr(umbel, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Celery'"):
        umbel.Celery  # noqa: B018
