"""The window: computed from what exists, told when it is due."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.worker.delivery.prefetch import AMQP_WINDOW_MAX, Limit, Prefetch

counts = st.integers(0, 200)


@given(st.integers(1, 64), st.integers(1, 16), counts, counts, st.integers(0, 64))
def test_the_window_is_what_the_formula_says(
    concurrency: int, multiplier: int, held: int, parked: int, debtors: int
) -> None:
    prefetch = Prefetch(concurrency, multiplier)
    prefetch.held, prefetch.parked, prefetch.debtors = held, parked, debtors
    base = concurrency * multiplier
    assert prefetch.window == max(multiplier, base - debtors * multiplier) + held + parked
    prefetch.held = prefetch.parked = prefetch.debtors = 0
    assert prefetch.window == prefetch.base == base


def test_tasks_from_before_a_break_reduce_the_window_until_they_end() -> None:
    prefetch = Prefetch(4, 5)
    windows = []
    for debtors in (0, 1, 3, 4, 9, 4, 3, 1, 0):
        prefetch.debtors = debtors
        windows.append(prefetch.window)
    assert windows == [20, 15, 5, 5, 5, 5, 5, 15, 20]


def test_held_tasks_widen_the_window_up_to_their_limit_and_parked_ones_beyond_it() -> None:
    prefetch = Prefetch(2, 4, held_max=3)
    prefetch.held = 2
    assert prefetch.window == 10
    prefetch.held = 50
    assert prefetch.window == 11
    prefetch.parked = 7
    assert prefetch.window == 18


def test_a_limit_of_none_held_tasks_is_a_limit() -> None:
    prefetch = Prefetch(2, 4, held_max=0)
    prefetch.held = 50
    assert prefetch.window == 8


def test_the_window_follows_the_concurrency() -> None:
    prefetch = Prefetch(2, 4)
    prefetch.held = 1
    prefetch.concurrency = 5
    assert (prefetch.base, prefetch.window) == (20, 21)


def test_no_multiplier_means_no_limit_whatever_is_held() -> None:
    prefetch = Prefetch(2, 0)
    prefetch.held, prefetch.debtors = 5, 2
    assert prefetch.window == 0


def test_a_window_wider_than_the_broker_can_express_becomes_credit_of_consumers() -> None:
    prefetch, sent = Prefetch(1, 1), []
    prefetch.window_max = AMQP_WINDOW_MAX
    prefetch.held = AMQP_WINDOW_MAX - 1
    prefetch.apply(sent.append)
    prefetch.held += 1
    prefetch.apply(sent.append)
    assert sent == [Limit(AMQP_WINDOW_MAX), Limit(501, per_consumer=True)]
    prefetch.held = 0
    prefetch.apply(sent.append)
    assert sent[2:] == [Limit(1)]


def test_a_base_wider_than_the_broker_can_express_is_cut() -> None:
    prefetch, sent = Prefetch(1_000, 1_000), []
    prefetch.window_max = AMQP_WINDOW_MAX
    prefetch.apply(sent.append)
    prefetch.held += 5
    prefetch.apply(sent.append)
    assert sent == [Limit(AMQP_WINDOW_MAX)] * 2


def test_credit_respects_the_limit_of_held_tasks() -> None:
    prefetch, sent = Prefetch(1, 1, held_max=70_000), []
    prefetch.window_max = AMQP_WINDOW_MAX
    prefetch.held = 69_999
    prefetch.apply(sent.append)
    prefetch.held += 1
    for _ in range(501):
        prefetch.hold(Waits())
    assert not prefetch.is_due


class Waits:
    era = 0


class ModelBroker:
    """A queue without end, and what RabbitMQ lets through: by channel or by consumer."""

    def __init__(self, concurrency: int, multiplier: int) -> None:
        self.prefetch = Prefetch(concurrency, multiplier)
        self.prefetch.count_taken = lambda: len(self.unsettled)
        self.limit = Limit(0)
        self.consumer = 0
        self.unsettled: list[tuple[str, int, Waits]] = []  # kind, consumer, message

    def set_limit(self, limit: Limit) -> None:
        if limit.per_consumer or self.limit.per_consumer:
            self.consumer += 1
        self.limit = limit

    def has_room(self) -> bool:
        if not self.limit.per_consumer:
            return len(self.unsettled) < self.limit.count
        mine = sum(consumer == self.consumer for _, consumer, _ in self.unsettled)
        return mine < self.limit.count

    def deliver(self, kind: str) -> None:
        message = Waits()
        self.unsettled.append((kind, self.consumer, message))
        {"hold": self.prefetch.hold, "park": self.prefetch.park, "run": lambda _: None}[kind](
            message
        )

    def settle(self, place: int) -> None:
        kind, _, message = self.unsettled.pop(place % len(self.unsettled))
        ends = {"hold": self.prefetch.unhold, "park": self.prefetch.unpark, "run": lambda _: None}
        ends[kind](message)

    @property
    def can_run(self) -> int:
        return sum(kind == "run" for kind, _, _ in self.unsettled)


def moves(dice: Random) -> Iterator[str]:
    """Stretches in which one kind of move is frequent, so that the window widens and narrows."""
    kinds = ["hold", "park", "run", "settle", "grow"]
    for frequent in dice.choices(kinds[:4], k=8):
        yield from dice.choices([*kinds, *[frequent] * 8], k=dice.randrange(60))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32))
def test_no_number_of_waiting_messages_starves_the_others_and_few_are_taken_too_many(
    concurrency: int, multiplier: int, seed: int
) -> None:
    dice = Random(seed)
    broker = ModelBroker(concurrency, multiplier)
    prefetch = broker.prefetch
    prefetch.window_max, prefetch.credit_step = 30, 5
    widest = prefetch.own
    for move in moves(dice):
        if move == "settle" and broker.unsettled:
            broker.settle(dice.randrange(1_000))
        elif move == "grow":
            prefetch.concurrency = 1 + prefetch.concurrency % 5
        widest = max(widest, prefetch.own)
        while prefetch.is_due:
            prefetch.apply(broker.set_limit)
        if move in ("hold", "park", "run"):
            if broker.has_room():
                broker.deliver(move)
            else:
                assert broker.can_run >= prefetch.own, "a message that could run is kept out"
        assert broker.can_run <= 2 * widest + prefetch.credit_step
    while broker.unsettled:
        broker.settle(0)
    prefetch.apply(broker.set_limit)
    assert broker.limit == Limit(prefetch.base)


def test_the_broker_is_told_once_for_many_changes_and_not_at_all_for_none() -> None:
    prefetch, sent = Prefetch(2, 4), []
    prefetch.apply(sent.append)
    for _ in range(100):
        prefetch.held += 1
    for _ in range(40):
        prefetch.held -= 1
    prefetch.apply(sent.append)
    prefetch.apply(sent.append)
    prefetch.held += 1
    prefetch.held -= 1
    assert not prefetch.is_due
    prefetch.apply(sent.append)
    assert sent == [Limit(8), Limit(68)]


def test_a_new_channel_is_told_even_what_the_old_one_knew() -> None:
    prefetch, sent = Prefetch(2, 4), []
    prefetch.apply(sent.append)
    prefetch.forget_sent()
    assert prefetch.is_due
    prefetch.apply(sent.append)
    assert sent == [Limit(8), Limit(8)]


def test_a_change_that_could_not_be_told_stays_due() -> None:
    prefetch = Prefetch(2, 4)

    def broken(limit: Limit) -> None:
        raise ConnectionError(limit)

    with pytest.raises(ConnectionError):
        prefetch.apply(broken)
    assert prefetch.is_due
