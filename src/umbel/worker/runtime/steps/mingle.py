"""Mingle: a worker that starts, or is connected again, catches up with the others."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from umbel.broker.sessions.connections import driver
from umbel.worker.blueprint import Step

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.runtime.consumer import Consumer
    from umbel.worker.runtime.options import WorkerOptions

logger = logging.getLogger("umbel.mingle")

TRANSPORTS = frozenset({"amqp", "redis", "gcpubsub", "memory"})


class MingleStep(Step):
    """Greets the others before the worker does anything else."""

    name = "Mingle"
    requires = ("Events",)

    @classmethod
    def why_off(cls, app: Umbel, options: WorkerOptions) -> str:
        """The switch."""
        return "--without-mingle" if options.without_mingle else ""

    def start(self, parent: Consumer) -> None:
        """Take over clocks and revocations; others that do not answer do not hold it up."""
        kind = driver(parent.connection)
        if kind not in TRANSPORTS:
            logger.info("no mingling on %s", kind)
            return
        began = time.monotonic()
        try:
            done = parent.worker.mingling.run(parent.connection)
        except parent.connection_errors:
            raise
        except Exception as exc:  # noqa: BLE001 - the worker works without it
            logger.warning("mingling failed: %s: %s", type(exc).__name__, exc)
            return
        finally:
            parent.app.control.close()
        if done is None:
            logger.info("mingle: all alone")
            return
        logger.info(
            "mingle: %d nodes answered in %.2f s%s",
            len(done.answered), time.monotonic() - began,
            f", silent: {', '.join(done.silent)}" if done.silent else "",
        )  # fmt: skip
