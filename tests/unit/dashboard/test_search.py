"""The language of the search field."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.app.events.state import State
from umbel.dashboard.search import SearchError, parse, wait_of

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
    search = parse(query, now=lambda: NOW, details=True)
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


@pytest.fixture(scope="module")
def own() -> State:
    """Tasks in states of their own, and how those that did not go on ended."""
    made = State()
    stories = {
        "works": ["received", "started", "progress"],
        "unheard": ["progress"],  # by a worker without -E
        "again": ["started", "progress", "retried"],
        "second": ["started", "progress", "retried", "started", "progress"],
        "killed": ["started", "progress", "revoked"],
        "returned": ["started", "progress", "rejected"],
        "cancelled": ["started", "cancelled"],
        "done": ["started", "progress", "succeeded"],
    }
    for uuid, kinds in stories.items():
        for clock, kind in enumerate(kinds, 1):
            made.event(
                {"type": f"task-{kind}", "uuid": uuid, "hostname": "w1@host", "clock": clock,
                 "timestamp": NOW - 10 + clock}
            )  # fmt: skip
    return made


def test_a_task_in_a_state_of_its_own_runs_until_it_ends(own: State) -> None:
    def found(query: str) -> set[str]:
        search = parse(query, lambda: NOW, lambda: {"PROGRESS", "CANCELLED"})
        return {task.uuid for task in own.tasks.values() if search(task)}

    assert found("state:running") == {"works", "unheard", "second"}
    assert found("state:running,done") == {"works", "unheard", "second", "done"}
    assert found("-state:running") == {"again", "killed", "returned", "cancelled", "done"}
    assert found("state:progress") == {"works", "unheard", "second", "killed", "returned"}
    assert found("state:PROGRESS runtime:>5s") == {"works", "second"}
    assert found("state:started") == set()


def test_a_state_that_nobody_saw_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(SearchError, match=r"unknown state 'bogus': use one of failed, .*; no task"):
        parse("state:bogus")
    with pytest.raises(SearchError, match=r"of your own: HALFWAY, PROGRESS$"):
        parse("-state:done,bogus", own_states=lambda: ["PROGRESS", "HALFWAY"])
    many = [f"S{number:03}" for number in range(100)]
    with pytest.raises(SearchError, match=r"S019 and 80 more$"):
        parse("state:bogus", own_states=lambda: many)


@pytest.mark.parametrize(
    ("story", "waited_s"),
    [
        ([("sent", 50, 0), ("received", 40, 0), ("started", 30, None)], 20),
        ([("sent", 50, 0), ("received", 40, 0)], 50),
        # The retry was sent, and not received yet: the attempt before it says nothing of its wait.
        ([("sent", 50, 0), ("started", 40, None), ("sent", 30, 1), ("retried", 29, None)], 29),
        # The retry was not seen to be sent.
        ([("sent", 50, 0), ("started", 40, None), ("retried", 30, None)], 30),
        (
            [("sent", 50, 0), ("started", 40, None), ("retried", 30, None), ("received", 25, 1),
             ("started", 20, None)],
            5,
        ),
        ([("received", 40, 0), ("succeeded", 10, None)], None),
    ],
)  # fmt: skip
def test_a_wait_is_that_of_the_last_attempt(
    story: list[tuple[str, int, int | None]], waited_s: float | None
) -> None:
    state = State()
    for clock, (kind, ago_s, retries) in enumerate(story, 1):
        fields = {} if retries is None else {"retries": retries}
        state.event(
            {"type": f"task-{kind}", "uuid": "t", "hostname": "w1@host", "clock": clock,
             "timestamp": NOW - ago_s, **fields}
        )  # fmt: skip
    assert wait_of(state.tasks["t"], NOW) == waited_s


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
            search = parse(text, details=True)
        except SearchError:
            continue
        for task in state.tasks.values():
            search(task)


def test_a_glob_of_many_stars_does_not_take_for_ever(state: State) -> None:
    search = parse("name:" + "*a" * 100)
    began = time.process_time()
    assert not any(search(task) for task in state.tasks.values())
    assert time.process_time() - began < 1.0
