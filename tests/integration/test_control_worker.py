"""Workers do what they are told: events, queues, limits, the size of the pool, their end."""

from __future__ import annotations

import time

import pytest

from tests.ears import Ears
from tests.integration.commanded import Start, Tasks, silent, tell
from tests.servers import RabbitMQServer, wait_until
from umbel.worker.runtime import autoscale
from umbel.worker.runtime.steps import autoscaler as autoscaler_step


def test_task_events_are_switched_on_and_off(
    broker_url: str, commanded: Start, tasks: Tasks
) -> None:
    inside = commanded(broker_url)
    with Ears(broker_url) as ears:

        def run() -> str:
            count = len(tasks.ran)
            result = inside.send("note")
            wait_until(lambda: len(tasks.ran) > count, what="the task")
            return str(result.id)

        silent_before = run()
        assert tell(inside, "enable_events") == {"ok": "task events enabled"}
        assert tell(inside, "enable_events") == {"ok": "task events already enabled"}
        told = run()
        ears.wait_for("task-succeeded", uuid=told)
        assert tell(inside, "disable_events") == {"ok": "task events disabled"}
        assert tell(inside, "disable_events") == {"ok": "task events already disabled"}
        silent_after = run()
        beats = len(ears.of("worker-heartbeat"))
        assert tell(inside, "heartbeat") is None
        ears.wait_for("worker-heartbeat", beats + 1)
        heard = {event.get("uuid") for event in ears.events}
        assert told in heard
        assert not {silent_before, silent_after} & heard


def test_a_paused_queue_waits_until_it_is_resumed(
    broker_url: str, commanded: Start, tasks: Tasks
) -> None:
    inside = commanded(broker_url)
    assert tell(inside, "pause", queue="celery") == {"ok": "celery paused"}
    inside.send("note", "paused")
    inside.break_connection()
    assert tell(inside, "queue_lengths") == {"celery": 1}
    assert tell(inside, "pause", queue="other") == {"ok": "other is not consumed here"}
    assert tell(inside, "ping") == {"ok": "pong"}
    assert tasks.ran == []
    assert tell(inside, "resume", queue="celery") == {"ok": "celery resumed"}
    assert tell(inside, "resume", queue="celery") == {"ok": "celery was not paused here"}
    wait_until(lambda: tasks.ran == ["paused"], what="the task")


def test_queues_that_are_added_and_cancelled_stay_so_over_a_break(
    broker_url: str, commanded: Start, tasks: Tasks
) -> None:
    inside = commanded(broker_url)

    def consumed() -> set[str]:
        return {queue["name"] for queue in tell(inside, "active_queues")}

    assert tell(inside, "add_consumer", queue="more") == {"ok": "add consumer more"}
    inside.send("note", "more", queue="more")
    wait_until(lambda: tasks.ran == ["more"], what="a task of the new queue")
    assert tell(inside, "cancel_consumer", queue="celery") == {
        "ok": "no longer consuming from celery"
    }
    assert consumed() == {"more"}
    inside.break_connection()
    assert consumed() == {"more"}
    inside.send("note", "left", queue="celery")
    inside.send("note", "again", queue="more")
    wait_until(lambda: tasks.ran == ["more", "again"], what="a task of the new queue")
    assert tell(inside, "add_consumer", queue="celery") == {"ok": "add consumer celery"}
    wait_until(lambda: tasks.ran[2:] == ["left"], what="the task that waited")
    assert consumed() == {"celery", "more"}


def test_a_queue_that_the_broker_refuses_does_no_harm(
    amqp_url: str, commanded: Start, tasks: Tasks, rabbitmq_server: RabbitMQServer
) -> None:
    inside = commanded(amqp_url)
    with rabbitmq_server.connection(amqp_url.rsplit("/", 1)[1]) as connection:
        connection.channel().queue_declare("taken", durable=False, auto_delete=True)
        connection.channel().exchange_declare("topical", "topic", durable=True)
        for wrong in (
            {"queue": "taken"},
            {"queue": "x", "exchange": "topical"},
            {"queue": "amq.reserved"},
            {"queue": "x", "exchange_type": "bogus"},
            {"queue": "q" * 300},
            {"queue": "x", "queue_arguments": {"x-max-priority": "high"}},
        ):
            assert list(tell(inside, "add_consumer", **wrong)) == ["error"], wrong
    inside.send("note", 1)
    wait_until(lambda: tasks.ran == [1], what="a task")
    inside.break_connection()
    assert [queue["name"] for queue in tell(inside, "active_queues")] == ["celery"]
    assert inside.worker.counters.connections_lost == 1


def test_limits_apply_at_once(
    broker_url: str, redis_url: str, commanded: Start, tasks: Tasks
) -> None:
    inside = commanded(broker_url, redis_url, concurrency=2)
    assert inside.send("spin", 0).get(timeout=30) == "to the end"
    assert tell(inside, "time_limit", task_name="spin", soft=0.1, hard=None) == {
        "ok": "time limits set successfully"
    }
    result = inside.send("spin", 20)
    assert "SoftTimeLimitExceeded" in repr(result.get(timeout=10, propagate=False))
    tell(inside, "time_limit", task_name="spin", soft=None, hard=None)
    assert inside.send("spin", 0.3).get(timeout=30) == "to the end"

    assert tell(inside, "rate_limit", task_name="note", rate_limit="1/h") == {
        "ok": "new rate limit set successfully"
    }
    for number in range(20):
        inside.send("note", number)
    wait_until(
        lambda: inside.worker.deliveries.limits.parked_count == 19, what="tasks that are parked"
    )
    wait_until(lambda: tasks.ran == [0], what="the first task")
    assert tell(inside, "rate_limit", task_name="note", rate_limit=0) == {
        "ok": "rate limit disabled successfully"
    }
    wait_until(lambda: sorted(tasks.ran) == list(range(20)), what="every task")


def test_the_pool_grows_and_shrinks_when_it_is_told_to(
    redis_url: str, commanded: Start, tasks: Tasks
) -> None:
    inside = commanded(redis_url, concurrency=1)
    for _ in range(3):
        inside.send("hold")
    wait_until(lambda: len(tell(inside, "active")) == 1, what="one task")
    assert tell(inside, "pool_grow", n=2) == {"ok": "pool will grow"}
    wait_until(lambda: len(tell(inside, "active")) == 3, what="three tasks")
    assert tell(inside, "stats")["pool"]["max-concurrency"] == 3
    assert tell(inside, "pool_shrink", n=2) == {"ok": "pool will shrink"}
    assert tell(inside, "stats")["prefetch_count"] == 4
    assert "at least one must stay" in tell(inside, "pool_shrink", n=1)["error"]
    tasks.hold.set()


def test_the_pool_follows_the_work_also_over_a_break(
    redis_url: str, commanded: Start, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaler_step, "LOOK_S", 0.05)
    monkeypatch.setattr(autoscale.Autoscaler.__init__, "__defaults__", (0.2, time.monotonic))
    inside = commanded(redis_url, autoscale=(4, 1), concurrency=1)

    def size() -> int:
        return int(tell(inside, "stats")["autoscaler"]["current"])

    assert size() == 1
    for _ in range(6):
        inside.send("hold")
    wait_until(lambda: size() == 4, what="a pool of four")
    assert "set by the autoscaler" in tell(inside, "pool_grow", n=1)["error"]
    tasks.hold.set()
    wait_until(lambda: size() == 1, what="a pool of one")
    inside.break_connection()
    assert tell(inside, "autoscale", max=3, min=2) == {"ok": "autoscale now max=3 min=2"}
    assert size() == 2
    tasks.hold.clear()
    for _ in range(6):
        inside.send("hold")
    wait_until(lambda: size() == 3, what="a pool of three")
    assert "1 <= min <= max" in tell(inside, "autoscale", max=1, min=2)["error"]


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_worker_is_told_to_stop_and_ends_warm(
    broker_url: str, commanded: Start, tasks: Tasks, pool: str
) -> None:
    inside = commanded(broker_url, pool=pool)
    inside.send("hold")
    assert tasks.holding.wait(20)
    assert silent(inside, "shutdown")
    assert inside.alive
    tasks.hold.set()
    assert inside.join() == 0
    assert inside.worker.counters.finished == 1


def test_a_busy_solo_worker_says_that_it_will_obey_and_does(
    broker_url: str, commanded: Start, tasks: Tasks
) -> None:
    inside = commanded(broker_url, pool="solo")
    inside.send("hold")
    assert tasks.holding.wait(20)
    assert tell(inside, "count", n=1) == {
        "ok": "count will be carried out when the worker's loop turns again"
    }
    assert tasks.commands == []
    tasks.hold.set()
    wait_until(lambda: tasks.commands == [{"n": 1}], what="the command")
    assert tell(inside, "count") == {"ok": 2}


def test_a_node_that_has_its_messages_confirmed_answers(amqp_url: str, commanded: Start) -> None:
    inside = commanded(amqp_url, settings={"broker_transport_options": {"confirm_publish": True}})
    for _ in range(3):
        assert tell(inside, "ping") == {"ok": "pong"}
