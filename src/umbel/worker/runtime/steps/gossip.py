"""Gossip: a worker follows the others and takes part in elections."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from umbel.broker.sessions.connections import driver
from umbel.worker.blueprint import Step

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.runtime.consumer import Consumer
    from umbel.worker.runtime.options import WorkerOptions

logger = logging.getLogger("umbel.gossip")

TRANSPORTS = frozenset({"amqp", "redis", "memory"})


class GossipStep(Step):
    """Starts and stops the thread that listens."""

    name = "Gossip"
    requires = ("Mingle",)

    @classmethod
    def why_off(cls, app: Umbel, options: WorkerOptions) -> str:
        """The switch."""
        return "--without-gossip" if options.without_gossip else ""

    def start(self, parent: Consumer) -> None:
        """Listen; the thread outlives a lost connection of the consumer."""
        worker = parent.worker
        kind = driver(parent.connection)
        if kind not in TRANSPORTS:
            logger.info("no gossip and no elections on %s", kind)
            return
        worker.gossip.start()

    def stop(self, parent: Consumer) -> None:
        """Listen no more, unless only the consumer's connection is gone."""
        worker = parent.worker
        if parent.lost and not worker.stop_wanted.is_set():
            return
        worker.gossip.stop(lost=parent.lost)
