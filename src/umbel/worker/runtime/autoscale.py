"""Choosing the size of the pool by the work that there is.

Looked at once a second: more tasks at hand than slots let the pool grow to what they need, at once,
up to `most`. Slots that nobody needed for `KEEP_S` are taken away, one per look, down to `least`:
growing too late costs waiting, shrinking too early costs the same again a moment later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbel.worker.runtime.worker import Worker

logger = logging.getLogger("umbel.autoscale")

LOOK_S = 1.0
KEEP_S = 30.0


class Autoscaler:
    """Sizes one pool; on the loop's thread."""

    def __init__(
        self,
        worker: Worker,
        most: int,
        least: int,
        keep_s: float = KEEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self.most, self.least = most, least
        self._keep_s = keep_s
        self._clock = clock
        self._needed_at = clock()

    @property
    def size(self) -> int:
        """How many tasks may run at once."""
        return self._worker.pool.size

    @property
    def wanted(self) -> int:
        """How many tasks could run now."""
        deliveries = self._worker.deliveries
        held = deliveries.prefetch.held + deliveries.prefetch.parked
        return max(0, len(deliveries.reserved) - held)

    def look(self) -> None:
        """Grow if there is more to do than slots, shrink if slots are idle for long."""
        wanted = min(max(self.wanted, self.least), self.most)
        now = self._clock()
        if wanted >= self.size:
            self._needed_at = now
        if wanted > self.size:
            self._grow(wanted - self.size)
        elif self.size > wanted and now - self._needed_at >= self._keep_s:
            self._shrink(1)

    def update(self, most: int | None, least: int | None) -> tuple[int, int]:
        """New bounds, effective at once; the one that is not given follows where it must."""
        if most is None:
            most = max(self.most, least or 0)
        if least is None:
            least = min(self.least, most)
        if least < 1 or most < least:
            raise ValueError(f"autoscale max={most} min={least}: give 1 <= min <= max")
        self.most, self.least = most, least
        if self.size > most:
            self._shrink(self.size - most)
        elif self.size < least:
            self._grow(least - self.size)
        return most, least

    def info(self) -> dict[str, Any]:
        """The `autoscaler` part of the `stats` reply."""
        return {
            "max": self.most,
            "min": self.least,
            "current": self.size,
            "qty": self.wanted,
        }

    def _grow(self, n: int) -> None:
        logger.info("the pool grows by %d to %d", n, self.size + n)
        self._worker.grow(n)

    def _shrink(self, n: int) -> None:
        logger.info("the pool shrinks by %d to %d", n, self.size - n)
        self._worker.shrink(n)
