"""What belongs to the process, every test finds as it was: the broker in memory, shared tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kombu.transport.memory import Channel, Transport

from umbel.app import current


@pytest.fixture(autouse=True)
def _empty_memory_broker() -> Iterator[None]:
    yield
    Channel.queues.clear()
    Transport.global_state.clear()


@pytest.fixture(autouse=True)
def _own_shared_tasks() -> Iterator[None]:
    """Every application of this process knows shared tasks, those of other tests too."""
    before = list(current._shared)
    yield
    current._shared[:] = before
