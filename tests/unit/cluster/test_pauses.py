"""Which queues are paused: the last word holds, and rubbish is only counted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from umbel.cluster import pauses
from umbel.cluster.pauses import Pauses

NOW = 1_800_000_000.0


def test_of_two_words_about_a_queue_the_later_one_holds() -> None:
    known = Pauses()
    assert known.say("q", NOW, True, NOW)
    assert known.is_paused("q")
    assert known.say("q", NOW + 1, False, NOW)
    assert not known.say("q", NOW + 0.5, True, NOW), "it was told too late"
    assert not known.is_paused("q")
    assert not known.is_paused("other")


def test_of_two_words_of_one_moment_the_pause_holds() -> None:
    for words in ([True, False], [False, True]):
        known = Pauses()
        for paused in words:
            known.say("q", NOW, paused, NOW)
        assert known.is_paused("q")


def test_the_same_word_twice_is_no_contradiction() -> None:
    known = Pauses()
    assert known.say("q", NOW, True, NOW)
    assert known.say("q", NOW, True, NOW)
    assert known.merge({"q": [NOW, True]}, NOW) == {}


def test_who_was_away_learns_what_changed_and_does_not_bring_a_pause_back() -> None:
    there, away = Pauses(), Pauses()
    there.say("old", NOW, True, NOW)
    away.merge(there.told(), NOW)
    there.say("old", NOW + 1, False, NOW)
    there.say("new", NOW + 2, True, NOW)
    assert there.merge(away.told(), NOW) == {}
    assert away.merge(there.told(), NOW) == {"old": False, "new": True}
    assert away.summary() == there.summary() != Pauses().summary() == ""


def test_the_oldest_words_go_when_there_are_too_many() -> None:
    known = Pauses(count_max=2)
    for number in range(3):
        known.say(f"q{number}", NOW + number, True, NOW)
    assert list(known.told()) == ["q1", "q2"]
    assert known.counts == {pauses.TOO_MANY: 1}
    assert known.merge({"q0": [NOW, True]}, NOW) == {}, "older than all others"


def test_a_clock_that_is_far_ahead_does_not_hold_for_ever() -> None:
    known = Pauses()
    assert known.say("q", NOW + 10 * pauses.SKEW_MAX_S, True, NOW)
    assert known.counts == {pauses.STAMP_AHEAD: 1}
    assert known.say("q", NOW + 1, False, NOW + 1)
    assert not known.is_paused("q")


@pytest.mark.parametrize(
    "word",
    [
        None, 7, "text", [], [NOW], [NOW, True, 1], {"a": 1}, [NOW, 1], [NOW, None], [NOW, "true"],
        [None, True], ["1", True], [True, True], [math.nan, True], [math.inf, True],
        [-1, True], [0, True], [2**70, True], [[NOW], True],
    ],
    ids=repr,
)  # fmt: skip
def test_words_of_other_shapes_change_nothing_but_a_counter(word: Any) -> None:
    known = Pauses()
    known.say("q", NOW, True, NOW)
    assert known.merge({"q": word, "r": word}, NOW) == {}
    assert known.told() == {"q": [NOW, True]}
    assert known.counts == {pauses.BAD_WORD: 2}


@pytest.mark.parametrize("name", ["", "x" * 256, "\ud800", 7, None, ("a",)], ids=repr)
def test_names_that_no_queue_has_are_counted(name: Any) -> None:
    known = Pauses()
    assert known.merge({name: [NOW, True]}, NOW) == {}
    assert known.counts == {pauses.BAD_QUEUE: 1}
    with pytest.raises(ValueError, match="a name and a time"):
        known.say(name, NOW, True, NOW)


@pytest.mark.parametrize("told", [None, 7, "text", [["q", [NOW, True]]]], ids=repr)
def test_what_is_no_mapping_is_counted(told: Any) -> None:
    known = Pauses()
    assert known.merge(told, NOW) == {}
    assert known.counts == {pauses.NOT_PAUSES: 1}


def test_a_flood_of_words_is_read_up_to_a_bound() -> None:
    known = Pauses()
    known.merge({f"q{number}": [NOW, True] for number in range(50_000)}, NOW)
    assert len(known) == pauses.COUNT_MAX
    assert known.counts[pauses.TOO_MANY] == 50_000 - pauses.COUNT_MAX
