"""The language of the search field."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.app.events.state import State
from umbel.dashboard.search import SearchError, parse

NOW = 1_000_000.0


@pytest.fixture(scope="module")
def state() -> State:
    made = State()

    def tell(kind: str, uuid: str, clock: int, ago_s: float, **fields: Any) -> None:
        made.event(
            {"type": f"task-{kind}", "uuid": uuid, "hostname": "w1@host", "clock": clock,
             "timestamp": NOW - ago_s, **fields}
        )  # fmt: skip

    tell("received", "ok", 1, 30, name="img.resize", args="('a b',)", kwargs="{}", retries=0)
    tell("started", "ok", 2, 29)
    tell("succeeded", "ok", 3, 20, runtime=9.0, result="1")
    tell("received", "bad", 4, 10, name="img.crop", args="()", kwargs="{}", retries=2)
    tell("started", "bad", 5, 9)
    tell("failed", "bad", 6, 8, exception="ValueError('x')", traceback="t")
    tell("received", "new", 7, 100, name="mail[1].send", args="(1,)", kwargs="{}", retries=0)
    tell("started", "run", 8, 4)
    return made


def found(state: State, query: str) -> set[str]:
    search = parse(query, now=lambda: NOW)
    return {task.uuid for task in state.tasks.values() if search(task)}


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("", {"ok", "bad", "new", "run"}),
        ("state:failed", {"bad"}),
        ("state:FAILURE", {"bad"}),
        ("state:failed,succeeded", {"ok", "bad"}),
        ("state:done", {"ok", "bad"}),
        ("state:waiting", {"new"}),
        ("-state:done", {"new", "run"}),
        ("name:img.*", {"ok", "bad"}),
        ("name:IMG.resize", {"ok"}),
        ("name:img", set()),
        ("name:img.?rop", {"bad"}),
        ("name:mail[1].send", {"new"}),
        ("name:img.crop,mail*", {"bad", "new"}),
        ("runtime:>5s", {"ok"}),
        ("runtime:<5s", {"bad", "run"}),
        ("runtime:500ms..2s", {"bad"}),
        ("wait:>1m", {"new"}),
        ("age:<15s", {"bad", "run"}),
        ("retries:>0", {"bad"}),
        ("retries:2", {"bad"}),
        ("clock:>=7", {"new", "run"}),
        ("worker:w1@*", {"ok", "bad", "new", "run"}),
        ("error:ValueError*", {"bad"}),
        ("valueerror", {"bad"}),
        ('"a b"', {"ok"}),
        ("resize -state:failed", {"ok"}),
        ("id:ok", {"ok"}),
        ("state:failed name:img.* runtime:>5s", set()),
    ],
)
def test_a_query_finds_what_it_says(state: State, query: str, wanted: set[str]) -> None:
    assert found(state, query) == wanted


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("colour:red", "unknown key 'colour': use one of state"),
        ("runtime:soon", "is no duration"),
        ("retries:5s", "is no number"),
        ("runtime:1..", "is no duration"),
        ("state:<x>", "unknown state"),
        ("x" * 501, "longer than"),
        ("a " * 30, "more than"),
    ],
)
def test_what_can_not_be_understood_is_said(query: str, words: str) -> None:
    with pytest.raises(SearchError, match=words.replace("(", r"\(")):
        parse(query)


@given(st.text(max_size=120))
def test_nothing_but_a_search_error_is_ever_raised(state: State, query: str) -> None:
    for text in (query, f"state:{query}", f"name:{query}", f"runtime:{query}", f"-clock:{query}"):
        try:
            search = parse(text)
        except SearchError:
            continue
        for task in state.tasks.values():
            search(task)


def test_a_glob_of_many_stars_does_not_take_for_ever(state: State) -> None:
    search = parse("name:" + "*a" * 100)
    began = time.process_time()
    assert not any(search(task) for task in state.tasks.values())
    assert time.process_time() - began < 1.0
