"""Which messages are recognised when they come again, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from umbel.wire.tasks import TaskHeader
from umbel.worker.delivery.effects import ACK, REJECT, Delivery
from umbel.worker.delivery.redelivery import (
    REMEMBERED_S,
    SETTLED_MAX,
    Key,
    Redeliveries,
    Settled,
)
from umbel.worker.delivery.states import MessageState

HEADER = TaskHeader(task="t", id="i", retries=1, umbel_clock=7, umbel_sent=1_000)


class Site:
    """What a worker remembers, at a time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.memory = Redeliveries(lambda: self.now)

    def recognises(self, header: TaskHeader) -> bool:
        return self.memory.recognise(header) is not None


@pytest.mark.parametrize("how", [ACK, REJECT])
def test_a_message_that_was_settled_is_settled_in_the_same_way_once(how: str) -> None:
    site = Site()
    site.memory.remember(HEADER, how)
    settled = site.memory.recognise(HEADER)
    assert isinstance(settled, Settled)
    assert settled.how == how
    assert not site.recognises(HEADER)


@pytest.mark.parametrize(
    "other",
    [
        {"id": "other"},
        {"task": "other"},
        {"retries": 2},
        {"replaced_task_nesting": 1},
        {"eta": "2026-11-17T00:00:00+00:00"},
        {"umbel_sent": 2_000},
        {"umbel_clock": 8},
    ],
    ids=str,
)
def test_another_message_of_the_same_task_is_not_taken_for_it(other: dict[str, Any]) -> None:
    site = Site()
    site.memory.remember(HEADER, ACK)
    assert not site.recognises(structs.replace(HEADER, **other))
    assert site.recognises(HEADER)


def test_what_was_put_back_runs() -> None:
    site = Site()
    site.memory.remember(HEADER, ACK)
    site.memory.remember(HEADER, "requeue")
    assert not site.recognises(HEADER)


def test_what_was_settled_long_ago_is_not_recognised() -> None:
    site = Site()
    site.memory.remember(HEADER, ACK)
    site.now = REMEMBERED_S + 1
    assert not site.recognises(HEADER)


def test_the_oldest_are_forgotten_beyond_the_bound() -> None:
    site = Site()
    for number in range(SETTLED_MAX + 1):
        site.memory.remember(structs.replace(HEADER, id=str(number)), ACK)
    assert not site.recognises(structs.replace(HEADER, id="0"))
    assert site.recognises(structs.replace(HEADER, id=str(SETTLED_MAX)))


@pytest.mark.parametrize("strange", [[1], {"a": 1}, "text", None, 1.5])
def test_whatever_a_sender_says_of_its_clock_a_message_has_a_key(strange: Any) -> None:
    header = structs.replace(HEADER, umbel_clock=strange, umbel_sent=strange)
    assert hash(Key.of(header)) == hash(Key.of(structs.replace(header)))


def test_a_running_task_is_recognised_until_it_has_ended() -> None:
    site = Site()
    policy: Any = None
    running = Delivery(policy, "message", HEADER)
    running.message_state = MessageState.VOID
    site.memory.expect(running)
    assert site.memory.recognise(HEADER) is running
    site.memory.expect(running)
    site.memory.ended(running)
    assert not site.recognises(HEADER)
