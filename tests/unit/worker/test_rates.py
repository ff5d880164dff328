"""Rate limits: the bucket, parking, bounds, changes at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.app.declaring import parse_rate
from umbel.worker.prefetch import Prefetch
from umbel.worker.rates import Bucket, RateLimits


class Timer:
    """A timer whose time is set by the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.entries: list[Any] = []

    def call_after(self, wait_s: float, call: Callable[..., None], args: tuple[Any, ...]) -> Any:
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


class FakeWorker:
    """What the limits need of a worker."""

    def __init__(self, parked_max: int = 1_000) -> None:
        self.timer = Timer()
        self.prefetch = Prefetch(2, 4)
        self.ran: list[tuple[float, Any]] = []
        self.returned: list[Any] = []
        self.rates = RateLimits(self, parked_max, lambda: self.timer.now)  # type: ignore[arg-type]

    def ready(self, request: Any) -> None:
        self.ran.append((self.timer.now, request))

    def hold(self, request: Any, wait_s: float, then: Callable[[Any], None]) -> None:
        self.timer.call_after(wait_s, then, (request,))

    def return_to_queue(self, request: Any) -> None:
        self.returned.append(request)

    def admit(self, count: int, name: str = "t") -> None:
        for number in range(count):
            self.rates.admit(name, FakeRequest(self, number))


class FakeRequest:
    def __init__(self, worker: FakeWorker, number: int) -> None:
        self.number = number
        self.strategy = self
        self.worker = worker

    def enter(self, request: Any) -> None:
        self.worker.ready(request)


def test_tasks_of_a_limited_type_are_spread_evenly() -> None:
    worker = FakeWorker()
    worker.rates.set("t", "10/s")
    worker.admit(5)
    worker.timer.advance(1)
    assert [when for when, _ in worker.ran] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_parked_tasks_run_in_the_order_in_which_they_came() -> None:
    worker = FakeWorker()
    worker.rates.set("t", "100/s")
    worker.admit(20)
    worker.timer.advance(5)
    assert [request.number for _, request in worker.ran] == list(range(20))


def test_another_type_is_not_delayed() -> None:
    worker = FakeWorker()
    worker.rates.set("slow", "1/h")
    worker.admit(500, "slow")
    worker.admit(1, "other")
    assert len(worker.ran) == 2


def test_parked_tasks_take_no_place_in_the_window_and_leave_none_behind() -> None:
    worker = FakeWorker()
    base = worker.prefetch.window
    worker.rates.set("t", "10/s")
    worker.admit(30)
    assert worker.prefetch.window == base + 29
    worker.timer.advance(10)
    assert worker.prefetch.window == base
    assert len(worker.ran) == 30


def test_a_lifted_limit_lets_all_parked_tasks_run_at_once() -> None:
    worker = FakeWorker()
    worker.rates.set("t", "1/h")
    worker.admit(50)
    worker.rates.set("t", None)
    assert len(worker.ran) == 50
    assert worker.prefetch.parked == 0


def test_a_new_limit_applies_to_what_is_parked_at_once() -> None:
    worker = FakeWorker()
    worker.rates.set("t", "1/h")
    worker.admit(11)
    worker.rates.set("t", "10/s")
    worker.timer.advance(1.0)
    assert len(worker.ran) == 11


def test_beyond_the_bound_tasks_go_back_to_their_queue() -> None:
    worker = FakeWorker(parked_max=3)
    worker.rates.set("t", "1/h")
    worker.admit(10)
    assert worker.returned == []
    worker.timer.advance(0.1)
    assert len(worker.returned) == 6
    assert worker.rates.given_back == 6
    assert worker.prefetch.parked == 3


def test_a_limit_that_was_set_at_run_time_outlives_the_first_message_of_its_type() -> None:
    worker = FakeWorker()
    worker.rates.set("t", "1/m")
    worker.rates.begin("t", "100/s")
    assert worker.rates.lanes["t"].bucket.rate == pytest.approx(1 / 60)


def test_clearing_forgets_what_is_parked_and_its_timers() -> None:
    worker = FakeWorker()
    worker.rates.set("t", "1/s")
    worker.admit(4)
    assert len(worker.rates.clear()) == 3
    worker.timer.advance(10)
    assert len(worker.ran) == 1
    assert worker.prefetch.parked == 0


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
