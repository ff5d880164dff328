"""Forms: on the wire nobody can tell them from the events that are made as mappings."""

from __future__ import annotations

from typing import Any

import pytest

from umbel.app.events.stamper import Stamper
from umbel.cluster.clock import Clock
from umbel.wire.event_forms import (
    TaskForm,
    TaskReceived,
    TaskStarted,
    TaskSucceeded,
    as_event,
    kind_of,
)
from umbel.wire.events import encode, read

ACCEPT = frozenset({"application/json"})
STAMPS = ("a@test", 7, -1.0, 12, 1.5e9, 3, 10**15)
RECEIVED = ("id", "t", "(1,)", "{}", "root", None, 0, None, "2026-01-01T00:00:00+00:00")
FORMS: list[TaskForm] = [
    TaskReceived(*STAMPS, *RECEIVED),
    TaskStarted(*STAMPS, "id"),
    TaskSucceeded(*STAMPS, "id", "None", 0.25),
]


@pytest.mark.parametrize("form", FORMS, ids=kind_of)
def test_a_form_is_written_as_the_stamper_writes_the_same_event(form: TaskForm) -> None:
    event = as_event(form)
    stamper = Stamper("a@test", Clock(11))
    stamper.pid, stamper.utcoffset, stamper.inc, stamper.seq = 7, -1.0, 10**15, 2
    own = dict(list(event.items())[8:])
    made = stamper.make(kind_of(form), {**own, "timestamp": 1.5e9})
    assert list(made.items()) == list(event.items())
    assert encode(form) == encode(event) == encode(made)
    assert encode([form, made]) == encode([made, form])
    assert read(encode(form), "application/json", "utf-8", accept=ACCEPT).events == [made]


@pytest.mark.parametrize(("told", "shown"), [("\udc80", "\\udc80"), (object(), None)])
def test_what_json_can_not_hold_is_replaced_in_a_form_too(told: Any, shown: str | None) -> None:
    form = TaskSucceeded(*STAMPS, "id", told, 0.25)
    (event, other) = read(
        encode([form, FORMS[1]]), "application/json", "utf-8", accept=ACCEPT
    ).events
    assert isinstance(event["result"], str)
    assert shown is None or event["result"] == shown
    assert other == as_event(FORMS[1])
