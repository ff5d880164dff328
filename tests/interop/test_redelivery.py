"""A worker of one library takes up what a worker of the other left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.peers import CELERY, UMBEL, WAIT_S, Marks
from tests.servers import RedisServer, wait_until

SUCCESSIONS = [(UMBEL, CELERY), (CELERY, UMBEL)]
VISIBILITY_S = 1


@pytest.mark.parametrize(("dying", "heir"), SUCCESSIONS)
@pytest.mark.parametrize("broker", ["redis", "amqp"])
def test_the_tasks_of_a_killed_worker_run_on_its_heir(
    broker: str,
    dying: str,
    heir: str,
    marks: Marks,
    own_redis: RedisServer,
    new_settings: Callable[..., Any],
    new_client: Callable[..., Any],
    crew: Callable[..., Any],
) -> None:
    options = {"visibility_timeout": VISIBILITY_S} if broker == "redis" else {}
    settings = new_settings(broker, broker_transport_options=options, worker_prefetch_multiplier=1)
    client = new_client(heir, settings)
    gate = marks.name()
    killed = crew(dying, settings)
    results = [client.send("late", kwargs={"mark": gate}) for _ in range(2)]
    for _ in results:
        assert marks.wait(f"{gate}:reached").startswith(f"{dying}@")

    killed.kill()
    if broker == "redis":
        redis = own_redis.client(int(settings["broker_url"].rpartition("/")[2]))
        wait_until(lambda: _all_visible(redis), WAIT_S, "the time-out of the messages")
    crew(heir, settings)

    for _ in results:
        assert marks.wait(f"{gate}:reached").startswith(f"{heir}@")
    for _ in results:
        marks.open(gate)
    for result in results:
        hostname, redelivered = result.get(timeout=WAIT_S)
        assert hostname.startswith(f"{heir}@")
        assert redelivered is True


def _all_visible(redis: Any) -> bool:
    scores = [score for _, score in redis.zrange("unacked_index", 0, -1, withscores=True)]
    return len(scores) == 2 and max(scores) < time.time() - VISIBILITY_S


@pytest.mark.parametrize(("leaving", "heir"), SUCCESSIONS)
@pytest.mark.parametrize("broker", ["redis", "amqp"])
def test_a_worker_that_leaves_gives_back_what_waits_for_its_time(
    broker: str,
    leaving: str,
    heir: str,
    new_settings: Callable[..., Any],
    new_client: Callable[..., Any],
    crew: Callable[..., Any],
) -> None:
    settings = new_settings(broker, worker_prefetch_multiplier=1)
    client = new_client(heir, settings)
    worker = crew(leaving, settings)
    results = [client.send("where", number, countdown=60) for number in range(4)]
    for result in results:
        worker.wait_for(rf"{result.id}.*received")

    worker.stop()

    successor = crew(heir, settings)
    for result in results:
        successor.wait_for(rf"{result.id}.*received")
