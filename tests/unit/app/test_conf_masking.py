"""No secret is ever shown, whatever it is made of and wherever it stands."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Queue

from umbel.app.conf import Conf
from umbel.wire.masking import _SEPARATOR, masked, masked_url

# Whatever surrounds it, this piece must never be seen.
MARK = "hUnTeR"
_any_text = st.text(max_size=12)
_url_text = st.text(st.sampled_from("ab1:@/?#&;,=%[]+ .*'\"\\\n"), max_size=12)
passwords = st.one_of(
    st.builds(lambda text: MARK + text + MARK, st.one_of(_any_text, _url_text)),
    st.builds(lambda a, b: a + MARK + b, st.one_of(_any_text, _url_text), _url_text),
).filter(lambda text: not _SEPARATOR.search(text))
schemes = st.sampled_from(["redis", "rediss", "amqp", "sentinel", "sqs", "mongodb+srv", "db+pg"])
users = st.sampled_from(["", "user", "a%20b"])
hosts = st.sampled_from(["host", "host:6379", "[::1]:6379", "h1:1,h2:2", ""])
tails = st.sampled_from(["", "/", "/0", "//", "/0?timeout=5", "/v?x=1&y=2"])


@st.composite
def urls(draw: st.DrawFn) -> str:
    password = draw(passwords)
    form = draw(st.sampled_from(["quoted", "raw", "parameter", "parameter-after"]))
    scheme, host, tail = draw(schemes), draw(hosts), draw(tails)
    if form == "raw":
        return f"{scheme}://{draw(users)}:{password}@{host}{tail}"
    if form == "quoted":
        return f"{scheme}://{draw(users)}:{quote(password, safe='')}@{host}{tail}"
    name = draw(st.sampled_from(["password", "pass", "ssl_key", "token", "api_key", "Secret"]))
    before = "a=b&" if form == "parameter-after" else ""
    return f"{scheme}://{host}/0?{before}{name}={quote(password, safe='')}"


@given(st.lists(urls(), min_size=1, max_size=3), st.sampled_from([";", "; ", ","]))
def test_no_masked_address_contains_its_password(addresses: list[str], separator: str) -> None:
    assert MARK not in masked_url(separator.join(addresses))
    assert MARK not in str(masked("broker_url", addresses))
    assert MARK not in str(masked("imports", {"x": [tuple(addresses)]}))


secret_names = st.sampled_from(
    ["password", "PASS", "redis_password", "api_key", "Token", "client_secret", "credentials",
     "signature", "ssl_keyfile", "AWS_SECRET_ACCESS_KEY"]
)  # fmt: skip
secrets: st.SearchStrategy[Any] = st.one_of(
    passwords,
    passwords.map(lambda p: p.encode("utf-8", "replace")),
    st.lists(passwords, min_size=1),
    st.dictionaries(st.just("x"), passwords, min_size=1),
)
nested: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.dictionaries(secret_names, secrets, min_size=1), urls()),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=2),
        st.dictionaries(st.sampled_from(["a", "options"]), inner, min_size=1),
        st.tuples(inner),
    ),
    max_leaves=6,
)


@given(nested)
def test_no_masked_structure_contains_a_secret_under_a_secret_name(value: Any) -> None:
    conf = Conf()
    conf.broker_transport_options = {"given": value}
    for with_defaults in (False, True):
        assert MARK not in str(conf.masked(with_defaults))
    assert MARK not in repr(conf)


@given(st.sampled_from(["password=%s", "host=h password=%s port=5", '{"password": "%s"}']),
       passwords)  # fmt: skip
def test_no_text_with_an_assignment_shows_the_secret(form: str, password: str) -> None:
    assert MARK not in masked("database_url", form % password)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("amqp://user:pw@host:5672/vhost", "amqp://user:**@host:5672/vhost"),
        ("redis://:pw@host/0;redis://:pw@other/0", "redis://:**@host/0;redis://:**@other/0"),
        ("redis://h/0?password=pw&timeout=5", "redis://h/0?password=**&timeout=5"),
        ("redis://h:6379/0?password=p@w&timeout=5", "redis://h:**@**&timeout=5"),
        ("redis://user:forgot-the-host", "redis://user:**"),
        ("redis+socket:///run/redis.sock?virtual_host=0",) * 2,
        ("redis://[::1]:6379/0",) * 2,
        ("embedded://",) * 2,
        ("azurestoragequeues://pw@account", "azurestoragequeues://**@account"),
        ("shop.tasks.charge",) * 2,
    ],
)
def test_what_is_not_secret_stays_readable(given: str, shown: str) -> None:
    assert masked("broker_url", given) == shown


def test_names_that_only_look_secret_are_shown() -> None:
    value = {"routing_key": "a", "socket_keepalive": True, "global_keyprefix": "x", "key": None}
    assert masked("broker_transport_options", value) == value
    assert masked("task_default_routing_key", "a") == "a"
    routes = {"shop.api.*": {"queue": "a"}, "shop.passwords.reset": "b"}
    assert masked("task_routes", routes) == routes


def test_masked_settings_are_plain_json() -> None:
    conf = Conf()
    conf.update(task_queues=[Queue("a")], task_routes=[print, {"a": "b"}], imports={"x"})
    shown = conf.masked()
    assert json.loads(json.dumps(shown)) == {
        "task_queues": ["<Queue a>"],
        "task_routes": ["<builtins.print>", {"a": "b"}],
        "imports": ["x"],
    }


def test_a_structure_that_holds_itself_is_cut_off() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    assert "..." in str(masked("broker_transport_options", loop))
