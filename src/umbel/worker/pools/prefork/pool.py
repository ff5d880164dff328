"""The prefork pool: its public face.

See the package for the design. One lock guards all state. `submit` writes to a child directly when
one has room. What children say is heard by the keeper thread, and watchers are called there; or, if
the watchers have a loop (`PoolOptions.loop`), on the loop's thread, which saves a change of threads
for every few orders. Everything else is done by the keeper.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

from umbel.worker.orders import Order
from umbel.worker.pools.base import Pool, PoolClosed, PoolOptions, Submission, Watcher, notify
from umbel.worker.pools.prefork.child import Job
from umbel.worker.pools.prefork.keeper import Keeper
from umbel.worker.pools.prefork.nursery import check_platform
from umbel.worker.pools.prefork.roster import LOAD_S

_FORKED_WAIT_S = 10.0
_TERMINATE_JOIN_S = 5.0


class PreforkPool(Pool):
    """Runs each order in one of `size` child processes."""

    name: ClassVar[str] = "prefork"

    def __init__(self, options: PoolOptions) -> None:
        check_platform()
        super().__init__(options)
        self._keeper = Keeper(options)
        self._lock = self._keeper.lock
        self._roster = self._keeper.roster
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._keeper.keep, name="umbel-keeper", daemon=True)

    @property
    def size(self) -> int:
        """How many child processes there should be."""
        return self._keeper.target

    def start(self) -> None:
        """Fork the children; returns when they are forked, not when they are ready."""
        if self.options.loop is not None:
            self.options.loop.watch(self._keeper.bells_fd, self._keeper.listen)
        self._thread.start()
        self._keeper.forked.wait(_FORKED_WAIT_S)

    def submit(
        self,
        order: Order,
        watcher: Watcher,
        soft_s: float | None,
        hard_s: float | None,
        expected_s: float | None = None,
    ) -> None:
        """Send the order to a child with room, or queue it; `OrderError` if it cannot be sent."""
        job = self._job(order, watcher, soft_s, hard_s, expected_s)
        keeper = self._keeper
        with self._lock:
            if self._is_closed:
                raise PoolClosed(f"order {order.id} came after the prefork pool was closed")
            queue = self._roster.queue
            if job.bulky:
                queue.append(job)
                keeper.wake()  # only the keeper can wait for a socket to take more
            elif queue or self._roster.place(job) is None:
                queue.append(job)
            else:
                keeper.send()

    def fill(self, orders: Iterator[Submission]) -> None:
        """Send to each child as many orders as it has room for, many in one packet."""
        unfit: list[tuple[Watcher, Exception]] = []
        with self._lock:
            if not self._is_closed:
                self._keeper.fill(self._jobs(orders, unfit))
        for watcher, exc in unfit:
            notify(watcher.unfit, exc)

    def _jobs(
        self, orders: Iterator[Submission], unfit: list[tuple[Watcher, Exception]]
    ) -> Iterator[Job]:
        make = self._job
        for one in orders:
            try:
                job = make(*one)
            except Exception as exc:  # noqa: BLE001 - the watcher hears it
                unfit.append((one[1], exc))
            else:
                yield job

    def _job(
        self,
        order: Order,
        watcher: Watcher,
        soft_s: float | None,
        hard_s: float | None,
        expected_s: float | None,
    ) -> Job:
        cost_s = LOAD_S if expected_s is None or expected_s > LOAD_S else expected_s
        return Job(next(self._numbers), order, watcher, soft_s, hard_s, cost_s)

    @property
    def _is_closed(self) -> bool:
        return self._keeper.closing or self._keeper.terminated

    def has_room(self) -> bool:
        """Whether some child has so little to do that one more order would begin soon."""
        with self._lock:
            return self._roster.has_room

    def recall(self) -> list[Watcher]:
        """Take back every order that no child has begun."""
        with self._lock:
            return [job.watcher for job in self._roster.recall()]

    def close_and_join(self, timeout_s: float | None) -> bool:
        """Take no more orders; children leave when all orders have ended."""
        with self._lock:
            self._keeper.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def terminate(self) -> None:
        """Kill every child at once.

        What has ended is not to be run again because nobody has listened yet: on the thread where
        watchers are called they are, a last time.
        """
        loop = self.options.loop
        with self._lock:
            calls = self._keeper.terminate(last_words=loop is not None and loop.is_here)
        for call, args in calls:
            notify(call, *args)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_TERMINATE_JOIN_S)

    def cancel(self, order_id: str, signum: int) -> bool:
        """Signal the child that runs the order, or drop the order if it has not begun."""
        signal.Signals(signum)  # ValueError for a number that is no signal
        with self._lock:
            found = self._roster.cancel(order_id, signum)
            self._keeper.wake()
            return found

    def grow(self, n: int) -> None:
        """Fork `n` more children."""
        with self._lock:
            self._keeper.target += n
            self._keeper.wake()

    def shrink(self, n: int) -> None:
        """Let `n` children go, idle ones first; none is interrupted."""
        with self._lock:
            self._keeper.target = self._checked_shrink(n)
            staying = [child for child in self._roster.children.values() if not child.leaving]
            surplus = max(0, len(staying) - self._keeper.target)
            for child in sorted(staying, key=lambda one: len(one.held))[:surplus]:
                self._roster.dismiss(child)
            self._keeper.wake()

    def restart(self) -> None:
        """Replace every child, each when its present order has ended."""
        with self._lock:
            for child in self._roster.children.values():
                if not child.leaving:
                    self._roster.dismiss(child)
            self._keeper.wake()

    def info(self) -> dict[str, Any]:
        """The `pool` part of the `stats` reply."""
        with self._lock:
            children = list(self._roster.children.values())
            waiting = len(self._roster.queue)
        total = self._keeper.accepted_count
        described = {
            "processes": [child.pid for child in children],
            "max-tasks-per-child": self.options.max_tasks_per_child or "N/A",
            "writes": {
                "total": total,
                "avg": f"{1 / max(len(children), 1):.2%}",
                "all": ", ".join(f"{child.served / max(total, 1):.2%}" for child in children),
                "raw": ", ".join(str(child.served) for child in children),
                "strategy": "fair",
                "inqueues": {
                    "total": len(children),
                    "active": sum(1 for child in children if child.held),
                    "waiting": waiting,
                },
            },
        }
        return self._described(**described)
