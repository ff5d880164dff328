"""The tables of settings against Celery's, against themselves, and against their page."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery.app.defaults import _TO_NEW_KEY, DEFAULTS
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.app.conf import Conf
from umbel.app.inert_settings import INERT, NAMES, modern_name
from umbel.app.settings import SECTIONS, SETTINGS
from umbel.app.settings_page import page
from umbel.exceptions import ImproperlyConfigured

# Intended differences: what Celery has as default, and we have not.
DIFFERENT = {
    "broker_url": (None, "embedded://"),
    "broker_connection_max_retries": (100, None),
}
# Read by Celery's backends without a declaration.
UNDECLARED = {
    "override_backends",
    "gcs_threadpool_maxsize",
    "redis_backend_credential_provider",
    "redis_backend_health_check_interval",
    "redis_client_name",
    "result_backend_thread_safe",
}
OWN = {
    "broker_blocked_connection_timeout",
    "broker_consumer_timeout",
    "broker_redis_transport",
    "broker_amqp_transport",
    "control_allow",
    "control_signing",
    "control_signing_key",
    "election_allow",
    "embedded_directory",
    "embedded_server",
    "event_buffer_max",
    "event_flush_interval",
    "event_stream",
    "event_stream_max",
    "file_umask",
    "metrics_address",
    "task_message_max_bytes",
    "task_message_max_depth",
    "task_message_max_integer_digits",
    "task_redact_names",
    "task_trace_spans",
    "worker_code_version",
    "worker_cpu_affinity",
    "worker_gossip_interval",
    "worker_goodbye_timeout",
    "worker_gossip_queue_ttl",
    "worker_heartbeat_interval",
    "worker_parked_task_limit",
    "worker_watchdog_timeout",
}


def _plain(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return list(value) if isinstance(value, tuple) else value


def test_every_setting_of_celery_is_known_here_and_no_other_but_the_named_ones() -> None:
    assert frozenset(DEFAULTS) | UNDECLARED | OWN == NAMES
    assert not SETTINGS.keys() & INERT.keys()
    assert sum(len(settings) for _, settings in SECTIONS) == len(SETTINGS)


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_a_default_is_celerys_unless_the_difference_is_intended(name: str) -> None:
    ours = SETTINGS[name].default if name in SETTINGS else INERT[name][0]
    if name in DIFFERENT:
        assert (DEFAULTS[name], ours) == DIFFERENT[name]
        assert SETTINGS[name].differs
    else:
        assert _plain(ours) == _plain(DEFAULTS[name])


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_default_is_a_value_of_its_own_kind_and_carries_a_trade_off(name: str) -> None:
    setting = SETTINGS[name]
    assert setting.kind.check(setting.default) == setting.default
    assert len(setting.trade_off) > 40
    assert bool(setting.differs) == (name in DIFFERENT or name in OWN)


odd_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(),
        st.timedeltas(), st.dates(), st.just(object()), st.sampled_from(["json", "a://b", "1/s"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=2),
    ),
    max_leaves=4,
)  # fmt: skip


@given(st.sampled_from(sorted(SETTINGS)), odd_values)
@settings(max_examples=500)
def test_any_value_is_taken_or_refused_in_one_line_and_what_is_taken_is_stable(
    name: str, value: Any
) -> None:
    conf = Conf()
    refusal = _refusal(lambda: conf.update({name: value}))
    if refusal is not None:
        assert refusal.startswith(f"setting {name!r} is ")
        assert "\n" not in refusal
    else:
        assert SETTINGS[name].kind.check(conf[name]) == conf[name]
        conf.masked()


@given(st.sampled_from(sorted(SETTINGS)), st.text(max_size=8))
@settings(max_examples=300)
def test_any_text_in_the_environment_is_taken_or_refused(name: str, text: str) -> None:
    refusal = _refusal(lambda: Conf().load_environment({f"UMBEL_{name.upper()}": text}))
    assert refusal is None or refusal.startswith(f"setting 'UMBEL_{name.upper()}' is ")


def _refusal(write: Callable[[], None]) -> str | None:
    try:
        write()
    except ImproperlyConfigured as exc:
        return str(exc)
    return None


@pytest.mark.parametrize("old", sorted(_TO_NEW_KEY))
def test_every_old_name_leads_to_the_new_one(old: str) -> None:
    assert modern_name(old) == _TO_NEW_KEY[old]


def test_the_page_of_settings_is_up_to_date() -> None:
    written = Path(__file__).parents[3] / "docs" / "settings.md"
    assert written.read_text(encoding="utf-8") == page(), (
        "run: python -m umbel.app.settings_page docs/settings.md"
    )
