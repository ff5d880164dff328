"""Tasks: consumes the task queues."""

from __future__ import annotations

import contextlib
from typing import Any

from kombu import Consumer

from umbel.broker.messages import leave_compressed
from umbel.worker.blueprint import Step


class TasksStep(Step):
    """Declares the queues and asks the broker for their messages."""

    name = "Tasks"
    requires = ("Connection",)

    def start(self, parent: Any) -> None:
        """Begin to consume; the window is set first, so that the broker never sends too much."""
        worker = parent.worker
        channel = parent.channel = parent.connection.channel()
        leave_compressed(channel)
        parent.tasks = Consumer(
            channel,
            queues=list(worker.app.queues.consumed.values()),
            on_message=worker.receiver,
            on_decode_error=worker.receiver.undecodable,
            accept=None,
            no_ack=False,
        )
        worker.prefetch.forget_sent()
        self.apply_prefetch(parent)
        parent.tasks.consume()

    @staticmethod
    def apply_prefetch(parent: Any) -> None:
        """Tell the broker how many messages we want at once."""
        tasks, prefetch = parent.tasks, parent.worker.prefetch
        if prefetch.is_due:
            prefetch.apply(lambda window: tasks.qos(prefetch_count=window))

    def stop(self, parent: Any) -> None:
        """Consume no more and close the channel, which gives back what is not acknowledged."""
        tasks, parent.tasks = parent.tasks, None
        channel, parent.channel = parent.channel, None
        if tasks is not None:
            with contextlib.suppress(Exception):
                tasks.cancel()
        if channel is not None:
            with contextlib.suppress(Exception):
                channel.close()
