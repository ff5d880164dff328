"""The switches of first and later connections, and failing over, with real brokers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ears import Ears
from tests.inside import Inside
from tests.servers import RedisServer, free_port, wait_until
from tests.sites import Site
from umbel import Umbel
from umbel.cluster.backoff import Backoff
from umbel.worker.blueprint import Step
from umbel.worker.runtime import consumer
from umbel.worker.runtime.errors import BrokerUnreachable


@pytest.mark.parametrize(
    ("settings", "tries"),
    [
        ({"broker_connection_retry_on_startup": False}, 1),
        ({"broker_connection_max_retries": 1}, 2),
    ],
    ids=["no-retry", "one-retry"],
)
def test_a_worker_that_may_not_try_again_ends_with_one_clear_line(
    redis_site: Site, settings: dict[str, Any], tries: int
) -> None:
    address = f"redis://127.0.0.1:{free_port()}/0"
    worker = redis_site.worker("threads", wait=False, settings={**settings, "broker_url": address})
    assert worker.wait() == 1
    told = [line for line in worker.lines if "annot connect" in line]
    assert len(told) == tries
    assert f"cannot connect to {address}" in told[-1]
    assert "Retrying" not in told[-1]
    assert "Traceback" not in worker.output


def test_a_worker_waits_for_its_broker_for_ever_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery gives up after a hundred attempts; here that would be after a few minutes."""
    monkeypatch.setattr(consumer, "RETRY", Backoff(0.001, 0.003))
    tries: list[int] = []
    refused = consumer.Consumer._refused

    def count(self: Any, exc: Exception, attempt: int, *rest: Any) -> None:
        tries.append(attempt)
        refused(self, exc, attempt, *rest)

    monkeypatch.setattr(consumer.Consumer, "_refused", count)
    server, ran = RedisServer(tmp_path), []
    inside = Inside({"broker_url": server.url, "result_backend": "disabled://"}, noting(ran))
    try:
        inside.start(wait=False)
        wait_until(lambda: len(tries) > 110 or not inside.alive, 30, "many attempts")
        server.start()
        inside.wait_until_ready()
        inside.send("note", 1)
        wait_until(lambda: ran == [1], what="a task of the broker that came back")
    finally:
        inside.close()
        server.close()


def test_a_worker_that_may_not_reconnect_ends_when_the_connection_is_lost(
    redis_site: Site, redis_server: RedisServer
) -> None:
    worker = redis_site.worker("threads", settings={"broker_connection_retry": False})
    assert redis_site.works()
    redis_server.client().client_kill_filter(_type="normal", skipme=True)
    assert worker.wait() == 1
    last_words = [line for line in worker.lines if "CRITICAL" in line]
    assert len(last_words) == 1
    assert "broker_connection_retry is off" in last_words[0]
    assert "Traceback" not in worker.output


def test_a_worker_that_is_stopped_while_it_has_no_connection_says_good_bye(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"broker_url": redis_url, "result_backend": "disabled://"}
    inside = Inside(settings, noting([]))
    away = threading.Event()

    def connect_never(self: consumer.Consumer) -> None:
        away.set()
        self.worker.stop_wanted.wait()

    with Ears(redis_url) as ears:
        try:
            inside.start()
            ears.wait_for("worker-online")
            monkeypatch.setattr(consumer.Consumer, "connect", connect_never)
            inside.worker.consumer.failure = ConnectionError("broken by a test")
            inside.worker.inbox.wake()
            assert away.wait(10)
            assert inside.stop() == 0
            ears.wait_for("worker-offline")
            assert not [one for one in threading.enumerate() if one.name.startswith("umbel-gossip")]
        finally:
            inside.close()


class Gated:
    """An early-acknowledged task that waits until it is let go."""

    def __init__(self) -> None:
        self.begun, self.gate, self.ended = (threading.Event() for _ in range(3))

    def __call__(self, app: Umbel) -> None:
        @app.task(name="gated")
        def gated() -> None:
            self.begun.set()
            self.gate.wait(20)
            self.ended.set()


def test_what_runs_may_end_before_a_worker_that_may_not_reconnect_does(broker_url: str) -> None:
    tasks = Gated()
    settings = {
        "broker_url": broker_url,
        "result_backend": "disabled://",
        "broker_connection_retry": False,
    }
    inside = Inside(settings, tasks).start()
    try:
        inside.send("gated")
        assert tasks.begun.wait(20)
        inside.call(lambda: setattr(inside.worker.consumer, "failure", ConnectionError("gone")))
        wait_until(lambda: inside.worker.consumer.connection is None, what="the loss")
        assert inside.alive
        tasks.gate.set()
        with pytest.raises(BrokerUnreachable, match="broker_connection_retry is off"):
            inside.join()
        assert tasks.ended.is_set()
    finally:
        tasks.gate.set()
        inside.close()


def noting(ran: list[Any]) -> Any:
    def tasks(app: Umbel) -> None:
        app.task(name="note")(ran.append)

    return tasks


@pytest.mark.parametrize("form", ["list", "text"])
def test_every_broker_of_a_list_is_tried_in_turn(broker_url: str, form: str) -> None:
    scheme = broker_url.partition("://")[0]
    dead = [f"{scheme}://127.0.0.1:{free_port()}//" for _ in range(3)]
    ran: list[Any] = []
    urls: Any = [*dead, broker_url]
    settings = {
        "broker_url": urls if form == "list" else ";".join(urls),
        "result_backend": "disabled://",
        "broker_connection_retry_on_startup": False,
    }
    inside = Inside(settings, noting(ran)).start()
    try:
        inside.send("note", 1)
        wait_until(lambda: ran == [1], what="the task")
    finally:
        inside.close()


@pytest.fixture
def second_redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.close()


def test_a_worker_goes_to_the_next_broker_when_its_own_dies(
    redis_server: RedisServer, redis_url: str, second_redis: RedisServer
) -> None:
    """The brokers share nothing: what matters is where the worker consumes."""
    ran: list[Any] = []
    settings = {"broker_url": [second_redis.url, redis_url], "result_backend": "disabled://"}
    inside = Inside(settings, noting(ran)).start()
    other = Umbel("other", broker=redis_url, backend="disabled://", set_as_current=False)
    try:
        inside.send("note", "first")
        wait_until(lambda: ran == ["first"], what="a task of the first broker")
        second_redis.kill()
        other.send_task("note", ("second",))
        wait_until(lambda: ran == ["first", "second"], 20, "a task of the second broker")
        assert inside.worker.counters.connections_lost == 1
        assert inside.stop() == 0
    finally:
        other.close()
        inside.close()


def test_timers_of_the_workers_own_steps_outlive_connections(broker_url: str) -> None:
    beats: list[int] = []
    settings = {"broker_url": broker_url, "result_backend": "disabled://"}

    class Beat(Step):
        requires = ("Timer",)

        def start(self, parent: Any) -> None:
            parent.timer.call_repeatedly(0.05, beats.append, (1,))

    def tasks(app: Umbel) -> None:
        app.steps["worker"].add(Beat)

    inside = Inside(settings, tasks).start()
    try:
        counts = []
        for _ in range(3):
            before = len(beats)
            wait_until(lambda own=before: len(beats) > own + 2, what="beats")
            counts.append(inside.call(lambda: len(inside.worker.timer)))
            inside.break_connection()
        assert len(set(counts)) == 1, "a timer was left over, or lost"
    finally:
        inside.close()


def test_a_task_is_not_cancelled_for_a_connection_that_did_not_bring_it(redis_url: str) -> None:
    """Redis was lost, and lost again before there was a channel: its message is still ours."""
    tasks = Gated()
    settings = {
        "broker_url": redis_url,
        "result_backend": "disabled://",
        "task_acks_late": True,
        "worker_cancel_long_running_tasks_on_connection_loss": True,
    }
    inside = Inside(settings, tasks).start()
    worker = inside.worker

    def lost_twice() -> None:
        worker.driver.connection_lost()
        worker.consumer.channel = None
        worker.driver.connection_lost()
        worker.consumer.failure = ConnectionError("gone")

    try:
        inside.send("gated")
        assert tasks.begun.wait(20)
        wait_until(lambda: worker.deliveries.active, what="the task to be counted")
        inside.call(lost_twice)
        wait_until(lambda: worker.counters.connections_lost == 1, what="the loss")
        inside.wait_until_ready()
        tasks.gate.set()
        wait_until(lambda: not worker.deliveries.reserved, what="the end of the task")
        assert tasks.ended.is_set()
        assert worker.counters.received == 1, "it was delivered again"
    finally:
        tasks.gate.set()
        inside.close()
