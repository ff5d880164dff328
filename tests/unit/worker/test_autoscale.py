"""The autoscaler: grows with the work at once, shrinks when slots were idle for long."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from umbel.worker.runtime.autoscale import KEEP_S, Autoscaler


class Pool:
    size = 2


class FakeWorker:
    """What the autoscaler needs of a worker."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.deliveries = SimpleNamespace(reserved={}, prefetch=SimpleNamespace(held=0, parked=0))
        self.now = 1_000.0
        self._keys = itertools.count()

    def grow(self, n: int) -> None:
        self.pool.size += n

    def shrink(self, n: int) -> None:
        self.pool.size -= n
        assert self.pool.size >= 1

    def work(self, count: int) -> None:
        """So many tasks are at hand, running or waiting."""
        self.deliveries.reserved = {next(self._keys): object() for _ in range(count)}


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def scaler(worker: FakeWorker) -> Autoscaler:
    return made(worker)


def made(worker: Any, most: int = 8, least: int = 2) -> Autoscaler:
    return Autoscaler(worker, most, least, clock=lambda: worker.now)


def look(scaler: Autoscaler, worker: FakeWorker, seconds: float = 1.0) -> int:
    worker.now += seconds
    scaler.look()
    return worker.pool.size


def test_it_grows_to_what_is_needed_at_once_and_no_further_than_allowed(
    scaler: Autoscaler, worker: FakeWorker
) -> None:
    worker.work(5)
    assert look(scaler, worker) == 5
    worker.work(100)
    assert look(scaler, worker) == 8


def test_it_shrinks_one_by_one_after_a_while_and_not_below_the_least(
    scaler: Autoscaler, worker: FakeWorker
) -> None:
    worker.work(8)
    look(scaler, worker)
    worker.work(0)
    sizes = [look(scaler, worker) for _ in range(int(KEEP_S) + 10)]
    kept, shrinking = sizes[: int(KEEP_S) - 1], sizes[int(KEEP_S) - 1 :]
    assert set(kept) == {8}
    assert shrinking[:6] == [7, 6, 5, 4, 3, 2]
    assert set(shrinking[6:]) == {2}


def test_slots_that_are_needed_now_and_then_are_kept(
    scaler: Autoscaler, worker: FakeWorker
) -> None:
    for second in range(200):
        worker.work(6 if second % 20 == 0 else 1)
        size = look(scaler, worker)
        assert size == 6


def test_tasks_that_wait_for_their_time_need_no_slot(
    scaler: Autoscaler, worker: FakeWorker
) -> None:
    worker.work(7)
    worker.deliveries.prefetch.held, worker.deliveries.prefetch.parked = 4, 2
    assert look(scaler, worker) == 2
    assert scaler.info() == {"max": 8, "min": 2, "current": 2, "qty": 1}


def test_new_bounds_apply_at_once(scaler: Autoscaler, worker: FakeWorker) -> None:
    worker.work(8)
    look(scaler, worker)
    assert scaler.update(5, None) == (5, 2)
    assert worker.pool.size == 5
    assert scaler.update(None, 7) == (7, 7)
    assert worker.pool.size == 7
    assert scaler.update(3, None) == (3, 3)
    assert worker.pool.size == 3
    assert look(scaler, worker) == 3


@pytest.mark.parametrize("bounds", [(0, 0), (1, 2), (5, 0), (-3, -4)])
def test_bounds_that_make_no_sense_are_refused_and_change_nothing(
    scaler: Autoscaler, worker: FakeWorker, bounds: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match="give 1 <= min <= max"):
        scaler.update(*bounds)
    assert (scaler.most, scaler.least, worker.pool.size) == (8, 2, 2)


def test_the_size_never_leaves_its_bounds_whatever_happens(worker: FakeWorker) -> None:
    dice = random.Random(4)
    scaler = made(worker, 6, 2)
    for _ in range(5_000):
        if dice.random() < 0.02:
            least = dice.randint(1, 6)
            scaler.update(dice.randint(least, 12), least)
        worker.work(dice.choice([0, 0, 1, 3, 20]))
        size = look(scaler, worker, dice.choice([1.0, 1.0, 40.0]))
        assert scaler.least <= size <= scaler.most
