"""The broker in memory belongs to the process: every test finds it empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kombu.transport.memory import Channel, Transport


@pytest.fixture(autouse=True)
def _empty_memory_broker() -> Iterator[None]:
    yield
    Channel.queues.clear()
    Transport.global_state.clear()
