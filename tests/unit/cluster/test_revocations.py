"""Revocations: how long they hold, what they match, and what is taken from whom."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from umbel.cluster import revocations as module
from umbel.cluster.revocations import Revocation, Revocations

NOW = 1_800_000_000.0
HOUR_S, DAY_S = 3600.0, 86_400.0
LIFE_S = 3 * HOUR_S


class Wall:
    """A wall clock that is set by hand."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def revocations(wall: Wall) -> Revocations:
    return Revocations(wall)


def lives(revocations: Revocations) -> dict[str, tuple[float, float]]:
    return {one.key: (one.stamp, one.until) for one in revocations.all()}


# -- how long ------------------------------------------------------------------------------


def test_a_revoked_id_is_in_for_three_hours_and_then_it_is_not(
    revocations: Revocations, wall: Wall
) -> None:
    changed = revocations.revoke("a", wall.now)
    assert changed == [Revocation("task", "a", NOW, NOW + LIFE_S)]
    assert "a" in revocations
    assert "b" not in revocations
    wall.now += LIFE_S - 0.001
    assert "a" in revocations
    wall.now += 0.001
    assert "a" not in revocations
    assert revocations.ids() == []


def test_any_is_false_while_there_is_nothing_to_look_up(
    revocations: Revocations, wall: Wall
) -> None:
    assert not revocations.any
    revocations.revoke(["a"], wall.now)
    assert revocations.any
    wall.now += LIFE_S
    assert revocations.purge(wall.now) == 1
    assert not revocations.any
    revocations.revoke_headers({"k": "v"}, wall.now)
    assert revocations.any


def test_a_revoke_of_a_task_that_is_due_tomorrow_still_holds_tomorrow(
    revocations: Revocations, wall: Wall
) -> None:
    revocations.revoke("a", wall.now)
    eta = NOW + DAY_S
    changed = revocations.note_task("a", eta, None, wall.now)
    assert changed == [Revocation("task", "a", NOW, eta + LIFE_S)]
    for wall.now in (NOW + LIFE_S, eta, eta + HOUR_S):
        assert "a" in revocations
        assert revocations.ids() == ["a"]
    wall.now = eta + LIFE_S
    assert "a" not in revocations


def test_the_message_of_a_revoked_task_may_come_much_later_and_tell_its_eta_then(
    revocations: Revocations, wall: Wall
) -> None:
    revocations.revoke("a", wall.now)
    wall.now += 2 * HOUR_S
    revocations.note_task("a", NOW + DAY_S, None, wall.now)
    assert lives(revocations) == {"a": (NOW, NOW + DAY_S + LIFE_S)}


def test_a_revocation_holds_until_the_task_has_expired(
    revocations: Revocations, wall: Wall
) -> None:
    revocations.revoke("a", wall.now)
    revocations.note_task("a", None, NOW + DAY_S, wall.now)
    assert lives(revocations) == {"a": (NOW, NOW + DAY_S)}
    assert revocations.note_task("a", None, NOW + HOUR_S, wall.now) == []  # never shorter
    assert lives(revocations) == {"a": (NOW, NOW + DAY_S)}


def test_a_task_that_nobody_revoked_changes_nothing(revocations: Revocations, wall: Wall) -> None:
    assert revocations.note_task("a", NOW + DAY_S, NOW + DAY_S, wall.now, {"k": "v"}) == []
    assert revocations.note_task("a", None, None, wall.now) == []
    assert not revocations.any


def test_an_eta_in_the_far_future_is_kept_for_a_year(revocations: Revocations, wall: Wall) -> None:
    revocations.revoke("a", wall.now)
    revocations.note_task("a", NOW + 5000 * DAY_S, None, wall.now)
    assert lives(revocations) == {"a": (NOW, NOW + module.LIFE_MAX_S)}


def test_revoking_again_keeps_the_oldest_time_and_extends_the_life(
    revocations: Revocations, wall: Wall
) -> None:
    revocations.revoke("a", wall.now)
    assert revocations.revoke("a", wall.now) == []
    wall.now += HOUR_S
    revocations.revoke("a", wall.now)
    assert lives(revocations) == {"a": (NOW, NOW + HOUR_S + LIFE_S)}


def test_ids_are_told_oldest_first(revocations: Revocations) -> None:
    for key, when in (("c", 3.0), ("a", 2.0), ("b", 1.0)):
        revocations.revoke(key, NOW + when)
    revocations.revoke("b", NOW + 9)
    assert revocations.ids() == ["b", "a", "c"]


def test_when_it_is_full_those_that_end_first_go_and_are_counted(wall: Wall) -> None:
    revocations = Revocations(wall, count_max=3)
    revocations.revoke("tomorrow", NOW)
    revocations.note_task("tomorrow", NOW + DAY_S, None, NOW)
    for number in range(1, 5):
        revocations.revoke(str(number), NOW + number)
    assert revocations.ids() == ["tomorrow", "3", "4"]
    assert revocations.evicted == 2
    assert len(revocations) == 3


def test_what_could_not_be_kept_is_not_reported_as_changed(wall: Wall) -> None:
    revocations = Revocations(wall, count_max=1)
    revocations.revoke("long", NOW)
    revocations.note_task("long", NOW + DAY_S, None, NOW)
    assert revocations.revoke("short", NOW) == []
    assert "short" not in revocations


@pytest.mark.parametrize("bad", [None, 7, "", "x" * 1001, "\ud800", b"a", ["a"]])
def test_an_id_that_can_be_none_is_refused_and_counted(
    revocations: Revocations, wall: Wall, bad: Any
) -> None:
    assert [one.key for one in revocations.revoke(["good", bad], wall.now)] == ["good"]
    assert revocations.counts["bad-id"] == 1


# -- stamped headers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("revoked", "stamps", "matched"),
    [
        ({"customer": "x"}, {"customer": "x"}, {"customer": "x"}),
        ({"customer": ["x", "y"]}, {"customer": "y"}, {"customer": "y"}),
        ({"customer": "x"}, {"customer": ["w", "x"]}, {"customer": "x"}),
        ({"customer": ["x", "y"]}, {"other": 1, "customer": ("z", "y")}, {"customer": "y"}),
        ({"customer": 17}, {"customer": 17}, {"customer": 17}),
        ({"customer": 17}, {"customer": 17.0}, {"customer": 17.0}),
        ({"customer": 1}, {"customer": True}, {"customer": True}),
        ({"k": {"b": 1, "a": 2}}, {"k": {"a": 2, "b": 1}}, {"k": {"a": 2, "b": 1}}),
        (["customer=x", "no pair", "k=a=b"], {"k": "a=b"}, {"k": "a=b"}),
        (["customer=x", "customer=y"], {"customer": "y"}, {"customer": "y"}),
        ({"customer": "17"}, {"customer": 17}, None),
        ({"customer": "x"}, {"other": "x"}, None),
        ({"customer": "x"}, {"customer": None}, None),
        ({"customer": "x"}, {"customer": []}, None),
        ({"customer": "x"}, {}, None),
        ({"customer": "x"}, None, None),
        ({"customer": "x"}, ["customer"], None),
        ({"customer": "x"}, {"customer": Ellipsis}, None),
    ],
    ids=repr,
)  # fmt: skip
def test_a_task_is_revoked_by_what_it_is_stamped_with(
    revocations: Revocations, wall: Wall, revoked: Any, stamps: Any, matched: Any
) -> None:
    assert revocations.matching(stamps) is None
    revocations.revoke_headers(revoked, wall.now)
    assert revocations.matching(stamps) == matched
    assert revocations.revokes("a", stamps) is (matched is not None)
    wall.now += LIFE_S
    assert revocations.matching(stamps) is None


def test_stamps_of_other_types_match_as_they_look_on_the_wire(
    revocations: Revocations, wall: Wall
) -> None:
    one, day = uuid.uuid4(), datetime(2026, 1, 2, tzinfo=UTC)
    revocations.revoke_headers({"id": one, "day": day}, wall.now)
    assert revocations.revokes("a", {"id": str(one)})
    assert revocations.revokes("a", {"day": day})
    assert revocations.headers() == {"day": ["2026-01-02T00:00:00Z"], "id": [str(one)]}


def test_a_task_is_revoked_by_its_id_whatever_it_is_stamped_with(
    revocations: Revocations, wall: Wall
) -> None:
    revocations.revoke("a", wall.now)
    assert revocations.revokes("a", {"customer": "x"})
    assert not revocations.revokes("b", {"customer": "x"})


def test_a_header_is_revoked_as_long_as_a_task_that_carries_it_may_come_up(
    revocations: Revocations, wall: Wall
) -> None:
    revocations.revoke_headers({"customer": ["x", "y"]}, wall.now)
    changed = revocations.note_task("a", NOW + DAY_S, None, wall.now, {"customer": "y"})
    assert changed == [Revocation("header", '["customer","y"]', NOW, NOW + DAY_S + LIFE_S)]
    wall.now = NOW + DAY_S
    assert revocations.headers() == {"customer": ["y"]}


def test_headers_have_a_bound_of_their_own(wall: Wall) -> None:
    revocations = Revocations(wall, header_count_max=2)
    revocations.revoke("a", wall.now)
    revocations.revoke_headers({"n": list(range(5))}, wall.now)
    assert revocations.headers() == {"n": [3, 4]}
    assert revocations.evicted == 3
    assert "a" in revocations


@pytest.mark.parametrize(
    "bad",
    [None, "customer", 7, {}, [], ["no pair"], {"": "x"}, {7: "x"}, {"k": None}, {"k": Ellipsis},
     {"k": float("inf")}, {"k": "x" * 1001}, {"k": "\ud800"}],
)  # fmt: skip
def test_headers_that_can_be_none_are_refused_and_counted(
    revocations: Revocations, wall: Wall, bad: Any
) -> None:
    assert revocations.revoke_headers(bad, wall.now) == []
    assert revocations.counts["bad-header"] == 1
    assert not revocations.any


# -- from others ---------------------------------------------------------------------------


def test_a_joiner_learns_every_revocation_with_its_original_time(wall: Wall) -> None:
    old, joiner = Revocations(wall), Revocations(wall)
    old.revoke("a", NOW - HOUR_S)
    old.revoke("tomorrow", NOW - HOUR_S)
    old.note_task("tomorrow", NOW + DAY_S, None, NOW)
    old.revoke_headers({"customer": "x"}, NOW - 60)
    told = json.loads(json.dumps(old.difference(json.loads(json.dumps(joiner.digest())))))
    joiner.merge(told, wall.now)
    assert joiner.all() == old.all()
    assert joiner.agrees(old.digest())
    assert "a" in joiner
    assert joiner.revokes("b", {"customer": "x"})


def test_only_what_differs_is_told(wall: Wall) -> None:
    one, other = Revocations(wall), Revocations(wall)
    ids = [uuid.UUID(int=n).hex for n in range(5000)]
    for node in (one, other):
        node.revoke(ids, NOW)
    assert one.difference(other.digest()) == {"tasks": {}, "headers": {}}
    one.revoke("new", NOW)
    told = one.difference(other.digest())
    assert "new" in told["tasks"]
    assert len(told["tasks"]) < 100
    assert len(json.dumps(one.digest())) < 8_000


def test_a_life_that_was_extended_is_told_as_well(wall: Wall) -> None:
    one, other = Revocations(wall), Revocations(wall)
    for node in (one, other):
        node.revoke("a", NOW)
    one.note_task("a", NOW + DAY_S, None, NOW)
    other.merge(one.difference(other.digest()), NOW)
    assert lives(other) == lives(one)


def test_what_is_beyond_the_limit_is_told_the_next_time(wall: Wall) -> None:
    one, other = Revocations(wall), Revocations(wall)
    one.revoke([str(n) for n in range(1000)], NOW)
    rounds = 0
    while not one.agrees(other.digest()):
        told = one.difference(other.digest(), limit=100)
        other.merge(told, NOW)
        rounds += 1
    assert 5 < rounds < 100
    assert len(other) == 1000


def test_a_revocation_that_has_ended_is_not_taken_over(
    revocations: Revocations, wall: Wall
) -> None:
    told = {"tasks": {"a": [NOW - DAY_S, NOW - DAY_S + LIFE_S], "b": [NOW - DAY_S, NOW + 1]}}
    assert [one.key for one in revocations.merge(told, wall.now)] == ["b"]


def test_a_node_with_a_shorter_life_does_not_shorten_ours(
    revocations: Revocations, wall: Wall
) -> None:
    revocations.merge({"tasks": {"a": [NOW - 10, NOW + 5]}}, wall.now)
    assert lives(revocations) == {"a": (NOW - 10, NOW - 10 + LIFE_S)}


def test_a_stamp_from_the_future_is_clamped(revocations: Revocations, wall: Wall) -> None:
    near, far = NOW + module.SKEW_MAX_S, NOW + module.SKEW_MAX_S + 1
    revocations.merge({"tasks": {"near": [near, near + LIFE_S], "far": [far, 9e15]}}, wall.now)
    assert lives(revocations) == {
        "near": (near, near + LIFE_S),
        "far": (NOW, NOW + module.LIFE_MAX_S),
    }
    assert revocations.counts["stamp-ahead"] == 1
    wall.now += 60
    revocations.merge({"tasks": {"far": [far + DAY_S, far + DAY_S]}}, wall.now)
    assert lives(revocations)["far"][0] == NOW  # heard again: the first time counts


def test_ids_of_a_celery_worker_are_stamped_when_they_are_first_seen(
    revocations: Revocations, wall: Wall
) -> None:
    assert len(revocations.merge_ids(["a", "b"], wall.now)) == 2
    wall.now += HOUR_S
    assert [one.key for one in revocations.merge_ids(["a", "b", "c"], wall.now)] == ["c"]
    changed = revocations.merge_ids({"b": [12.5, "b"], "d": [1e9, "d"]}, wall.now)
    assert [one.key for one in changed] == ["d"]
    assert lives(revocations)["a"] == (NOW, NOW + LIFE_S)


def test_a_celery_worker_can_not_make_an_id_immortal(revocations: Revocations, wall: Wall) -> None:
    revocations.merge_ids(["a"], wall.now)
    for _ in range(10):
        wall.now += HOUR_S
        revocations.merge_ids(["a"], wall.now)
    assert "a" not in revocations
    revocations.revoke("a", wall.now)  # a revoke of its own is another matter
    assert "a" in revocations


def test_what_was_kept_is_restored(wall: Wall) -> None:
    before, after = Revocations(wall), Revocations(wall)
    before.revoke(["a", "b"], NOW - 60)
    before.revoke_headers({"customer": "x"}, NOW - 60)
    rows: list[tuple[Any, ...]] = [*before.all(), ("other", "c", NOW, NOW + 9), (None, 1, 2, 3)]
    after.restore(rows, NOW)  # type: ignore[arg-type]
    assert after.all() == before.all()
    assert after.counts["bad-life"] == 2


def test_what_was_kept_stands_on_a_machine_that_does_not_know_the_time_yet(wall: Wall) -> None:
    revocations = Revocations(wall)
    wall.now = 60.0
    revocations.restore([("task", "a", NOW, NOW + DAY_S)], wall.now)
    assert "a" in revocations
    wall.now = NOW + HOUR_S
    assert "a" in revocations
    assert lives(revocations) == {"a": (NOW, NOW + DAY_S)}


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (None, "not-revocations"),
        ([], "not-revocations"),
        ("text", "not-revocations"),
        ({"tasks": ["a"]}, "not-revocations"),
        ({"tasks": {"a": None}}, "bad-life"),
        ({"tasks": {"a": [1]}}, "bad-life"),
        ({"tasks": {"a": [True, False]}}, "bad-life"),
        ({"tasks": {"a": ["1", "2"]}}, "bad-life"),
        ({"tasks": {"a": [-1.0, NOW]}}, "bad-life"),
        ({"tasks": {"a": [float("nan"), NOW]}}, "bad-life"),
        ({"tasks": {"a": [NOW, float("inf")]}}, "bad-life"),
        ({"tasks": {"a": [NOW, 10**400]}}, "bad-life"),
        ({"tasks": {7: [NOW, NOW]}}, "bad-id"),
        ({"tasks": {"x" * 1001: [NOW, NOW]}}, "bad-id"),
        ({"headers": {"customer": [NOW, NOW]}}, "bad-header"),
        ({"headers": {'["customer", "x"]': [NOW, NOW]}}, "bad-header"),
        ({"headers": {'["customer",1.0]': [NOW, NOW]}}, "bad-header"),
        ({"headers": {'["customer"]': [NOW, NOW]}}, "bad-header"),
        ({"headers": {"[" * 999: [NOW, NOW]}}, "bad-header"),
        ({"headers": {7: [NOW, NOW]}}, "bad-header"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_no_revocation_is_counted_and_nothing_is_raised(
    revocations: Revocations, wall: Wall, told: Any, reason: str
) -> None:
    assert revocations.merge(told, wall.now) == []
    assert revocations.counts == {reason: 1}
    assert not revocations.any


def test_a_peer_can_not_tell_more_than_a_bound(
    revocations: Revocations, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_COUNT_MAX", 3)
    ids = [str(n) for n in range(5)]
    revocations.merge({"tasks": {key: [NOW, NOW + 9] for key in ids}}, wall.now)
    assert len(revocations) == 3
    assert revocations.counts["too-many"] == 2
    revocations.merge_ids([*ids, "new"], wall.now)
    assert "new" in revocations  # the newest come last
    assert revocations.counts["too-many"] == 5


@pytest.mark.parametrize("told", [None, 7, "a", {"a"}, b"a"])
def test_what_no_celery_worker_sends_is_counted(
    revocations: Revocations, wall: Wall, told: Any
) -> None:
    assert revocations.merge_ids(told, wall.now) == []
    assert revocations.counts == {"not-revocations": 1}


@pytest.mark.parametrize(
    "digest",
    [
        None,
        [],
        {"100": "1"},
        {f"{n}": "1" for n in range(257)},
        {0: "1"},
        {"0": 7},
        {"0": "-1"},
        {"0": "f" * 17},
        {"": "f"},
        {"٣": "f"},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_digest_is_counted_and_answered_with_nothing(
    revocations: Revocations, wall: Wall, digest: Any
) -> None:
    revocations.revoke("a", wall.now)
    assert revocations.difference({"tasks": digest}) == {}
    assert revocations.difference(digest) == {}
    assert revocations.counts == {"bad-digest": 4}
    assert not revocations.agrees(digest)
