"""What tasks do from inside, run by a worker on real brokers with results in Redis."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.servers import RedisServer, wait_until
from umbel import Task, Umbel, chain, chord, group
from umbel.exceptions import Ignore, MaxRetriesExceededError, Reject
from umbel.worker.runtime.options import WorkerOptions
from umbel.worker.runtime.worker import Worker

runs: defaultdict[str, list[Any]] = defaultdict(list)
gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)


def declare(app: Umbel) -> None:
    declare_plain(app)
    declare_compositions(app)
    declare_outcomes(app)


def declare_plain(app: Umbel) -> None:
    @app.task(name="add")
    def add(x: Any, y: Any = 0) -> Any:
        return x + y

    @app.task(name="echo")
    def echo(value: Any) -> Any:
        return value

    @app.task(name="total")
    def total(numbers: Any) -> Any:
        return sum(map(total, numbers)) if isinstance(numbers, list) else numbers

    @app.task(name="fans_out")
    def fans_out(n: int) -> list[str]:
        return [one.id for one in app.send_many([add.s(i, i) for i in range(n)])]


def declare_compositions(app: Umbel) -> None:
    @app.task(bind=True, name="becomes")
    def becomes(self: Task, *args: Any, sig: Any) -> Any:
        raise self.replace(app.signature(sig))

    @app.task(bind=True, name="split")
    def split(self: Task, n: int) -> Any:
        if n <= 1:
            return n
        raise self.replace(group([split.s(n // 2), split.s(n - n // 2)]))

    @app.task(bind=True, name="joins")
    def joins(self: Task, more: int) -> int:
        for n in range(more):
            self.add_to_chord(app.tasks["add"].s(100, n))
        return 1


class Noted(Task):
    """Notes which tasks have ended in a retry."""

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        runs[task_id].append("retried")


def declare_outcomes(app: Umbel) -> None:
    @app.task(bind=True, name="retries", max_retries=3)
    def retries(self: Task, key: str, needed: int, **options: Any) -> int:
        runs[key].append((self.request.retries, time.monotonic(), self.request.id))
        if self.request.retries < needed:
            raise self.retry(**options)
        return self.request.retries

    @app.task(bind=True, name="outrun", max_retries=1, base=Noted)
    def outrun(self: Task, key: str) -> None:
        outcome = self.retry(countdown=0, throw=False)
        assert gates[key].wait(20)
        raise outcome

    @app.task(name="flaky", autoretry_for=(ConnectionError,), retry_backoff=0.02, max_retries=4)
    async def flaky(key: str) -> str:
        await asyncio.sleep(0)
        runs[key].append(1)
        if len(runs[key]) < 3:
            raise ConnectionError(key)
        return "at last"

    @app.task(bind=True, name="progress")
    def progress(self: Task, key: str) -> str:
        self.update_state(state="PROGRESS", meta={"half": True})
        assert gates[key].wait(20)
        return "done"

    @app.task(bind=True, name="steers", acks_late=True)
    def steers(self: Task, key: str, how: str) -> str:
        runs[key].append(how)
        if len(runs[key]) == 1:
            raise Ignore if how == "ignore" else Reject(how, requeue=how == "requeue")
        return "second time"


@pytest.fixture(scope="module", params=["redis", "amqp"])
def app(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Umbel]:
    redis_server.client(252).flushdb()
    backend = broker = redis_server.url_of(252)
    if request.param == "amqp":
        broker = request.getfixturevalue("rabbitmq_server").add_vhost("app-tasks")
    served = Umbel("tasks", broker=broker, backend=backend, set_as_current=False)
    declare(served)
    worker = Worker(served, WorkerOptions(pool="threads", concurrency=4))
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_until(lambda: worker.ready_now, 20, "the worker to be ready")
    client = Umbel("tasks", broker=broker, backend=backend, set_as_current=False)
    declare(client)
    yield client
    worker.stop()
    thread.join(20)
    client.close()
    assert not thread.is_alive()


def s(app: Umbel, name: str, *args: Any, **kwargs: Any) -> Any:
    return app.tasks[name].s(*args, **kwargs)


def replacements(app: Umbel) -> dict[str, tuple[Any, Any]]:
    add = app.tasks["add"]
    return {
        "task": (add.s(2, 3), 5),
        "chain": (chain(add.s(1, 1), add.s(3)), 5),
        "group": (group([add.s(2, 2), add.s(1)]), [4, 1]),
        "chord": (chord([add.s(1, 1), add.s(3)], s(app, "total")), 5),
        "chain ending in a group": (chain(add.s(1, 1), group([add.s(1), add.s(2)])), [3, 4]),
    }


KINDS = ["task", "chain", "group", "chord", "chain ending in a group"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replaced_task_gives_the_replacements_value_wherever_it_stands(
    app: Umbel, kind: str
) -> None:
    sig, value = replacements(app)[kind]
    first = app.tasks["becomes"].s(sig=sig)
    total = sum(value) if isinstance(value, list) else value
    alone = first.delay()
    in_chain = chain(s(app, "add", 1, 1), first, s(app, "total"), s(app, "add", 100)).delay()
    in_header = chord([s(app, "add", 7), first, s(app, "add", 9)], s(app, "echo")).delay()
    as_body = chord([s(app, "add", 7), s(app, "add", 8)], first).delay()
    assert alone.get(timeout=30) == value
    assert in_chain.get(timeout=30) == total + 100
    assert in_header.get(timeout=30) == [7, value, 9]
    assert as_body.get(timeout=30) == value


def test_parts_of_a_chord_may_split_again_and_again(app: Umbel) -> None:
    result = chord([s(app, "split", 5), s(app, "split", 3)], s(app, "total")).delay()
    assert result.get(timeout=30) == 8


def test_parts_may_join_a_chord_that_runs(app: Umbel) -> None:
    result = chord([s(app, "joins", 3), s(app, "add", 2)], s(app, "echo")).delay()
    assert sorted(result.get(timeout=30)) == [1, 2, 100, 101, 102]


def test_a_retry_runs_later_under_the_same_id(app: Umbel) -> None:
    key = uuid.uuid4().hex
    result = app.tasks["retries"].delay(key, 2, countdown=0.2)
    assert result.get(timeout=30) == 2
    numbers, times, ids = zip(*runs[key], strict=True)
    assert numbers == (0, 1, 2)
    assert set(ids) == {result.id}
    assert all(later - sooner >= 0.19 for sooner, later in pairwise(times))


def test_retries_end_with_the_error_that_says_so(app: Umbel) -> None:
    result = app.tasks["retries"].delay(uuid.uuid4().hex, 99, countdown=0)
    with pytest.raises(MaxRetriesExceededError, match="Can't retry retries"):
        result.get(timeout=30)


def test_a_retry_that_ends_before_the_run_that_sent_it_keeps_its_result(app: Umbel) -> None:
    key = uuid.uuid4().hex
    result = app.tasks["outrun"].delay(key)
    wait_until(lambda: result.state == "FAILURE", 20, "the end of the second run")
    gates[key].set()
    wait_until(lambda: runs[result.id] == ["retried"], 20, "the end of the first one")
    assert app.AsyncResult(result.id).state == "FAILURE"
    with pytest.raises(MaxRetriesExceededError):
        result.get(timeout=30)


def test_a_retried_step_keeps_its_chain_and_its_links(app: Umbel) -> None:
    key = uuid.uuid4().hex
    step = s(app, "retries", key, 1, countdown=0)
    assert chain(step, s(app, "add", 10), s(app, "add", 100)).delay().get(timeout=30) == 111
    parts = [s(app, "retries", f"{key}{n}", n, countdown=0) for n in range(3)]
    assert chord(parts, s(app, "echo")).delay().get(timeout=30) == [0, 1, 2]


def test_errors_are_retried_automatically_in_async_tasks_too(app: Umbel) -> None:
    key = uuid.uuid4().hex
    assert app.tasks["flaky"].delay(key).get(timeout=30) == "at last"
    assert len(runs[key]) == 3


def test_a_state_of_ones_own_is_seen_from_outside(app: Umbel) -> None:
    key = uuid.uuid4().hex
    result = app.tasks["progress"].delay(key)
    wait_until(lambda: result.state == "PROGRESS", 20, "the state to be seen")
    assert result.info == {"half": True}
    gates[key].set()
    assert result.get(timeout=30) == "done"


@pytest.mark.parametrize(("how", "count"), [("requeue", 2), ("reject", 1), ("ignore", 1)])
def test_a_rejected_message_comes_back_only_if_asked_to(app: Umbel, how: str, count: int) -> None:
    key = uuid.uuid4().hex
    result = app.tasks["steers"].delay(key, how)
    if count == 2:
        assert result.get(timeout=30) == "second time"
    else:
        wait_until(lambda: runs[key], 20, "the task to run")
        # Whatever is sent after it has run when it would have come back.
        assert app.tasks["add"].delay(1, 1).get(timeout=30) == 2
        assert result.state == "PENDING"
    assert len(runs[key]) == count


def test_what_a_task_sends_in_one_go_are_its_children(app: Umbel) -> None:
    result = app.tasks["fans_out"].delay(5)
    ids = result.get(timeout=30)
    assert [child.id for child in result.children] == ids
    assert [app.AsyncResult(one).get(timeout=30) for one in ids] == [0, 2, 4, 6, 8]


def test_two_hundred_tasks_sent_in_one_go_all_come_back(app: Umbel) -> None:
    results = app.send_many([s(app, "add", n, n) for n in range(200)])
    assert [one.get(timeout=30) for one in results] == [2 * n for n in range(200)]
