"""Events: the worker's voice.

The dispatcher has a connection and a thread of its own, so it outlives the loss of the consumer's
connection: what is told meanwhile waits in its buffer. It ends, flushed, when the worker does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umbel.app.events.dispatcher import Dispatcher
from umbel.app.events.stamper import Stamper
from umbel.worker.blueprint import Step

if TYPE_CHECKING:
    from umbel.worker.runtime.consumer import Consumer
    from umbel.worker.runtime.worker import Worker

# How long the last events are tried to be sent; less when the broker seems to be gone.
PATIENCE_S, LOST_PATIENCE_S = 2.0, 0.5


class EventsStep(Step):
    """Makes the dispatcher and closes it."""

    name = "Events"
    requires = ("Connection",)

    def start(self, parent: Consumer) -> None:
        """Begin to tell; after a lost connection there is nothing to begin."""
        worker = parent.worker
        if worker.events is None:
            groups = {"worker", "task"} if worker.plan.task_events else {"worker"}
            stamper = Stamper(worker.plan.hostname, worker.app.clock)
            worker.events = Dispatcher(worker.app, groups=groups, stamper=stamper)
            worker.life.begin(stamper.inc)
        worker.app.events.synchronised = True
        worker.events.start()
        worker.events.hurry()  # the broker is there
        worker.task_events.refresh()

    def stop(self, parent: Consumer) -> None:
        """Send what is left and end; a lost connection is no reason to."""
        worker = parent.worker
        if parent.lost and not worker.stop_wanted.is_set():
            return
        self._end(worker, LOST_PATIENCE_S if parent.lost else PATIENCE_S)

    def terminate(self, parent: Consumer) -> None:
        """The same, with less patience."""
        self._end(parent.worker, LOST_PATIENCE_S)

    @staticmethod
    def _end(worker: Worker, patience_s: float) -> None:
        events, worker.events = worker.events, None
        worker.task_events.refresh()
        if events is not None:
            events.close(patience_s)
