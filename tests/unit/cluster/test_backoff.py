"""How pauses grow, and where they end."""

from __future__ import annotations

import pytest

from umbel.cluster.backoff import Backoff

SOME = Backoff(0.1, 5.0)


def test_pauses_double_up_to_the_longest() -> None:
    pauses_s = [SOME.pause_s(failures) for failures in range(1, 9)]
    assert pauses_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_dice_make_a_pause_up_to_half_as_long() -> None:
    for failures in (1, 3, 20):
        whole_s = SOME.pause_s(failures)
        assert SOME.pause_s(failures, 0.0) == pytest.approx(whole_s / 2)
        assert SOME.pause_s(failures, 0.5) == pytest.approx(whole_s * 0.75)


def test_no_number_of_failures_is_too_many() -> None:
    assert SOME.pause_s(10**9) == 5.0


def test_without_a_failure_there_is_no_pause_to_ask_for() -> None:
    with pytest.raises(AssertionError):
        SOME.pause_s(0)
