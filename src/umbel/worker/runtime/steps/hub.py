"""Hub: kombu's event loop, on which asynchronous transports and the inbox are watched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kombu.asynchronous import Hub

from umbel.worker.blueprint import Step

if TYPE_CHECKING:
    from umbel.worker.runtime.worker import Worker


class HubStep(Step):
    """Makes the hub; a green pool has an event loop of its own and needs none."""

    name = "Hub"
    requires = ("Timer",)

    def create(self, parent: Worker) -> None:
        """One hub for the life of the worker; its readers come and go with the connection."""
        parent.hub = Hub(timer=parent.timer)

    def stop(self, parent: Worker) -> None:
        """Let go of every descriptor."""
        parent.hub.close()
