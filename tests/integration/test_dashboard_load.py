"""What a busy cluster costs the dashboard: processor, memory, and that nothing is lost.

The measure itself is `benchmarks/dashboard.py`; here it is taken for some seconds, in `make soak`
for as long as is promised.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.dashboard import CORES_MAX, MEMORY_MB_MAX, measure
from tests.servers import RedisServer
from tests.sizes import size

WORKERS = 100


def test_a_thousand_events_a_second_of_a_hundred_workers_are_held(
    redis_server: RedisServer, redis_url: str, tmp_path: Path
) -> None:
    found = measure(redis_server, redis_url, tmp_path, seconds=size(10, 300), workers=WORKERS)
    print(found)
    assert found.holds
    assert found.nodes_alive == WORKERS
    assert found.missing == 0
    assert found.reconnects == 0


def test_a_broker_that_is_restarted_under_load_is_heard_again(
    redis_server: RedisServer, redis_url: str, tmp_path: Path
) -> None:
    found = measure(
        redis_server, redis_url, tmp_path, seconds=size(8, 60), workers=20, restarts=2, rate=500
    )
    print(found)
    assert found.holds
    assert found.heard_after_all
    assert found.reconnects >= 1
    assert found.nodes_alive == 20


def test_a_promise_that_is_not_held_is_told(
    redis_server: RedisServer, redis_url: str, tmp_path: Path
) -> None:
    found = measure(redis_server, redis_url, tmp_path, seconds=2, workers=5, rate=100)
    assert not replace(found, memory_mb_max=MEMORY_MB_MAX + 1).holds
    assert not replace(found, cores_at_rate=CORES_MAX + 0.01).holds
    assert not replace(found, heard_after_all=False).holds
    assert not replace(found, complaints=["Traceback"]).holds
