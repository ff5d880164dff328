"""The list of what Umbel's events say beyond Celery's holds for senders, readers and the page."""

from __future__ import annotations

import re

import pytest
from celery.events.state import Task as CeleryTask
from celery.events.state import Worker as CeleryWorker

from tests.workers import ROOT
from umbel.cluster.event_rows import ADDED, COLUMNS, row
from umbel.cluster.task_states import CLASS_FIELDS, read, tie
from umbel.wire.event_fields import TASK_DETAILS, WORKER_DETAILS, Field, details_of
from umbel.wire.event_forms import TaskReceived, TaskStarted, TaskSucceeded, as_event

STAMPS = ("a@test", 7, -1.0, 12, 1.5e9, 3, 10**15)
CALL = ("t", "()", "{}", "root", None, 0, None, None)
DETAILS = {**TASK_DETAILS, **WORKER_DETAILS}
EVENT = {"type": "task-received", "uuid": "t", "hostname": "w", "timestamp": 1.0, "clock": 3}
VALUES = {"text": "x", "whole": 7, "number": 0.5, "flag": True, "json": {"celery": 3}}


def test_the_page_has_every_field_with_its_kind_and_events() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    found = {
        name: Field(kind, tuple(re.findall(r"`([\w-]+)`", events)), text)
        for name, kind, events, text in re.findall(
            r"^\| `(\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", page, re.MULTILINE
        )
    }
    assert found == DETAILS


def test_no_field_has_the_name_of_something_that_celerys_monitors_have() -> None:
    taken = {name for kind in (CeleryTask, CeleryWorker) for name in dir(kind)}
    assert not taken & DETAILS.keys() - {"queue"}
    assert "id" not in DETAILS


@pytest.mark.parametrize("kind", [TaskReceived, TaskStarted, TaskSucceeded])
def test_a_form_has_the_fields_that_the_list_says_and_leaves_out_what_is_unset(
    kind: type[TaskReceived | TaskStarted | TaskSucceeded],
) -> None:
    tag = kind.__struct_config__.tag
    assert set(kind.__struct_fields__) & TASK_DETAILS.keys() == details_of(str(tag)).keys()
    bare = TaskReceived(*STAMPS, "id", *CALL)
    assert not as_event(bare).keys() & TASK_DETAILS.keys()
    full = TaskReceived(*STAMPS, "id", *CALL, "celery", "g", True, 2, 99)
    told = {"queue": "celery", "group_id": "g", "redelivered": True, "deliveries": 2}
    assert as_event(full) == {**as_event(bare), **told, "payload_bytes": 99}


@pytest.mark.parametrize("name", sorted({n for n, f in DETAILS.items() for _ in f.events}))
def test_every_field_has_a_column_that_is_filled_from_each_of_its_events(name: str) -> None:
    field = DETAILS[name]
    value = VALUES[field.kind]
    for kind in field.events:
        made = row({**EVENT, "type": kind, name: value}, 2.0, "recorder")
        assert made[name] == ('{"celery":3}' if field.kind == "json" else value)
        assert "extra" not in made
    assert COLUMNS[name] == ("text" if field.kind == "json" else field.kind)
    assert name in ADDED or name == "queue"


@pytest.mark.parametrize("name", sorted(DETAILS))
@pytest.mark.parametrize("wrong", [object, [], {"a": []}, 2**70, "x" * 20_000, None, float("inf")])
def test_a_value_of_the_wrong_kind_costs_nothing_but_itself(name: str, wrong: object) -> None:
    for kind in DETAILS[name].events:
        made = row({**EVENT, "type": kind, name: wrong}, 2.0, "recorder")
        value = made.get(name)
        assert value is None or isinstance(value, (str, float, int))


def test_details_belong_to_the_event_and_are_not_folded_into_the_task() -> None:
    plain, told = read(EVENT), read({**EVENT, "queue": "celery", "payload_bytes": 9})
    assert tie(plain) == tie(told)
    assert not told.extra
    folded = {name for fields in CLASS_FIELDS.values() for name in fields}
    assert not folded & TASK_DETAILS.keys() - {"queue"}
