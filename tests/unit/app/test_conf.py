"""Conf: what may be set, from where, which source wins, and what a refusal says."""

from __future__ import annotations

import re
import threading
import types
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from kombu import Queue

from umbel.app import conf as conf_module
from umbel.app.conf import Conf, SettingWarning
from umbel.exceptions import ImproperlyConfigured


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conf_module, "_warned", set())


@pytest.fixture
def conf() -> Conf:
    return Conf()


def test_reading_a_setting_is_a_plain_instance_attribute(conf: Conf) -> None:
    assert vars(conf)["task_serializer"] == "json"
    assert conf.task_serializer == conf["task_serializer"] == conf.get("task_serializer") == "json"
    assert "task_serializer" in conf
    assert "no_such" not in conf
    assert conf.get("no_such", 7) == 7
    assert set(conf) == set(dict(conf.items()))
    assert len(conf) == len(list(conf))


def test_two_confs_share_no_mutable_default(conf: Conf) -> None:
    conf.broker_transport_options["visibility_timeout"] = 5
    assert Conf().broker_transport_options == {}
    assert conf.changed() == {"broker_transport_options": {"visibility_timeout": 5}}


def test_a_misspelt_setting_is_refused_with_the_closest_name(conf: Conf) -> None:
    text = "unknown setting 'task_seriallizer' (value 'json'): did you mean 'task_serializer'?"
    for refused in (
        lambda: setattr(conf, "task_seriallizer", "json"),
        lambda: conf.__setitem__("task_seriallizer", "json"),
        lambda: conf.update(task_seriallizer="json"),
        lambda: conf.update({"task_seriallizer": "json"}),
        lambda: conf.load_object({"task_seriallizer": "json"}),
    ):
        with pytest.raises(ImproperlyConfigured, match=re.escape(text)):
            refused()


def test_reading_an_unknown_name_raises_what_python_expects(conf: Conf) -> None:
    text = re.escape("unknown setting 'task_seriallizer': did you mean 'task_serializer'?")
    for expected in (AttributeError, ImproperlyConfigured):
        with pytest.raises(expected, match=text):
            conf.task_seriallizer  # noqa: B018
    for expected in (KeyError, ImproperlyConfigured):
        with pytest.raises(expected, match=text):
            conf["task_seriallizer"]
    assert not hasattr(conf, "task_seriallizer")
    assert not hasattr(conf, "_private")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("BROKER_URL", "broker_url"),
        ("CELERY_TASK_SERIALIZER", "task_serializer"),
        ("CELERYD_CONCURRENCY", "worker_concurrency"),
        ("CELERY_ACKS_LATE", "task_acks_late"),
        ("CELERYD_TASK_TIME_LIMIT", "task_time_limit"),
    ],
)
def test_an_old_name_is_refused_naming_the_new_one(conf: Conf, old: str, new: str) -> None:
    for source in ({old: 1}, SimpleNamespace(**{old: 1})):
        with pytest.raises(ImproperlyConfigured, match=f"{old}.*it is called '{new}' now"):
            conf.load_object(source)


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("task_time_limit", 3, 3.0),
        ("task_time_limit", timedelta(minutes=1), 60.0),
        ("result_expires", timedelta(hours=1), 3600),
        ("result_expires", 60.0, 60),
        ("result_expires", None, None),
        ("worker_concurrency", 8.0, 8),
        ("accept_content", ["json", "application/x-msgpack"], ("json", "application/x-msgpack")),
        ("accept_content", {"yaml", "json"}, ("json", "yaml")),
        ("imports", ["a", "b"], ("a", "b")),
        ("task_default_delivery_mode", "transient", 1),
        ("broker_url", ("redis://a", "redis://b"), ["redis://a", "redis://b"]),
        ("broker_url", "redis://a;redis://b", "redis://a;redis://b"),
        ("result_backend", "rpc", "rpc://"),
        ("embedded_directory", Path("here"), "here"),
        ("worker_redirect_stdouts_level", "info", "INFO"),
        ("broker_use_ssl", {"cert_reqs": 2}, {"cert_reqs": 2}),
        ("task_default_rate_limit", 5, 5.0),
        ("task_default_rate_limit", "10/m", "10/m"),
        ("task_compression", "application/x-gzip", "gzip"),
        ("worker_pool", "processes", "prefork"),
        ("timezone", "Europe/Berlin", "Europe/Berlin"),
        ("result_backend_max_retries", float("inf"), float("inf")),
        ("task_queues", {"a": {"routing_key": "x"}}, {"a": {"routing_key": "x"}}),
        ("task_routes", ({"a.*": "q"}, "pkg.router"), [{"a.*": "q"}, "pkg.router"]),
        ("task_routes", [[("a.*", {"queue": "q"})]], [{"a.*": {"queue": "q"}}]),
        ("task_annotations", {"*": {"rate_limit": "1/s"}}, {"*": {"rate_limit": "1/s"}}),
    ],
)
def test_a_value_is_coerced_where_nothing_is_lost(
    conf: Conf, name: str, given: object, kept: object
) -> None:
    conf[name] = given
    assert conf[name] == kept
    assert type(conf[name]) is type(kept)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("task_acks_late", "true", "must be True or False"),
        ("task_acks_late", 1, "must be True or False"),
        ("worker_concurrency", 0, "must be a whole number, 1 or more"),
        ("worker_concurrency", "4", "must be a whole number, 1 or more"),
        ("worker_concurrency", True, "must be a whole number"),
        ("worker_concurrency", 1.5, "must be a whole number"),
        ("worker_prefetch_multiplier", -1, "0 or more"),
        ("task_default_priority", 256, "from 0 to 255"),
        ("task_time_limit", float("nan"), "must be a number of seconds"),
        ("task_time_limit", 10**400, "must be a number of seconds"),
        ("task_time_limit", -1, "0 or more"),
        ("result_expires", 0.5, "whole seconds"),
        ("result_expires", timedelta(seconds=-1), "whole seconds"),
        ("task_serializer", "pickle", "is refused: unpickling runs whatever code"),
        ("accept_content", ["json", "pickle"], "is refused: unpickling runs whatever code"),
        ("accept_content", ["application/x-python-serialize"], "unpickling"),
        ("accept_content", "json", "write ['json']"),
        ("accept_content", [1], "must be a list of serializers"),
        ("task_serializer", "jsn", "did you mean 'json'?"),
        ("task_serializer", ["json"], "must be one of json, msgpack, yaml"),
        ("worker_pool", "prefrok", "must be one of prefork, threads, gevent, asyncio, solo; did"),
        ("task_protocol", 3, "must be one of 1, 2"),
        ("task_protocol", True, "must be one of 1, 2"),
        ("imports", "shop.tasks", "write ['shop.tasks']"),
        ("broker_url", "localhost", "must be an address such as redis://"),
        ("broker_url", [], "or a list of them"),
        ("broker_url", None, "must be an address"),
        ("broker_url", "", "must be an address"),
        ("result_backend", "django-db", "redis://host:6379/1, rpc:// or disabled://"),
        ("broker_transport_options", [("a", 1)], "must be a dictionary"),
        ("broker_transport_options", {1: 1}, "with strings as keys"),
        ("task_publish_retry_policy", {"max_retry": 3}, "'max_retry': use max_retries"),
        ("task_publish_retry_policy", {"max_retries": "3"}, "has 'max_retries': '3', which must"),
        ("timezone", "Europe/Berlim", "did you mean 'Europe/Berlin'?"),
        ("timezone", "../etc/passwd", "must name a time zone"),
        ("task_default_rate_limit", "ten a day", "must be a rate such as '10/s'"),
        ("task_default_rate_limit", True, "must be a rate"),
        ("worker_log_format", "{message}", "log format in % style"),
        ("worker_redirect_stdouts_level", "LOUD", "must be a log level"),
        ("task_default_exchange_type", "dirct", "did you mean 'direct'?"),
        ("task_queues", [1], "kombu.Queue"),
        ("task_queues", "a,b", "kombu.Queue"),
        ("task_routes", 5, "a function"),
        ("task_annotations", {"*": 5}, "attribute: value"),
        ("broker_use_ssl", "yes", "dictionary of TLS options"),
        ("broker_failover_strategy", "random", "round-robin"),
        ("task_default_queue", "", "not empty"),
        ("task_message_max_bytes", 0, "from 1024 to 2147483647"),
    ],
)
def test_a_wrong_value_is_refused_and_says_what_is_right(
    conf: Conf, name: str, given: object, says: str
) -> None:
    before = conf[name]
    with pytest.raises(ImproperlyConfigured, match=re.escape(says)) as refusal:
        conf[name] = given
    assert str(refusal.value).startswith(f"setting {name!r} is ")
    assert "\n" not in str(refusal.value)
    assert conf[name] == before


def test_a_refusal_shows_no_password(conf: Conf) -> None:
    with pytest.raises(ImproperlyConfigured) as refusal:
        conf.broker_url = ["redis://:hunter2@host/0", "redis:hunter2"]
    assert "redis://:**@host/0" in str(refusal.value)
    with pytest.raises(ImproperlyConfigured) as refusal:
        conf.update(redis_passwort="hunter2")
    assert "hunter2" not in str(refusal.value)


def test_an_update_with_one_wrong_value_changes_nothing(conf: Conf) -> None:
    with pytest.raises(ImproperlyConfigured):
        conf.update(task_acks_late=True, task_default_queue="x", worker_concurrency=0)
    assert conf.changed() == {}
    assert conf.revision == 0
    conf.update({"task_acks_late": True}, task_default_queue="x")
    assert conf.changed() == {"task_default_queue": "x", "task_acks_late": True}
    assert conf.revision == 1


def test_code_beats_environment_beats_object_beats_default_in_any_order(conf: Conf) -> None:
    conf.task_default_queue = "code"
    conf.load_environment({"UMBEL_TASK_DEFAULT_QUEUE": "env", "UMBEL_TIMEZONE": "UTC"})
    conf.load_object(
        {"task_default_queue": "object", "timezone": "Asia/Tokyo", "task_acks_late": True}
    )
    assert (conf.task_default_queue, conf.timezone, conf.task_acks_late) == ("code", "UTC", True)
    del conf.task_default_queue
    assert conf.task_default_queue == "env"


def test_callers_can_not_change_a_stored_value_through_what_they_passed(conf: Conf) -> None:
    options = {"visibility_timeout": 5}
    conf.broker_transport_options = options
    options["visibility_timeout"] = 6
    assert conf.broker_transport_options == {"visibility_timeout": 5}


# -- the environment -------------------------------------------------------------------------


def test_the_environment_is_read_by_type(conf: Conf) -> None:
    conf.load_environment(
        {
            "UMBEL_BROKER_URL": "redis://a;redis://b",
            "UMBEL_RESULT_BACKEND": "redis://c/1",
            "UMBEL_TASK_ACKS_LATE": "True",
            "UMBEL_WORKER_CONCURRENCY": "12",
            "UMBEL_TASK_TIME_LIMIT": "2.5",
            "UMBEL_RESULT_EXPIRES": "null",
            "UMBEL_ACCEPT_CONTENT": "json, yaml",
            "UMBEL_IMPORTS": '["a", "b"]',
            "UMBEL_BROKER_TRANSPORT_OPTIONS": '{"visibility_timeout": 60}',
            "UMBEL_TASK_PROTOCOL": "1",
            "UMBEL_BROKER_USE_SSL": "yes",
            "UMBEL_TASK_QUEUES": '["a", "b"]',
            "UMBEL_WORKER_PREFETCH_MULTIPLIER": "",
            "UMBEL_APP": "shop",
            "PATH": "/bin",
        }
    )
    assert conf.changed() == {
        "broker_url": "redis://a;redis://b",
        "broker_transport_options": {"visibility_timeout": 60},
        "broker_use_ssl": True,
        "result_backend": "redis://c/1",
        "result_expires": None,
        "accept_content": ("json", "yaml"),
        "task_protocol": 1,
        "task_queues": ["a", "b"],
        "task_acks_late": True,
        "task_time_limit": 2.5,
        "imports": ("a", "b"),
        "worker_concurrency": 12,
    }


def test_celery_variables_are_read_and_ours_win(conf: Conf) -> None:
    conf.load_environment(
        {
            "CELERY_BROKER_URL": "redis://celery",
            "CELERY_RESULT_BACKEND": "redis://celery/1",
            "UMBEL_BROKER_URL": "redis://umbel",
        }
    )
    assert conf.broker_url == "redis://umbel"
    assert conf.result_backend == "redis://celery/1"


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("UMBEL_WORKER_CONCURRENCY", "four", "setting 'UMBEL_WORKER_CONCURRENCY' is 'four': it"),
        ("UMBEL_TASK_ACKS_LATE", "maybe", "must be true or false"),
        ("UMBEL_BROKER_TRANSPORT_OPTIONS", "{", "must be JSON"),
        ("UMBEL_TASK_SERIALIZER", "pickle", "unpickling"),
        ("UMBEL_TASK_SERIALIZR", "json", "did you mean 'UMBEL_TASK_SERIALIZER'?"),
        ("CELERY_BROKER_URL", "nowhere", "setting 'CELERY_BROKER_URL' is 'nowhere'"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_own_name(
    conf: Conf, variable: str, text: str, says: str
) -> None:
    with pytest.raises(ImproperlyConfigured, match=re.escape(says)):
        conf.load_environment({variable: text})


@pytest.mark.parametrize("variable", ["UMBEL_SERVICE_HOST", "UMBEL_PORT", "UMBEL_PORT_6379_TCP"])
def test_a_variable_that_resembles_no_setting_is_somebody_elses(conf: Conf, variable: str) -> None:
    with pytest.warns(SettingWarning, match=variable):
        conf.load_environment({variable: "tcp://10.0.0.1:80"})
    assert conf.changed() == {}


# -- config objects --------------------------------------------------------------------------

CONFIG = """
from __future__ import annotations
import os
from datetime import timedelta
from kombu import Queue
_mine = 1
PROJECT = 'shop'
result_expires = timedelta(hours=1)
task_queues = (Queue('a'), Queue('b'))
def task_routes(name, args, kwargs, options, task=None): return {'queue': 'a'}
class nested:
    task_acks_late = True
class Base:
    task_acks_late = True
class Derived(Base):
    timezone = 'UTC'
    def method(self): ...
table = {'task_default_queue': 'x'}
del table
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    import sys

    (tmp_path / "conf_sample.py").write_text(CONFIG)
    (tmp_path / "conf_broken.py").write_text("import no_such_package_here")
    (tmp_path / "conf_syntax.py").write_text("a b c")
    (tmp_path / "conf_typo.py").write_text("task_seriallizer = 'json'")
    (tmp_path / "conf_helper.py").write_text("prices = {}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("conf_")]:
        del sys.modules[name]


def test_a_module_gives_its_public_lower_case_values(conf: Conf, modules: Path) -> None:
    conf.load_object("conf_sample")
    assert sorted(conf.changed()) == ["result_expires", "task_queues", "task_routes"]
    assert conf.result_expires == 3600
    assert all(isinstance(queue, Queue) for queue in conf.task_queues)
    assert callable(conf.task_routes)


def test_a_dotted_name_leads_into_a_module(conf: Conf, modules: Path) -> None:
    conf.load_object("conf_sample:Derived")
    assert conf.changed() == {"task_acks_late": True, "timezone": "UTC"}
    other = Conf()
    other.load_object("conf_sample.nested")
    assert other.changed() == {"task_acks_late": True}


@pytest.mark.parametrize(
    ("dotted", "says"),
    [
        ("conf_missing", "config module 'conf_missing' was not found"),
        ("conf_sample.py", "write 'conf_sample'"),
        ("conf_sample:nothing", "'conf_sample' has no 'nothing'"),
        ("conf_sample.nothing", "module 'conf_sample' has no 'nothing'"),
        ("conf_broken", "can not be imported: ModuleNotFoundError: No module named 'no_such"),
        ("conf_syntax", "can not be imported: SyntaxError"),
        ("conf_typo", "did you mean 'task_serializer'?"),
        ("conf_helper", "must start with an underscore"),
    ],
)
def test_a_config_module_that_is_wrong_gets_one_line(
    conf: Conf, modules: Path, dotted: str, says: str
) -> None:
    with pytest.raises(ImproperlyConfigured, match=re.escape(says)) as refusal:
        conf.load_object(dotted)
    assert "\n" not in str(refusal.value)


def test_a_namespace_takes_its_upper_case_names_only_and_strictly(conf: Conf) -> None:
    settings = types.ModuleType("settings")
    vars(settings).update(
        CELERY_TASK_SERIALIZER="json", CELERY_BROKER_URL="redis://h", DEBUG=True, whatever=1
    )
    conf.load_object(settings, namespace="CELERY")
    assert conf.changed() == {"broker_url": "redis://h", "task_serializer": "json"}
    settings.CELERY_TASK_SERIALIZR = "json"  # type: ignore[attr-defined]
    with pytest.raises(ImproperlyConfigured, match="did you mean 'CELERY_TASK_SERIALIZER'"):
        conf.load_object(settings, namespace="CELERY")
    with pytest.raises(ImproperlyConfigured, match="called 'CELERY_TASK_ACKS_LATE' now"):
        conf.load_object({"CELERY_ACKS_LATE": True}, namespace="CELERY")
    with pytest.raises(ImproperlyConfigured, match="setting 'CELERY_WORKER_CONCURRENCY' is 0"):
        conf.load_object({"CELERY_WORKER_CONCURRENCY": 0}, namespace="CELERY")


def test_a_config_dictionary_may_hold_settings_only(conf: Conf) -> None:
    conf.load_object({"task_acks_late": True, "_mine": 1})
    assert conf.changed() == {"task_acks_late": True}
    with pytest.raises(ImproperlyConfigured, match="the key 5"):
        conf.load_object({5: True})
    with pytest.raises(ImproperlyConfigured, match="is None"):
        conf.load_object(None)


# -- settings without effect -----------------------------------------------------------------


def test_a_setting_without_effect_is_kept_and_warned_of_once_per_process(conf: Conf) -> None:
    with pytest.warns(SettingWarning, match="'beat_schedule' has no effect: periodic tasks"):
        conf.beat_schedule = {"x": {"task": "y"}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Conf().load_object({"beat_schedule": {"x": {}}})
        conf.worker_send_task_events = False  # the default: nothing is missed
    assert conf.beat_schedule == {"x": {"task": "y"}}


# -- threads ---------------------------------------------------------------------------------


def test_a_reader_sees_a_whole_update_or_none_of_it(conf: Conf) -> None:
    done = threading.Event()
    torn: list[object] = []

    def read() -> None:
        while not done.is_set():
            seen = dict(vars(conf))  # one step, like the write
            if (
                seen["task_default_queue"][1:]
                != (seen["task_default_routing_key"] or "-celery")[1:]
            ):
                torn.append(seen)

    conf.update(task_default_queue="q0", task_default_routing_key="k0")
    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(300):
        conf.update(task_default_queue=f"q{turn}", task_default_routing_key=f"k{turn}")
    done.set()
    reader.join(10)
    assert not torn
    assert conf.revision == 301
