"""Rate limits: the bucket, parking, bounds, changes at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.app.declaring import parse_rate
from umbel.wire.tasks import TaskHeader
from umbel.worker.delivery.effects import Delivery
from umbel.worker.delivery.limits import Bucket, RateLimits
from umbel.worker.delivery.prefetch import Prefetch


class Timer:
    """A timer whose time is set by the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.entries: list[Any] = []

    def call_after(self, wait_s: float, call: Callable[..., None], *args: Any) -> Any:
        entry = Entry(self.now + wait_s, call, args)
        self.entries.append(entry)
        return entry

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            due = [e for e in self.entries if e.at <= end and not e.cancelled]
            if not due:
                break
            entry = min(due, key=lambda e: e.at)
            self.entries.remove(entry)
            self.now = max(self.now, entry.at)
            entry.call(*entry.args)
        self.now = end


class Entry:
    def __init__(self, at: float, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.at, self.call, self.args, self.cancelled = at, call, args, False

    def cancel(self) -> None:
        self.cancelled = True


class Place:
    """What the limits ask for, and where deliveries go from there."""

    def __init__(self, parked_max: int = 1_000) -> None:
        self.timer = Timer()
        self.prefetch = Prefetch(2, 4)
        self.ran: list[tuple[float, Any]] = []
        self.returned: list[Any] = []
        self.call_after = self.timer.call_after
        effects: Any = self
        self.limits = RateLimits(self, effects, self.prefetch, parked_max, lambda: self.timer.now)

    def make_ready(self, delivery: Any) -> None:
        self.ran.append((self.timer.now, delivery))

    judge_again = make_ready

    def return_behind(self, delivery: Any) -> None:
        self.returned.append(delivery)

    def surplus_returned(self, parked_max: int) -> None:
        """Nobody reads the log."""

    def queue_of(self, message: Any) -> str | None:
        return None

    def set(self, name: str, rate: str | None) -> None:
        self.limits.set(name, parse_rate(rate))

    def admit(self, count: int, name: str = "t") -> None:
        for number in range(count):
            policy: Any = None
            self.limits.admit(name, Delivery(policy, number, TaskHeader(task=name, id=str(number))))


def test_tasks_of_a_limited_type_are_spread_evenly() -> None:
    place = Place()
    place.set("t", "10/s")
    place.admit(5)
    place.timer.advance(1)
    assert [when for when, _ in place.ran] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_parked_tasks_run_in_the_order_in_which_they_came() -> None:
    place = Place()
    place.set("t", "100/s")
    place.admit(20)
    place.timer.advance(5)
    assert [one.message for _, one in place.ran] == list(range(20))


def test_another_type_is_not_delayed() -> None:
    place = Place()
    place.set("slow", "1/h")
    place.admit(500, "slow")
    place.admit(1, "other")
    assert len(place.ran) == 2


def test_parked_tasks_take_no_place_in_the_window_and_leave_none_behind() -> None:
    place = Place()
    base = place.prefetch.window
    place.set("t", "10/s")
    place.admit(30)
    assert place.prefetch.window == base + 29
    place.timer.advance(10)
    assert place.prefetch.window == base
    assert len(place.ran) == 30


def test_a_lifted_limit_lets_all_parked_tasks_run_at_once() -> None:
    place = Place()
    place.set("t", "1/h")
    place.admit(50)
    place.set("t", None)
    assert len(place.ran) == 50
    assert place.prefetch.parked == 0


def test_a_new_limit_applies_to_what_is_parked_at_once() -> None:
    place = Place()
    place.set("t", "1/h")
    place.admit(11)
    place.set("t", "10/s")
    place.timer.advance(1.0)
    assert len(place.ran) == 11


def test_beyond_the_bound_tasks_go_back_to_their_queue() -> None:
    place = Place(parked_max=3)
    place.set("t", "1/h")
    place.admit(10)
    assert place.returned == []
    place.timer.advance(0.1)
    assert len(place.returned) == 6
    assert place.limits.given_back == 6
    assert place.prefetch.parked == 3


def test_a_limit_that_was_set_at_run_time_outlives_the_first_message_of_its_type() -> None:
    place = Place()
    place.set("t", "1/m")
    place.limits.begin("t", 100.0)
    assert place.limits.lanes["t"].bucket.rate == pytest.approx(1 / 60)


def test_clearing_forgets_what_is_parked_and_its_timers() -> None:
    place = Place()
    place.set("t", "1/s")
    place.admit(4)
    assert len(place.limits.clear()) == 3
    place.timer.advance(10)
    assert len(place.ran) == 1
    assert place.prefetch.parked == 0


def test_a_bucket_does_not_save_up() -> None:
    bucket = Bucket(10)
    assert bucket.take(1_000.0)
    assert not bucket.take(1_000.0)


@given(
    rate=st.floats(min_value=0.01, max_value=1_000),
    steps=st.lists(st.floats(min_value=0, max_value=10), max_size=50),
)
def test_a_bucket_never_lets_more_through_than_its_rate_and_one_over(
    rate: float, steps: list[float]
) -> None:
    bucket, now, taken = Bucket(rate), 0.0, 0
    for step in steps:
        now += step
        while bucket.take(now):
            taken += 1
    assert taken <= now * rate + 2


@pytest.mark.parametrize(
    ("rate", "per_s"),
    [("10/s", 10), ("5/m", 5 / 60), ("1/h", 1 / 3600), (2.5, 2.5), ("7", 7), (None, 0), (0, 0)],
)
def test_a_rate_is_read_as_tasks_per_second(rate: Any, per_s: float) -> None:
    assert parse_rate(rate) == pytest.approx(per_s)


@pytest.mark.parametrize("rate", ["ten", "10/d", "-1/s", float("inf"), True, "1/s/s", []])
def test_a_bad_rate_is_refused_by_its_value(rate: Any) -> None:
    with pytest.raises(ValueError, match="rate limit"):
        parse_rate(rate)
