"""Links: borrowed, bounded, thrown away when they break; how often a message is tried."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from tests.unit.app.pump import messages
from umbel.app import publish
from umbel.app.publish import Link, Publisher, RetryPolicy
from umbel.app.umbel import Umbel
from umbel.broker.tasks import batches, outlets


@pytest.fixture
def app() -> Iterator[Umbel]:
    made = Umbel(
        "publish",
        broker="memory://",
        backend="disabled://",
        task_default_queue=f"q{uuid.uuid4().hex}",
        broker_pool_limit=2,
        set_as_current=False,
    )
    yield made
    made.close()


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited between tries; nobody really waits."""
    waited: list[float] = []
    monkeypatch.setattr(publish.time, "sleep", waited.append)
    return waited


NONE = RetryPolicy({}, enabled=False)


# -- patience ------------------------------------------------------------------------------


def test_waits_grow_by_steps_up_to_a_bound_and_then_end() -> None:
    policy = RetryPolicy(
        {"max_retries": 4, "interval_start": 1, "interval_step": 2, "interval_max": 4}, True
    )
    assert [policy.delay_s(attempt) for attempt in range(6)] == [1, 3, 4, 4, None, None]


def test_patience_may_have_no_end_or_be_switched_off() -> None:
    assert RetryPolicy({"max_retries": None}, True).delay_s(10**6) is not None
    assert RetryPolicy({"max_retries": 0}, True).delay_s(0) is None
    assert RetryPolicy({"max_retries": 5}, False).delay_s(0) is None
    assert RetryPolicy(None, True).delay_s(0) == 0


def test_a_message_is_tried_as_often_as_the_policy_says(
    app: Umbel, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def broken(*_: Any) -> None:
        tries.append(1)
        raise ConnectionResetError("gone")

    monkeypatch.setattr(batches, "publish_one", broken)
    with pytest.raises(OperationalError, match=r"memory://.* after 3 tries: ConnectionResetError"):
        app.send_task(
            "t", retry_policy={"max_retries": 2, "interval_start": 0.5, "interval_step": 1,
                               "interval_max": 9}
        )  # fmt: skip
    assert (len(tries), naps) == (3, [0.5, 1.5])
    tries.clear()
    with pytest.raises(OperationalError, match="after 1 tries"):
        app.send_task("t", retry=False)
    assert len(tries) == 1


def test_an_error_that_is_not_the_brokers_is_raised_as_it_is_and_only_once(
    app: Umbel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def broken(*_: Any) -> None:
        tries.append(1)
        raise LookupError("a mistake of ours")

    monkeypatch.setattr(batches, "publish_one", broken)
    with pytest.raises(LookupError, match="a mistake of ours"):
        app.send_task("t")
    assert len(tries) == 1
    monkeypatch.undo()
    app.send_task("t")


# -- links ---------------------------------------------------------------------------------


def test_a_link_is_used_again(app: Umbel) -> None:
    publisher = app.publisher
    seen: list[Link] = []
    publisher.run(seen.append)
    publisher.run(seen.append)
    assert seen[0] is seen[1]


def test_a_link_that_failed_is_thrown_away_with_the_idle_ones(
    app: Umbel, naps: list[float]
) -> None:
    publisher = app.publisher
    seen: list[Link] = []

    def fail_first(link: Link) -> None:
        seen.append(link)
        if len(seen) == 1:
            raise ConnectionResetError("gone")

    publisher.run(fail_first)
    assert seen[0] is not seen[1]
    assert not seen[0].connection.connected


def test_no_more_links_are_open_than_the_limit(app: Umbel) -> None:
    publisher = app.publisher
    busy, most = 0, 0
    lock = threading.Lock()
    used: set[int] = set()

    def work(link: Link) -> None:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
            used.add(id(link))
        with lock:
            busy -= 1

    def run() -> None:
        for _ in range(50):
            publisher.run(work)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 2
    assert len(used) <= 2


def test_whoever_waits_for_a_link_gets_the_place_of_one_that_broke(
    app: Umbel, naps: list[float]
) -> None:
    app.conf.broker_pool_limit = 1
    publisher = Publisher(app)
    taken, breaks = threading.Event(), threading.Event()

    def breaking(link: Link) -> None:
        taken.set()
        assert breaks.wait(10)
        raise LookupError("broken")

    def first() -> None:
        with pytest.raises(LookupError):
            publisher.run(breaking)

    holder = threading.Thread(target=first)
    holder.start()
    assert taken.wait(10)
    done: list[Link] = []
    waiter = threading.Thread(target=publisher.run, args=(done.append,))
    waiter.start()
    breaks.set()
    holder.join(10)
    waiter.join(10)
    assert len(done) == 1


def test_without_a_limit_every_message_has_a_connection_of_its_own(app: Umbel) -> None:
    app.conf.broker_pool_limit = 0
    publisher = Publisher(app)
    seen: list[Link] = []
    publisher.run(seen.append)
    publisher.run(seen.append)
    assert seen[0] is not seen[1]
    assert not any(link.connection.connected for link in seen)


def test_a_link_that_comes_back_after_the_end_is_closed(app: Umbel) -> None:
    publisher = app.publisher
    seen: list[Link] = []

    def work(link: Link) -> None:
        seen.append(link)
        publisher.close()

    publisher.run(work)
    assert not seen[0].connection.connected


def test_a_connection_that_is_made_but_not_usable_is_not_left_open(
    app: Umbel, monkeypatch: pytest.MonkeyPatch, naps: list[float]
) -> None:
    made: list[Any] = []
    connect = app.connection

    def noted(*args: Any, **options: Any) -> Any:
        made.append(connect(*args, **options))
        return made[-1]

    def unusable(*_: Any, **__: Any) -> Any:
        raise OperationalError("no channel")

    monkeypatch.setattr(app, "connection", noted)
    monkeypatch.setattr(outlets, "Producer", unusable)
    with pytest.raises(OperationalError, match="no channel"):
        app.send_task("t", retry=False)
    assert not any(connection.connected for connection in made)


# -- declarations --------------------------------------------------------------------------


class Declared:
    """Counts what is declared on a link."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for kind in (Queue, Exchange):
            self._count(kind, monkeypatch)

    def _count(self, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        original = kind.declare

        def declare(entity: Any, *args: Any, **kwargs: Any) -> Any:
            self.names.append(f"{kind.__name__.lower()} {entity.name}")
            return original(entity, *args, **kwargs)

        monkeypatch.setattr(kind, "declare", declare)


def test_a_queue_is_declared_once_per_link(app: Umbel, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = Declared(monkeypatch)
    for _ in range(3):
        app.send_task("t")
    assert declared.names.count(f"queue {app.conf.task_default_queue}") == 1


def test_a_queue_that_may_vanish_is_declared_for_every_message(
    app: Umbel, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = Declared(monkeypatch)
    fleeting = Queue(uuid.uuid4().hex, auto_delete=True)
    app.queues.add(fleeting)
    for _ in range(3):
        app.send_task("t", queue=fleeting.name)
    assert declared.names.count(f"queue {fleeting.name}") == 3


def test_a_queue_and_an_exchange_of_one_name_are_both_declared(
    app: Umbel, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = uuid.uuid4().hex
    declared = Declared(monkeypatch)
    app.send_task("t", queue=Queue(name, Exchange(f"other-{name}")))
    declared.names.clear()
    app.send_task("t", exchange=Exchange(name, type="fanout"), routing_key="")
    assert f"exchange {name}" in declared.names


def test_a_batch_is_declared_and_published_in_order(app: Umbel) -> None:
    other = f"q{uuid.uuid4().hex}"
    app.send_many([app.signature("t", (n,), queue=other if n % 2 else None) for n in range(6)])
    assert [m.payload[0] for m in messages(app, other)] == [[1], [3], [5]]
    assert [m.payload[0] for m in messages(app, app.conf.task_default_queue)] == [[0], [2], [4]]
