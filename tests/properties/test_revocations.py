"""What holds for every exchange of revocations."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from umbel.cluster.revocations import Revocations

NOW = 1_800_000_000.0
EXPIRES_S = 100.0
FULL = 8  # small, so that bounds are reached

ids = st.sampled_from([f"task-{n}" for n in range(24)])
stamps = st.integers(-150, 500).map(lambda n: NOW + n)
ends = st.integers(-50, 2000).map(lambda n: NOW + n)
keys = st.tuples(st.sampled_from(["k", "l"]), st.integers(0, 9)).map(
    lambda pair: json.dumps(pair, separators=(",", ":"))
)
times = st.tuples(stamps, ends).map(list)
told = st.fixed_dictionaries(
    {
        "tasks": st.dictionaries(ids, times, max_size=20),
        "headers": st.dictionaries(keys, times, max_size=20),
    }
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers() | ids, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["tasks", "headers", "0", "ff"]), inner)
    ),
    max_leaves=12,
)


def node(*merged: Any, count_max: int = 1000) -> Revocations:
    made = Revocations(
        lambda: NOW, expires_s=EXPIRES_S, count_max=count_max, header_count_max=count_max
    )
    for one in merged:
        made.merge(one, NOW)
    return made


def everything(revocations: Revocations) -> Any:
    """What a node knows, in the form in which it tells it."""
    return {
        kind: {one.key: [one.stamp, one.until] for one in revocations.all() if one.kind == name}
        for kind, name in (("tasks", "task"), ("headers", "header"))
    }


def held(revocations: Revocations) -> list[tuple[str, str, float]]:
    """Who is revoked, and until when."""
    return sorted((one.kind, one.key, one.until) for one in revocations.all())


@given(told, told)
def test_the_order_of_merging_makes_no_difference(a: Any, b: Any) -> None:
    assert node(a, b).all() == node(b, a).all()


@given(told, told, told)
def test_the_grouping_of_merging_makes_no_difference(a: Any, b: Any, c: Any) -> None:
    left = node(everything(node(a, b)), c)
    right = node(a, everything(node(b, c)))
    assert left.all() == right.all()


@given(told, told)
def test_merging_again_changes_nothing(a: Any, b: Any) -> None:
    merged = node(a, b)
    before = merged.all()
    for again in (a, b, everything(merged)):
        assert merged.merge(again, NOW) == []
    assert merged.all() == before


@given(told, told, told)
def test_full_nodes_agree_about_who_stays_and_until_when(a: Any, b: Any, c: Any) -> None:
    def full(*merged: Any) -> Revocations:
        return node(*merged, count_max=FULL)

    left = full(everything(full(a, b)), c)
    right = full(a, everything(full(b, c)))
    other = full(everything(full(c, a)), b)
    assert held(left) == held(right) == held(other)


@given(told, told, st.sampled_from([1, 5, 1000]), st.sampled_from([FULL, 1000]))
def test_two_nodes_that_exchange_differences_come_to_agree(
    a: Any, b: Any, limit: int, count_max: int
) -> None:
    one, other = node(a, count_max=count_max), node(b, count_max=count_max)
    rounds = 0
    while not one.agrees(other.digest()):
        one.merge(wired(other.difference(wired(one.digest()), limit)), NOW)
        other.merge(wired(one.difference(wired(other.digest()), limit)), NOW)
        rounds += 1
        assert rounds <= (1 if limit == 1000 else 100)
    if limit == 1000:
        assert one.all() == other.all()
        if count_max == 1000:
            assert one.all() == node(a, b).all()


def wired(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(told, told)
def test_nodes_that_agree_know_the_same(a: Any, b: Any) -> None:
    one, other = node(a), node(b)
    assert one.agrees(other.digest()) == (one.all() == other.all())


@given(anything)
def test_nothing_that_is_told_raises_or_is_taken_without_bounds(rubbish: Any) -> None:
    revocations = node()
    revocations.revoke("a", NOW)
    revocations.merge(rubbish, NOW)
    revocations.merge_ids(rubbish, NOW)
    revocations.revoke_headers(rubbish, NOW)
    revocations.difference(rubbish)
    revocations.matching(rubbish)
    assert not revocations.agrees(rubbish)
    for one in revocations.all():
        assert NOW < one.until < NOW + 400 * 86_400


values = st.text(max_size=5) | st.integers() | st.floats(allow_nan=False) | st.booleans()


@given(st.dictionaries(st.text(min_size=1, max_size=5), values, min_size=1, max_size=4))
def test_whatever_can_be_revoked_by_header_is_matched_and_can_be_told(headers: Any) -> None:
    one, other = node(), node()
    if not one.revoke_headers(headers, NOW):
        return
    other.merge(wired(one.difference(other.digest())), NOW)
    assert other.all() == one.all()
    assert other.matching(headers) == one.matching(headers)
    assert one.matching(headers) is not None


class Life(RuleBasedStateMachine):
    """One node against an obvious table of who is revoked until when."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.model: dict[str, float] = {}
        self.revocations = Revocations(lambda: self.now, expires_s=EXPIRES_S, count_max=FULL)

    def _set(self, key: str, until: float) -> None:
        known = self.model.get(key, 0.0)
        self.model[key] = max(until, known if known > self.now else 0.0)
        self._settle()

    def _settle(self) -> None:
        alive = [(until, key) for key, until in self.model.items() if until > self.now]
        self.model = {key: until for until, key in sorted(alive)[-FULL:]}

    @rule(key=ids)
    def revoke(self, key: str) -> None:
        self.revocations.revoke(key, self.now)
        self._set(key, self.now + EXPIRES_S)

    @rule(key=ids, later_s=st.floats(0, 1000))
    def message_seen(self, key: str, later_s: float) -> None:
        self.revocations.note_task(key, self.now + later_s, None, self.now)
        if self.model.get(key, 0.0) > self.now:
            self._set(key, self.now + later_s + EXPIRES_S)

    @rule(key=ids, later_s=st.floats(0, 1000))
    def peer(self, key: str, later_s: float) -> None:
        until = self.now + later_s
        self.revocations.merge({"tasks": {key: [self.now, until]}}, self.now)
        self._set(key, max(until, self.now + EXPIRES_S))

    @rule(seconds=st.floats(0, 300))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self._settle()

    @rule()
    def purge(self) -> None:
        self.revocations.purge(self.now)

    @invariant()
    def holds_to_the_end_of_each_life(self) -> None:
        """Nothing is dropped before its end, unless there are too many; nothing holds longer."""
        self._settle()
        for number in range(24):
            key = f"task-{number}"
            assert (key in self.revocations) == (key in self.model), key
        assert len(self.revocations) <= FULL


TestLife = Life.TestCase
