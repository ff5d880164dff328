"""For all events of a task, in any order and any number: one task, and the one that Celery sees."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery.events.state import State as CeleryState
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.app.events.state import State
from umbel.cluster.clock import order
from umbel.cluster.task_states import (
    CLASS_FIELDS,
    CLASS_STATE,
    EVENT_CLASS,
    FIELD_KIND,
    TASK_FIELDS,
    class_of,
    fold,
    position,
    read,
)
from umbel.cluster.task_summary import Summary
from umbel.wire.events import check

Event = dict[str, Any]
unhurried = settings(deadline=None)  # on a busy machine an example may take long

SANE: dict[str, st.SearchStrategy[Any]] = {
    "text": st.sampled_from(["", "a", "b"]),
    "whole": st.integers(0, 3),
    "number": st.sampled_from([0, 1, 0.5]),
    "moment": st.sampled_from(["2026-01-01T00:00:00+00:00", 5.0, 7]),
    "flag": st.booleans(),
    "signal": st.sampled_from([9, "TERM"]),
}
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
CUSTOM_TYPES = ("task-progress", "task-cancelled")
SPELLED_TYPES = ("task-success", "task-retry", "task-pending", "task-Started", "task-")


@st.composite
def any_event(draw: st.DrawFn, uuid: str = "t") -> Event:
    """Whatever the wire lets through: ties, missing clocks and fields, values of any type."""
    kind = draw(st.sampled_from([*EVENT_CLASS, *CUSTOM_TYPES, *SPELLED_TYPES]))
    event: Event = {
        "type": kind,
        "uuid": uuid,
        "hostname": draw(st.sampled_from(["w1", "w2", "w1.7"])),
        "timestamp": draw(st.sampled_from([1.0, 2, 2.0, 3.5])),
    }
    optional = {
        "clock": st.integers(0, 4) | st.none(),
        "pid": st.sampled_from([7, 8]),
        "local_received": st.floats(0, 10),
        "seq": st.integers(1, 9),
        "progress": anything,
        "state": anything,
    }
    fields = {field: SANE[FIELD_KIND[field]] | anything for field in CLASS_FIELDS[class_of(kind)]}
    event |= draw(st.fixed_dictionaries({}, optional=optional | fields))
    assert check(event) == ""
    return event


@st.composite
def shuffled(draw: st.DrawFn, items: list[Any]) -> list[Any]:
    """The items in some order, some of them more than once."""
    again = draw(st.lists(st.sampled_from(items), max_size=4)) if items else []
    return draw(st.permutations(items + again))


def known_as(task: dict[str, Any]) -> str:
    """A text that tells 1 from 1.0 and from True."""
    return repr(sorted(task.items()))


@unhurried
@given(st.lists(any_event(), min_size=1, max_size=8), st.data())
def test_any_order_and_number_of_the_same_events_folds_to_the_same_task(
    events: list[Event], data: st.DataObject
) -> None:
    assert known_as(fold(data.draw(shuffled(events)))) == known_as(fold(events))


@unhurried
@given(st.lists(any_event(), min_size=1, max_size=8), st.data())
def test_a_summary_is_the_fold_however_the_events_are_cut_and_merged(
    events: list[Event], data: st.DataObject
) -> None:
    parts = [Summary("t") for _ in range(3)]
    for event in data.draw(shuffled(events)):
        data.draw(st.sampled_from(parts)).add(read(event))
    for event in events:  # whatever went where, all of it is somewhere
        parts[0].add(read(event))
    whole = Summary("t")
    for part in data.draw(shuffled(parts)):
        whole.merge(part)
    assert known_as(whole.as_dict()) == known_as(fold(events))
    assert whole.first is not None
    assert position(whole.first) == min(map(order, events))
    assert whole.last is not None
    assert position(whole.last) == max(map(order, events))


@unhurried
@given(st.lists(any_event(), min_size=1, max_size=6))
def test_the_place_of_a_record_is_the_place_of_its_event(events: list[Event]) -> None:
    assert [position(read(event)) for event in events] == [order(event) for event in events]


@unhurried
@given(st.lists(st.sampled_from("abc").flatmap(any_event), min_size=1, max_size=12), st.data())
def test_a_state_sees_the_fold_of_each_task_however_the_events_arrive(
    events: list[Event], data: st.DataObject
) -> None:
    state = State()
    for event in data.draw(shuffled(events)):
        state.event(event)
    for uuid in {event["uuid"] for event in events}:
        folded = fold([event for event in events if event["uuid"] == uuid])
        assert known_as(state.tasks[uuid].as_dict()) == known_as(folded)
        parent = folded["parent_id"]
        listed = parent is not None and state.tasks[uuid] in state.children(parent)
        assert listed == (parent is not None and parent != uuid)


WORKER_FIELDS = ("freq", "active", "processed", "loadavg", "lost", "sw_ident", "sw_ver", "sw_sys")


@st.composite
def any_worker_event(draw: st.DrawFn) -> Event:
    """What a worker might say of itself, and what it should not."""
    kinds = ["online", "heartbeat", "offline", "elect", "x"]
    common = {
        "type": st.sampled_from([f"worker-{kind}" for kind in kinds]),
        "hostname": st.sampled_from(["w1", "w2"]),
        "timestamp": st.integers(-5, 5) | st.floats(-5, 5),
    }
    sane = {"clock": st.integers(0, 9), "pid": st.integers(1, 2), "inc": st.integers(1, 3)}
    others = dict.fromkeys([*WORKER_FIELDS, "id", "alive", "local_received"], anything)
    event: Event = draw(st.fixed_dictionaries(common, optional=sane | others))
    assert check(event) == ""
    return event


@unhurried
@given(st.lists(any_worker_event() | any_event(), max_size=12))
def test_whatever_the_fields_hold_a_state_takes_it_and_can_be_written_as_json(
    events: list[Event],
) -> None:
    state = State(clock=lambda: 5.0)
    for event in events:
        state.event(event)
    assert state.event_count == len(events)
    json.dumps(state.snapshot(), allow_nan=False)
    assert state.tasks_by_time() == state.tasks_by_time(reverse=False)[::-1]
    assert len(state.alive_workers()) <= len(state.workers) <= 3


# -- next to Celery ----------------------------------------------------------------------------


@st.composite
def sent_by_workers(draw: st.DrawFn) -> list[Event]:
    """Events as Celery sends them: clocks that differ, all fields of the class, right types."""
    clocks = draw(st.lists(st.integers(1, 50), min_size=1, max_size=9, unique=True))
    events = []
    for clock in sorted(clocks):
        kind = draw(st.sampled_from([*EVENT_CLASS, *CUSTOM_TYPES]))
        fields = {
            field: SANE[FIELD_KIND[field]] | st.none() for field in CLASS_FIELDS[class_of(kind)]
        }
        common = {
            "type": st.just(kind),
            "uuid": st.just("t"),
            "hostname": st.sampled_from(["w1", "w2"]),
            "pid": st.just(7),
            "clock": st.just(clock),
            "timestamp": st.sampled_from([1.0, 2.0, 3.0]),
            "local_received": st.just(2.0),
        }
        events.append(draw(st.fixed_dictionaries(common | fields)))
    return events


def celerys(events: list[Event]) -> dict[str, Any]:
    """The task that Celery's `State` makes of events in the order in which they are given."""
    state = CeleryState()
    for event in events:
        state.event(dict(event))
    task = state.tasks["t"]
    seen = {field: getattr(task, field, None) for field in TASK_FIELDS}
    return seen | {"worker": task.worker and task.worker.hostname, "extra": None}


@unhurried
@given(sent_by_workers(), st.data())
def test_a_task_is_what_celery_sees_when_it_gets_the_events_in_order(
    events: list[Event], data: st.DataObject
) -> None:
    expected = celerys(events)
    assert fold(data.draw(shuffled(events))) == expected
    state = State()
    for event in data.draw(shuffled(events)):
        state.event(event)
    assert state.tasks["t"].as_dict() == expected


def event(kind: str, clock: int, **fields: Any) -> Event:
    common = {"uuid": "t", "hostname": "w1", "pid": 7, "timestamp": 1.0, "local_received": 1.0}
    return {"type": kind, "clock": clock, **common, **fields}


DONE = event("task-succeeded", 9, result="3", runtime=0.5)
NO_CLOCK = {key: value for key, value in event("task-started", 0).items() if key != "clock"}

# Where we differ from Celery's `State`: why, the events as they arrive, what we say of the task.
DIFFERENCES: dict[str, tuple[str, list[Event], dict[str, Any]]] = {
    "late retry": (
        "what arrives last counts as what happened last",
        [DONE, event("task-retried", 4, exception="E", traceback="T")],
        {"state": "SUCCESS"},
    ),
    "late start": (
        "an old event overwrites the time and the worker of the end",
        [DONE, event("task-started", 4, hostname="w2")],
        {"worker": "w1", "clock": 9},
    ),
    "no clock": ("an event without a clock raises KeyError", [NO_CLOCK], {"state": "STARTED"}),
    "field named like a method": (
        "a field `event` takes the place of the method, and the next event raises TypeError",
        [event("task-started", 1, event=5), DONE],
        {"state": "SUCCESS"},
    ),
    "field named like an attribute": (
        "a field `state` becomes the state",
        [DONE, event("task-started", 10, state="LOST")],
        {"state": "SUCCESS", "extra": {"state": "LOST"}},
    ),
    "wrong type": (
        "any value is believed, and breaks who reads it",
        [event("task-succeeded", 1, result=["3"], runtime="abc")],
        {"result": None, "runtime": None, "state": "SUCCESS"},
    ),
    "type that spells a state": (
        "an event that the protocol does not know ends a task",
        [event("task-success", 1), event("task-failed", 2, exception="E", traceback=None)],
        {"state": "FAILURE"},
    ),
    "fewer fields than before": (
        "fields of older events of a class stay; ours is one row per class, the last one",
        [event("task-received", 1, name="old", args="()"), event("task-received", 2, args="(1,)")],
        {"name": None, "args": "(1,)"},
    ),
    "long text": (
        "a text of any length is kept",
        [event("task-succeeded", 1, result="x" * 20_000, runtime=1)],
        {"result": "x" * 10_000},
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_where_we_differ_from_celery_the_difference_is_named(name: str) -> None:
    _, events, expected = DIFFERENCES[name]
    folded = fold(events)
    assert {field: folded[field] for field in expected} == expected
    try:
        seen = celerys(events)
    except (KeyError, TypeError, AttributeError):
        return
    assert {field: seen[field] for field in expected} != expected


def test_all_states_of_the_tables_are_compared() -> None:
    assert set(CLASS_STATE) | set(FIELD_KIND) < set(TASK_FIELDS)
