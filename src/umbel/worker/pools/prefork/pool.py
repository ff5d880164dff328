"""The prefork pool: its public face, and the keeper thread that looks after the children.

See the package for the design. One lock guards all state. `submit` writes to a child directly when
one has room; everything else happens on the keeper thread, which sleeps until a child rings or
dies, a deadline passes, or somebody wakes it. Watchers are called by the keeper without the lock,
or by whoever `PoolOptions.carry` brings the calls to, all those of one turn together.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic, sleep
from typing import Any, ClassVar

from umbel.worker.orders import Order, decode_outcome
from umbel.worker.pools.base import Pool, PoolClosed, PoolOptions, Watcher, logger, notify
from umbel.worker.pools.prefork import frames, inside
from umbel.worker.pools.prefork.child import Child, Job
from umbel.worker.pools.prefork.nursery import Nursery, check_platform
from umbel.worker.pools.prefork.roster import LOAD_S, Roster

_SWEEP_S = 0.5  # looking after children without a pidfd
_RECHECK_S = 0.01  # an order over its limit that seems to have ended: its frame is on the way
# So long after a child rang it may have begun an order unrung, or it will ring for the next one.
_LOOK_S = inside.QUIET_S + 0.003
_FORKED_WAIT_S = 10.0
_TERMINATE_JOIN_S = 5.0


class PreforkPool(Pool):
    """Runs each order in one of `size` child processes."""

    name: ClassVar[str] = "prefork"

    def __init__(self, options: PoolOptions) -> None:
        check_platform()
        super().__init__(options)
        self._lock = threading.Lock()
        self._target = options.concurrency
        self._roster = Roster(options.max_tasks_per_child)
        self._children = self._roster.children
        self._nursery = Nursery(options)
        self._numbers = itertools.count(1)
        self._epoll = select.epoll()
        self._watched: dict[int, Child | None] = {}
        self._wake_fd, self._waker_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(self._waker_fd, False)
        self._watch(self._wake_fd, None, select.EPOLLIN)
        self._forked = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="umbel-keeper", daemon=True)
        self._closing = False
        self._terminated = False
        self._accepted_count = 0
        self._overdue = False
        self.carries = options.carry is not None

    @property
    def size(self) -> int:
        """How many child processes there should be."""
        return self._target

    def start(self) -> None:
        """Fork the children; returns when they are forked, not when they are ready."""
        self._keeper.start()
        self._forked.wait(_FORKED_WAIT_S)

    def submit(
        self,
        order: Order,
        watcher: Watcher,
        soft_s: float | None,
        hard_s: float | None,
        expected_s: float | None = None,
    ) -> None:
        """Send the order to a child with room, or queue it; `OrderError` if it cannot be sent."""
        cost_s = LOAD_S if expected_s is None or expected_s > LOAD_S else expected_s
        job = Job(next(self._numbers), order, watcher, soft_s, hard_s, cost_s)
        with self._lock:
            if self._closing or self._terminated:
                raise PoolClosed(f"order {order.id} came after the prefork pool was closed")
            queue = self._roster.queue
            if job.bulky:
                queue.append(job)
                self._wake()  # only the keeper can wait for a socket to take more
            elif queue or not self._roster.place(job):
                queue.append(job)

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
            self._closing = True
            self._wake()
        if self._keeper.is_alive():
            self._keeper.join(timeout_s)
        return not self._keeper.is_alive()

    def terminate(self) -> None:
        """Kill every child at once."""
        with self._lock:
            self._terminated = True
            self._roster.queue.clear()
            self._roster.calls.clear()
            for child in self._children.values():
                child.signal(signal.SIGKILL)
            self._wake()
        if self._keeper.is_alive() and threading.current_thread() is not self._keeper:
            self._keeper.join(_TERMINATE_JOIN_S)

    def cancel(self, order_id: str, signum: int) -> bool:
        """Signal the child that runs the order, or drop the order if it has not begun."""
        signal.Signals(signum)  # ValueError for a number that is no signal
        with self._lock:
            found = self._roster.cancel(order_id, signum)
            self._wake()
            return found

    def grow(self, n: int) -> None:
        """Fork `n` more children."""
        with self._lock:
            self._target += n
            self._wake()

    def shrink(self, n: int) -> None:
        """Let `n` children go, idle ones first; none is interrupted."""
        with self._lock:
            self._target = self._checked_shrink(n)
            staying = [child for child in self._children.values() if not child.leaving]
            surplus = max(0, len(staying) - self._target)
            for child in sorted(staying, key=lambda one: len(one.held))[:surplus]:
                self._roster.dismiss(child)
            self._wake()

    def restart(self) -> None:
        """Replace every child, each when its present order has ended."""
        with self._lock:
            for child in self._children.values():
                if not child.leaving:
                    self._roster.dismiss(child)
            self._wake()

    def info(self) -> dict[str, Any]:
        """The `pool` part of the `stats` reply."""
        with self._lock:
            children = list(self._children.values())
            waiting = len(self._roster.queue)
        total = self._accepted_count
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

    def _wake(self) -> None:
        """Make the keeper look around; with the lock held."""
        if self._waker_fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.write(self._waker_fd, b"\0")

    # From here on: the keeper thread.

    def _keep(self) -> None:
        over = False
        while not over:
            try:
                over = self._turn()
            except Exception:  # noqa: BLE001 - without a keeper the pool would stand still
                logger.exception("the keeper of the prefork pool failed; it goes on")
                sleep(_SWEEP_S)  # an error that repeats must not take a whole core
        with self._lock:
            self._epoll.close()
            os.close(self._wake_fd)
            os.close(self._waker_fd)
            self._waker_fd = -1

    def _turn(self) -> bool:
        """Wait for something to happen and deal with it; true when all is over."""
        with self._lock:
            try:
                self._populate()
            finally:
                self._forked.set()
            timeout_s = self._timeout_s()
        events = self._epoll.poll(timeout_s)
        with self._lock:
            for fd, mask in events:
                self._handle(fd, mask)
            now = monotonic()
            for child in list(self._children.values()):
                self._look_after(child, now)
            if not self._terminated:
                self._hand_out()
            calls, self._roster.calls = self._roster.calls, []
            overdue, self._overdue = self._overdue, False
            ends = self._terminated or (self._closing and not self._roster.queue)
            over = ends and not self._children
        if calls and self.options.carry is not None:
            self.options.carry(partial(self._make, calls))
        else:
            self._make(calls)
        if overdue:
            self.options.overdue()
        return over

    def _make(self, calls: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Make calls of watchers, unless the pool was terminated meanwhile."""
        for call, args in calls:
            if self._terminated:
                return
            notify(call, *args)

    def _populate(self) -> None:
        """Fork what is missing. Those about to leave count: the bound holds during a restart."""
        wanted = self._target
        if self._terminated:
            wanted = 0
        elif self._closing:
            wanted = min(wanted, len(self._roster.queue))
        while len(self._children) < wanted and monotonic() >= self._nursery.not_before:
            child = self._nursery.birth()
            if child is not None:
                self._children[child.pid] = child
                # By its edge: nobody needs to read what the bell counts.
                self._watch(child.bell_fd, child, select.EPOLLIN | select.EPOLLET)
                if child.pidfd is not None:
                    self._watch(child.pidfd, child, select.EPOLLIN)

    def _timeout_s(self) -> float | None:
        """How long nothing needs to be done unless something happens."""
        times: list[float] = []
        now = monotonic()
        hiring = not self._terminated and (not self._closing or self._roster.queue)
        if hiring and len(self._children) < self._target:
            times.append(self._nursery.not_before)
        for child in self._children.values():
            if not child.ready and not child.leaving:
                times.append(child.born + self.options.proc_alive_timeout_s)
            if child.pidfd is None:
                times.append(now + _SWEEP_S)
            if child.look_at is not None:
                times.append(child.look_at)
            job = child.running
            if job is not None:
                if job.soft_at is not None:
                    times.append(job.soft_at)
                if job.hard_at is not None:
                    times.append(job.hard_at)
                if job.cost_s < LOAD_S and job.began is not None and child.spare:
                    times.append(job.began + LOAD_S)
        return max(0.0, min(times) - now) if times else None

    def _handle(self, fd: int, mask: int) -> None:
        child = self._watched.get(fd)
        if fd == self._wake_fd:
            os.read(fd, 4096)
        elif child is None or child.reaped:
            return
        elif fd == child.bell_fd:
            self._listen(child)
            child.look_at = monotonic() + _LOOK_S
        elif fd == child.pidfd:
            self._bury_if_dead(child)
        else:
            child.write_on()

    def _listen(self, child: Child, to_the_end: bool = False) -> None:
        """Read what the child said."""
        try:
            for kind, seq, payload in child.frames(to_the_end):
                self._heard(child, kind, seq, payload)
        except Exception:  # noqa: BLE001 - whatever a broken pipe may hold
            # Something else wrote into it: the child cannot be believed any more.
            logger.exception("pool process %d sent rubbish and is killed", child.pid)
            child.results_open = False
            child.signal(signal.SIGKILL)

    def _heard(self, child: Child, kind: int, seq: int, payload: bytes) -> None:
        roster = self._roster
        if kind == frames.READY:
            child.ready = True
            return
        job = child.held[seq]
        if kind == frames.ACCEPTED:
            when = frames.accepted_when(payload)
            child.running = job
            child.started_any = True
            self._accepted_count += 1
            self._nursery.thrives()
            job.begin(when)
            roster.calls.append((job.watcher.accepted, (child.pid, when)))
            if job.cancelled is not None:
                roster.strike_cancelled(child)
            return
        outcome = decode_outcome(payload)
        child.drop(seq)
        child.running = None
        child.served += 1
        roster.calls.append((job.watcher.finished, (outcome,)))
        if kind == frames.FINISHED_LAST:
            child.leaving = True
            roster.requeue(child.let_go())

    def _look_after(self, child: Child, now: float) -> None:
        """Limits of the order that it runs, its start, and its end where there is no pidfd."""
        if child.look_at is not None and now >= child.look_at:
            child.look_at = None
            if child.held:
                self._listen(child)
        if child.pidfd is None and self._bury_if_dead(child):
            return
        if not child.ready and not child.leaving:
            if now >= child.born + self.options.proc_alive_timeout_s:
                child.leaving = True
                child.signal(signal.SIGKILL)
            return
        job = child.running
        if job is None:
            return
        if job.cost_s < LOAD_S and job.began is not None and now >= job.began + LOAD_S:
            self._roster.overdue(child, job)
            self._overdue = self._overdue or child.spare > 0
        if not job.due(now):
            return
        self._listen(child)  # it may have ended meanwhile
        if child.running is not job:
            return
        if job.soft_at is not None and now >= job.soft_at:
            job.soft_at = None
            child.strike_soft(job)
            self._roster.report(job.watcher.soft_limit, job.soft_s)
        if job.hard_at is not None and now >= job.hard_at:
            killed = self._roster.kill_for_limit(child, job)
            job.hard_at = None if killed else now + _RECHECK_S

    def _bury_if_dead(self, child: Child) -> bool:
        reason = child.reap()
        if reason is None:
            return False
        self._listen(child, to_the_end=True)
        for fd in (child.bell_fd, child.pidfd, child.near.fileno()):
            if fd is not None:
                self._unwatch(fd)
        if not child.leaving or not child.ready:
            self._nursery.died(child, reason)
        self._roster.bury(child, reason)
        child.close()
        return True

    def _hand_out(self) -> None:
        self._roster.feed()
        for child in self._children.values():
            near = child.near.fileno()
            if child.writing:
                if near not in self._watched:
                    self._watch(near, child, select.EPOLLOUT)
            elif near in self._watched:
                self._unwatch(near)
            if self._closing and not self._roster.queue and not child.held:
                child.hang_up()

    def _watch(self, fd: int, child: Child | None, events: int) -> None:
        self._watched[fd] = child
        self._epoll.register(fd, events)

    def _unwatch(self, fd: int) -> None:
        if fd in self._watched:
            del self._watched[fd]
            self._epoll.unregister(fd)
