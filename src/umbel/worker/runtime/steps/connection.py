"""Connection: the one connection that tasks arrive on, and the node's name on the broker."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from umbel.broker.sessions.connections import hang_up
from umbel.worker.blueprint import Step
from umbel.worker.runtime.naming import Naming

if TYPE_CHECKING:
    from umbel.worker.runtime.consumer import Consumer

logger = logging.getLogger("umbel.consumer")


class ConnectionStep(Step):
    """Opens the connection and closes it, which gives unacknowledged messages back."""

    name = "Connection"

    def create(self, parent: Consumer) -> None:
        """What claims the name."""
        parent.naming = Naming(parent)

    def start(self, parent: Consumer) -> None:
        """Connect, with patience; a worker that is told to stop meanwhile goes no further."""
        parent.connection = parent.connect()
        if parent.connection is None:
            parent.blueprint.stop(parent)
            return
        logger.info("Connected to %s", parent.url)
        parent.naming.claim()

    def stop(self, parent: Consumer) -> None:
        """Close; a connection that is broken is let go, and the name is kept."""
        if not parent.lost or parent.worker.stop_wanted.is_set():
            parent.naming.release(lost=parent.lost)
        connection, parent.connection = parent.connection, None
        if connection is not None:
            hang_up(connection, lost=parent.lost, polled_elsewhere=True)
