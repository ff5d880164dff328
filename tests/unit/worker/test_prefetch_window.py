"""The window: computed from what exists, told when it is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.worker.prefetch import WINDOW_MAX, Prefetch

counts = st.integers(0, 200)


@given(st.integers(1, 64), st.integers(1, 16), counts, counts, st.integers(0, 64))
def test_the_window_is_what_the_formula_says(
    concurrency: int, multiplier: int, held: int, parked: int, debtors: int
) -> None:
    prefetch = Prefetch(concurrency, multiplier)
    prefetch.held, prefetch.parked, prefetch.debtors = held, parked, debtors
    base = concurrency * multiplier
    assert prefetch.window == max(multiplier, base - debtors * multiplier) + held + parked
    prefetch.held = prefetch.parked = prefetch.debtors = 0
    assert prefetch.window == prefetch.base == base


def test_tasks_from_before_a_break_reduce_the_window_until_they_end() -> None:
    prefetch = Prefetch(4, 5)
    windows = []
    for debtors in (0, 1, 3, 4, 9, 4, 3, 1, 0):
        prefetch.debtors = debtors
        windows.append(prefetch.window)
    assert windows == [20, 15, 5, 5, 5, 5, 5, 15, 20]


def test_held_tasks_widen_the_window_up_to_their_limit_and_parked_ones_beyond_it() -> None:
    prefetch = Prefetch(2, 4, held_max=3)
    prefetch.held = 2
    assert prefetch.window == 10
    prefetch.held = 50
    assert prefetch.window == 11
    prefetch.parked = 7
    assert prefetch.window == 18


def test_a_limit_of_none_held_tasks_is_a_limit() -> None:
    prefetch = Prefetch(2, 4, held_max=0)
    prefetch.held = 50
    assert prefetch.window == 8


def test_the_window_follows_the_concurrency() -> None:
    prefetch = Prefetch(2, 4)
    prefetch.held = 1
    prefetch.concurrency = 5
    assert (prefetch.base, prefetch.window) == (20, 21)


def test_no_multiplier_means_no_limit_whatever_is_held() -> None:
    prefetch = Prefetch(2, 0)
    prefetch.held, prefetch.debtors = 5, 2
    assert prefetch.window == 0


def test_a_window_that_the_protocol_can_not_say_is_cut() -> None:
    prefetch = Prefetch(1, 1)
    prefetch.held = 10**6
    assert prefetch.window == WINDOW_MAX


def test_the_broker_is_told_once_for_many_changes_and_not_at_all_for_none() -> None:
    prefetch, sent = Prefetch(2, 4), []
    prefetch.apply(sent.append)
    for _ in range(100):
        prefetch.held += 1
    for _ in range(40):
        prefetch.held -= 1
    prefetch.apply(sent.append)
    prefetch.apply(sent.append)
    prefetch.held += 1
    prefetch.held -= 1
    assert not prefetch.is_due
    prefetch.apply(sent.append)
    assert sent == [8, 68]


def test_a_new_channel_is_told_even_what_the_old_one_knew() -> None:
    prefetch, sent = Prefetch(2, 4), []
    prefetch.apply(sent.append)
    prefetch.forget_sent()
    assert prefetch.is_due
    prefetch.apply(sent.append)
    assert sent == [8, 8]


def test_a_change_that_could_not_be_told_stays_due() -> None:
    prefetch = Prefetch(2, 4)

    def broken(window: int) -> None:
        raise ConnectionError(window)

    with pytest.raises(ConnectionError):
        prefetch.apply(broken)
    assert prefetch.is_due
