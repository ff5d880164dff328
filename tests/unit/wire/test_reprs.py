"""Reprs: like `repr` when that is short, and bounded always."""

from __future__ import annotations

from collections import OrderedDict, deque

import pytest

from umbel.wire.reprs import safe_repr


@pytest.mark.parametrize(
    "value",
    [
        (),
        (1,),
        (1, "two", 3.0, None, True),
        {"k": [1, {"x": 2}]},
        [b"bytes", "it's"],
        {1},
        set(),
        "text",
        5,
        None,
        2**100,
        [[[]]],
        {"ü": "☃"},
    ],
    ids=repr,
)
def test_ordinary_values_read_as_python_writes_them(value):
    assert safe_repr(value) == repr(value)


def test_deeper_levels_are_left_out():
    assert safe_repr([[[[1]]]]) == "[[[[...]]]]"
    assert safe_repr({"a": {"b": {"c": {"d": 1}}}}) == "{'a': {'b': {'c': {...}}}}"


@pytest.mark.parametrize("chars", [0, 1, 3, 10, 100, 1024])
def test_the_text_is_never_longer_than_asked_for(chars):
    endless: list[object] = []
    endless.append(endless)
    for value in (
        "x" * 10**6,
        b"\xff" * 10**6,
        list(range(10**6)),
        dict.fromkeys(range(10**4), "y" * 100),
        endless,
        [endless] * 100,
        10**2000,
        ["a" * 200] * 30,
    ):
        text = safe_repr(value, chars)
        assert len(text) <= chars


def test_a_cut_text_says_so():
    assert safe_repr([1] * 1000, 20) == "[1, 1, 1, 1, 1, 1..."


def test_work_is_bounded_for_values_that_refer_to_themselves_many_times():
    node: list[object] = [0]
    for _ in range(100):
        node = [node] * 50
    assert len(safe_repr(node, 1024, 1000)) <= 1024


def test_a_long_integer_is_described():
    assert safe_repr((1 << 100_000,)) == "(<int of 100001 bits>,)"


def test_other_containers_carry_the_name_of_their_type():
    assert safe_repr(deque([1])) == "deque([1])"
    assert safe_repr(OrderedDict(a=1)) == "OrderedDict({'a': 1})"
    assert safe_repr(frozenset()) == "frozenset()"


def test_a_hostile_repr_does_no_harm():
    class Raises:
        def __repr__(self):
            raise RuntimeError("no")

    class Quits:
        def __repr__(self):
            raise SystemExit(1)

    class Lies:
        def __repr__(self):
            return 5

    class Endless:
        def __repr__(self):
            return repr(self)

    class Surrogate:
        def __repr__(self):
            return "\ud800"

    class Items(dict):
        def items(self):
            raise RuntimeError("no")

    for value in (Raises(), Quits(), Lies(), Endless(), Surrogate(), Items(a=1)):
        assert type(value).__name__ in safe_repr(value) or isinstance(value, Surrogate)
        safe_repr([value, {"k": value}]).encode("utf-8")
    assert safe_repr(["\ud800", 1, [2]]) == "['\\ud800', 1, [2]]"
