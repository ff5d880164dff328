"""Evloop: turns the loop. Always the last step of a consumer."""

from __future__ import annotations

from typing import Any

from umbel.worker.blueprint import Step
from umbel.worker.loops import asynloop, synloop


class EvloopStep(Step):
    """Chooses the loop by transport and pool, and runs it until the worker stops."""

    name = "Evloop"
    requires = ("Connection", "Tasks")
    last = True

    def start(self, parent: Any) -> None:
        """Consume until told to stop; raises when the connection is lost."""
        transport = parent.connection.transport
        evented = transport.implements.asynchronous and not parent.worker.pool.green
        (asynloop if evented else synloop)(parent)
