"""Timer: what has to happen later, on the loop thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kombu.asynchronous.timer import Timer

from umbel.worker.blueprint import Step

if TYPE_CHECKING:
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.worker")


class TimerStep(Step):
    """Makes the timer that tasks with an eta wait on."""

    name = "Timer"

    def create(self, parent: Worker) -> None:
        """One timer for the life of the worker."""
        parent.timer = Timer(on_error=_failed)

    def stop(self, parent: Worker) -> None:
        """Nothing happens later any more."""
        parent.timer.clear()


def _failed(exc: BaseException) -> None:
    logger.error("a timer's work failed", exc_info=exc)
