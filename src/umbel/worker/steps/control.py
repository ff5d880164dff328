"""Control: obeys remote control."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from umbel.worker.blueprint import Step
from umbel.worker.commands import BUILTIN
from umbel.worker.panel import Panel
from umbel.worker.pidbox import GreenPidbox, Pidbox, ThreadPidbox

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.options import WorkerOptions


class ControlStep(Step):
    """Opens the pidbox that fits the pool."""

    name = "Control"
    requires = ("Connection",)

    def __init__(self, parent: Any, **options: Any) -> None:
        self.pidbox: Pidbox | None = None

    @classmethod
    def why_off(cls, app: Umbel, options: WorkerOptions) -> str:
        """The setting."""
        return "" if app.conf.worker_enable_remote_control else "worker_enable_remote_control"

    def create(self, parent: Any) -> None:
        """Gather the commands."""
        parent.worker.panel = Panel(parent.worker, BUILTIN)

    def start(self, parent: Any) -> None:
        """Listen."""
        worker = parent.worker
        if self.pidbox is None:
            kind = _pidbox_for(worker.pool)
            self.pidbox = kind(parent.app, worker.plan.hostname, worker.panel)
        worker.panel.pidbox = self.pidbox
        worker.panel.loop_thread = threading.get_ident() if worker.pool.inline else None
        self.pidbox.start(parent.connection)

    def stop(self, parent: Any) -> None:
        """Listen no more, unless only the consumer's connection is gone."""
        lost = parent.lost and not parent.worker.stop_wanted.is_set()
        if self.pidbox is not None:
            self.pidbox.stop(lost=lost)


def _pidbox_for(pool: Any) -> type[Pidbox]:
    if pool.green:
        return GreenPidbox
    return ThreadPidbox if pool.inline else Pidbox
