"""Redis counts how often a message went back, where RabbitMQ's quorum queues count too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from umbel.broker.redis.messages import redelivered


def envelope(**headers: Any) -> bytes:
    info = {"exchange": "", "routing_key": "celery"}
    return json.dumps({"headers": headers, "properties": {"delivery_info": info}}).encode()


def test_each_time_a_message_goes_back_is_counted() -> None:
    raw = envelope(task="t")
    for count in (1, 2, 3):
        raw = redelivered(raw)
        assert json.loads(raw)["headers"]["x-delivery-count"] == count
        assert json.loads(raw)["headers"]["redelivered"] is True


@pytest.mark.parametrize("before", ["many", None, -4, True, 1.5])
def test_a_count_that_is_none_begins_anew(before: Any) -> None:
    raw = redelivered(envelope(**{"x-delivery-count": before}))
    assert json.loads(raw)["headers"]["x-delivery-count"] == 1
