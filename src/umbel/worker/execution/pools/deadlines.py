"""A thread that calls back at a given time, for the limits of pools without a loop of their own.

It starts with the first deadline and sleeps, without polling, until the earliest one; with no
deadline it sleeps for good. Jobs mostly end before their limits, so deadlines are mostly
cancelled: a cancelled one stays in the heap until its time or until they are the majority, then
the heap is rebuilt. The heap is thus bounded by twice the number of live deadlines, plus a few.
Callbacks run one after the other and must not block.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from time import monotonic

from umbel.worker.execution.pools.base import notify

_REBUILD_MIN = 64


class Deadline:
    """One pending callback."""

    __slots__ = ("_call", "_owner")

    def __init__(self, owner: Deadlines, call: Callable[[], object]) -> None:
        self._owner = owner
        self._call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Do not call back; it may be running already."""
        with self._owner.changed:
            if self._call is not None:
                self._call = None
                self._owner.forget_one()

    def take(self) -> Callable[[], object] | None:
        """What to call, once; with the owner's lock held."""
        call, self._call = self._call, None
        return call

    @property
    def pending(self) -> bool:
        """Neither called nor cancelled."""
        return self._call is not None


class Deadlines:
    """Calls back at given monotonic times."""

    def __init__(self, name: str) -> None:
        self.changed = threading.Condition()
        self._name = name
        self._heap: list[tuple[float, int, Deadline]] = []
        self._numbers = itertools.count()
        self._cancelled = 0
        self._thread: threading.Thread | None = None
        self._stopped = False

    def call_at(self, when: float, call: Callable[[], object]) -> Deadline:
        """Call `call` at monotonic time `when`."""
        deadline = Deadline(self, call)
        with self.changed:
            heapq.heappush(self._heap, (when, next(self._numbers), deadline))
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            elif self._heap[0][2] is deadline:
                self.changed.notify()
        return deadline

    def stop(self, wait_s: float | None) -> None:
        """End the thread, waiting for a callback under way; pending deadlines are dropped."""
        with self.changed:
            self._stopped = True
            self._heap.clear()
            self.changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait_s)

    def forget_one(self) -> None:
        """Count a cancelled deadline; with the lock held."""
        self._cancelled += 1
        if self._cancelled > _REBUILD_MIN and self._cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].pending]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def _loop(self) -> None:
        while True:
            with self.changed:
                call = self._next_due()
            if call is None:
                return
            notify(call)

    def _next_due(self) -> Callable[[], object] | None:
        while not self._stopped:
            if not self._heap:
                self.changed.wait()
                continue
            wait_s = self._heap[0][0] - monotonic()
            if not self._heap[0][2].pending:
                heapq.heappop(self._heap)
                self._cancelled = max(0, self._cancelled - 1)
            elif wait_s > 0:
                self.changed.wait(wait_s)
            else:
                call = heapq.heappop(self._heap)[2].take()
                if call is not None:
                    return call
        return None
