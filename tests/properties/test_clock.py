"""For all messages: what was caused comes later, and no value drives a clock out of its bounds."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from umbel.cluster.clock import CLOCK_MAX, JUMP_MAX, Clock, is_clock, order

clocks = st.integers(0, CLOCK_MAX)
anything = (
    clocks | st.integers() | st.floats() | st.none() | st.booleans() | st.text() | st.lists(clocks)
)
events = st.fixed_dictionaries(
    {"hostname": st.text(min_size=1, max_size=5), "timestamp": st.floats(-1e9, 1e9)},
    optional={"clock": clocks | st.integers(0, 3), "pid": st.none() | st.integers(0, 9)},
)


@given(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=40))
def test_whatever_was_caused_by_a_message_has_a_greater_clock(
    first: int, deliveries: list[tuple[int, int]]
) -> None:
    nodes = [Clock() for _ in range(5)]
    nodes[first].forward()
    for sender, receiver in deliveries:
        sent = nodes[sender].forward()
        assert nodes[receiver].adjust(sent) > sent
        assert nodes[receiver].forward() > sent


@given(clocks, st.lists(anything, max_size=30))
def test_a_witnessed_clock_never_goes_back_nor_jumps_nor_leaves_its_range(
    start: int, heard: list[Any]
) -> None:
    clock = Clock(start)
    clock.witnessed = True
    for value in heard:
        before, refused = clock.value, clock.refused
        after = clock.adjust(value)
        assert is_clock(after)
        assert before <= after <= before + JUMP_MAX + 1
        if clock.refused > refused:
            assert after == before
        else:
            assert after == min(max(before, value) + 1, CLOCK_MAX)


@given(clocks, anything)
def test_a_value_was_taken_over_exactly_when_the_clock_is_not_behind_it(
    start: int, value: Any
) -> None:
    clock = Clock(start)
    accepted = clock.accepts(value)
    after = clock.adjust(value)
    if is_clock(value):
        assert accepted == (after >= value)
    else:
        assert not accepted


@given(events, events, events)
def test_the_order_of_events_is_total_and_has_no_cycles(
    a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]
) -> None:
    x, y, z = order(a), order(b), order(c)
    assert (x < y) + (x == y) + (x > y) == 1
    assert not (x < y < z) or x < z
