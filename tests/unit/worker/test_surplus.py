"""Beyond the bound of parked tasks: when they go back, when a queue rests, and for how long."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.asynchronous.timer import Timer as KombuTimer

from umbel.wire.tasks import TaskHeader
from umbel.worker.delivery.effects import Delivery
from umbel.worker.delivery.limits import RateLimits
from umbel.worker.delivery.prefetch import Prefetch
from umbel.worker.delivery.surplus import LONG_S, RETURNS_PER_S, ROOM_MIN, SHORT_S, Round


def made(name: str, number: int, queue: str) -> Delivery:
    """A delivery of one type of task; its message is the name of the queue."""
    policy: Any = SimpleNamespace(name=name)
    return Delivery(policy, queue, TaskHeader(task=name, id=f"{name}-{number}"))


class Site:
    """The effects of a worker with queues; a message that goes back goes to the tail."""

    def __init__(self, parked_max: int, lasting: bool = True) -> None:
        self.now = 0.0
        self.timer = ManualTimer(self)
        self.prefetch = Prefetch(2, 4)
        self.ran: list[Delivery] = []
        self.taken_count = 0
        self.queues: dict[str, deque[Delivery]] = {}
        self.stopped: set[str] = set()
        self.lasting = lasting
        self.call_after = self.timer.call_after
        effects: Any = self
        self.rates = RateLimits(self, effects, self.prefetch, parked_max, lambda: self.now)
        self.surplus = self.rates.surplus

    # where deliveries go from the limits
    def make_ready(self, delivery: Delivery) -> None:
        self.ran.append(delivery)

    judge_again = make_ready

    def return_behind(self, delivery: Delivery) -> None:
        self.queues[delivery.message].append(delivery)

    # effects
    def surplus_returned(self, parked_max: int) -> None:
        """Nobody reads the log."""

    def queue_of(self, message: Any) -> str:
        return str(message)

    origin_of = queue_of

    def can_rest(self, name: str) -> bool:
        return self.lasting

    def rest(self, name: str) -> None:
        self.stopped.add(name)

    def resume(self, name: str) -> None:
        self.stopped.discard(name)

    def length_of(self, name: str) -> int:
        return len(self.queues[name])

    # what a test does
    def send(self, name: str, count: int, queue: str = "q", start: int = 0) -> None:
        own = self.queues.setdefault(queue, deque())
        for number in range(start, start + count):
            own.append(made(name, number, queue))

    def work(self, seconds: float, per_s: int = 2_000) -> None:
        """Let time pass: messages are taken one by one, timers run when they are due."""
        for _ in range(int(seconds * per_s)):
            for name, own in self.queues.items():
                if own and name not in self.stopped:
                    self.taken_count += 1
                    delivery = own.popleft()
                    self.rates.admit(delivery.policy.name, delivery)
            self.now += 1 / per_s
            self.timer.run()

    def names(self) -> list[str]:
        return [one.policy.name for one in self.ran]


class ManualTimer:
    """kombu's timer, whose time is the site's."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.entries: list[tuple[float, int, Any]] = []
        self.count = 0

    def call_after(self, wait_s: float, call: Any, *args: Any) -> Any:
        entry = KombuTimer.Entry(call, args)
        self.count += 1
        self.entries.append((self.site.now + wait_s, self.count, entry))
        return entry

    def run(self) -> None:
        due = sorted(item for item in self.entries if item[0] <= self.site.now)
        for item in due:
            self.entries.remove(item)
            if not item[2].canceled:
                item[2]()


def site_with(count: int, parked_max: int = 100, **options: Any) -> Site:
    site = Site(parked_max, **options)
    site.rates.set("slow", 1 / 3600)
    site.send("slow", count)
    return site


def test_what_has_room_beside_the_bound_goes_back_from_time_to_time_and_delays_nobody() -> None:
    site = site_with(150)
    site.work(1)
    assert site.rates.given_back > 0
    site.work(10)
    before = site.taken_count
    site.work(60)
    assert site.taken_count - before <= 60 * RETURNS_PER_S, "no more often than it may cost"
    assert site.taken_count > before, "another worker may have a place for them"
    site.send("quick", 1)
    site.work(0.1)
    assert site.names()[-1] == "quick"
    assert not site.stopped


def test_a_long_queue_is_gone_through_in_order_and_then_rests() -> None:
    site = site_with(1_000)
    site.send("quick", 1)
    site.work(0.6)
    assert site.names() == ["slow", "quick"]
    site.work(2)
    assert site.stopped == {"q"}
    assert len(site.queues["q"]) == 899
    assert site.rates.parked_count == site.prefetch.parked == 100


def test_an_idle_queue_is_gone_through_no_more_often_than_it_may_cost() -> None:
    site = site_with(1_000)
    site.work(10)
    before = site.taken_count
    site.work(100)
    assert 0 < site.taken_count - before <= 1.3 * 100 * RETURNS_PER_S


def test_a_rest_ends_when_something_comes() -> None:
    site = site_with(1_000)
    site.work(10)
    assert site.stopped
    for number in range(3):
        site.send("quick", 1, start=number)
        site.work(1.5)
        assert site.names().count("quick") == number + 1
        site.work(1)
        assert site.stopped, "nothing is left that was not seen"


def test_more_of_the_same_makes_it_less_curious() -> None:
    site = site_with(1_000)
    site.work(10)
    taken = []
    for number in range(60):
        site.send("slow", 1, start=1_000 + number)
        before = site.taken_count
        site.work(1)
        taken.append(site.taken_count - before)
    assert sum(taken[:10]) > sum(taken[-20:-10]), "it looks ever less often"
    assert sum(taken[20:]) <= 2 * 40 * RETURNS_PER_S


def test_another_queue_does_not_rest_with_it() -> None:
    site = site_with(1_000)
    site.send("quick", 1, queue="other")
    site.work(10)
    assert site.stopped == {"q"}
    site.send("quick", 5, queue="other", start=1)
    site.work(0.1)
    assert site.names().count("quick") == 6
    assert site.stopped == {"q"}


def test_each_queue_has_rounds_of_its_own() -> None:
    site = site_with(1_000)
    site.send("slow", 20, queue="short")
    site.send("quick", 1)
    site.work(2)
    assert "quick" in site.names(), "the short one ended the round of the long one"


def test_a_changed_limit_ends_the_rest_and_lets_all_run() -> None:
    site = site_with(1_000)
    site.work(10)
    assert site.stopped
    site.rates.set("slow", None)
    site.work(1)
    assert len(site.ran) == 1_000
    assert site.prefetch.parked == 0
    assert site.rates.parked_count == 0


def test_another_type_that_comes_for_the_first_time_ends_no_rest() -> None:
    site = site_with(1_000)
    site.work(10)
    before = site.taken_count
    site.rates.begin("quick", None)
    site.work(0.5)
    assert site.stopped
    assert site.taken_count == before


def test_a_fast_limit_is_used_to_the_full_in_spite_of_rests() -> None:
    site = Site(100)
    site.rates.set("slow", 100.0)
    site.send("slow", 2_000)
    site.work(20.5)
    assert len(site.ran) == 2_000


def test_a_queue_that_would_be_deleted_does_not_rest() -> None:
    site = site_with(1_000, lasting=False)
    site.work(5)
    assert not site.stopped
    site.send("quick", 1)
    site.work(1)
    assert site.names()[-1] == "quick"


def test_nothing_is_left_over_when_the_surplus_has_run() -> None:
    site = Site(20)
    site.rates.set("slow", 200.0)
    site.send("slow", 300)
    site.work(3)
    assert len(site.ran) == 300
    assert len(site.surplus) == 0
    assert site.surplus.rounds == {}
    assert site.prefetch.window == site.prefetch.base
    site.work(LONG_S)
    assert [item for item in site.timer.entries if not item[2].canceled] == []


@pytest.mark.parametrize("seconds", [0.2, 10])
def test_clearing_forgets_the_surplus_and_its_rests(seconds: float) -> None:
    site = site_with(1_000)
    site.work(seconds)
    waiting = site.rates.clear()
    assert len(waiting) + len(site.queues["q"]) + len(site.ran) == 1_000
    assert site.prefetch.parked == 0
    assert not site.surplus.is_resting
    taken = site.taken_count
    site.stopped.clear()
    site.work(1)
    assert site.taken_count > taken


def test_a_bound_of_none_still_lets_tasks_run_at_their_rate() -> None:
    site = Site(0)
    site.rates.set("slow", 50.0)
    site.send("slow", 100)
    site.work(4)
    assert len(site.ran) == 100
    assert site.surplus.room == ROOM_MIN


def test_a_rest_is_as_long_as_going_round_may_cost_and_no_shorter_than_a_moment() -> None:
    one = Round()
    one.returned_count = 1_000
    one.end(0.0, found=False)
    assert one.until == 1_000 / RETURNS_PER_S
    assert one.not_before == SHORT_S
    one.returned_count = 1
    one.end(0.0, found=False)
    assert one.until == LONG_S


def test_parked_and_surplus_requests_can_be_taken_out_and_no_longer_count() -> None:
    site = site_with(110)
    site.work(0.056)  # before the surplus goes back
    waiting = site.rates.waiting()
    parked, surplus = waiting[0], waiting[-1]
    assert (site.rates.parked_count, len(site.surplus)) == (100, 9)
    taken = site.rates.take_out({id(parked), id(surplus), id(object())})
    assert taken == [id(parked), id(surplus)]
    assert parked not in site.rates.waiting()
    assert surplus not in site.rates.waiting()
    assert (site.rates.parked_count, len(site.surplus)) == (100, 7), "one has moved up"
    assert site.prefetch.parked == 107
    rest = site.rates.take_out({id(one) for one in waiting})
    assert len(rest) == 107
    assert (site.rates.parked_count, len(site.surplus), site.prefetch.parked) == (0, 0, 0)
