"""Tasks: consumes the task queues."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from kombu import Consumer

from umbel.broker.messages import leave_compressed
from umbel.broker.taking import taker_for
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
        parent.taker = taker_for(channel)
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
        prefetch = parent.worker.prefetch
        # Messages that arrive while the broker is told may change the window again.
        while prefetch.is_due:
            prefetch.apply(partial(_set_window, parent))

    def stop(self, parent: Any) -> None:
        """Consume no more and close the channel, which gives back what is not acknowledged."""
        tasks, parent.tasks = parent.tasks, None
        channel, parent.channel = parent.channel, None
        parent.taker = None
        if tasks is not None:
            with contextlib.suppress(Exception):
                tasks.cancel()
        if channel is not None:
            with contextlib.suppress(Exception):
                channel.close()


def _set_window(parent: Any, window: int) -> None:
    """One window for the channel, which may change at any time.

    Quorum queues know windows of consumers only, and these hold for consumers made later.
    """
    tasks = parent.tasks
    if not _any_quorum(parent):
        tasks.qos(prefetch_count=window, apply_global=True)
        return
    running = any(tasks.consuming_from(queue) for queue in tasks.queues)
    if running:
        tasks.cancel()
    tasks.qos(prefetch_count=window)
    if running:
        tasks.consume()


def _any_quorum(parent: Any) -> bool:
    if not parent.app.conf.worker_detect_quorum_queues:
        return False
    queues = parent.app.queues.consumed.values()
    return any((q.queue_arguments or {}).get("x-queue-type") == "quorum" for q in queues)
