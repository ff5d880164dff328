"""Which messages are recognised when they come again, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from umbel.wire.tasks import TaskHeader
from umbel.worker.salvage import ACK, REJECT, REMEMBERED_S, SETTLED_MAX, Key, Salvage

HEADER = TaskHeader(task="t", id="i", retries=1, umbel_clock=7, umbel_sent=1_000)


class Site:
    """A worker that settles messages."""

    def __init__(self) -> None:
        self.now = 0.0
        self.settled: list[tuple[Any, str]] = []
        self.salvage = Salvage(self, lambda: self.now)  # type: ignore[arg-type]

    def settle(self, message: Any, how: str) -> None:
        self.settled.append((message, how))


@pytest.mark.parametrize("how", [ACK, REJECT])
def test_a_message_that_was_settled_is_settled_in_the_same_way_once(how: str) -> None:
    site = Site()
    site.salvage.remember(HEADER, how)
    assert site.salvage.adopt("again", HEADER)
    assert site.settled == [("again", how)]
    assert not site.salvage.adopt("once more", HEADER)


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
    site.salvage.remember(HEADER, ACK)
    assert not site.salvage.adopt("other", structs.replace(HEADER, **other))
    assert site.salvage.adopt("again", HEADER)


def test_what_was_put_back_runs() -> None:
    site = Site()
    site.salvage.remember(HEADER, ACK)
    site.salvage.remember(HEADER, "requeue")
    assert not site.salvage.adopt("again", HEADER)


def test_what_was_settled_long_ago_is_not_recognised() -> None:
    site = Site()
    site.salvage.remember(HEADER, ACK)
    site.now = REMEMBERED_S + 1
    assert not site.salvage.adopt("again", HEADER)


def test_the_oldest_are_forgotten_beyond_the_bound() -> None:
    site = Site()
    for number in range(SETTLED_MAX + 1):
        site.salvage.remember(structs.replace(HEADER, id=str(number)), ACK)
    assert not site.salvage.adopt("first", structs.replace(HEADER, id="0"))
    assert site.salvage.adopt("last", structs.replace(HEADER, id=str(SETTLED_MAX)))


@pytest.mark.parametrize("strange", [[1], {"a": 1}, "text", None, 1.5])
def test_whatever_a_sender_says_of_its_clock_a_message_has_a_key(strange: Any) -> None:
    header = structs.replace(HEADER, umbel_clock=strange, umbel_sent=strange)
    assert hash(Key.of(header)) == hash(Key.of(structs.replace(header)))


def test_a_running_task_takes_its_message_over_and_holds_a_place_in_the_window() -> None:
    site = Site()
    running: Any = SimpleNamespace(header=HEADER, settled=False, void=True, name="t", id="i")
    site.prefetch = SimpleNamespace(adopted=0)  # type: ignore[attr-defined]
    site.salvage._expect(running)
    assert site.salvage.adopt("again", HEADER)
    assert (running.message, running.void) == ("again", False)
    assert site.settled == [], "the task settles it when it ends"
    assert site.prefetch.adopted == 1  # type: ignore[attr-defined]
    site.salvage.ended(running)
    assert site.prefetch.adopted == 0  # type: ignore[attr-defined]
