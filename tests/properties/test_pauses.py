"""What holds for every exchange of paused queues: all come to the same, in whatever order."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from umbel.cluster.pauses import Pauses

NOW = 1_800_000_000.0
FULL = 4  # small, so that the bound is reached

queues = st.sampled_from([f"queue-{number}" for number in range(8)])
stamps = st.integers(-20, 20).map(lambda n: NOW + n)
said = st.tuples(queues, stamps, st.booleans())
words = st.lists(said, max_size=20)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(stamps, st.booleans()).map(list)
        | st.dictionaries(queues | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


def node(*spoken: tuple[str, float, bool], full: int = 1_000) -> Pauses:
    made = Pauses(full)
    for queue, stamp, paused in spoken:
        made.say(queue, stamp, paused, NOW)
    return made


def over_the_wire(told: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(told))


@given(words, st.randoms(), st.sampled_from([FULL, 1_000]))
def test_the_order_in_which_words_are_heard_does_not_matter(
    spoken: list[Any], random: Any, full: int
) -> None:
    shuffled = spoken * 2
    random.shuffle(shuffled)
    one, other = node(*spoken, full=full), node(*shuffled, full=full)
    assert one.told() == {**other.told()}
    assert one.summary() == other.summary()


@given(words, words, words, st.sampled_from([FULL, 1_000]))
def test_whoever_exchanges_comes_to_what_hearing_everything_gives(
    first: list[Any], second: list[Any], third: list[Any], full: int
) -> None:
    nodes = [node(*spoken, full=full) for spoken in (first, second, third)]
    for _ in range(2):
        for one in nodes:
            for other in nodes:
                one.merge(over_the_wire(other.told()), NOW)
    expected = node(*first, *second, *third, full=full).told()
    assert [one.told() for one in nodes] == [expected] * 3


@given(words)
def test_the_word_that_holds_is_the_greatest(spoken: list[Any]) -> None:
    known = node(*spoken)
    for queue in {queue for queue, *_ in spoken}:
        latest = max((stamp, paused) for name, stamp, paused in spoken if name == queue)
        assert known.get(queue) == latest
        assert known.is_paused(queue) == latest[1]


@given(words, anything)
def test_whatever_is_told_raises_nothing_and_stays_bounded(spoken: list[Any], told: Any) -> None:
    known = node(*spoken, full=FULL)
    before = known.told()
    changed = known.merge(told, NOW)
    assert len(known) <= FULL
    assert all(known.is_paused(queue) == paused for queue, paused in changed.items())
    for queue, word in known.told().items():
        assert word == before.get(queue) or queue in changed
