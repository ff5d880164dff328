"""Autoscaler: lets the pool follow the work; off unless `--autoscale` is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from umbel.worker.blueprint import Step
from umbel.worker.runtime.autoscale import LOOK_S, Autoscaler

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.runtime.options import WorkerOptions
    from umbel.worker.runtime.worker import Worker


class AutoscalerStep(Step):
    """Makes the autoscaler and wakes it once a second."""

    name = "Autoscaler"
    requires = ("Pool",)

    def __init__(self, parent: Worker, **options: Any) -> None:
        self._timer: Any = None

    @classmethod
    def why_off(cls, app: Umbel, options: WorkerOptions) -> str:
        """Off unless it is asked for."""
        return "" if options.autoscale is not None else "no --autoscale"

    def create(self, parent: Worker) -> None:
        """The pool begins with the least."""
        assert parent.options.autoscale is not None
        most, least = parent.options.autoscale
        parent.autoscaler = Autoscaler(parent, most, least)

    def start(self, parent: Worker) -> None:
        """Begin to look."""
        assert parent.autoscaler is not None
        self._timer = parent.timer.call_repeatedly(LOOK_S, parent.autoscaler.look)

    def stop(self, parent: Worker) -> None:
        """Look no more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
