"""The time that nodes agree on: what each of them makes of the clocks of the others."""

from __future__ import annotations

import itertools

import pytest

from umbel.cluster.agreed_time import (
    SAMPLES_MAX,
    SAMPLES_MIN,
    SHIFT_MAX_S,
    TOLERANCE_S,
    AgreedTime,
)

HOURS_2 = 7_200.0
TRUE_S = 1_794_771_516.25


class Host:
    """A node on a host whose clock is off by so much."""

    def __init__(self, name: str, off_s: float = 0.0) -> None:
        self.name, self.off_s = name, off_s
        self.time = AgreedTime(lambda: TRUE_S + self.off_s)


def beat(hosts: list[Host], times: int = SAMPLES_MAX, start_s: float = 0.0) -> None:
    """Every node hears every other one, and looks at the clocks after each round."""
    for round_ in range(times):
        for one, other in itertools.permutations(hosts, 2):
            now = start_s + 2.0 * round_
            one.time.heard(other.name, TRUE_S + other.off_s, other.time.shift_s, now)
        for host in hosts:
            host.time.settle({other.name for other in hosts})


def join(host: Host, others: list[Host]) -> None:
    host.time.adopt([other.time() - host.time() for other in others])


def test_clocks_that_nearly_agree_are_left_alone() -> None:
    hosts = [Host("a"), Host("b", 1.0), Host("c", TOLERANCE_S - 0.5)]
    beat(hosts)
    assert [host.time.shift_s for host in hosts] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("off_s", [HOURS_2, -HOURS_2, 20.0])
def test_the_one_whose_clock_is_off_goes_by_that_of_the_majority(off_s: float) -> None:
    hosts = [Host("a"), Host("b", 0.2), Host("off", off_s)]
    beat(hosts)
    assert [host.time.shift_s for host in hosts[:2]] == [0.0, 0.0]
    assert hosts[2].time() == pytest.approx(TRUE_S, abs=1.0)


@pytest.mark.parametrize("off_s", [HOURS_2, -HOURS_2])
def test_a_node_that_starts_takes_over_the_time_of_those_who_are_there(off_s: float) -> None:
    first, second = Host("first"), Host("second", off_s)
    join(second, [first])
    assert (first.time(), second.time()) == (TRUE_S, TRUE_S)
    beat([first, second])
    assert (first.time(), second.time()) == (TRUE_S, TRUE_S), "two clocks are no majority"


def test_the_time_stays_when_nodes_leave_and_others_come() -> None:
    first, off = Host("first"), Host("off", HOURS_2)
    join(off, [first])
    beat([first, off])
    off.time.forget("first")
    assert not off.time.settle({"first"})
    assert off.time() == TRUE_S
    later = Host("later", 0.1)
    join(later, [off])
    assert later.time() == pytest.approx(TRUE_S, abs=1.0)


def test_where_two_have_agreed_on_nothing_the_earlier_time_is_taken() -> None:
    one, other = Host("one"), Host("other", -HOURS_2)
    beat([one, other])
    assert (one.time(), other.time()) == (TRUE_S - HOURS_2, TRUE_S - HOURS_2)


def test_a_clock_that_was_put_right_is_believed_again() -> None:
    hosts = [Host("a"), Host("b"), Host("off", HOURS_2)]
    beat(hosts)
    hosts[2].off_s = 0.0
    beat(hosts, start_s=100.0)
    assert [host.time.shift_s for host in hosts] == [0.0, 0.0, 0.0]


def test_a_few_delayed_or_forged_heartbeats_change_nothing() -> None:
    host = Host("a")
    for number in range(SAMPLES_MAX):
        told = TRUE_S - 50_000 if number % 2 else TRUE_S
        for name in ("b", "c"):
            host.time.heard(name, told, None, 2.0 * number)
    assert not host.time.settle({"b", "c"})
    for _ in range(1_000):  # a burst after a break counts once
        host.time.heard("b", TRUE_S - 50_000, None, 100.0)
    assert not host.time.settle({"b", "c"})


def test_who_is_not_counted_or_was_heard_too_seldom_decides_nothing() -> None:
    host = Host("a")
    for number in range(SAMPLES_MIN - 1):
        for name in ("b", "c"):
            host.time.heard(name, TRUE_S + HOURS_2, 0.0, 2.0 * number)
    assert not host.time.settle({"b", "c"})
    for name in ("b", "c"):
        host.time.heard(name, TRUE_S + HOURS_2, 0.0, 100.0)
    assert not host.time.settle({"b"}) or host.time.shift_s == 0.0
    assert host.time.settle({"b", "c"})
    assert host.time.shift_s == HOURS_2


@pytest.mark.parametrize(
    "told",
    [None, "x", float("nan"), float("inf"), 10**400, True, [1], 1e9],
    ids=lambda told: repr(told)[:20],
)
def test_a_shift_that_makes_no_sense_is_none(told: object) -> None:
    host = Host("a")
    for number in range(SAMPLES_MIN):
        host.time.heard("b", TRUE_S, told, 2.0 * number)
    assert not host.time.settle({"b"})


def test_more_than_a_day_is_not_believed() -> None:
    host = Host("a")
    assert not host.time.adopt([2 * SHIFT_MAX_S])
    assert not host.time.adopt([float("nan"), float("inf")])
    assert not host.time.adopt([])
    assert host.time.shift_s == 0.0
