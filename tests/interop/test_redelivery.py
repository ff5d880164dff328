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


def test_workers_with_wrong_clocks_and_celery_leave_each_others_tasks_alone(
    marks: Marks,
    own_redis: RedisServer,
    new_settings: Callable[..., Any],
    new_client: Callable[..., Any],
    crew: Callable[..., Any],
) -> None:
    """Celery notes what it takes, and judges what is overdue, by its own clock, which is right."""
    options = {
        "visibility_timeout": 60,
        "unacked_restore_interval": 0.25,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 1,
    }
    settings = new_settings("redis", broker_transport_options=options, worker_prefetch_multiplier=1)
    client, gate = new_client(UMBEL, settings), marks.name()
    redis = own_redis.client(int(settings["broker_url"].rpartition("/")[2]))
    crew(CELERY, settings)
    for number, shift_s in enumerate((-7_200.0, 7_200.0)):
        crew(UMBEL, settings, name=f"umbel{number}@%h", shift_s=shift_s)
    results = [client.send("late", kwargs={"mark": gate}) for _ in range(6)]
    holders = {marks.wait(f"{gate}:reached").partition("@")[0] for _ in results}
    assert holders == {CELERY, "umbel0", "umbel1"}
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 3, WAIT_S, "everybody to have looked often")
    assert (redis.llen("celery"), redis.hlen("unacked")) == (0, 6), "some were given back"
    for _ in results:
        marks.open(gate)
    for result in results:
        assert result.get(timeout=WAIT_S)[1] is False, "it was delivered before"
