"""Patterns of node names: what they match, what is refused, and how long it takes at most."""

from __future__ import annotations

import time

import pytest

from umbel.wire.limits import Refusal
from umbel.wire.patterns import check_pattern, matches


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("w1@h", "w1@h", True),
        ("w1", "w1@h", False),
        ("w?@*", "w1@host", True),
        ("*@host", "w1@host", True),
        ("W1@h", "w1@h", False),
        ("[!w]*", "w1@h", False),
        ("", "w1@h", False),
    ],
)
def test_a_glob_fits_the_whole_name(pattern, name, fits):
    assert matches(name, pattern, "glob") is fits


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("w", "w1@h", True),
        ("1", "w1@h", False),
        (".*@h$", "w1@h", True),
        (r"(mail|web)-\d{2,3}@", "web-07@h", True),
        (r"(?:mail|web)-\d{2,3}@", "web-7@h", False),
        (r"(?P<kind>w)[1-3]+?@[^.]+$", "w12@h", True),
        (r"\Aw1\Z", "w1", True),
        ("a{,2}b", "aab", True),
        ("a{2}b", "ab", False),
        ("a{x}", "a{x}", True),
        ("", "w1@h", True),
        ("a||b", "w1", True),
        ("^$", "", True),
        ("[]]", "]", True),
        (r"[\w.-]+@", "a.b-c@h", True),
    ],
)
def test_an_expression_fits_the_beginning_of_the_name(pattern, name, fits):
    assert matches(name, pattern, "pcre") is fits


@pytest.mark.parametrize(
    "pattern",
    [
        "(", ")", "[", "[a", "[z-a]", "*", "a**", "a*+", "a{2}{3}", "^*", "a{3,2}", "(?i)a",
        r"(a)\1", "(?=a)", "(?<!a)b", r"\b", r"\x41", "\\", "[[a]", r"[\x41]", "(?#c)", "(?>a)",
        "(" * 60 + ")" * 60, "(a{500}){500}", "((){900}){900}", "a{99999}", "x" * 251,
    ],
)  # fmt: skip
def test_an_expression_that_is_not_understood_is_refused(pattern):
    with pytest.raises(Refusal) as caught:
        check_pattern(pattern, "pcre")
    assert "can not be matched" in caught.value.text


def test_a_matcher_that_nobody_knows_is_refused():
    with pytest.raises(Refusal, match="choose glob or pcre"):
        check_pattern("a", "sql")


@pytest.mark.parametrize(
    ("pattern", "matcher"),
    [
        ("(a+)+$", "pcre"),
        ("(a|a)*b", "pcre"),
        ("(a*)*" * 40 + "b", "pcre"),
        ("(.*,){20}x", "pcre"),
        (".*" * 100 + "b", "pcre"),
        ("*a" * 100 + "b", "glob"),
    ],
)
def test_no_pattern_takes_long(pattern, matcher):
    began = time.process_time()
    assert not matches("a" * 900 + "!", pattern, matcher)
    assert time.process_time() - began < 2.0


def test_a_name_beyond_the_bound_fits_nothing():
    assert not matches("a" * 1001, "a*", "glob")
    assert not matches("a" * 1001, "a", "pcre")
