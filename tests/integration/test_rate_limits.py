"""Rate limits end to end: other types flow, changes apply at once, nothing is lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.inside import Inside, percentile
from tests.servers import RabbitMQServer, RedisServer, wait_until
from umbel import Umbel


class Notes:
    """A limited task and one that is not."""

    def __init__(self) -> None:
        self.slow: list[Any] = []
        self.quick: dict[Any, float] = {}

    def __call__(self, app: Umbel) -> None:
        @app.task(name="slow", rate_limit="1/h")
        def slow(value: Any) -> None:
            self.slow.append(value)

        @app.task(name="quick")
        def quick(value: Any) -> None:
            self.quick[value] = time.monotonic()


Make = Callable[..., tuple[Inside, Notes]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Inside] = []

    def start(url: str, **settings: Any) -> tuple[Inside, Notes]:
        notes = Notes()
        inside = Inside({"broker_url": url, "result_backend": "disabled://", **settings}, notes)
        made.append(inside)
        return inside.start(), notes

    yield start
    for inside in made:
        inside.close()


@pytest.fixture
def length_of(redis_server: RedisServer, request: pytest.FixtureRequest) -> Callable[[str], int]:
    def length(url: str) -> int:
        own = url.rsplit("/", 1)[1]
        if url.startswith("redis"):
            return int(redis_server.client(int(own)).llen("celery"))
        server: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
        return server.queue_length("celery", own)

    return length


def send_slow(inside: Inside, count: int) -> None:
    inside.client.send_many([inside.client.signature("slow", (n,)) for n in range(count)])


def test_five_hundred_parked_tasks_do_not_delay_another_type(broker_url: str, make: Make) -> None:
    inside, notes = make(broker_url)
    rates = inside.worker.rates
    send_slow(inside, 501)
    wait_until(lambda: rates.parked_count == 500, 20, "the parked tasks")
    waits_s = []
    for n in range(30):
        began = time.monotonic()
        inside.send("quick", n)
        wait_until(lambda n=n: n in notes.quick, what="the other type")
        waits_s.append(notes.quick[n] - began)
    assert percentile(waits_s, 0.9) < 0.1, waits_s
    assert notes.slow == [0]
    assert inside.worker.prefetch.window == inside.worker.prefetch.base + 500


def test_another_type_behind_limited_ones_is_reached(broker_url: str, make: Make) -> None:
    inside, notes = make(broker_url)
    slow, quick = inside.client.signature("slow", (0,)), inside.client.signature("quick", ("q",))
    inside.client.send_many([*(slow.clone() for _ in range(300)), quick])
    wait_until(lambda: "q" in notes.quick, 10, "the last of the queue")
    assert inside.worker.rates.parked_count == 299


def test_a_new_limit_applies_at_once_to_what_is_parked(broker_url: str, make: Make) -> None:
    inside, notes = make(broker_url)
    rates = inside.worker.rates
    send_slow(inside, 41)
    wait_until(lambda: rates.parked_count == 40, what="the parked tasks")
    inside.call(lambda: rates.set("slow", "100/s"))
    began = time.monotonic()
    wait_until(lambda: len(notes.slow) == 41, what="all of them at the new rate")
    assert 0.3 < time.monotonic() - began < 5
    inside.call(lambda: rates.set("slow", "1/h"))
    send_slow(inside, 10)
    wait_until(lambda: rates.parked_count == 9, what="parked again")
    inside.call(lambda: rates.set("slow", 0))
    wait_until(lambda: len(notes.slow) == 51, 2, "all of them without a limit")
    wait_until(lambda: not inside.worker.tally.reserved, what="nothing left over")
    assert inside.worker.prefetch.window == inside.worker.prefetch.base


def test_tasks_beyond_the_bound_go_back_and_none_is_lost(broker_url: str, make: Make) -> None:
    inside, notes = make(broker_url, worker_parked_task_limit=5)
    rates = inside.worker.rates
    send_slow(inside, 60)
    wait_until(lambda: rates.given_back > 60, 20, "tasks that went back")
    assert rates.parked_count == 5
    for n in range(5):
        inside.send("quick", n)
    wait_until(lambda: len(notes.quick) == 5, 10, "the other type")
    held = [inside.worker.prefetch.held for _ in range(20)]
    assert max(held) <= 60
    inside.call(lambda: rates.set("slow", None))
    wait_until(lambda: len(notes.slow) >= 60, 20, "all of them")
    wait_until(lambda: not inside.worker.tally.reserved, what="nothing left over")
    assert Counter(notes.slow) == Counter(range(60))
    assert inside.worker.prefetch.window == inside.worker.prefetch.base


def test_a_stopping_worker_gives_parked_tasks_back(
    broker_url: str, make: Make, length_of: Callable[[str], int]
) -> None:
    inside, notes = make(broker_url)
    send_slow(inside, 51)
    wait_until(lambda: inside.worker.rates.parked_count == 50, what="the parked tasks")
    wait_until(lambda: notes.slow == [0], what="the first one")
    assert inside.stop() == 0
    wait_until(lambda: length_of(broker_url) == 50, what="fifty in the queue")
