"""Failures: what peers store is rebuilt, and nothing in it is trusted."""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import celery.exceptions
import pytest
from billiard import exceptions as billiard_exceptions
from celery import Celery

from umbel import exceptions
from umbel.exceptions import SecurityError
from umbel.wire.content import dumps_json
from umbel.wire.failures import UnknownFailure, decode_failure, encode_failure

backend = Celery("peer", backend="cache+memory://", set_as_current=False).backend


class Custom(Exception):
    class Nested(Exception):
        pass


class Picky(Exception):
    def __init__(self, *, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code


class Unprintable(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.b = b

    def __str__(self):
        return f"{self.b}"


def failure(name, message=("x",), module=__name__):
    return {"exc_type": name, "exc_message": list(message), "exc_module": module}


OURS = [
    exceptions.TaskRevokedError("expired"),
    exceptions.NotRegistered("w.nosuch"),
    exceptions.ChordError("Dependency t raised ValueError()"),
    exceptions.Reject("why", True),
    exceptions.Retry("again", None, 5),
    exceptions.MaxRetriesExceededError("too often"),
    exceptions.TimeLimitExceeded(5),
    exceptions.SoftTimeLimitExceeded(5),
    exceptions.WorkerLostError("signal 9"),
    exceptions.Terminated(15),
    exceptions.TimeoutError("late"),
]


@pytest.mark.parametrize("exc", OURS, ids=repr)
def test_our_classes_are_stored_under_names_that_a_peer_resolves(exc):
    theirs = backend.exception_to_python(json.loads(dumps_json(encode_failure(exc))))
    home = celery.exceptions if theirs.__class__.__module__.startswith("celery") else None
    assert type(theirs) is getattr(home or billiard_exceptions, type(exc).__name__)
    if not isinstance(exc, exceptions.Retry):  # a peer's puts itself among its arguments
        assert theirs.args == exc.args


@pytest.mark.parametrize("exc", OURS, ids=repr)
def test_our_classes_come_back_as_ours(exc):
    found = decode_failure(json.loads(dumps_json(encode_failure(exc))))
    assert type(found) is type(exc)
    assert found.args == exc.args


@pytest.mark.parametrize(
    "theirs",
    [
        celery.exceptions.TaskRevokedError("revoked"),
        celery.exceptions.NotRegistered("w.x"),
        celery.exceptions.ChordError("c"),
        celery.exceptions.MaxRetriesExceededError("m"),
        billiard_exceptions.TimeLimitExceeded(5),
        billiard_exceptions.WorkerLostError("lost"),
        billiard_exceptions.SoftTimeLimitExceeded(3),
        billiard_exceptions.Terminated(15),
    ],
    ids=repr,
)
def test_what_a_peer_stores_becomes_our_class(theirs):
    found = decode_failure(json.loads(backend.encode(backend.prepare_exception(theirs, "json"))))
    assert type(found) is getattr(exceptions, type(theirs).__name__)
    assert found.args == theirs.args


def test_peer_classes_are_known_under_either_module():
    for module in ("celery.exceptions", "billiard.exceptions"):
        found = decode_failure(failure("WorkerLostError", module=module))
        assert type(found) is exceptions.WorkerLostError


@pytest.mark.parametrize(
    "exc",
    [ValueError("bad", 3), KeyError("k"), Custom("c"), Custom.Nested(1, 2), OSError(2, "gone")],
    ids=repr,
)
def test_ordinary_and_custom_exceptions_survive_and_look_as_a_peer_writes_them(exc):
    stored = encode_failure(exc)
    peers = backend.prepare_exception(exc, "json")
    assert json.loads(dumps_json(stored)) == json.loads(backend.encode(peers))
    found = decode_failure(stored)
    assert type(found) is type(exc)
    assert found.args == exc.args


def test_arguments_that_cannot_be_stored_become_their_repr():
    class Hostile:
        def __repr__(self):
            raise RuntimeError("no")

    stored = encode_failure(ValueError({1, 2}, Hostile(), object, "fine", (1, 2)))
    dumps_json(stored)
    assert stored["exc_message"][0] == "{1, 2}"
    assert "unrepresentable Hostile" in stored["exc_message"][1]
    assert stored["exc_message"][3:] == ["fine", (1, 2)]


def test_an_exception_whose_arguments_cannot_be_read_is_stored_all_the_same():
    class Odd(Exception):
        @property
        def args(self):
            raise RuntimeError("no")

    assert encode_failure(Odd())["exc_type"].endswith("Odd")


def test_a_constructor_that_wants_other_arguments_is_gone_around():
    found = decode_failure(failure("Picky", ["5: no"]))
    assert type(found) is Picky
    assert found.args == ("5: no",)
    assert str(found) == "5: no"


def test_an_exception_that_could_not_be_printed_gets_a_stand_in():
    found = decode_failure(failure("Unprintable", ["a"]))
    assert isinstance(found, UnknownFailure)
    assert repr(found) == "Unprintable('a')"


def test_a_class_that_is_not_loaded_gets_a_stand_in_of_its_name():
    found = decode_failure(failure("Outer.Gone", ["a", 2], "not.loaded.here"))
    assert isinstance(found, UnknownFailure)
    assert type(found).__module__ == "not.loaded.here"
    assert repr(found) == "Gone('a', 2)"
    assert type(found) is type(decode_failure(failure("Outer.Gone", [], "not.loaded.here")))
    assert "not" not in sys.modules


def test_a_module_is_never_imported_to_find_a_class():
    assert "this" not in sys.modules
    decode_failure(failure("Anything", module="this"))
    assert "this" not in sys.modules


def test_a_lazy_module_is_not_woken(monkeypatch, tmp_path):
    (tmp_path / "sleeping_beauty.py").write_text("raise SystemExit('woken')")
    spec = importlib.util.spec_from_file_location(
        "sleeping_beauty", tmp_path / "sleeping_beauty.py"
    )
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sleeping_beauty", module)
    loader.exec_module(module)
    assert isinstance(decode_failure(failure("Kiss", module="sleeping_beauty")), UnknownFailure)


def test_a_module_that_makes_names_on_access_is_not_asked(monkeypatch):
    module = types.ModuleType("eager_to_please")
    asked = []
    module.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "eager_to_please", module)
    assert isinstance(decode_failure(failure("Name", module="eager_to_please")), UnknownFailure)
    assert asked == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "int"),
        ("builtins", "object"),
        ("os", "path"),
        ("os", "path.join"),
        ("os", "environ.clear"),
        (__name__, "sys.exit"),
        (__name__, "backend"),
        ("types", "ModuleType"),
    ],
)
def test_a_name_that_is_not_an_exception_is_a_security_error(module, name):
    with pytest.raises(SecurityError, match="not an exception"):
        decode_failure(failure(name, ["echo"], module))


def test_a_non_exception_is_never_called(monkeypatch):
    calls = []
    monkeypatch.setitem(globals(), "trap", calls.append)
    with pytest.raises(SecurityError):
        decode_failure(failure("trap"))
    assert calls == []


@pytest.mark.parametrize("name", ["SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_a_stored_failure_cannot_end_its_reader(name):
    found = decode_failure(failure(name, ["x"], "builtins"))
    assert isinstance(found, Exception)
    assert type(found).__name__ == name


@pytest.mark.parametrize(
    "data",
    [None, {}, [], "text", 5, {"exc_type": 5}, {"exc_type": None}, {"exc_message": ["x"]}],
    ids=repr,
)
def test_what_is_not_a_failure_gets_a_stand_in(data):
    assert isinstance(decode_failure(data), UnknownFailure)


@pytest.mark.parametrize(
    "data",
    [
        {"exc_type": "", "exc_module": None},
        {"exc_type": "a\0b", "exc_module": "m", "exc_message": None},
        {"exc_type": "\ud800", "exc_module": "\ud800"},
        {"exc_type": "X" * 10**6, "exc_module": "m" * 10**6},
        {"exc_type": "...", "exc_module": "os"},
        {"exc_type": "ValueError", "exc_module": ["builtins"]},
        {"exc_type": "ExceptionGroup", "exc_module": "builtins", "exc_message": ["m", "[]"]},
        {"exc_type": "UnicodeDecodeError", "exc_module": "builtins", "exc_message": ["m"]},
        {"exc_type": "ValueError", "exc_module": "builtins", "exc_message": "bare"},
        {"exc_type": "ValueError", "exc_module": "builtins"},
    ],
    ids=range(10),
)
def test_odd_names_and_messages_do_no_harm(data):
    found = decode_failure(data)
    assert isinstance(found, Exception)
    str(found), repr(found)
    encode_failure(found)


def test_an_exception_passes_through():
    exc = ValueError("as it is")
    assert decode_failure(exc) is exc
