"""A long run with broken connections: what was told adds up, and is in causal order.

Five workers, two thousand tasks (`make soak`: ten thousand), half of them sent by the other half,
and three times all connections of the workers are cut. Two monitors watch from outside: ours and
Celery's.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Self

import psutil
import pytest
from celery import Celery
from celery.events.state import State as CeleryState

from tests.ears import Ears
from tests.servers import RabbitMQServer, RedisServer, wait_until
from tests.sites import APP, Site
from tests.sizes import size
from tests.workers import WorkerProcess
from umbel.app.events.state import State

PARENTS, BREAKS = size(1_000, 5_000), 3
SETTINGS = {
    "task_send_sent_event": True,
    "task_ignore_result": True,
    "event_buffer_max": 50_000,
    # Else RabbitMQ may lose a task that is sent while a connection breaks.
    "broker_transport_options": {"confirm_publish": True},
}
SAME = (
    "state", "name", "args", "kwargs", "result", "exception", "retries", "root_id", "parent_id",
    "runtime", "client",
)  # fmt: skip
Cut = Callable[[list[WorkerProcess]], None]


class CeleryMonitor:
    """Celery's receiver and state, on a thread."""

    def __init__(self, url: str) -> None:
        self.app = Celery("monitor", broker=url, set_as_current=False)
        self.state: Any = CeleryState(max_tasks_in_memory=20_000)
        self._connection = self.app.connection_for_read()
        self._receiver = self.app.events.Receiver(
            self._connection, handlers={"*": self.state.event}
        )
        self._thread = threading.Thread(
            target=self._receiver.capture, kwargs={"wakeup": False}, daemon=True
        )

    def succeeded(self) -> int:
        tasks = list(self.state.tasks.values())
        return sum(1 for task in tasks if task.state == "SUCCESS")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._receiver.should_stop = True
        self._thread.join(20)
        self._connection.release()
        self.app.close()


def ports_of(workers: list[WorkerProcess]) -> list[int]:
    """The local ports of all connections of these workers and their children."""
    found: list[int] = []
    for worker in workers:
        process = psutil.Process(worker.pid)
        for one in (process, *process.children(recursive=True)):
            found += [link.laddr.port for link in one.net_connections("tcp") if link.raddr]
    return found


@pytest.fixture
def cut(site: Site, request: pytest.FixtureRequest) -> Cut:
    """Ends every connection of workers to their broker, from the broker's side."""
    if site.broker_url.startswith("redis"):
        server: RedisServer = request.getfixturevalue("redis_server")

        def cut_redis(workers: list[WorkerProcess]) -> None:
            client, chosen = server.client(), set(ports_of(workers))
            for known in client.client_list():
                if int(known["addr"].rpartition(":")[2]) in chosen:
                    client.client_kill_filter(_id=known["id"])

        return cut_redis
    rabbit: RabbitMQServer = request.getfixturevalue("rabbitmq_server")
    return lambda workers: rabbit.close_connections(ports=ports_of(workers))


@pytest.fixture
def watched(site: Site) -> Iterator[tuple[Ears, State, CeleryMonitor]]:
    state = State(max_tasks=20_000)
    with Ears(site.broker_url, state=state) as ears, CeleryMonitor(site.broker_url) as monitor:
        yield ears, state, monitor


def run(site: Site, workers: list[WorkerProcess], ears: Ears, cut: Cut) -> None:
    """Send the tasks, cut connections on the way, and wait until all is told."""
    site.app.conf.update(SETTINGS)
    share = PARENTS // (BREAKS + 1)
    for part in range(BREAKS + 1):
        numbers = range(part * share, (part + 1) * share)
        site.app.send_many([site.app.signature(f"{APP}.send_child", (n,)) for n in numbers])
        wanted = (part * 2 + 1) * share
        wait_until(lambda n=wanted: len(ears.succeeded) >= n, 60, f"{wanted} tasks")
        if part < BREAKS:
            cut(workers)
    wait_until(lambda: len(ears.succeeded) >= 2 * PARENTS, 90, "all tasks")
    for worker in workers:
        worker.stop()
    wait_until(lambda: len(ears.of("worker-offline")) == len(workers), 30, "all good-byes")


@pytest.mark.timeout(300)
def test_what_five_workers_tell_over_three_breaks_adds_up_and_is_in_order(
    site: Site, cut: Cut, watched: tuple[Ears, State, CeleryMonitor]
) -> None:
    ears, state, monitor = watched
    workers = [
        site.worker(
            "prefork" if number == 0 else "threads", "-E", "-n", f"w{number}@test",
            settings=SETTINGS,
        )
        for number in range(5)
    ]  # fmt: skip
    run(site, workers, ears, cut)
    assert sum("lost" in worker.output for worker in workers) >= 5, "connections were cut"
    check_sums(ears, workers)
    check_causes(ears)
    wait_until(lambda: monitor.succeeded() == 2 * PARENTS, 60, "Celery's monitor")
    check_tables(ears, state, monitor)


def check_sums(ears: Ears, workers: list[WorkerProcess]) -> None:
    """For every node: the numbers that came, and those that it says it lost, are all numbers."""
    numbers: dict[tuple[str, int], set[int]] = defaultdict(set)
    for event in ears.events:
        numbers[event["hostname"], event["inc"]].add(event["seq"])
    for good_bye in ears.of("worker-offline"):
        seen = numbers.pop((good_bye["hostname"], good_bye["inc"]))
        assert len(seen) + good_bye["lost"] == good_bye["seq"] == max(seen)
    # The rest are processes that sent tasks; they write down what they could not tell.
    missing = sum(max(seen) - len(seen) for seen in numbers.values())
    told = sum(
        int(found)
        for worker in workers
        for found in re.findall(r"(\d+) task-sent events were lost", worker.output)
    )
    assert missing <= told


def check_causes(ears: Ears) -> None:
    """Every event of a task comes after the start of the task that sent it."""
    started: dict[str, int] = {}
    for event in ears.of("task-started"):
        first = started.get(event["uuid"], event["clock"])
        started[event["uuid"]] = min(first, event["clock"])
    parents = {e["uuid"]: e["parent_id"] for e in ears.of("task-received") if e["parent_id"]}
    assert len(parents) == PARENTS
    early = [
        event for event in ears.events
        if parents.get(event.get("uuid")) and event["clock"] <= started[parents[event["uuid"]]]
    ]  # fmt: skip
    assert early == []


def check_tables(ears: Ears, state: State, monitor: CeleryMonitor) -> None:
    """Both monitors show the same tasks."""
    deliveries: dict[str, int] = defaultdict(int)
    for event in ears.of("task-received"):
        deliveries[event["uuid"]] += 1
    theirs = monitor.state.tasks
    assert len(state.tasks) == len(theirs) == 2 * PARENTS
    different = []
    for uuid, other in theirs.items():
        own = state.tasks[uuid]
        names = SAME if deliveries[uuid] == 1 else ("state", "name")
        different += [
            (uuid, name, getattr(own, name), getattr(other, name))
            for name in names
            if getattr(own, name) != getattr(other, name)
        ]
        if deliveries[uuid] == 1 and own.worker != other.worker.hostname:
            different.append((uuid, "worker", own.worker, other.worker.hostname))
    assert different == []
