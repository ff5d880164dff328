"""The prefetch window on real brokers: how many messages a worker really holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Exchange, Queue

from tests.inside import Inside
from tests.servers import wait_until
from umbel import Umbel
from umbel.worker.delivery.prefetch import AMQP_WINDOW_MAX, CREDIT_STEP

HOUR_S = 3600


class Gates:
    """Tasks that wait until they are let go, one by one."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.ran: list[Any] = []

    def __call__(self, app: Umbel) -> None:
        @app.task(name="early")
        def early(value: Any = None) -> None:
            self.gate.acquire(timeout=30)
            self.ran.append(value)

        @app.task(name="late", acks_late=True)
        def late(value: Any = None) -> None:
            self.gate.acquire(timeout=30)
            self.ran.append(value)

        @app.task(name="note")
        def note(value: Any) -> None:
            self.ran.append(value)


Make = Callable[..., tuple[Inside, Gates]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[tuple[Inside, Gates]] = []

    def start(url: str, concurrency: int, multiplier: int, **settings: Any) -> tuple[Inside, Gates]:
        gates = Gates()
        inside = Inside(
            {"broker_url": url, "result_backend": "disabled://", **settings},
            gates,
            concurrency=concurrency,
            prefetch_multiplier=multiplier,
        )
        made.append((inside, gates))
        return inside.start(), gates

    yield start
    for inside, gates in made:
        gates.gate.release(1000)
        inside.close()


def told(inside: Inside) -> int:
    """The window that the broker knows."""
    prefetch = inside.worker.deliveries.prefetch
    wait_until(lambda: not prefetch.is_due, what="the broker to be told")
    return inside.call(lambda: prefetch.window)


def settles_at(read: Callable[[], int], value: int) -> None:
    """It comes to the value, and a moment later it is still there."""
    wait_until(lambda: read() == value, what=f"{value}, not {read()}")
    for _ in range(20):
        threading.Event().wait(0.01)
        assert read() == value


def test_a_worker_holds_exactly_its_window_and_follows_its_pool(
    broker_url: str, make: Make
) -> None:
    inside, _ = make(broker_url, 2, 2)
    inside.client.send_many([inside.client.signature("late") for _ in range(30)])
    counters = inside.worker.counters
    settles_at(lambda: counters.received, 4)
    inside.call(lambda: inside.worker.grow(2))
    settles_at(lambda: counters.received, 8)
    assert told(inside) == inside.worker.deliveries.prefetch.base == 8
    inside.call(lambda: inside.worker.shrink(3))
    assert told(inside) == inside.worker.deliveries.prefetch.base == 2


def test_tasks_with_an_eta_widen_the_window_up_to_their_limit(broker_url: str, make: Make) -> None:
    inside, gates = make(broker_url, 2, 2, worker_eta_task_limit=10)
    for n in range(7):
        inside.send("note", n, countdown=HOUR_S)
    inside.send("note", "now")
    wait_until(lambda: gates.ran == ["now"], what="the task behind them")
    assert told(inside) == 4 + 7
    for n in range(20):
        inside.send("note", n, countdown=HOUR_S)
    settles_at(lambda: inside.worker.deliveries.prefetch.held, 4 + 10)
    assert told(inside) == 4 + 10


@pytest.mark.slow
def test_more_held_tasks_than_amqp_can_count_starve_no_other_task(
    broker_url: str, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    inside, gates = make(broker_url, 2, 2)
    prefetch, client = inside.worker.deliveries.prefetch, inside.client
    held = 0
    for count in (AMQP_WINDOW_MAX - 10, 2_000):
        for _ in range(0, count, 1_000):
            client.send_many([client.signature("note", (0,), countdown=HOUR_S)] * 1_000)
            held += 1_000
        wait_until(lambda: prefetch.held == held, 60, "the held tasks")  # noqa: B023
        gates.ran.clear()
        for n in range(5):
            inside.send("note", n)
        wait_until(lambda: len(gates.ran) == 5, what="the tasks that could run")
    # No more than a bounded number is taken ahead of other workers.
    client.send_many([client.signature("late", (n,)) for n in range(3_000)])
    taken = inside.worker.deliveries.reserved
    wait_until(lambda: len(taken) > held, what="tasks that run")
    settles_at(lambda: len(taken) - held <= 2 * prefetch.base + CREDIT_STEP, True)
    lines = [line for line in caplog.messages if "AMQP can express" in line]
    assert len(lines) == broker_url.startswith("amqp")
    assert inside.worker.counters.connections_lost == 0


def test_after_a_break_the_window_is_reduced_and_grows_back_exactly(
    broker_url: str, make: Make
) -> None:
    inside, gates = make(broker_url, 4, 3)
    for n in range(3):
        inside.send("early", n)
    wait_until(lambda: len(inside.worker.deliveries.active) == 3, what="three running tasks")
    assert told(inside) == 12
    inside.break_connection()
    windows = [told(inside)]
    for n in range(3):
        gates.gate.release()
        wait_until(
            lambda n=n: inside.worker.deliveries.prefetch.debtors == 2 - n, what="the end of a task"
        )
        windows.append(told(inside))
    assert windows == [3, 6, 9, 12]
    assert inside.worker.deliveries.active == inside.worker.deliveries.reserved == {}
    assert sorted(gates.ran) == [0, 1, 2]


def test_what_was_held_before_a_break_is_held_once_after_it(broker_url: str, make: Make) -> None:
    inside, gates = make(broker_url, 2, 2)
    for n in range(5):
        inside.send("note", n, countdown=HOUR_S)
    prefetch = inside.worker.deliveries.prefetch
    wait_until(lambda: prefetch.held == 5, what="the held ones")
    for _ in range(3):
        inside.break_connection()
        wait_until(lambda: prefetch.held == 5, what="the held ones again")
    settles_at(lambda: prefetch.held, 5)
    assert told(inside) == 4 + 5
    assert len(inside.worker.deliveries.reserved) == 5
    assert gates.ran == []


def test_a_second_break_does_not_count_a_task_twice(broker_url: str, make: Make) -> None:
    inside, gates = make(broker_url, 4, 3)
    inside.send("early")
    wait_until(lambda: inside.worker.deliveries.active, what="a running task")
    for _ in range(3):
        inside.break_connection()
        assert told(inside) == 9
    gates.gate.release()
    wait_until(lambda: told(inside) == 12, what="the whole window")


def test_the_reduction_can_be_switched_off(redis_url: str, make: Make) -> None:
    inside, _ = make(redis_url, 4, 3, worker_enable_prefetch_count_reduction=False)
    inside.send("early")
    wait_until(lambda: inside.worker.deliveries.active, what="a running task")
    inside.break_connection()
    assert told(inside) == 12


def quorum(name: str, kind: str) -> Queue:
    return Queue(
        name,
        Exchange(f"{name}-{kind}", type=kind),
        routing_key=name,
        queue_arguments={"x-queue-type": "quorum"},
    )


def test_quorum_queues_have_a_window_per_consumer(amqp_url: str, make: Make) -> None:
    """A direct exchange: tasks with an eta wait in the worker, whose window has to grow."""
    queues = [quorum("jobs", "direct")]
    inside, gates = make(amqp_url, 2, 2, task_queues=queues, task_default_queue="jobs")
    inside.client.send_many([inside.client.signature("late", (n,)) for n in range(12)])
    settles_at(lambda: inside.worker.counters.received, 4)
    gates.gate.release(12)
    wait_until(lambda: len(gates.ran) == 12, 20, "the tasks")
    wait_until(lambda: not inside.worker.deliveries.reserved, what="their acknowledgements")
    for n in range(20):
        inside.send("note", n, countdown=HOUR_S)
    settles_at(lambda: inside.worker.deliveries.prefetch.held, 20)
    assert told(inside) == 4 + 20
    inside.send("note", "now")
    wait_until(lambda: "now" in gates.ran, what="the task behind them")
    assert sorted(gates.ran[:12]) == list(range(12)), "none was lost or run twice on the way"
    assert inside.worker.counters.connections_lost == 0
