"""For all orders of arrival: what is missing is what a plain set says."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from umbel.cluster.sequences import Sequences

numbers = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def missing(sequences: Sequences) -> set[int]:
    gaps = sequences.gaps().get(("w", 1), ())
    return {number for first, last in gaps for number in range(first, last + 1)}


@given(numbers)
def test_gaps_and_duplicates_are_those_of_a_set(heard: list[int]) -> None:
    sequences, seen = Sequences(), set[int]()
    for number in heard:
        assert sequences.note("w", 1, number) == (number not in seen)
        seen.add(number)
        assert missing(sequences) == set(range(min(seen), max(seen) + 1)) - seen
    assert sequences.missing_count == len(missing(sequences))
    assert sequences.duplicate_count == len(heard) - len(seen)


@given(numbers, st.randoms())
def test_the_order_of_arrival_does_not_matter(heard: list[int], dice: object) -> None:
    first, second = Sequences(), Sequences()
    for number in heard:
        first.note("w", 1, number)
    dice.shuffle(heard)  # type: ignore[attr-defined]
    for number in heard:
        second.note("w", 1, number)
    assert first.gaps() == second.gaps()
    assert first.duplicate_count == second.duplicate_count


@given(numbers, st.integers(1, 4))
def test_the_ranges_are_bounded_in_order_and_apart(heard: list[int], ranges_max: int) -> None:
    sequences = Sequences(ranges_max=ranges_max)
    for number in heard:
        sequences.note("w", 1, number)
        gaps = sequences.gaps().get(("w", 1), ())
        assert len(gaps) <= ranges_max
        flat = [end for gap in gaps for end in gap]
        assert flat == sorted(flat)
        assert all(b[0] - a[1] > 1 for a, b in pairwise(gaps))
    unbounded = Sequences(ranges_max=1_000)
    for number in heard:
        unbounded.note("w", 1, number)
    assert missing(sequences) <= missing(unbounded)
    assert sequences.missing_count >= unbounded.missing_count
