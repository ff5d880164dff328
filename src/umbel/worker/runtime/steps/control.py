"""Control: obeys remote control.

On RabbitMQ the queue of a node belongs to one connection. One that is gone without a word keeps it
until the broker notices; the worker goes on without commands meanwhile, and looks again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from umbel.broker.sessions.names import NodeNameTaken, is_locked
from umbel.worker.blueprint import Step
from umbel.worker.control.commands import BUILTIN
from umbel.worker.control.panel import Panel
from umbel.worker.control.pidbox import OwnPidbox, Pidbox, pidbox_for

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.runtime.consumer import Consumer
    from umbel.worker.runtime.options import WorkerOptions

logger = logging.getLogger("umbel.control")

LOOK_S = 1.0


class ControlStep(Step):
    """Opens the pidbox that fits the pool."""

    name = "Control"
    requires = ("Connection",)

    def __init__(self, parent: Consumer, **options: Any) -> None:
        self.pidbox: Pidbox | None = None
        self._locked_out = False

    @classmethod
    def why_off(cls, app: Umbel, options: WorkerOptions) -> str:
        """The setting."""
        return "" if app.conf.worker_enable_remote_control else "worker_enable_remote_control"

    def create(self, parent: Consumer) -> None:
        """Gather the commands."""
        parent.worker.panel = Panel(parent.worker, BUILTIN)

    def start(self, parent: Consumer) -> None:
        """Listen."""
        worker, panel = parent.worker, parent.worker.panel
        assert panel is not None
        first = self.pidbox is None
        if self.pidbox is None:
            kind = pidbox_for(worker.pool)
            self.pidbox = kind(parent.app, worker.plan.hostname, panel)
        panel.pidbox = self.pidbox
        self._listen(parent)
        if first and isinstance(self.pidbox, OwnPidbox) and self.pidbox.locked:
            self._settle(parent, self.pidbox)
            if self.pidbox.locked:
                self._report_locked(parent)

    def stop(self, parent: Consumer) -> None:
        """Listen no more; a pidbox with a connection of its own outlives the consumer's."""
        outlives = isinstance(self.pidbox, OwnPidbox) and parent.lost
        if self.pidbox is not None and not (outlives and not parent.worker.stop_wanted.is_set()):
            self.pidbox.stop(lost=parent.lost)

    def _listen(self, parent: Consumer) -> None:
        assert self.pidbox is not None
        try:
            self.pidbox.start(parent.connection)
        except parent.connection_errors as exc:
            if not is_locked(exc):
                raise
            if not self._locked_out:
                self._report_locked(parent)
            self._locked_out = True
            parent.worker.timer.call_after(LOOK_S, self._look_again, (parent, parent.connection))
        else:
            self._locked_out = False

    def _look_again(self, parent: Consumer, connection: Any) -> None:
        if parent.connection is connection and not parent.worker.stop_wanted.is_set():
            self._listen(parent)

    @staticmethod
    def _report_locked(parent: Consumer) -> None:
        logger.warning(
            "the control queue of %s belongs to another connection: commands are obeyed "
            "as soon as the broker has closed it",
            parent.worker.plan.hostname,
        )

    @staticmethod
    def _settle(parent: Consumer, pidbox: OwnPidbox) -> None:
        """Two of one name started at a time, and the other one has the queue."""
        if not parent.naming.sure:
            return  # it was looked at before, and nobody answered
        pidbox.stop()  # or it would answer by itself
        try:
            parent.naming.claim_again()
        except NodeNameTaken:
            if parent.worker.events is not None:
                parent.worker.events.disable()  # the good-bye would be the other one's
            raise
        pidbox.start(parent.connection)
