"""The logical clock: sends, receipts, bounds, and the order of events."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from umbel.cluster.clock import (
    CLOCK_MAX,
    FIRST_MAX,
    JUMP_MAX,
    Clock,
    is_clock,
    order,
    origin,
)

NOT_CLOCKS = [
    *(None, True, False, -1, 1.0, float("nan"), float("inf"), "5", [], {}, Ellipsis),
    *(CLOCK_MAX + 1, 2**63, 10**30),
]


def test_sending_advances_by_one_and_receiving_goes_beyond_both() -> None:
    clock = Clock()
    assert [clock.forward(), clock.forward()] == [1, 2]
    assert clock.adjust(10) == 11
    assert clock.adjust(3) == 12
    assert clock.forward() == 13


@pytest.mark.parametrize("value", NOT_CLOCKS, ids=repr)
def test_what_is_no_clock_is_refused_counted_and_moves_nothing(value: Any) -> None:
    clock = Clock(5)
    assert not is_clock(value)
    assert not clock.accepts(value)
    assert clock.adjust(value) == 5
    assert (clock.value, clock.refused) == (5, 1)


def test_one_message_moves_a_clock_by_a_bounded_jump() -> None:
    clock = Clock(5)
    assert clock.adjust(5 + JUMP_MAX + 1) == 5
    assert clock.refused == 1
    assert clock.adjust(5 + JUMP_MAX) == 6 + JUMP_MAX


def test_a_clock_that_has_heard_nobody_takes_any_value_of_the_lower_half() -> None:
    clock = Clock()
    clock.forward()
    assert not clock.witnessed
    assert not clock.accepts(FIRST_MAX + 1)
    assert clock.adjust(FIRST_MAX) == FIRST_MAX + 1
    assert clock.witnessed


def test_a_refused_value_is_not_having_heard_somebody() -> None:
    clock = Clock()
    clock.adjust(CLOCK_MAX)
    assert (clock.witnessed, clock.value) == (False, 0)


def test_a_clock_that_was_saved_has_heard_somebody() -> None:
    assert Clock(7).witnessed
    assert not Clock(7).accepts(FIRST_MAX)


def test_at_its_end_a_clock_stands_still() -> None:
    clock = Clock(CLOCK_MAX)
    assert clock.forward() == CLOCK_MAX
    assert clock.adjust(CLOCK_MAX) == CLOCK_MAX
    assert clock.refused == 0


def test_a_clock_can_not_be_made_of_what_is_none() -> None:
    with pytest.raises(AssertionError):
        Clock(-1)


def test_threads_never_get_the_same_value() -> None:
    clock = Clock(lock=threading.Lock())
    taken: list[list[int]] = [[] for _ in range(4)]

    def take(into: list[int]) -> None:
        into.extend(clock.forward() for _ in range(2_000))

    threads = [threading.Thread(target=take, args=(into,)) for into in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(itertools.chain(*taken)) == list(range(1, 8_001))


def test_events_are_ordered_by_clock_then_time_then_origin() -> None:
    def event(clock: int | None, timestamp: float, hostname: str) -> dict[str, Any]:
        fields = {"timestamp": timestamp, "hostname": hostname, "pid": 1}
        return fields if clock is None else {**fields, "clock": clock}

    in_order = [
        event(None, 1.0, "b"),
        event(None, 2.0, "a"),
        event(1, 9.0, "a"),
        event(2, 0.5, "z"),
        event(2, 1.0, "a"),
        event(2, 1.0, "b"),
        event(10, 0.0, "a"),
    ]
    shuffled = [in_order[number] for number in (4, 0, 6, 2, 5, 1, 3)]
    assert sorted(shuffled, key=order) == in_order


def test_an_origin_is_the_node_and_its_process_or_the_node_alone() -> None:
    assert origin({"hostname": "w1@a", "pid": 7}) == "w1@a.7"
    assert origin({"hostname": "w1@a", "pid": 0}) == "w1@a.0"
    assert origin({"hostname": "w1@a"}) == "w1@a"
    assert origin({"hostname": "w1@a", "pid": None}) == "w1@a"
