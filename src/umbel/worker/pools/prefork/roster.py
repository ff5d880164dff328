"""Who has which order: the FIFO, the children, and moves between them.

Bookkeeping without threads or clocks; the pool calls it with its lock held. Rules:

- an order goes to a child that holds nothing, else to the one that has least to do, as long as that
  is less than `LOAD_S` and fewer than `DEPTH` orders; in the order of arrival;
- an order of which nobody knows how long it takes counts as `LOAD_S`: nothing is put behind it;
- an order that a child has not begun may be taken back, and goes to the head of the FIFO;
- no child is idle while another has orders to spare (`level`);
- before a child is signalled for one order, its others are taken back. If it then still holds
  another, it has just read that one, so the order in question has ended: no signal is sent.
"""

from __future__ import annotations

import heapq
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from umbel.worker.pools.prefork import inside
from umbel.worker.pools.prefork.child import Child, Job

DEPTH = 64
"""Orders per child, the running one included. More saves waits between short orders and wake-ups of
both sides; what a child has not begun can be taken back."""
LOAD_S = 0.020
"""Nothing is given to a child that has so much to do. More helps orders of this length, whose child
else waits a moment for the next one; less lets them begin in the order of their arrival."""
LEVEL_S = 0.002
"""From a child that is through with all it holds in this time nothing is taken for an idle one."""


Call = tuple[Callable[..., None], tuple[Any, ...]]


class Roster:
    """The orders of one pool that have not ended, and where they are."""

    def __init__(self, max_tasks_per_child: int | None) -> None:
        self.queue: deque[Job] = deque()
        self.children: dict[int, Child] = {}  # by pid; alive, or dead and not yet waited for
        self.calls: list[Call] = []  # of watchers, to be made unlocked
        self._max_tasks = max_tasks_per_child

    def report(self, call: Callable[..., None], *args: Any) -> None:
        """Have a watcher called once the lock is free."""
        self.calls.append((call, args))

    @property
    def has_room(self) -> bool:
        """Whether some child would begin one more order soon."""
        return not self.queue and any(True for _ in self._open_children())

    def fill(self, jobs: Iterator[Job], send: Callable[[], None]) -> None:
        """Give to each child as much as it may have, in the order of `jobs`; see `place`.

        `send` is called for who waits for something to do; for the others the caller does.
        """
        if self.queue:
            return
        # The one that has least to do is first; numbers of processes tell equal ones apart.
        able = [(child.load_s, child.pid, child) for child in self._open_children()]
        heapq.heapify(able)
        while able:
            child = able[0][2]
            job = next(jobs, None)
            if job is None:
                return
            if job.bulky:
                self.queue.append(job)  # until the keeper has looked for an idle child
                return
            child.give(job)
            if len(child.held) == 1:
                send()
                if self.queue:
                    return  # it came back: that child is dead, which the keeper has yet to hear
            if child.is_open(self._depth(child), LOAD_S):
                heapq.heapreplace(able, (child.load_s, child.pid, child))
            else:
                heapq.heappop(able)

    def _open_children(self) -> Iterator[Child]:
        return (one for one in self.children.values() if one.is_open(self._depth(one), LOAD_S))

    def place(self, job: Job) -> Child | None:
        """Give the order to the child with the least to do, which `send` tells; None when none
        has room."""
        chosen: Child | None = None
        for child in self.children.values():
            if child.is_open(self._depth(child), LOAD_S):
                if not child.held:
                    child.give(job)
                    return child
                if not job.bulky and (chosen is None or child.load_s < chosen.load_s):
                    chosen = child
        if chosen is not None:
            chosen.give(job)
        return chosen

    def send(self) -> list[tuple[Child, int]]:
        """Send what was given; to whom, and how much."""
        told: list[tuple[Child, int]] = []
        for child in self.children.values():
            count = child.given_count
            if count:
                told.append((child, count))
                self.requeue(child.send())
        return told

    def feed(self) -> None:
        """Hand out what waits, then even out what has been handed out."""
        while self.queue and self.place(self.queue[0]):
            self.queue.popleft()
        self.send()
        if not self.queue:
            self._level()

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Put orders that never began back to the head, in their order."""
        for job in reversed(jobs):
            if job.cancelled is not None:
                self.report(job.watcher.terminated, job.cancelled)
            else:
                self.queue.appendleft(job)

    def reclaim(self, child: Child) -> None:
        """Take back everything that the child has not read."""
        self.requeue(child.take_back(len(child.held)))

    def recall(self) -> list[Job]:
        """Everything that no child has begun, oldest first; it is no longer ours."""
        for child in self.children.values():
            self.reclaim(child)
        jobs = sorted(self.queue, key=lambda job: job.seq)
        self.queue.clear()
        return jobs

    def overdue(self, child: Child, job: Job) -> None:
        """The order that the child runs takes longer than was expected."""
        child.load_s += LOAD_S - job.cost_s
        job.cost_s = LOAD_S

    def dismiss(self, child: Child) -> None:
        """Let the child exit when its present order has ended."""
        self.reclaim(child)
        child.hang_up()

    def cancel(self, order_id: str, signum: int) -> bool:
        """End an order, wherever it is."""
        found = False
        for child in self.children.values():
            for job in [job for job in child.held.values() if job.order_id == order_id]:
                job.cancelled = signum
                found = True
            if found:
                self.strike_cancelled(child)
        kept: deque[Job] = deque()
        for job in self.queue:
            if job.order_id == order_id:
                self.report(job.watcher.terminated, signum)
                found = True
            else:
                kept.append(job)
        self.queue = kept
        return found

    def strike_cancelled(self, child: Child) -> None:
        """Signal the child if the order that it runs was cancelled, once."""
        if any(job.cancelled is not None for job in child.held.values()):
            self.reclaim(child)
        job = child.running
        if job is None or job.cancelled is None or job.struck or len(child.held) > 1:
            return
        job.struck = True
        if job.cancelled == inside.SOFT_SIGNAL:
            child.strike_soft(job)
        elif job.cancelled in inside.IGNORED_SIGNALS:
            child.signal(signal.SIGTERM)
        else:
            child.signal(job.cancelled)

    def kill_for_limit(self, child: Child, job: Job) -> bool:
        """Kill the child for the order that it runs; False when that seems to have ended."""
        self.reclaim(child)
        if child.running is not job or len(child.held) > 1:
            return False
        job.over_limit = child.leaving = True
        child.signal(signal.SIGKILL)
        return True

    def bury(self, child: Child, reason: str) -> None:
        """Settle what a dead child held: one order may have begun, the others go on."""
        del self.children[child.pid]
        job = child.running
        if job is not None:
            child.drop(job.seq)
            if job.over_limit:
                self.report(job.watcher.hard_limit, job.hard_s)
            elif job.cancelled is not None:
                self.report(job.watcher.terminated, job.cancelled)
            else:
                self.report(job.watcher.lost, reason)
        self.requeue(child.let_go())

    def _depth(self, child: Child) -> int:
        if self._max_tasks is None:
            return DEPTH
        return min(DEPTH, self._max_tasks - child.served)

    def _level(self) -> None:
        """Give each idle child an order that another one holds in reserve."""
        idle = sum(1 for child in self.children.values() if child.idle)
        while idle > 0:
            donor = max(self.children.values(), key=_spare_load)
            taken = donor.take_back(1) if _spare_load(donor) >= LEVEL_S else []
            if not taken:
                return
            idle -= 1
            if not self.place(taken[0]):
                self.requeue(taken)
                return
            self.send()


def _spare_load(child: Child) -> float:
    return child.load_s if child.unbegun else 0.0
