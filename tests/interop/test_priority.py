"""Priorities: lower is sooner on Redis, higher is sooner on RabbitMQ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.peers import CELERY, UMBEL, Marks

PRIORITIES = [6, 0, 9, 3, 6, 9, 0, 3]


@pytest.mark.parametrize("broker", ["redis", "amqp"])
@pytest.mark.parametrize(("client_of", "worker_of"), [(CELERY, UMBEL), (UMBEL, CELERY)])
def test_a_worker_takes_the_most_urgent_message_first(
    client_of: str,
    worker_of: str,
    broker: str,
    marks: Marks,
    new_settings: Callable[..., Any],
    new_client: Callable[..., Any],
    crew: Callable[..., Any],
) -> None:
    settings = new_settings(broker, task_queue_max_priority=10, worker_prefetch_multiplier=1)
    client = new_client(client_of, settings)
    gate, mark = marks.name(), marks.name()
    crew(worker_of, settings, pool="solo", concurrency=1)
    # It holds its message until the end, so the worker has room for no other.
    client.send("late", kwargs={"mark": gate})
    marks.wait(f"{gate}:reached")

    sent = [client.send("mark", p, kwargs={"mark": mark}, priority=p) for p in PRIORITIES]
    marks.open(gate)

    order = [marks.wait(mark)["args"][0] for _ in sent]
    assert order == sorted(PRIORITIES, reverse=broker == "amqp")
