"""Evloop: turns the loop. Always the last step of a consumer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umbel.worker.blueprint import Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from umbel.worker.runtime.consumer import Consumer


class EvloopStep(Step):
    """Chooses the loop by transport and pool, and runs it until the worker stops."""

    name = "Evloop"
    requires = ("Connection", "Tasks")
    last = True

    loop: Callable[[Consumer], None] | None = None  # instead of the one that would be chosen

    def start(self, parent: Consumer) -> None:
        """Consume until asked to stop; raises when the connection is lost."""
        # Here, because the loops know the step that consumes.
        from umbel.worker.runtime.loops import asynloop, synloop

        assert parent.connection is not None
        evented = parent.connection.transport.implements.asynchronous
        chosen = asynloop if evented and not parent.worker.pool.green else synloop
        (self.loop or chosen)(parent)
