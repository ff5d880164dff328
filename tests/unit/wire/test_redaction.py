"""What of a task's arguments may be shown."""

from __future__ import annotations

import inspect
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from celery.utils.saferepr import saferepr
from hypothesis import given
from hypothesis import strategies as st

from umbel.wire.redaction import (
    DEFAULT_NAMES,
    PEER_CHARS_MAX,
    Names,
    Redaction,
    Switch,
    by_name,
    fault_of,
    redact_event,
    redacted_repr,
)
from umbel.wire.tasks import TaskHeader

SECRET = "hunter2-Zq"


def rules(fun: Any = None, switch: Switch = None, names: Any = DEFAULT_NAMES) -> Redaction:
    return Redaction(tuple(names), switch, inspect.signature(fun) if fun else None)


def login(user: Any, password: Any, remember: Any = False) -> None: ...


def header(args: Any, kwargs: Any, **fields: Any) -> TaskHeader:
    texts = {"argsrepr": saferepr(args, 1024), "kwargsrepr": saferepr(kwargs, 1024), "lang": "py"}
    return TaskHeader("t", "1", **{**texts, **fields})


def never() -> Any:
    raise AssertionError("the body was opened")


def told(redaction: Redaction, args: Any, kwargs: Any, **fields: Any) -> tuple[str, str]:
    """What the event of a message from a peer says."""
    return redaction.event_reprs(header(args, kwargs, **fields), lambda: (list(args), kwargs))


# -- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "password", "PASSWORD", "user_password", "userpassword", "password_hash", "passwords",
        "password2", "passwd", "api_key", "apiKey", "APIKey", "apikey", "X-Api-Key", "token",
        "accessToken", "access.token", "TOKENS", "authorization", "Authorization", "card_number",
        "cardNumber", "cardnumber", "db_pass", "aws_secret_access_key", "clientSecret", "cvc",
    ],
)  # fmt: skip
def test_a_name_with_a_secret_word_is_secret_however_it_is_written(name: str) -> None:
    assert name in Names(DEFAULT_NAMES)


@pytest.mark.parametrize(
    "name",
    ["", "_", "user", "key", "keyword", "tokenizer", "compass", "passenger", "spinning", "author",
     "secretary", "routing_key", "monkey", "x" * 5000],
)  # fmt: skip
def test_a_word_that_only_holds_the_letters_is_none(name: str) -> None:
    assert name not in Names(DEFAULT_NAMES)


def test_patterns_are_for_the_whole_name_and_words_for_a_part() -> None:
    names = Names(["x_*", "iban", "пароль", "a.b"])
    for name in ("x_ray", "X-Ray", "the_iban", "ПАРОЛЬ", "a_b", "ab"):
        assert name in names
    for name in ("ax_ray", "ibanez", "axb"):
        assert name not in names


@pytest.mark.parametrize("names", [[], ["", "--"]])
def test_no_names_hide_nothing(names: list[str]) -> None:
    assert not Names(names)
    redaction = rules(login, names=names)
    assert redaction.shows_all
    assert redaction.kwargs_repr({"password": "x"}) == "{'password': 'x'}"


def test_the_memory_for_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.wire.secret_texts._NAMES_REMEMBERED_MAX", 3)
    names = Names(["token"])
    assert [f"token_{n}" in names for n in range(10)] == [True] * 10
    assert len(names._known) <= 3


# -- what we write -------------------------------------------------------------------------


def test_keywords_are_hidden_by_name_and_positions_by_the_signature() -> None:
    redaction = rules(login)
    assert redaction.args_repr(("bob", SECRET)) == "('bob', '**')"
    assert redaction.args_repr(["bob", SECRET, True]) == "['bob', '**', True]"
    assert redaction.kwargs_repr({"user": "bob", "password": SECRET}) == (
        "{'user': 'bob', 'password': '**'}"
    )


def test_further_positional_arguments_are_hidden_under_the_name_that_takes_them() -> None:
    def check(user: Any, *tokens: Any) -> None: ...

    assert rules(check).args_repr(("bob", 1, 2)) == "('bob', '**', '**')"


def test_mappings_inside_are_hidden_by_key_down_to_where_the_text_ends() -> None:
    inside = {"a": [{"token": SECRET, "n": 1}], b"pin": 12345, 3: 4}
    assert by_name(DEFAULT_NAMES).args_repr((inside,)) == ("({'a': [{...}], b'pin': '**', 3: 4},)")
    assert by_name(DEFAULT_NAMES).kwargs_repr({"x": [{"token": SECRET}]}) == (
        "{'x': [{'token': '**'}]}"
    )


def test_what_says_nothing_is_shown_under_any_name() -> None:
    assert by_name(DEFAULT_NAMES).kwargs_repr({"token": None, "secret": True, "pin": 0}) == (
        "{'token': None, 'secret': True, 'pin': '**'}"
    )


@dataclass
class Account:
    name: str
    password: str


class Sealed:
    def __repr__(self) -> str:
        raise ValueError(SECRET)


class Broken(UserDict[str, Any]):
    def items(self) -> Any:
        raise ValueError(SECRET)


class Pair(NamedTuple):
    user: str
    password: str


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Account("bob", SECRET), "('**',)"),
        (Pair("bob", SECRET), "(('bob', '**'),)"),
        (OrderedDict(password=SECRET), "({'password': '**'},)"),
        (UserDict(password=SECRET), "({'password': '**'},)"),
        (MappingProxyType({"a": {"b": {"c": {"password": SECRET}}}}), "({'a': {'b': {...}}},)"),
        ({Pair("bob", SECRET)}, "([('bob', '**')],)"),
        (Sealed(), "(<unrepresentable Sealed: ValueError>,)"),
        (Broken(a=1), "(**)"),
        (datetime(2026, 1, 2), "(datetime.datetime(2026, 1, 2, 0, 0),)"),  # noqa: DTZ001
    ],
)
def test_objects_do_not_tell_more_than_mappings(value: Any, text: str) -> None:
    assert by_name(DEFAULT_NAMES).args_repr((value,)) == text


def test_a_value_without_secrets_is_written_as_ever() -> None:
    value = OrderedDict(a=[1, (2,)], b={"c"})
    assert (
        by_name(DEFAULT_NAMES).args_repr((value,))
        == "(OrderedDict({'a': [1, (...,)], 'b': {'c'}}),)"
    )


def test_huge_and_self_referencing_values_cost_no_more_than_their_text() -> None:
    looks = 0

    class Counting(list[Any]):
        def __iter__(self) -> Any:
            nonlocal looks
            for item in super().__iter__():
                looks += 1
                yield item

    own: list[Any] = [{"token": SECRET}]
    own.append(own)
    text = by_name(DEFAULT_NAMES).args_repr((own, Counting([{"n": 1}] * 100_000)))
    assert text.startswith("([{'token': '**'}, [{...}, [...]]], [{'n': 1}, ")
    assert len(text) <= 1024
    assert looks < 5000


# -- the task's own say --------------------------------------------------------------------


def test_a_task_may_hide_all() -> None:
    redaction = rules(login, True)
    assert redaction.hides_all
    assert redaction.args_repr((1, 2)) == "(**)"
    assert redaction.kwargs_repr({"a": None}) == "{**}"
    assert (redaction.args_repr(()), redaction.kwargs_repr({})) == ("()", "{}")


def test_a_task_may_hide_nothing() -> None:
    redaction = rules(login, False)
    assert not redaction.hides_all
    assert redaction.args_repr((1, SECRET)) == f"(1, {SECRET!r})"
    assert (
        redaction.kwargs_repr({"token": 1, "x": {"token": 1}}) == "{'token': 1, 'x': {'token': 1}}"
    )


@pytest.mark.parametrize("more", [("user", "x*"), ["user", "x*"], frozenset({"user", "x*"})])
def test_a_task_may_name_more(more: Any) -> None:
    redaction = rules(login, more)
    assert not redaction.hides_all
    assert redaction.args_repr(("bob", SECRET, 1)) == "('**', '**', 1)"
    assert redaction.kwargs_repr({"xy": 1, "y": 1}) == "{'xy': '**', 'y': 1}"


def test_a_switch_is_a_boolean_or_names() -> None:
    assert [fault_of(good) for good in (True, False, ("card",), ["card"], ())] == [""] * 5
    for bad in ("card", 1, ("card", 2), ("",), {"card": 1}):
        assert "('card', 'cvc')" in fault_of(bad)


# -- calls inside of arguments -------------------------------------------------------------


def call(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"task": name, "args": args, "kwargs": kwargs, "options": {}}


def composed(switch: Switch = None) -> Redaction:
    inner = {"login": rules(login, switch), "hush": rules(None, True)}
    return Redaction(DEFAULT_NAMES, None, None, inner.get)


def test_a_call_inside_follows_the_rules_of_its_own_task() -> None:
    assert composed().kwargs_repr({"body": call("login", 1, SECRET, x=2)}) == (
        "{'body': {'task': 'login', 'args': (1, '**'), 'kwargs': {'x': 2}, 'options': {}}}"
    )
    assert composed().kwargs_repr({"body": call("hush", 1, x=2)}) == (
        "{'body': {'task': 'hush', 'args': '**', 'kwargs': '**', 'options': {}}}"
    )
    assert composed(False).kwargs_repr({"body": call("login", 1, 2, token=3)}) == (
        "{'body': {'task': 'login', 'args': (1, 2), 'kwargs': {'token': 3}, 'options': {}}}"
    )
    assert SECRET in composed().kwargs_repr({"body": call("other", 1, SECRET)})


def test_the_items_of_a_map_are_hidden_if_one_of_them_may_be_secret() -> None:
    mapped = {"task": {"task": "login", "args": ()}, "it": [(1, SECRET)], "n": 2}
    text = composed().kwargs_repr(mapped)
    assert text == "{'task': {'task': 'login', 'args': ()}, 'it': '**', 'n': 2}"
    plain = {"task": {"task": "other", "args": ()}, "it": [(1, 2)]}
    assert "[(1, 2)]" in composed().kwargs_repr(plain)


def test_a_peers_text_with_a_call_in_it_is_looked_into() -> None:
    kwargs = {"body": call("login", 1, SECRET)}
    assert SECRET not in told(composed(), (), kwargs)[1]


# -- what peers have written ---------------------------------------------------------------


def test_texts_in_which_nothing_can_be_secret_pass_unopened() -> None:
    sent = header((1, "a: b=c", {"x": 2}), {"user": "bob", "token": None})
    assert by_name(DEFAULT_NAMES).event_reprs(sent, never) == (sent.argsrepr, sent.kwargsrepr)


def test_what_an_umbel_client_has_hidden_passes_unopened() -> None:
    redaction = by_name(DEFAULT_NAMES)
    args, kwargs = ({"token": SECRET},), {"password": SECRET, "n": 1}
    texts = {"argsrepr": redaction.args_repr(args), "kwargsrepr": redaction.kwargs_repr(kwargs)}
    sent = header((), {}, **texts)
    assert redaction.event_reprs(sent, never) == (
        "({'token': '**'},)",
        "{'password': '**', 'n': 1}",
    )


def test_a_peers_text_is_written_anew_where_it_tells_a_secret() -> None:
    assert told(rules(login), ("bob", SECRET), {"x": (1,)}) == ("('bob', '**')", "{'x': (1,)}")
    assert told(rules(login), (), {"password": SECRET, "a": [1]}) == (
        "()",
        "{'password': '**', 'a': [1]}",
    )
    assert told(by_name(DEFAULT_NAMES), ({"a": {"pin": 12}},), {}) == (
        "({'a': {'pin': '**'}},)",
        "{}",
    )


def test_a_peers_cut_text_is_written_anew_too() -> None:
    long = "x" * 3000
    args, kwargs = told(
        rules(login), ("bob", SECRET, long), {"a": "y" * 100, "pin": SECRET, "b": long}
    )
    assert args.startswith("('bob', '**', 'xxx")
    assert kwargs.startswith("{'a': 'yyy")
    assert "'pin': '**'" in kwargs
    assert args.endswith("...")


@pytest.mark.parametrize("words", ["(***)", "(...)", "(<bob>, <hidden>)", "nothing to see", ""])
def test_a_senders_own_words_stay_if_they_tell_no_secret(words: str) -> None:
    assert told(rules(login), ("bob", SECRET), {}, argsrepr=words) == (words, "{}")


@pytest.mark.parametrize(
    "words", [f"login as bob with {SECRET}", f"[bob {SECRET}]", f"(Secret({SECRET[:7]}...", SECRET]
)
def test_a_text_that_can_not_be_made_sense_of_is_hidden_if_a_secret_is_in_it(words: str) -> None:
    assert told(rules(login), ("bob", SECRET), {}, argsrepr=words) == ("(**)", "{}")


def test_other_languages_write_as_they_like_so_their_bodies_are_opened() -> None:
    sent = {"argsrepr": "[]", "kwargsrepr": f"map[password:{SECRET}]", "lang": "go"}
    redaction = by_name(DEFAULT_NAMES)
    assert told(redaction, (), {"password": SECRET}, **sent) == ("()", "{**}")
    sent["kwargsrepr"] = f'{{"password":"{SECRET}"}}'
    assert told(redaction, (), {"password": SECRET}, **sent) == ("()", "{**}")
    sent["kwargsrepr"] = "map[n:1]"
    assert told(redaction, (), {"n": 1}, **sent) == ("()", "map[n:1]")


def test_missing_texts_are_made_from_the_body() -> None:
    none = {"argsrepr": None, "kwargsrepr": None}
    assert told(rules(login), ("bob", SECRET), {"n": 1}, **none) == ("('bob', '**')", "{'n': 1}")
    assert told(rules(login, False), ("bob", 1), {}, **none) == ("('bob', 1)", "{}")
    assert told(rules(login, True), ("bob", 1), {}, **none) == ("(**)", "{**}")


def test_a_task_that_hides_all_never_opens_a_body() -> None:
    assert rules(login, True).event_reprs(header((1,), {}), never) == ("(**)", "{}")


def test_a_body_that_can_not_be_opened_tells_nothing() -> None:
    def refuse() -> Any:
        raise ValueError("not json")

    sent = header(("bob", SECRET), {"n": 1})
    assert rules(login).event_reprs(sent, refuse) == ("(**)", "{**}")
    assert rules(login, False).event_reprs(TaskHeader("t", "1"), refuse) == ("", "")
    assert rules(login).event_reprs(sent, lambda: (1, 2)) == ("(**)", "{**}")


def test_endless_texts_of_peers_are_cut() -> None:
    sent = header((), {}, argsrepr="'\"'" * 10**6, kwargsrepr="{'a'" * 10**6)
    args, kwargs = rules(None, False).event_reprs(sent, never)
    assert (len(args), len(kwargs)) == (PEER_CHARS_MAX, PEER_CHARS_MAX)
    args, kwargs = by_name(DEFAULT_NAMES).event_reprs(sent, lambda: ([], {}))
    assert max(len(args), len(kwargs)) <= PEER_CHARS_MAX


def test_refusals_show_no_usual_secret() -> None:
    assert redacted_repr([{"password": SECRET}, 1], 80) == "[{'password': '**'}, 1]"
    assert redacted_repr(Broken(a=1), 80) == "'**'"


# -- results and errors --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"), (7, "7"), (2**70, str(2**70)), (0.5, "0.5"), ("ok", "'ok'"),
        ({"password": SECRET, "n": 1}, "{'password': '**', 'n': 1}"),
        ([{"a": [{"token": SECRET}]}], "[{'a': [{...}]}]"),
        ({"a": {"pin": SECRET}}, "{'a': {'pin': '**'}}"),
        (f"redis://:{SECRET}@h", "'redis://:**@h'"),
        ((f"redis://:{SECRET}@h", 1), "('redis://:**@h', 1)"),
        ({f"redis://:{SECRET}@h": 1}, "{'redis://:**@h': 1}"),
        ({"x": {"y": f"password={SECRET}"}}, "{'x': {'y': 'password=**'}}"),
        (f"password={SECRET}".encode(), "b'password=**'"),
        ([{"n": 1}, {"s": "a:b"}], "[{'n': 1}, {'s': 'a:b'}]"),
    ],
)  # fmt: skip
def test_results_are_hidden_by_their_names_and_texts(value: Any, text: str) -> None:
    redaction = by_name(DEFAULT_NAMES)
    assert redaction.result_repr(value) == text
    assert rules(None, True).result_repr(value) == "'**'"
    assert SECRET not in redaction.result_repr([value, {"x": value}])


def test_a_result_is_shown_whole_where_nothing_is_to_be_hidden() -> None:
    value = {"password": SECRET, "url": f"redis://:{SECRET}@h"}
    assert rules(None, False).result_repr(value) == repr(value)
    assert rules(None, None, ()).result_repr(value) == repr(value)


def test_a_long_result_is_cut_where_no_secret_is() -> None:
    redaction = by_name(DEFAULT_NAMES)
    for chars in range(1, 60):
        text = redaction.result_repr(f"redis://bob:{SECRET}@h", chars)
        assert len(text) <= chars
        assert SECRET[:4] not in text
    text = redaction.result_repr("x" * 1010 + f" redis://bob:{SECRET}@h")
    assert SECRET[:4] not in text
    assert redaction.result_repr("x" * 10**7 + f" pin={SECRET}").endswith("...")


def test_secret_arguments_are_hidden_where_results_and_errors_repeat_them() -> None:
    redaction = rules(login)
    assert redaction.result_repr(f"bob/{SECRET}", 1024, ("bob", SECRET), {}) == "'bob/**'"
    assert redaction.result_repr(f"bob/{SECRET}", 1024, (), {"password": SECRET}) == "'bob/**'"
    assert redaction.result_repr(7, 1024, ("bob", 7), {}) == "7"  # too short to be looked for
    secrets = redaction.secrets_of(("bob", [SECRET, {"a": b"binary-secret"}, 123456]), {})
    assert secrets == [SECRET, "binary-secret", "123456"]
    error = ValueError(f"{SECRET} is not 123456")
    assert redaction.error_repr(error, secrets) == "ValueError('** is not **')"
    cut = redaction.error_repr(ValueError("x" * 1005 + SECRET), secrets)
    assert cut.endswith("x**...")


def test_an_error_of_a_task_that_hides_all_shows_its_class_only() -> None:
    assert rules(login, True).error_repr(ValueError(SECRET)) == "ValueError('**')"
    assert rules(login, False).error_repr(ValueError("pin=1")) == "ValueError('pin=1')"


def test_fields_of_events_stay_values() -> None:
    given = {"token": SECRET, "n": 1, "at": 0.5, "more": [{"pin": 1, "url": f"a://b:{SECRET}@c"}]}
    shown = {"token": "**", "n": 1, "at": 0.5, "more": [{"pin": "**", "url": "a://b:**@c"}]}
    assert by_name(DEFAULT_NAMES).fields(given) == shown
    assert rules(None, False).fields(given) == given
    assert set(rules(None, True).fields(given).values()) == {"**"}
    assert rules(None).fields({"a": Broken(a=1)}) == {"a": "**"}


def test_events_of_peers_are_hidden_and_keep_what_they_are_about() -> None:
    told = {"result": f"{{'token': '{SECRET}'}}", "kwargs": f"{{'pin': {SECRET!r}}}"}
    about = {"type": "task-succeeded", "uuid": "token:5", "name": "pin=6", "timestamp": 1.0}
    event: dict[str, Any] = {**about, **told}
    redact_event(event, by_name(DEFAULT_NAMES))
    assert event == {**about, "result": "{'token': '**'}", "kwargs": "{'pin': '**'}"}
    own = {**about, **told, "inc": 5}
    redact_event(own, by_name(DEFAULT_NAMES))
    assert own == {**about, **told, "inc": 5}


def test_of_what_an_election_is_about_only_the_task_is_kept() -> None:
    action = {"task": "t", "args": [SECRET], "kwargs": {"x": SECRET}, "options": {"task_id": "1"}}
    event: dict[str, Any] = {"type": "worker-elect", "inc": 5, "action": action}
    redact_event(event, by_name(DEFAULT_NAMES))
    assert event["action"] == {"task": "t", "options": {"task_id": "1"}}
    event["action"] = f"password={SECRET}"
    redact_event(event, by_name(DEFAULT_NAMES))
    assert event["action"] == "password=**"


# -- for every value -----------------------------------------------------------------------

plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4)
)
keys = st.one_of(st.text(max_size=6), st.sampled_from(["user", "a", "it", "task", "args"]))


def holding(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    secret = st.dictionaries(
        st.sampled_from(["password", "API-KEY", "accessToken"]),
        st.sampled_from([SECRET, [SECRET], {"x": SECRET}, SECRET * 200]),
        min_size=1,
    )
    ordinary = st.dictionaries(keys, inner, max_size=4)
    return st.one_of(
        st.lists(inner, max_size=5),
        st.tuples(inner, inner),
        ordinary,
        st.builds(lambda a, b: {**a, **b}, ordinary, secret),
    )


values = st.recursive(plain_values, holding, max_leaves=12)


@given(args=st.lists(values, max_size=4), kwargs=st.dictionaries(keys, values, max_size=4))
def test_no_secret_is_ever_written(args: list[Any], kwargs: dict[str, Any]) -> None:
    redaction = by_name(DEFAULT_NAMES)
    kwargs = {**kwargs, "token": SECRET}
    assert SECRET not in redaction.args_repr(tuple(args))
    assert SECRET not in redaction.kwargs_repr(kwargs)
    assert SECRET not in "".join(told(redaction, tuple(args), kwargs))


@given(args=st.lists(values, min_size=2, max_size=4))
def test_no_secret_of_a_place_is_ever_written(args: list[Any]) -> None:
    args[1] = SECRET
    assert SECRET not in rules(login).args_repr(args)
    assert SECRET not in told(rules(login), tuple(args), {})[0]


@given(st.text(max_size=300), st.text(max_size=300), values)
def test_no_text_of_a_peer_raises(args: str, kwargs: str, body: Any) -> None:
    sent = header((), {}, argsrepr=args, kwargsrepr=kwargs)
    assert len(rules(login).event_reprs(sent, lambda: body)) == 2
