"""The prefork pool: the `Pool` interface over a supervisor and its children.

See the package for the design. One lock guards all state. `submit` and `fill` write to children
directly. What children send is read by the supervisor's thread, and watchers are called there; or,
if the watchers have a loop (`PoolOptions.loop`), on the loop's thread, which saves a change of
threads for every few jobs. Everything else is done by the supervisor's thread.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

from umbel.worker.execution.jobs import Job, encode_job, portable
from umbel.worker.execution.pools.base import (
    Pool,
    PoolClosed,
    PoolOptions,
    Submission,
    Watcher,
    notify,
)
from umbel.worker.execution.pools.prefork.child import WorkItem
from umbel.worker.execution.pools.prefork.forker import check_platform
from umbel.worker.execution.pools.prefork.frames import PACKET_PAYLOAD_BYTES_MAX
from umbel.worker.execution.pools.prefork.supervisor import LOAD_S, Supervisor

_FORKED_WAIT_S = 10.0
_TERMINATE_JOIN_S = 5.0


class PreforkPool(Pool):
    """Runs each job in one of `size` child processes."""

    name: ClassVar[str] = "prefork"

    def __init__(self, options: PoolOptions) -> None:
        check_platform()
        super().__init__(options)
        self._supervisor = Supervisor(options)
        self._lock = self._supervisor.lock
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(
            target=self._supervisor.run, name="umbel-supervisor", daemon=True
        )

    @property
    def size(self) -> int:
        """How many child processes there should be."""
        return self._supervisor.target

    def start(self) -> None:
        """Fork the children; returns when they are forked, not when they are ready."""
        if self.options.loop is not None:
            self.options.loop.watch(self._supervisor.bells_fd, self._supervisor.listen)
        self._thread.start()
        self._supervisor.forked.wait(_FORKED_WAIT_S)

    def submit(
        self,
        job: Job,
        watcher: Watcher,
        soft_s: float | None,
        hard_s: float | None,
        expected_s: float | None = None,
    ) -> None:
        """Send the job to a child with room, or queue it; `JobError` if it cannot be sent."""
        item = self._item(job, watcher, soft_s, hard_s, expected_s)
        with self._lock:
            if self._is_closed:
                raise PoolClosed(f"job {job.id} came after the prefork pool was closed")
            self._supervisor.submit(item)

    def fill(self, jobs: Iterator[Submission]) -> None:
        """Send to each child as many jobs as it has room for, many in one packet."""
        unfit: list[tuple[Watcher, Exception]] = []
        with self._lock:
            if not self._is_closed:
                self._supervisor.fill(self._items(jobs, unfit))
        for watcher, exc in unfit:
            notify(watcher.unfit, exc)

    def _items(
        self, jobs: Iterator[Submission], unfit: list[tuple[Watcher, Exception]]
    ) -> Iterator[WorkItem]:
        make = self._item
        for one in jobs:
            try:
                item = make(*one)
            except Exception as exc:  # noqa: BLE001 - the watcher hears it
                unfit.append((one[1], exc))
            else:
                yield item

    def _item(
        self,
        job: Job,
        watcher: Watcher,
        soft_s: float | None,
        hard_s: float | None,
        expected_s: float | None,
    ) -> WorkItem:
        cost_s = LOAD_S if expected_s is None or expected_s > LOAD_S else expected_s
        data = encode_job(job if job.decoded is None else portable(job))
        bulky = len(data) > PACKET_PAYLOAD_BYTES_MAX
        seq = next(self._numbers)
        return WorkItem(seq, job.id, watcher, soft_s, hard_s, cost_s, data, bulky)

    @property
    def _is_closed(self) -> bool:
        return self._supervisor.closing or self._supervisor.terminated

    def has_room(self) -> bool:
        """Whether some child has so little to do that one more job would begin soon."""
        with self._lock:
            return self._supervisor.has_room

    def recall(self) -> list[Watcher]:
        """Take back every job that no child has begun."""
        with self._lock:
            return [item.watcher for item in self._supervisor.recall()]

    def close_and_join(self, timeout_s: float | None) -> bool:
        """Take no more jobs; children leave when all jobs have ended."""
        with self._lock:
            self._supervisor.close()
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
            calls = self._supervisor.terminate(last_words=loop is not None and loop.is_here)
        for call, args in calls:
            notify(call, *args)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_TERMINATE_JOIN_S)

    def cancel(self, job_id: str, signum: int) -> bool:
        """Signal the child that runs the job, or drop the job if it has not begun."""
        signal.Signals(signum)  # ValueError for a number that is no signal
        with self._lock:
            return self._supervisor.cancel(job_id, signum)

    def grow(self, n: int) -> None:
        """Fork `n` more children."""
        with self._lock:
            self._supervisor.target += n
            self._supervisor.wake()

    def shrink(self, n: int) -> None:
        """Let `n` children go, idle ones first; none is interrupted."""
        with self._lock:
            self._supervisor.target = self._checked_shrink(n)
            staying = [child for child in self._supervisor.children.values() if not child.leaving]
            surplus = max(0, len(staying) - self._supervisor.target)
            for child in sorted(staying, key=lambda one: len(one.held))[:surplus]:
                self._supervisor.dismiss(child)
            self._supervisor.wake()

    def restart(self) -> None:
        """Replace every child, each when its present job has ended."""
        with self._lock:
            for child in self._supervisor.children.values():
                if not child.leaving:
                    self._supervisor.dismiss(child)
            self._supervisor.wake()

    def info(self) -> dict[str, Any]:
        """The `pool` part of the `stats` reply."""
        with self._lock:
            children = list(self._supervisor.children.values())
            waiting = len(self._supervisor.queue)
        total = self._supervisor.accepted_count
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
