"""Membership: readable transcripts of what is heard and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from umbel.cluster.membership import (
    ECHO_S,
    ESTABLISHED_S,
    FREQ_MAX_S,
    FREQ_MIN_S,
    FREQ_UNKNOWN_S,
    GRACE_S,
    SIGNS_MIN,
    SPARED_S,
    Deaf,
    Effect,
    Heard,
    Joined,
    Left,
    Lost,
    Member,
    Membership,
    Node,
    Offline,
    Returned,
    Tick,
    credible_freq_s,
    is_alive,
)

A = Node("a", 1, 100)
A2 = Node("a", 2, 200)
CELERY = Node("c", 1)
CELERY2 = Node("c", 2)


def heard(node: Node, kind: Any = "heartbeat", freq_s: Any = 2.0) -> Heard:
    return Heard(node.hostname, node.pid, node.inc, freq_s, kind)


def offline(node: Node) -> Offline:
    return Offline(node.hostname, node.pid, node.inc)


class Watch:
    """A membership and the time, with ticks in between."""

    def __init__(self, **options: Any) -> None:
        self.members = Membership("me", **options)
        self.now = 1_000.0

    def step(self, what: Any) -> list[Effect]:
        return self.members.step(what, self.now)

    def hear(self, *nodes: Node, **fields: Any) -> list[Effect]:
        return [effect for node in nodes for effect in self.step(heard(node, **fields))]

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, with a tick every half second."""
        effects = []
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            effects += self.step(Tick())
        return effects


# -- join ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["online", "heartbeat", "other"])
def test_the_first_sign_of_life_joins_whatever_it_is(kind: Any) -> None:
    watch = Watch()
    assert watch.hear(A, kind=kind) == [Joined(A)]
    assert watch.members.alive() == [Member(A, 1_000.0, 2.0)]


@pytest.mark.parametrize("node", [A, CELERY])
def test_an_incarnation_joins_once_however_often_it_says_that_it_is_online(node: Node) -> None:
    watch = Watch()
    assert watch.hear(node, kind="online") == [Joined(node)]
    for _ in range(3):
        assert watch.hear(node, kind="online") == []
        assert watch.hear(node) == []


def test_the_own_node_never_enters_the_table() -> None:
    watch = Watch()
    own = Node("me", 5, 6)
    assert watch.hear(own, kind="online") == []
    assert watch.step(offline(own)) == []
    assert len(watch.members) == 0
    assert watch.members.member("me") is None


def test_a_sign_of_life_that_names_no_process_counts_for_the_one_that_is_there() -> None:
    watch = Watch()
    nobody = Node("a")
    watch.hear(A)
    watch.wait(3)
    assert watch.hear(nobody) == []
    assert watch.wait(3.5) == []
    assert watch.step(offline(nobody)) == [Left(A)]
    assert watch.hear(Node("b")) == [Joined(Node("b"))]


# -- leave -----------------------------------------------------------------------------------


def test_a_node_leaves_once_and_late_messages_do_not_raise_it() -> None:
    watch = Watch()
    watch.hear(A)
    assert watch.step(offline(A)) == [Left(A)]
    assert watch.step(offline(A)) == []
    for kind in ("heartbeat", "other", "online"):
        assert watch.hear(A, kind=kind) == []
    assert watch.members.late_count == 3
    assert "a" not in watch.members


def test_a_good_bye_of_somebody_unknown_is_remembered_too() -> None:
    watch = Watch()
    assert watch.step(offline(A)) == []
    assert watch.hear(A) == []


def test_a_celery_worker_that_left_begins_another_life_with_online_only() -> None:
    watch = Watch()
    watch.hear(CELERY)
    watch.step(offline(CELERY))
    assert watch.hear(CELERY) == []
    assert watch.hear(CELERY, kind="online") == [Joined(CELERY)]


def test_what_is_remembered_of_the_dead_expires() -> None:
    watch = Watch(memory_s=10)
    watch.hear(A)
    watch.step(offline(A))
    watch.wait(9.5)
    assert watch.hear(A) == []
    watch.wait(0.5)
    assert watch.hear(A) == [Joined(A)]


# -- lost ------------------------------------------------------------------------------------


def test_two_intervals_of_silence_make_a_node_lost_once() -> None:
    watch = Watch()
    watch.hear(A)
    assert watch.wait(3.5) == []
    assert watch.wait(0.5) == [Lost(A, 4.0)]
    assert watch.wait(20) == []
    assert watch.members.member("a") == Member(A, 1_000.0, 2.0, alive=False)
    assert "a" not in watch.members


def test_any_sign_of_life_postpones_the_loss() -> None:
    watch = Watch()
    watch.hear(A)
    for kind in ("heartbeat", "other", "online") * 3:
        assert watch.wait(3.5) == []
        watch.hear(A, kind=kind, freq_s=None)
    assert watch.wait(4) == [Lost(A, 4.0)]


def test_a_lost_node_that_is_heard_again_returns_and_can_be_lost_again() -> None:
    watch = Watch()
    watch.hear(A)
    watch.wait(4)
    assert watch.hear(A, kind="other", freq_s=None) == [Returned(A)]
    assert watch.hear(A) == []
    assert watch.wait(4) == [Lost(A, 4.0)]
    assert watch.hear(A, kind="online") == [Returned(A)]


def test_a_lost_node_that_says_good_bye_was_gone_already_and_does_not_return() -> None:
    watch = Watch()
    watch.hear(A)
    watch.wait(4)
    assert watch.step(offline(A)) == []
    assert watch.hear(A) == []


def test_every_node_is_given_the_interval_that_it_tells() -> None:
    watch = Watch()
    watch.hear(A, freq_s=1)
    watch.hear(CELERY, freq_s=3.0)
    assert watch.wait(2) == [Lost(A, 2.0)]
    assert watch.wait(4) == [Lost(CELERY, 6.0)]


@pytest.mark.parametrize(
    ("told", "believed"),
    [
        (2, 2.0),
        (2.5, 2.5),
        (1e-9, FREQ_MIN_S),
        (1e300, FREQ_MAX_S),
        (float("inf"), FREQ_MAX_S),
        (10**400, FREQ_MAX_S),
        *((odd, FREQ_UNKNOWN_S) for odd in (None, 0, -5, float("nan"), "2", True, [], {})),
    ],
    ids=lambda value: f"{value!r:.12}",
)
def test_an_interval_is_believed_within_bounds(told: Any, believed: float) -> None:
    assert credible_freq_s(told) == believed


def test_the_rule_of_liveness_is_one_line() -> None:
    assert is_alive(10.0, 2.0, 13.999)
    assert not is_alive(10.0, 2.0, 14.0)


# -- one name, several lives -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["online", "heartbeat", "other"])
def test_a_newer_incarnation_replaces_the_one_that_is_there(kind: Any) -> None:
    watch = Watch()
    watch.hear(A)
    watch.wait(1)
    assert watch.hear(A2, kind=kind) == [Lost(A, 1.0), Joined(A2)]
    assert watch.hear(A, kind="online") == []
    assert watch.step(offline(A)) == []
    assert [member.node for member in watch.members.alive()] == [A2]


def test_an_older_incarnation_comes_late() -> None:
    watch = Watch()
    watch.hear(A2)
    assert watch.hear(A, kind="online") == []
    assert watch.members.late_count == 1


def test_a_restart_after_a_loss_is_a_join_only() -> None:
    watch = Watch()
    watch.hear(A)
    watch.wait(4)
    assert watch.hear(A2) == [Joined(A2)]


def test_a_restart_in_order_is_a_leave_and_a_join() -> None:
    watch = Watch()
    watch.hear(A)
    assert watch.step(offline(A)) + watch.hear(A2) == [Left(A), Joined(A2)]


def test_two_celery_workers_with_one_name_do_not_take_turns() -> None:
    watch = Watch(memory_s=10)
    assert watch.hear(CELERY) == [Joined(CELERY)]
    assert watch.hear(CELERY2) == [Lost(CELERY, 0.0), Joined(CELERY2)]
    for _ in range(20):  # longer than anything is remembered that is not heard
        assert watch.hear(CELERY, CELERY2) == []
        assert watch.wait(1) == []


def test_of_two_with_one_name_the_other_returns_when_the_first_is_lost() -> None:
    watch = Watch()
    watch.hear(CELERY, CELERY2)
    assert watch.wait(3.5) == []
    watch.hear(CELERY)
    assert watch.wait(0.5) == [Lost(CELERY2, 4.0)]
    assert watch.hear(CELERY) == [Returned(CELERY)]


def test_another_process_that_only_says_something_replaces_nobody_alive() -> None:
    watch = Watch()
    watch.hear(CELERY)
    assert watch.hear(CELERY2, kind="other") == []
    watch.wait(4)
    assert watch.hear(CELERY2, kind="other") == [Joined(CELERY2)]


def test_a_worker_that_moves_from_celery_to_umbel_is_another_one() -> None:
    watch = Watch()
    moved = Node("c", 7, 500)
    watch.hear(CELERY)
    assert watch.hear(moved) == [Lost(CELERY, 0.0), Joined(moved)]


# -- deafness --------------------------------------------------------------------------------


def test_after_deafness_everybody_gets_a_full_grace_period() -> None:
    watch = Watch()
    watch.hear(A, CELERY)
    watch.wait(1)
    watch.now += 60
    assert watch.step(Deaf()) == []
    assert watch.step(Tick()) == []
    watch.hear(A)
    assert watch.wait(GRACE_S - 0.5) == [], "others need as long to find their broker again"
    assert watch.wait(0.5) == [Lost(A, GRACE_S), Lost(CELERY, 61 + GRACE_S)]


def test_after_deafness_who_beats_slowly_gets_two_of_its_intervals() -> None:
    watch = Watch()
    watch.hear(A, freq_s=20.0)
    watch.wait(39)
    watch.step(Deaf())
    assert watch.wait(39.5) == []
    assert watch.wait(0.5) == [Lost(A, 79.0)]


def test_one_that_is_deaf_all_the_time_marks_nobody_as_lost() -> None:
    watch = Watch()
    watch.hear(A)
    for _ in range(100):
        watch.step(Deaf())
        assert watch.wait(1) == []
    assert "a" in watch.members


def test_deafness_does_not_wait_for_the_next_tick_to_count() -> None:
    watch = Watch()
    watch.hear(A, CELERY)
    watch.now += 20
    watch.hear(A)
    watch.step(Deaf())
    assert watch.step(Tick()) == []
    assert watch.wait(GRACE_S) == [Lost(A, GRACE_S), Lost(CELERY, 20 + GRACE_S)]


def test_silence_counts_if_an_own_event_came_back_an_interval_after_the_last_sign() -> None:
    watch = Watch()
    heard_at = watch.now
    watch.hear(A)
    watch.now += 60
    assert watch.step(Tick(heard_at + 2.0 + ECHO_S - 0.1)) == []
    assert watch.step(Tick(heard_at + 2.0 + ECHO_S)) == [Lost(A, 60.0)]


@pytest.mark.parametrize("freq_s", [0.5, 2.0, 20.0])
@pytest.mark.parametrize("own_s", [0.5, 2.0, 20.0])
def test_who_turns_deaf_marks_nobody_as_lost_whatever_the_intervals(
    freq_s: float, own_s: float
) -> None:
    """Own events come back until it turns deaf, and so do the heartbeats of the other node."""
    for phase in range(10):
        watch = Watch()
        deaf_at = watch.now + 60
        heard_at = deaf_at - freq_s * phase / 10 - 0.01
        watch.now = heard_at
        watch.hear(A, freq_s=freq_s)
        for echo_at in (deaf_at - own_s * phase / 10, deaf_at):
            watch.now = max(watch.now, deaf_at + own_s + ECHO_S)  # then it knows
            assert watch.step(Tick(echo_at)) == []


def test_time_that_seems_to_run_back_stands_still() -> None:
    watch = Watch()
    watch.hear(A)
    watch.now -= 500
    assert watch.step(Tick()) == []
    assert watch.hear(A) == []
    assert watch.members.member("a") == Member(A, 1_000.0, 2.0)


# -- bounds ----------------------------------------------------------------------------------


def test_when_the_table_is_full_the_longest_dead_are_forgotten_and_counted() -> None:
    watch = Watch(nodes_max=3)
    first, second, third = (Node(f"n{number}", 1, 1) for number in range(3))
    watch.hear(first)
    watch.wait(1)
    watch.hear(second)
    watch.wait(4)
    watch.hear(third)
    assert len(watch.members) == 1
    assert watch.hear(A) == [Joined(A)]
    assert watch.members.forgotten_count == 1
    assert watch.members.member("n0") is None
    assert watch.members.member("n1") is not None
    assert watch.hear(second) == [Returned(second)]


def test_a_table_full_of_the_living_refuses_others_and_counts_them() -> None:
    watch = Watch(nodes_max=2)
    watch.hear(A, CELERY)
    other = Node("z", 1, 1)
    assert watch.hear(other, other) == []
    assert watch.members.refused_count == 2
    assert watch.hear(A2) == [Lost(A, 0.0), Joined(A2)]  # in its old place
    watch.step(offline(CELERY))
    assert watch.hear(other) == [Joined(other)]


def test_the_memory_of_the_dead_is_bounded_and_the_oldest_go_first() -> None:
    watch = Watch(memory_max=2)
    nodes = [Node(f"n{number}", 1, 1) for number in range(3)]
    for node in nodes:
        watch.hear(node)
        watch.step(offline(node))
    assert watch.members.forgotten_count == 1
    assert watch.hear(*nodes) == [Joined(nodes[0])]


# -- strangers -------------------------------------------------------------------------------


def ghost(number: int) -> Node:
    return Node(f"ghost{number}", 1, 1)


def test_a_node_is_established_when_it_was_heard_again_and_again_for_long() -> None:
    watch = Watch()
    watch.hear(A)
    for _ in range(10 * SIGNS_MIN):
        watch.hear(A)
    assert not watch.members.heard_again("a"), "many times at once are one time"
    began = watch.now
    while watch.now < began + ESTABLISHED_S:
        assert watch.members.established_count == 0
        watch.wait(2)
        watch.hear(A)
        assert watch.members.heard_again("a")
    assert watch.members.established() == {"a"}
    watch.wait(4)
    assert watch.members.established_count == 0, "it is lost"
    assert watch.hear(A) == [Returned(A)]
    assert watch.members.established_count == 0, "and has to show again that it stays"


def test_a_node_that_is_heard_seldom_is_not_established_however_long_it_is_there() -> None:
    watch = Watch()
    watch.hear(A, freq_s=60)
    watch.wait(100)
    watch.hear(A, freq_s=60)
    assert watch.members.established_count == 0
    watch.wait(100)
    watch.hear(A, freq_s=60)
    assert watch.members.established_count == 1


def test_what_a_node_calls_its_interval_is_believed_up_to_the_bound() -> None:
    watch = Watch(freq_max_s=60.0)
    watch.hear(A, freq_s=86_400)
    watch.hear(CELERY, freq_s=2.0)
    watch.hear(CELERY, freq_s=86_400)
    assert watch.wait(119) == []
    assert watch.wait(1) == [Lost(A, 120.0), Lost(CELERY, 120.0)]


def test_a_bound_that_is_raised_holds_for_those_who_were_heard_before() -> None:
    watch = Watch(freq_max_s=60.0)
    watch.hear(A, freq_s=200)
    watch.wait(100)
    watch.members.freq_max_s = 300.0
    assert watch.wait(299) == []
    assert watch.wait(1) == [Lost(A, 400.0)]


def test_those_who_were_heard_least_make_room_first_after_a_moment() -> None:
    watch = Watch(nodes_max=4)
    watch.hear(A, freq_s=60)
    watch.wait(1)
    watch.hear(A, freq_s=60)  # twice
    watch.hear(*map(ghost, range(3)), freq_s=86_400)
    real = Node("real", 1, 1)
    assert watch.hear(real) == []
    assert watch.members.refused_count == 1
    watch.wait(SPARED_S)
    for number in range(3):
        newcomer = Node(f"real{number}", 1, 1)
        assert watch.hear(newcomer) == [Lost(ghost(number), SPARED_S), Joined(newcomer)]
    assert watch.members.forgotten_count == 3
    assert "a" in watch.members
    assert watch.hear(real) == [Lost(A, SPARED_S), Joined(real)], "then who was heard twice"
    assert watch.hear(A) == [], "there is no room"
    assert watch.hear(ghost(0)) == []
    watch.step(offline(real))
    assert watch.hear(A) == [Returned(A)], "an incarnation joins once"


def test_established_nodes_make_room_for_nobody() -> None:
    watch = Watch(nodes_max=2)
    for _ in range(20):
        watch.hear(A, CELERY)
        watch.wait(2)
    assert watch.members.established_count == 2
    watch.wait(1)
    assert watch.hear(ghost(1)) == []
    assert watch.members.refused_count == 1
    assert sorted(member.node.hostname for member in watch.members.alive()) == ["a", "c"]
