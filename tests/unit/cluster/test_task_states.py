"""A task from its events: which class gives the state, which event gives a field."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from umbel.cluster.task_states import (
    CLASS_FIELDS,
    CLASSES,
    EVENT_STATE,
    EXTRA_BYTES_MAX,
    EXTRA_FIELDS_MAX,
    FIELD_CLASSES,
    FIELD_KIND,
    KIND_TYPES,
    PRECEDENCE,
    STATE_CLASSES,
    TASK_FIELDS,
    TEXT_CHARS_MAX,
    fold,
    read,
)
from umbel.cluster.task_summary import Summary

Event = dict[str, Any]


def event(kind: str, clock: int = 1, **fields: Any) -> Event:
    common = {"uuid": "t", "hostname": "w1", "pid": 7, "timestamp": 100.0 + clock}
    return {"type": f"task-{kind}", "clock": clock, **common, **fields}


def summed_up(events: list[Event]) -> dict[str, Any]:
    summary = Summary("t")
    for one in events:
        summary.add(read(one))
    return summary.as_dict()


def task_of(*events: Event) -> dict[str, Any]:
    """The task, which is the same for every order of arrival and for both ways to get it."""
    expected = fold(events)
    for order in itertools.permutations(events):
        assert summed_up([*order, order[0]]) == expected
    return expected


# -- the tables --------------------------------------------------------------------------------


def test_the_tables_know_the_same_states_classes_and_fields() -> None:
    assert set(EVENT_STATE.values()) | {"custom"} == set(PRECEDENCE)
    assert set(STATE_CLASSES) == set(CLASSES) - {"retried"}
    assert set(FIELD_KIND) == {field for fields in CLASS_FIELDS.values() for field in fields}
    assert set(FIELD_KIND.values()) == set(KIND_TYPES)
    assert all(classes for classes in FIELD_CLASSES.values())


def test_a_summary_has_an_attribute_for_every_field_of_a_task() -> None:
    assert Summary("t").as_dict() == dict.fromkeys(TASK_FIELDS) | {"uuid": "t", "state": "PENDING"}


# -- state -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        (["sent"], "PENDING"),
        (["sent", "received"], "RECEIVED"),
        (["sent", "received", "started"], "STARTED"),
        (["sent", "received", "started", "succeeded"], "SUCCESS"),
        (["received", "started", "failed"], "FAILURE"),
        (["received", "revoked"], "REVOKED"),
        (["received", "rejected"], "RECEIVED"),
        (["rejected"], "REJECTED"),
        (["started", "progress"], "PROGRESS"),
        (["progress", "started"], "PROGRESS"),
        (["progress", "half-done"], "HALF-DONE"),
        (["progress", "failed"], "FAILURE"),
        (["failed", "progress"], "FAILURE"),
        (["succeeded", "failed", "revoked", "started"], "SUCCESS"),
        (["started", "retried"], "RETRY"),
        (["succeeded", "retried"], "RETRY"),
        (["started", "retried", "received"], "RECEIVED"),
        (["started", "retried", "sent"], "PENDING"),
        (["failed", "retried", "received", "started"], "STARTED"),
        (["succeeded", "retried", "started", "failed"], "FAILURE"),
    ],
)
def test_the_state_is_the_strongest_after_the_last_retry(kinds: list[str], state: str) -> None:
    assert task_of(*(event(kind, clock) for clock, kind in enumerate(kinds, 1)))["state"] == state


def test_a_custom_type_that_spells_a_state_is_no_stronger_than_others() -> None:
    assert task_of(event("success", 1))["state"] == "SUCCESS"
    assert task_of(event("success", 1), event("failed", 2))["state"] == "FAILURE"
    assert task_of(event("retry", 3), event("started", 2))["state"] == "RETRY"
    assert task_of(event("retry", 3), event("succeeded", 2))["state"] == "SUCCESS"


# -- order -------------------------------------------------------------------------------------


def test_the_clock_decides_and_not_the_time_of_day() -> None:
    late = event("started", 2, timestamp=5.0)
    assert task_of(event("started", 1, timestamp=9.0), late)["started"] == 5.0


def test_equal_clocks_are_decided_by_time_then_sender_then_type_then_content() -> None:
    def started(**fields: Any) -> Event:
        return event("progress", 1, **({"timestamp": 5.0} | fields))

    assert task_of(started(), started(timestamp=6.0))["timestamp"] == 6.0
    assert task_of(started(), started(hostname="w2"))["worker"] == "w2"
    assert task_of(started(), started(type="task-qrogress"))["state"] == "QROGRESS"
    one, other = started(x=1), started(x=2)
    assert task_of(one, other)["extra"] == task_of(other, one)["extra"]


def test_an_event_without_a_clock_stands_before_all_that_have_one() -> None:
    bare = event("started", timestamp=999.0)
    del bare["clock"]
    task = task_of(bare, event("retried", 1, timestamp=1.0))
    assert (task["state"], task["clock"], task["started"]) == ("RETRY", 1, 999.0)


# -- fields ------------------------------------------------------------------------------------


def test_the_call_is_told_by_the_last_of_sent_and_received() -> None:
    first = event("received", 1, name="a", args="(1,)", retries=0)
    again = event("sent", 2, name="b", args="(2,)", retries=1, queue="q")
    task = task_of(first, again)
    assert (task["name"], task["args"], task["retries"], task["queue"]) == ("b", "(2,)", 1, "q")
    assert (task["worker"], task["client"]) == ("w1", "w1")


def test_a_missing_field_leaves_the_word_to_the_other_class_but_null_does_not() -> None:
    sent = event("sent", 1, name="a", eta="soon", args="(1,)")
    task = task_of(sent, event("received", 2, name=None, args=["wrong"]))
    assert (task["name"], task["eta"], task["args"]) == (None, "soon", "(1,)")


def test_the_last_event_of_a_class_speaks_for_its_class() -> None:
    task = task_of(event("succeeded", 1, result="1", runtime=2.0), event("succeeded", 2))
    assert (task["result"], task["runtime"], task["succeeded"]) == (None, None, 102.0)


def test_the_error_is_that_of_the_last_failure_or_retry() -> None:
    failed = event("failed", 1, exception="one", traceback="tb")
    task = task_of(failed, event("retried", 2, exception="two"))
    assert (task["exception"], task["traceback"]) == ("two", "tb")


def test_a_late_received_moves_the_time_of_a_task_only_while_nothing_stronger_came() -> None:
    late = event("received", 9)
    assert task_of(event("started", 1), late)["clock"] == 1
    assert task_of(event("sent", 1), late)["clock"] == 9
    assert task_of(event("retried", 1), late)["clock"] == 9
    assert task_of(event("retried", 11), late, event("started", 8))["clock"] == 11


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("received", "name", 5),
        ("received", "args", ["x"]),
        ("received", "retries", True),
        ("received", "retries", 2**70),
        ("received", "eta", {"a": 1}),
        ("succeeded", "runtime", "abc"),
        ("succeeded", "runtime", float("nan")),
        ("succeeded", "runtime", float("inf")),
        ("revoked", "terminated", "yes"),
        ("revoked", "signum", 1.5),
    ],
)
def test_a_value_that_makes_no_sense_counts_as_missing(kind: str, field: str, value: Any) -> None:
    task = task_of(event(kind, **{field: value}))
    assert (task[field], task["extra"]) == (None, None)


def test_unknown_fields_are_kept_as_extra_of_the_last_event_that_has_some() -> None:
    task = task_of(
        event("progress", 1, done=4, name="mine", id="x"),
        event("started", 2, note={"b": 1, "a": [None]}),
        event("succeeded", 3, result="1", runtime=1),
    )
    assert task["extra"] == {"note": {"a": [None], "b": 1}}
    assert task_of(event("progress", 1, done=4, name="n"))["extra"] == {"done": 4, "name": "n"}


def test_a_field_called_extra_is_an_unknown_field_like_any_other() -> None:
    assert task_of(event("started", extra="eHh4"))["extra"] == {"extra": "eHh4"}


# -- bounds ------------------------------------------------------------------------------------


def test_long_texts_are_cut() -> None:
    task = task_of(event("failed", exception="E" * 50_000, traceback="T"))
    assert (task["exception"], task["traceback"]) == ("E" * TEXT_CHARS_MAX, "T")


def test_many_unknown_fields_are_cut_to_the_first_and_big_ones_are_left_out() -> None:
    many = task_of(event("progress", **{f"f{number:03}": number for number in range(100)}))
    assert list(many["extra"]) == [f"f{number:03}" for number in range(EXTRA_FIELDS_MAX)]
    assert task_of(event("progress", big="x" * EXTRA_BYTES_MAX))["extra"] is None


def test_what_json_lacks_hurts_nothing() -> None:
    odd = {"a": "\ud800", "b": {1, 2}, "c": object(), "d": float("nan"), "e": 10**40}
    extra = task_of(event("progress", **odd))["extra"]
    assert sorted(extra) == ["a", "b", "c", "d", "e"]


# -- merging -----------------------------------------------------------------------------------


def test_summaries_of_parts_merge_in_any_order() -> None:
    kinds = ["sent", "received", "started", "retried", "sent", "received", "started", "succeeded"]
    events = [event(kind, clock) for clock, kind in enumerate(kinds, 1)]
    left, right = Summary("t"), Summary("t")
    for one in events[::2]:
        left.add(read(one))
    for one in events[1::2]:
        right.add(read(one))
    left.merge(right)
    right.merge(left)
    right.merge(left)
    assert left.as_dict() == right.as_dict() == fold(events)
    assert (left.first, left.last) == (read(events[0]), read(events[-1]))


def test_adding_says_whether_anything_is_new() -> None:
    summary = Summary("t")
    started = read(event("started", 5))
    assert summary.add(started)
    assert not summary.add(started)
    assert not summary.add(read(event("started", 4)))
    assert summary.add(read(event("started", 6)))


def test_half_a_surrogate_pair_has_its_place_too() -> None:
    one, other = (event("progress", 1, hostname="w\ud800", x=x) for x in (1, 2))
    assert task_of(one, other) == task_of(other, one)
