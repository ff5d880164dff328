"""The agent, and hooks on task messages: parts of a user's that live in the consumer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.inside import Inside
from tests.servers import wait_until
from umbel import Umbel


class Agent:
    """Tells what happens to it, and uses the connection that it is given."""

    told: list[str] = []
    stop_fails = False

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        Agent.told.append("made")

    def start(self) -> None:
        assert self.connection.connected
        self.connection.channel().close()
        Agent.told.append("started")

    def stop(self) -> None:
        Agent.told.append("stopped")
        if Agent.stop_fails:
            raise ValueError("on purpose")


@pytest.fixture
def start() -> Iterator[Callable[..., Inside]]:
    made: list[Inside] = []
    Agent.told.clear()
    Agent.stop_fails = False

    def start_inside(url: str, ran: list[Any], **options: Any) -> Inside:
        def tasks(app: Umbel) -> None:
            app.task(name="note")(ran.append)

        settings = {"broker_url": url, "result_backend": "disabled://", **options.pop("settings")}
        made.append(Inside(settings, tasks, **options))
        return made[-1].start()

    yield start_inside
    for inside in made:
        inside.close()


@pytest.mark.parametrize("agent", [Agent, f"{__name__}:Agent", f"{__name__}.Agent"])
def test_an_agent_lives_as_long_as_the_connection_it_is_given(
    broker_url: str, start: Callable[..., Inside], agent: Any
) -> None:
    ran: list[Any] = []
    inside = start(broker_url, ran, settings={"worker_agent": agent})
    first = inside.worker.consumer.agent
    assert first.connection is inside.worker.consumer.connection
    inside.break_connection()
    assert inside.worker.consumer.agent is not first
    inside.send("note", 1)
    wait_until(lambda: ran == [1], what="a task")
    assert inside.stop() == 0
    assert Agent.told == ["made", "started", "stopped"] * 2


def test_an_agent_that_fails_to_stop_keeps_nobody_from_stopping(
    redis_url: str, start: Callable[..., Inside]
) -> None:
    inside = start(redis_url, [], settings={"worker_agent": Agent})
    Agent.stop_fails = True
    inside.break_connection()
    assert inside.stop() == 0
    assert Agent.told == ["made", "started", "stopped"] * 2


def test_hooks_see_every_task_message_and_their_errors_stay_with_them(
    broker_url: str, start: Callable[..., Inside], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, bool]] = []
    loop_thread: list[bool] = []

    def fails(message: Any) -> None:
        raise ValueError("on purpose")

    def sees(message: Any) -> None:
        loop_thread.append(threading.current_thread().name == "worker-inside")
        seen.append((message.headers.get("task"), message.acknowledged))

    def prepare(worker: Any) -> None:
        worker.on_task_message += [fails, sees]

    ran: list[Any] = []
    inside = start(broker_url, ran, settings={}, prepare=prepare)
    inside.send("note", 1)
    inside.send("unknown")
    inside.send("note", 2, countdown=0.1)
    wait_until(lambda: sorted(ran) == [1, 2], what="the tasks")
    assert sorted(seen) == [("note", False), ("note", False), ("unknown", False)]
    assert all(loop_thread)
    failures = [r for r in caplog.records if "a hook on task messages failed" in r.message]
    assert len(failures) == 3
