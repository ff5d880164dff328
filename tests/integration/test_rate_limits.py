"""Rate limits end to end: other types flow, changes apply at once, nothing is lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import psutil
import pytest
from kombu import Queue

from tests.inside import Inside
from tests.servers import RabbitMQServer, RedisServer, wait_until
from umbel import Umbel

ROUNDS = 2  # of a queue that rests: fewer take too short to measure


class Notes:
    """A limited task and one that is not."""

    def __init__(self) -> None:
        self.slow: list[Any] = []
        self.quick: dict[Any, float] = {}
        self.at_quick: Callable[[], None] = lambda: None

    def __call__(self, app: Umbel) -> None:
        @app.task(name="slow", rate_limit="1/h")
        def slow(value: Any) -> None:
            self.slow.append(value)

        @app.task(name="quick")
        def quick(value: Any) -> None:
            self.at_quick()
            self.quick[value] = time.monotonic()


Make = Callable[..., tuple[Inside, Notes]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Inside] = []

    def start(url: str, *, begin: bool = True, **settings: Any) -> tuple[Inside, Notes]:
        notes = Notes()
        inside = Inside({"broker_url": url, "result_backend": "disabled://", **settings}, notes)
        made.append(inside)
        return inside.start() if begin else inside, notes

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


@pytest.fixture
def second_url(broker_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Another place on the same broker."""
    if broker_url.startswith("redis"):
        server: RedisServer = request.getfixturevalue("redis_server")
        db = (int(broker_url.rsplit("/", 1)[1]) + 100) % RedisServer.DATABASES_COUNT
        server.client(db).flushdb()
        yield server.url_of(db)
    else:
        rabbitmq: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
        yield rabbitmq.add_vhost("second")
        rabbitmq.delete_vhost("second")


def send_slow(inside: Inside, count: int) -> None:
    inside.client.send_many([inside.client.signature("slow", (n,)) for n in range(count)])


def test_five_hundred_parked_tasks_do_not_delay_another_type(
    broker_url: str, second_url: str, make: Make
) -> None:
    """Compared with a worker without limited tasks at the same time, on the same machine."""
    other, others = make(second_url)
    inside, notes = make(broker_url)
    send_slow(inside, 501)
    wait_until(lambda: inside.worker.deliveries.limits.parked_count == 500, 20, "the parked tasks")
    undelayed_s, delayed_s = [], []
    for n in range(100):
        undelayed_s.append(probe(other, others, n))
        delayed_s.append(probe(inside, notes, n))
    assert max(delayed_s) - max(undelayed_s) < 0.1
    assert notes.slow == [0]
    assert inside.worker.deliveries.prefetch.window == inside.worker.deliveries.prefetch.base + 500


def probe(inside: Inside, notes: Notes, n: Any) -> float:
    """How long it takes until a task of the other type runs."""
    began = time.monotonic()
    inside.send("quick", n)
    wait_until(lambda: n in notes.quick, 20, "the other type")
    return notes.quick[n] - began


def test_another_type_behind_limited_ones_is_reached(broker_url: str, make: Make) -> None:
    inside, notes = make(broker_url)
    slow, quick = inside.client.signature("slow", (0,)), inside.client.signature("quick", ("q",))
    inside.client.send_many([*(slow.clone() for _ in range(300)), quick])
    wait_until(lambda: "q" in notes.quick, 10, "the last of the queue")
    assert inside.worker.deliveries.limits.parked_count == 299


def test_a_new_limit_applies_at_once_to_what_is_parked(broker_url: str, make: Make) -> None:
    inside, notes = make(broker_url)
    rates = inside.worker.deliveries.limits
    send_slow(inside, 41)
    wait_until(lambda: rates.parked_count == 40, what="the parked tasks")
    inside.call(lambda: inside.worker.driver.set_rate_limit("slow", "100/s"))
    began = time.monotonic()
    wait_until(lambda: len(notes.slow) == 41, what="all of them at the new rate")
    assert 0.3 < time.monotonic() - began < 5
    inside.call(lambda: inside.worker.driver.set_rate_limit("slow", "1/h"))
    send_slow(inside, 10)
    wait_until(lambda: rates.parked_count == 9, what="parked again")
    inside.call(lambda: inside.worker.driver.set_rate_limit("slow", 0))
    wait_until(lambda: len(notes.slow) == 51, 2, "all of them without a limit")
    wait_until(lambda: not inside.worker.deliveries.reserved, what="nothing left over")
    assert inside.worker.deliveries.prefetch.window == inside.worker.deliveries.prefetch.base


def test_tasks_beyond_the_bound_go_back_and_none_is_lost(broker_url: str, make: Make) -> None:
    inside, notes = make(broker_url, worker_parked_task_limit=5)
    rates = inside.worker.deliveries.limits
    send_slow(inside, 60)
    wait_until(lambda: rates.given_back > 60, 20, "tasks that went back")
    assert rates.parked_count == 5
    for n in range(5):
        inside.send("quick", n)
    wait_until(lambda: len(notes.quick) == 5, 10, "the other type")
    held = [inside.worker.deliveries.prefetch.held for _ in range(20)]
    assert max(held) <= 60
    inside.call(lambda: inside.worker.driver.set_rate_limit("slow", None))
    wait_until(lambda: len(notes.slow) >= 60, 20, "all of them")
    wait_until(lambda: not inside.worker.deliveries.reserved, what="nothing left over")
    assert Counter(notes.slow) == Counter(range(60))
    assert inside.worker.deliveries.prefetch.window == inside.worker.deliveries.prefetch.base


def test_another_type_behind_three_thousand_is_reached_when_each_was_looked_at_once(
    broker_url: str, make: Make
) -> None:
    inside, notes = make(broker_url, begin=False)
    received: list[int] = []
    notes.at_quick = lambda: received.append(inside.worker.counters.received)
    send_slow(inside, 3000)
    inside.send("quick", "q")
    inside.start()
    wait_until(lambda: "q" in notes.quick, 60, "the last of the queue")
    window = inside.worker.deliveries.prefetch.base
    assert received[0] <= 3001 + 10 * window  # by then: it goes round again while this looks
    assert inside.worker.deliveries.limits.parked_count == 1000


def wait_for_rest(inside: Inside) -> None:
    """Wait until the queue rests and nothing that lies in it is unknown."""
    worker = inside.worker

    def is_resting() -> bool:
        surplus, returns = worker.deliveries.limits.surplus, worker.consumer.returns
        if not surplus.is_resting or returns.pending or not worker.deliveries.reserved:
            return False
        (one,) = surplus.rounds.values()
        return one.length == worker.consumer.length_of("celery") and not one.for_news

    wait_until(lambda: inside.call(is_resting), 30, "a queue at rest")


def test_going_round_when_nothing_else_is_there_costs_little(
    broker_url: str, make: Make, broker_process: psutil.Process
) -> None:
    inside, _ = make(broker_url, worker_parked_task_limit=30)
    consumer, rates = inside.worker.consumer, inside.worker.deliveries.limits
    rests = SimpleQueue[tuple[float, int]]()
    rest = consumer.rest

    def note(name: str) -> None:
        # What is surplus now goes back right after the rest has begun.
        rests.put((time.monotonic(), rates.given_back + len(rates.surplus)))
        rest(name)

    consumer.rest = note  # type: ignore[method-assign]
    send_slow(inside, 100)
    wait_for_rest(inside)
    while not rests.empty():
        rests.get()
    began, given_back_before = rests.get(timeout=60)
    spent_s = time.process_time(), cpu_s(broker_process)
    for _ in range(ROUNDS):
        ended, given_back = rests.get(timeout=60)
    on_their_way = (
        inside.worker.deliveries.prefetch.base
    )  # when the first rest began: counted later
    assert given_back - given_back_before >= ROUNDS * 69 - on_their_way
    worker_share = (time.process_time() - spent_s[0]) / (ended - began)
    broker_share = (cpu_s(broker_process) - spent_s[1]) / (ended - began)
    print(f"worker {worker_share:.3f}, broker {broker_share:.3f} of a core")
    assert worker_share < 0.05
    assert broker_share < 0.05


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.fixture
def broker_process(broker_url: str, request: pytest.FixtureRequest) -> psutil.Process:
    kind = "redis_server" if broker_url.startswith("redis") else "rabbitmq_server"
    return psutil.Process(request.getfixturevalue(kind).process.pid)


def test_a_resting_queue_is_gone_through_again_when_something_comes(
    broker_url: str, make: Make
) -> None:
    inside, notes = make(broker_url, worker_parked_task_limit=200)
    send_slow(inside, 1200)
    wait_for_rest(inside)
    for n in range(3):
        assert probe(inside, notes, n) < 10, "it would rest for forty seconds"
        wait_for_rest(inside)


def test_another_queue_does_not_rest_with_it(broker_url: str, make: Make) -> None:
    queues = {"task_queues": [Queue("celery"), Queue("other")]}
    inside, notes = make(broker_url, worker_parked_task_limit=100, **queues)
    send_slow(inside, 1000)
    wait_for_rest(inside)
    received = inside.worker.counters.received
    for n in range(20):
        inside.send("quick", n, queue="other")
        wait_until(lambda n=n: n in notes.quick, 5, "the other queue")
    assert inside.worker.counters.received == received + 20, "the queue did not rest"


def test_rests_do_not_keep_a_fast_limit_from_being_used(broker_url: str, make: Make) -> None:
    inside, notes = make(broker_url, worker_parked_task_limit=20)
    inside.call(lambda: inside.worker.driver.set_rate_limit("slow", "200/s"))
    send_slow(inside, 600)
    began = time.monotonic()
    wait_until(lambda: len(notes.slow) == 600, 30, "all of them")
    assert time.monotonic() - began < 15
    assert Counter(notes.slow) == Counter(range(600))


def test_the_delivery_limit_of_a_quorum_queue_is_not_used_up(amqp_url: str, make: Make) -> None:
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": 2}
    queue = Queue("celery", queue_arguments=arguments)
    inside, notes = make(amqp_url, worker_parked_task_limit=2, task_queues=[queue])
    rates = inside.worker.deliveries.limits
    send_slow(inside, 40)
    wait_until(lambda: rates.given_back > 40 * 5, 60, "everything to go back some times")
    inside.call(lambda: inside.worker.driver.set_rate_limit("slow", None))
    wait_until(lambda: len(notes.slow) >= 40, 20, "all of them")
    assert Counter(notes.slow) == Counter(range(40))


def test_nothing_is_lost_when_the_connection_breaks_while_tasks_go_back(
    broker_url: str, make: Make
) -> None:
    inside, notes = make(broker_url, worker_parked_task_limit=50)
    rates = inside.worker.deliveries.limits
    send_slow(inside, 1000)
    for _ in range(5):
        before = rates.given_back
        wait_until(lambda own=before: rates.given_back > own + 30, 60, "tasks that go back")
        inside.break_connection()
    inside.call(lambda: inside.worker.driver.set_rate_limit("slow", None))
    wait_until(lambda: len(set(notes.slow)) == 1000, 30, "all of them")
    if broker_url.startswith("redis"):
        assert len(notes.slow) == 1000, "some were there twice"


def test_a_worker_that_stops_while_tasks_go_back_leaves_each_of_them_once(
    broker_url: str, make: Make, length_of: Callable[[str], int]
) -> None:
    inside, notes = make(broker_url, worker_parked_task_limit=50)
    send_slow(inside, 1000)
    wait_until(lambda: inside.worker.deliveries.limits.given_back > 200, 30, "tasks that go back")
    assert inside.stop() == 0
    wait_until(lambda: length_of(broker_url) == 999, what="all but the first in the queue")
    second, seen = make(broker_url)
    second.call(lambda: second.worker.driver.set_rate_limit("slow", None))
    wait_until(lambda: len(seen.slow) >= 999, 30, "all of them")
    assert Counter(notes.slow + seen.slow) == Counter(range(1000))


def test_a_stopping_worker_gives_parked_tasks_back(
    broker_url: str, make: Make, length_of: Callable[[str], int]
) -> None:
    inside, notes = make(broker_url)
    send_slow(inside, 51)
    wait_until(lambda: inside.worker.deliveries.limits.parked_count == 50, what="the parked tasks")
    wait_until(lambda: notes.slow == [0], what="the first one")
    assert inside.stop() == 0
    wait_until(lambda: length_of(broker_url) == 50, what="fifty in the queue")
