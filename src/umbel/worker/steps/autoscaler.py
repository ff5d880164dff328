"""Autoscaler: lets the pool follow the work; off unless `--autoscale` is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from umbel.worker.autoscale import LOOK_S, Autoscaler
from umbel.worker.blueprint import Step

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.options import WorkerOptions


class AutoscalerStep(Step):
    """Makes the autoscaler and wakes it once a second."""

    name = "Autoscaler"
    requires = ("Pool",)

    def __init__(self, parent: Any, **options: Any) -> None:
        self._timer: Any = None

    @classmethod
    def why_off(cls, app: Umbel, options: WorkerOptions) -> str:
        """Off unless it is asked for."""
        return "" if options.autoscale is not None else "no --autoscale"

    def create(self, parent: Any) -> None:
        """The pool begins with the least."""
        most, least = parent.options.autoscale
        parent.autoscaler = Autoscaler(parent, most, least)

    def start(self, parent: Any) -> None:
        """Begin to look."""
        self._timer = parent.timer.call_repeatedly(LOOK_S, parent.autoscaler.look)

    def stop(self, parent: Any) -> None:
        """Look no more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
