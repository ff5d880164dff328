"""Consumer: the last step of a worker, which runs until the worker stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umbel.worker.blueprint import Step

if TYPE_CHECKING:
    from umbel.worker.runtime.worker import Worker


class ConsumerStep(Step):
    """Runs the consumer's own blueprint."""

    name = "Consumer"
    requires = ("Pool",)
    last = True

    def create(self, parent: Worker) -> None:
        """Make the consumer; it connects when it runs."""
        from umbel.worker.runtime.consumer import Consumer

        parent.consumer = Consumer(parent)

    def start(self, parent: Worker) -> None:
        """Consume until the worker is asked to stop."""
        parent.consumer.run()
