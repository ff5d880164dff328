"""Gaps in sequence numbers: what is missing, what came late, what came twice."""

from __future__ import annotations

from umbel.cluster.sequences import Sequences, key_of


def heard(*numbers: int, **bounds: int) -> Sequences:
    sequences = Sequences(**bounds)
    for number in numbers:
        sequences.note("w1", 7, number)
    return sequences


def test_numbers_in_a_row_leave_no_gap() -> None:
    sequences = heard(1, 2, 3, 4)
    assert sequences.gaps() == {}
    assert sequences.missing_count == 0


def test_what_was_sent_before_one_listened_is_not_missing() -> None:
    assert heard(500, 501).gaps() == {}


def test_a_jump_leaves_a_gap_that_late_numbers_fill() -> None:
    sequences = heard(1, 2, 6, 10)
    assert sequences.gaps() == {("w1", 7): ((3, 5), (7, 9))}
    assert sequences.missing_count == 6
    assert sequences.note("w1", 7, 4)
    assert sequences.gaps() == {("w1", 7): ((3, 3), (5, 5), (7, 9))}
    for number in (3, 5, 9, 7, 8):
        assert sequences.note("w1", 7, number)
    assert sequences.gaps() == {}


def test_a_number_before_the_first_belongs_to_what_is_expected() -> None:
    sequences = heard(10, 9, 6)
    assert sequences.gaps() == {("w1", 7): ((7, 8),)}


def test_a_number_that_comes_again_is_a_duplicate() -> None:
    sequences = heard(1, 2, 5)
    assert not sequences.note("w1", 7, 2)
    assert not sequences.note("w1", 7, 5)
    assert sequences.note("w1", 7, 3)
    assert not sequences.note("w1", 7, 3)
    assert sequences.duplicate_count == 3
    assert sequences.missing_count == 1


def test_incarnations_are_kept_apart() -> None:
    sequences = heard(1, 2)
    sequences.note("w1", 8, 1)
    sequences.note("w2", 7, 5)
    sequences.note("w2", 7, 7)
    assert sequences.gaps() == {("w2", 7): ((6, 6),)}
    known = sequences.sequence("w1", 8)
    assert known is not None
    assert (known.first, known.last) == (1, 1)
    assert sequences.sequence("w3", 1) is None


def test_too_many_gaps_are_written_off_from_the_oldest_on_and_still_count() -> None:
    sequences = heard(1, 3, 5, 7, 9, ranges_max=2)
    assert sequences.gaps() == {("w1", 7): ((6, 6), (8, 8))}
    assert sequences.missing_count == 4
    assert not sequences.note("w1", 7, 2)  # nobody knows any more
    assert sequences.missing_count == 4


def test_of_too_many_incarnations_the_longest_silent_is_forgotten_and_still_counts() -> None:
    sequences = heard(1, 4, 4, incarnations_max=2)
    sequences.note("w2", 1, 1)
    sequences.note("w1", 7, 5)
    sequences.note("w3", 1, 1)  # w2 has been silent the longest
    assert sequences.sequence("w2", 1) is None
    sequences.note("w4", 1, 1)
    assert len(sequences) == 2
    assert sequences.forgotten_count == 2
    assert (sequences.missing_count, sequences.duplicate_count) == (2, 1)


def test_a_forged_number_costs_no_memory() -> None:
    sequences = heard(1, 2**53 - 1, 2**52)
    assert sequences.missing_count == 2**53 - 4
    assert len(sequences.gaps()["w1", 7]) == 2


def test_who_sends_events_for_a_worker_has_a_series_of_its_own() -> None:
    own = {"hostname": "w1", "inc": 7, "seq": 1}
    assert key_of(own) == ("w1", 7)
    assert key_of({**own, "umbel_series": 9}) == ("w1", 9)
    assert key_of({"hostname": "w1", "seq": 1}) is None
    assert key_of({"hostname": "w1", "inc": 7}) is None
