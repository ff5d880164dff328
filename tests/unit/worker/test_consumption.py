"""Which queues a worker consumes: added, dropped, paused and resumed while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Consumer, Queue

from tests.unit.worker.parts import idle_worker
from umbel import Umbel
from umbel.cluster.node import Greeted
from umbel.worker.runtime.worker import Worker

DIRECT: dict[str, Any] = {"exchange": "more", "exchange_type": "direct", "routing_key": "more"}


@pytest.fixture
def worker() -> Iterator[Worker]:
    app = Umbel(
        "unit",
        broker="memory://",
        backend="disabled://",
        set_as_current=False,
        task_queues=[Queue("a"), Queue("b")],
    )
    made = idle_worker(app)
    connect(made)
    yield made
    disconnect(made)
    made._aside.shutdown()
    made.inbox.close()
    app.close()


def connect(worker: Worker) -> None:
    """Consume, as the steps do, on a connection of its own."""
    consumer = worker.consumer
    consumer.connection = worker.app.connection()
    channel = consumer.channel = consumer.connection.channel()
    consumer.tasks = Consumer(channel, worker.consumption.queues, accept=None)
    consumer.tasks.consume()


def disconnect(worker: Worker) -> None:
    consumer = worker.consumer
    if consumer.connection is not None:
        consumer.connection.close()
    consumer.connection = consumer.tasks = None


def consumed(worker: Worker) -> set[str]:
    tasks = worker.consumer.tasks
    assert tasks is not None
    return {queue.name for queue in tasks.queues if tasks.consuming_from(queue)}


def reconnect(worker: Worker) -> set[str]:
    disconnect(worker)
    connect(worker)
    return consumed(worker)


def hear(worker: Worker, paused: dict[str, Any]) -> None:
    """Let another node greet, and tell which queues are paused."""
    worker.gossip.do(Greeted({"from_node": "other@test", "digest": {}, "paused": paused}))


def test_a_queue_that_is_added_is_consumed_now_and_after_a_break(worker: Worker) -> None:
    worker.consumption.add("more", **DIRECT)
    assert consumed(worker) == {"a", "b", "more"}
    assert reconnect(worker) == {"a", "b", "more"}
    worker.consumption.add("more", **DIRECT)
    assert consumed(worker) == {"a", "b", "more"}


def test_a_queue_that_is_dropped_stays_so(worker: Worker) -> None:
    worker.consumption.drop("a")
    assert consumed(worker) == {"b"}
    assert reconnect(worker) == {"b"}
    worker.consumption.drop("never there")
    worker.consumption.add("a", **DIRECT)
    assert consumed(worker) == {"a", "b"}


def test_a_queue_that_is_known_is_consumed_as_it_is_known(worker: Worker) -> None:
    worker.consumption.drop("a")
    worker.consumption.add("a", exchange="x", exchange_type="topic", routing_key="y")
    queue = worker.app.queues.consumed["a"]
    assert (queue.exchange.name, queue.exchange.type) == ("a", "direct")


def test_a_paused_queue_is_left_alone_until_it_is_resumed(worker: Worker) -> None:
    assert worker.consumption.pause("a")
    assert worker.consumption.pause("a")
    assert consumed(worker) == {"b"}
    assert reconnect(worker) == {"b"}
    assert worker.consumption.resume("a")
    assert not worker.consumption.resume("a")
    assert consumed(worker) == {"a", "b"}
    assert reconnect(worker) == {"a", "b"}


def test_what_is_not_consumed_here_can_not_be_paused(worker: Worker) -> None:
    assert not worker.consumption.pause("elsewhere")
    assert not worker.consumption.resume("elsewhere")
    assert consumed(worker) == {"a", "b"}


def test_dropping_or_adding_a_paused_queue_ends_its_pause(worker: Worker) -> None:
    worker.consumption.pause("a")
    worker.consumption.drop("a")
    assert not worker.consumption.resume("a")
    assert consumed(worker) == {"b"}
    worker.consumption.pause("b")
    worker.consumption.add("b", **DIRECT)
    assert consumed(worker) == {"b"}


def test_a_pause_of_the_cluster_outlives_dropping_and_adding(worker: Worker) -> None:
    consumption, now = worker.consumption, time.time()
    assert consumption.say("a", now, paused=True)
    assert consumption.pause("a")
    consumption.drop("a")
    consumption.add("a", **DIRECT)
    assert consumed(worker) == {"b"}
    assert not consumption.say("a", now - 1, paused=False), "a later word holds"
    assert consumption.say("a", now + 1, paused=False)
    assert consumption.resume("a")
    assert consumed(worker) == {"a", "b"}


def test_what_other_nodes_tell_is_obeyed_when_the_loop_turns(worker: Worker) -> None:
    consumption, now = worker.consumption, time.time()
    hear(worker, {"a": [now, True], "elsewhere": [now, True]})
    worker.inbox.run()
    assert consumed(worker) == {"b"}
    consumption.add("elsewhere", **DIRECT)
    assert reconnect(worker) == {"b"}
    hear(worker, {"a": [now + 1, False], "elsewhere": [now - 1, False]})
    worker.inbox.run()
    assert consumed(worker) == {"a", "b"}


def test_a_queue_that_rested_for_another_reason_stays_paused(worker: Worker) -> None:
    worker.consumer.rest("a")
    worker.consumption.pause("a")
    worker.consumer.resume("a")
    assert consumed(worker) == {"b"}
    worker.consumption.resume("a")
    assert consumed(worker) == {"a", "b"}


def test_changes_while_the_broker_is_away_hold_when_it_is_back(worker: Worker) -> None:
    disconnect(worker)
    worker.consumption.add("more", **DIRECT)
    worker.consumption.pause("a")
    worker.consumption.drop("b")
    connect(worker)
    assert consumed(worker) == {"more"}


def test_a_queue_that_the_broker_refuses_is_not_taken_up(worker: Worker) -> None:
    with pytest.raises(KeyError):
        worker.consumption.add("bad", exchange="x", exchange_type="none", routing_key="y")
    assert consumed(worker) == {"a", "b"}
    assert reconnect(worker) == {"a", "b"}
