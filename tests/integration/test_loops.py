"""The two loops: one suite for asynloop and synloop, on both brokers."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.inside import Inside, Times, percentile
from tests.servers import wait_until
from umbel import Umbel
from umbel.worker.runtime.loops import BUSY_TURN_S

LOOPS = ["asynloop", "synloop"]


class Bench:
    """A worker with tasks that write down when they ran."""

    def __init__(self, url: str, loop: str) -> None:
        self.loop = loop
        self.ran: list[Any] = []
        self.ends = Times()
        self.gate = threading.Event()
        self.inside = Inside(
            {"broker_url": url, "result_backend": "disabled://"},
            self._tasks,
            sync=loop == "synloop",
            prefetch_multiplier=4,
        )

    def _tasks(self, app: Umbel) -> None:
        @app.task(name="note")
        def note(value: Any) -> None:
            self.ran.append((value, time.time()))

        @app.task(name="late", acks_late=True)
        def late() -> None:
            self.gate.wait(20)
            self.ends.now()

        @app.task(name="early")
        def early() -> None:
            self.gate.wait(20)

        @app.task(name="noop")
        def noop() -> None:
            pass


@pytest.fixture(params=LOOPS)
def bench(broker_url: str, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(broker_url, request.param)
    yield made
    made.gate.set()
    made.inside.close()


def test_tasks_run_and_the_worker_ends(bench: Bench) -> None:
    inside = bench.inside.start()
    for number in range(50):
        inside.send("note", number)
    wait_until(lambda: len(bench.ran) == 50, 20, "fifty tasks")
    assert sorted(value for value, _ in bench.ran) == list(range(50))
    wait_until(lambda: not inside.worker.deliveries.reserved, what="nothing left over")
    assert inside.stop() == 0


def test_a_task_with_an_eta_runs_when_it_is_due(bench: Bench) -> None:
    inside = bench.inside.start()
    due = datetime.now(UTC) + timedelta(seconds=1.0)
    for _ in range(5):
        inside.send("note", "eta", eta=due)
    wait_until(lambda: len(bench.ran) == 5, what="the tasks")
    late_s = [when - due.timestamp() for _, when in bench.ran]
    assert min(late_s) >= 0
    assert statistics.median(late_s) < 0.25
    wait_until(lambda: inside.call(lambda: inside.worker.deliveries.prefetch.held) == 0)


def test_what_a_pool_thread_reports_wakes_an_idle_loop(bench: Bench) -> None:
    """The message of a late-acknowledged task is settled at once, with nothing else going on."""
    acks = Times()

    def watch(message: Any) -> None:
        settle = message.ack

        def ack(*args: Any, **options: Any) -> None:
            settle(*args, **options)
            acks.now()

        message.ack = ack

    inside = bench.inside
    inside.worker.on_task_message.append(watch)
    inside.start()
    for number in range(1, 8):
        bench.gate.clear()
        inside.send("late")
        wait_until(lambda: inside.worker.deliveries.active, what="the task to begin")
        bench.gate.set()
        acks.wait(number)
    gaps_s = [ack - end for ack, end in zip(acks.all, bench.ends.all, strict=True)]
    limit_s = 0.1 if bench.loop == "asynloop" else BUSY_TURN_S + 0.05
    assert statistics.median(gaps_s) < limit_s, gaps_s


def test_acks_are_out_before_a_full_worker_waits_for_an_end(amqp_url: str) -> None:
    """Else they would be lost with the connection, and tasks would run twice."""
    bench = Bench(amqp_url, "synloop")
    inside, unsent = bench.inside, []
    wait = inside.worker.inbox.wait

    def watched(timeout_s: float) -> None:
        unsent.append(len(inside.worker.consumer.connection.connection.gathering))
        wait(timeout_s)

    inside.worker.inbox.wait = watched  # type: ignore[method-assign]
    try:
        inside.start()
        for _ in range(2):
            inside.send("early")
        wait_until(lambda: len(inside.worker.deliveries.active) == 2, what="both to begin")
        wait_until(lambda: len(unsent) > 3, what="a few waits")
        assert set(unsent) == {0}
    finally:
        bench.gate.set()
        inside.close()


def test_posted_work_runs_in_the_order_in_which_it_came(bench: Bench) -> None:
    inside = bench.inside.start()
    seen: list[tuple[int, int]] = []

    def post(thread: int) -> None:
        for number in range(200):
            inside.worker.inbox.post(lambda at=(thread, number): seen.append(at))

    threads = [threading.Thread(target=post, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(seen) == 800, what="everything that was posted")
    for thread in range(4):
        assert [number for who, number in seen if who == thread] == list(range(200))


def test_timers_of_one_moment_run_by_priority(bench: Bench) -> None:
    inside = bench.inside.start()
    seen: list[int] = []

    def schedule() -> None:
        at = time.monotonic() + 0.2
        for priority in (5, 1, 9, 0):
            inside.worker.timer.call_at(at, seen.append, (priority,), priority=priority)

    inside.call(schedule)
    wait_until(lambda: len(seen) == 4, what="the timers")
    assert seen == [0, 1, 5, 9]


def test_a_timer_and_a_posted_call_that_fail_do_not_stop_the_loop(bench: Bench) -> None:
    inside = bench.inside.start()
    seen: list[str] = []

    def fail() -> None:
        seen.append("failed")
        raise ValueError("on purpose")

    def schedule() -> None:
        inside.worker.timer.call_after(0, fail)
        inside.worker.timer.call_after(0.01, seen.append, ("next",))

    inside.worker.inbox.post(fail)
    inside.call(schedule)
    wait_until(lambda: seen == ["failed", "failed", "next"], what="the next timer")
    inside.send("note", 1)
    wait_until(lambda: bench.ran, what="a task")
    assert inside.worker.counters.connections_lost == 0


def test_many_held_tasks_cost_few_changes_of_the_window(bench: Bench) -> None:
    inside = bench.inside.start()
    consumer, count = inside.worker.consumer, 200
    sent: list[int] = []

    def watch() -> None:
        assert consumer.tasks is not None
        qos = consumer.tasks.qos

        def counted(**options: Any) -> Any:
            sent.append(options["prefetch_count"])
            return qos(**options)

        consumer.tasks.qos = counted

    inside.call(watch)
    message = inside.client.signature("note", (0,), countdown=3600)
    inside.client.send_many([message.clone() for _ in range(count)])
    prefetch = inside.worker.deliveries.prefetch
    wait_until(lambda: prefetch.held == count and not prefetch.is_due, 20, "the held tasks")
    assert sent[-1] == prefetch.base + count
    # The broker sends no more than the window allows: that many rounds are needed, and a few.
    assert len(sent) <= count / 2, sent


@pytest.mark.parametrize("pool", ["threads"])
def test_a_saturated_loop_handles_what_is_posted_within_a_fifth_of_a_second(
    bench: Bench, pool: str
) -> None:
    inside = bench.inside
    message = inside.client.signature("noop")
    count = 20_000  # more than a fast machine runs while it is measured
    inside.client.send_many([message.clone() for _ in range(count)])
    inside.start()
    counters, waits_s = inside.worker.counters, list[float]()
    while len(waits_s) < 200 and counters.finished < count:
        began = time.monotonic()
        inside.call(lambda: None)
        waits_s.append(time.monotonic() - began)
        threading.Event().wait(0.002)
    assert counters.finished < count, "the load was over too soon"
    assert percentile(waits_s, 0.99) < 0.2, sorted(waits_s)[-10:]
