"""The keeper: looks after the children of one pool, on a thread of its own.

It sleeps until a child dies or rings, a deadline passes, or somebody wakes it; then it forks what
is missing, hears what was said, enforces limits and hands out what waits.

Where watchers have a loop, bells ring there and `listen` runs on the loop's thread: the keeper then
hears only what no bell told of (see `inside`), or what a loop that stands still has not listened
to. Whoever hears, calls of watchers go through one queue that is emptied on one thread, so that
they come in order. `close` makes the keeper listen in any case: the loop may have ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from time import monotonic, sleep

from umbel.worker.orders import decode_outcome
from umbel.worker.pools.base import PoolOptions, logger, watcher_failed
from umbel.worker.pools.prefork import frames, inside
from umbel.worker.pools.prefork.child import Child, Job
from umbel.worker.pools.prefork.nursery import Nursery
from umbel.worker.pools.prefork.roster import LOAD_S, Call, Roster

_SWEEP_S = 0.5  # looking after children without a pidfd
_RECHECK_S = 0.01  # an order over its limit that seems to have ended: its frame is on the way
# So long after a child was heard it has begun an order unrung, or will ring for the next one.
_LOOK_S = inside.QUIET_S + 0.012
# Who was not heard for so long is listened to when somebody else rings.
_ALSO_S = inside.QUIET_S / 2
# If it is found to have more orders than it runs the bells may be unheard: look again, less often.
_LOOK_S_MAX = 0.5
_NEVER = float("inf")


class Keeper:
    """The state of one pool, and the thread that keeps it; all under one lock."""

    def __init__(self, options: PoolOptions) -> None:
        self.lock = threading.Lock()
        self.target = options.concurrency
        self.closing = False
        self.terminated = False
        self.accepted_count = 0
        self.forked = threading.Event()
        self.roster = Roster(options.max_tasks_per_child)
        self._children = self.roster.children
        self._options = options
        self._loop = options.loop
        self._nursery = Nursery(options)
        self._calls: deque[Call] = deque()  # of watchers, to be made without the lock
        self._overdue = False
        self._sleeps_until = -_NEVER  # monotonic; the keeper's thread, if it sleeps
        self._wake_fd, self._waker_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(self._waker_fd, False)
        self._bells = select.epoll()
        self._epoll = select.epoll()
        self._watched: dict[int, Child | None] = {}
        self._watch(self._wake_fd, None, select.EPOLLIN)
        self.bells_fd = self._bells.fileno()
        if self._loop is None:
            self._watch(self.bells_fd, None, select.EPOLLIN)

    # -- called by others, with the lock held --------------------------------------------

    def wake(self) -> None:
        """Make the keeper look around."""
        if self._waker_fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.write(self._waker_fd, b"\0")

    def close(self) -> None:
        """End when all orders have."""
        self.closing = True
        if self._waker_fd >= 0 and self.bells_fd not in self._watched:
            self._watch(self.bells_fd, None, select.EPOLLIN)
        self.wake()

    def terminate(self, last_words: bool) -> list[Call]:
        """Kill every child; what they had said before, if asked for. Nobody is called any more."""
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        calls: list[Call] = []
        if last_words and not self.terminated:
            for child in self._children.values():
                self._listen(child)
            self._gather_calls()
            calls.extend(self._calls)
        self.terminated = True
        self.roster.queue.clear()
        self.roster.calls.clear()
        self._calls.clear()
        self.wake()
        return calls

    def send(self) -> None:
        """Send what children were given."""
        before = monotonic()
        for child, count in self.roster.send():
            if child.unbegun == count and child.look_at is not None and before > child.look_at:
                child.look_at = None  # it rang long ago, so it will ring for the first of these
            self._has_more(child)

    def fill(self, jobs: Iterator[Job]) -> None:
        """Have children begin as many of these as they have room for."""
        self.roster.fill(jobs, self.send)
        self.send()
        if self.roster.queue:
            self.wake()  # only the keeper can wait for a socket to take more

    def _has_more(self, child: Child) -> None:
        """The child holds orders that have not begun: it may begin one without ringing for it, or
        be kept from it for too long."""
        if child.look_at is not None:
            self._hasten(child.look_at)
        job = child.running
        if job is not None and job.began is not None and job.cost_s < LOAD_S:
            self._hasten(job.began + LOAD_S)

    def _hasten(self, when: float) -> None:
        """The keeper must not sleep any longer than that."""
        if when < self._sleeps_until:
            self._sleeps_until = when
            self.wake()

    # -- hearing: on the loop's thread, where there is one -------------------------------

    def listen(self) -> None:
        """Hear all that have rung, give them more to do, and tell the watchers."""
        with self.lock:
            if self._bells.closed:
                return
            self._hear_bells()
            if not self.terminated:
                self._hand_out()
            self._gather_calls()
        self._tell()

    def _tell(self) -> None:
        # First more to do for those who were heard: they go on while the rest is dealt with.
        self._options.on_room()
        self._make_calls()
        self._options.on_room()

    def _hear_bells(self) -> None:
        rung = {fd for fd, _ in self._bells.poll(0)}
        now = monotonic()
        for child in self._children.values():
            # Others have said something too, and then need not ring.
            if child.bell_fd in rung or (child.held and now - child.heard_at > _ALSO_S):
                child.listened(now)
                child.look_at = now + _LOOK_S
                self._listen(child)

    def _listen(self, child: Child, to_the_end: bool = False) -> None:
        """Read what the child said."""
        try:
            for said in child.listen(to_the_end):
                self._hear(child, said)
        except Exception:  # noqa: BLE001 - whatever a broken pipe may hold
            # Something else wrote into it: the child cannot be believed any more.
            logger.exception("pool process %d sent rubbish and is killed", child.pid)
            child.results_open = False
            child.signal(signal.SIGKILL)

    def _hear(self, child: Child, said: Iterable[frames.Frame]) -> None:
        calls, pid = self.roster.calls, child.pid
        begun: Job | None = None  # whose watcher has yet to be told
        try:
            for kind, seq, content in said:
                if kind == frames.ACCEPTED:
                    begun = child.begin(seq, content)
                    self.accepted_count += 1
                    if begun.is_special:
                        self._attend(child, begun)
                    continue
                if kind == frames.READY:
                    child.ready = True
                    continue
                outcome = decode_outcome(content)  # what is none leaves the order where it is
                job = child.end(seq)
                if job is begun:
                    calls.append((job.watcher.ran, (pid, job.began, outcome)))
                    begun = None
                else:
                    calls.append((job.watcher.finished, (outcome,)))
                if kind == frames.FINISHED_LAST:
                    child.leaving = True
                    self.roster.requeue(child.let_go())
        finally:
            if begun is not None:
                calls.append((begun.watcher.accepted, (pid, begun.began)))
        if child.started_any:
            self._nursery.thrives()

    def _attend(self, child: Child, job: Job) -> None:
        """An order has begun that has limits, or was cancelled meanwhile."""
        if job.cancelled is not None:
            self.roster.strike_cancelled(child)
        for due in (job.soft_at, job.hard_at):
            if due is not None:
                self._hasten(due)

    def _gather_calls(self) -> None:
        calls = self.roster.calls
        if calls:
            self._calls.extend(calls)
            calls.clear()

    def _make_calls(self) -> None:
        """Call watchers, unless the pool was terminated meanwhile."""
        calls = self._calls
        while calls and not self.terminated:
            call, args = calls.popleft()
            try:
                call(*args)
            except Exception as exc:  # noqa: BLE001 - the pool must go on
                watcher_failed(call, exc)

    def _hand_out(self) -> None:
        self.roster.feed()
        for child in self._children.values():
            if child.unbegun:
                self._has_more(child)
            near = child.near.fileno()
            if child.writing:
                if near not in self._watched:
                    self._watch(near, child, select.EPOLLOUT)
            elif near in self._watched:
                self._unwatch(near)
            if self.closing and not self.roster.queue and not child.held:
                child.hang_up()

    # -- the keeper's thread -------------------------------------------------------------

    def keep(self) -> None:
        """Be the keeper's thread until the pool has ended."""
        over = False
        while not over:
            try:
                over = self._turn()
            except Exception:  # noqa: BLE001 - without a keeper the pool would stand still
                logger.exception("the keeper of the prefork pool failed; it goes on")
                sleep(_SWEEP_S)  # an error that repeats must not take a whole core
        if self._loop is not None:
            self._loop.unwatch(self.bells_fd)
        with self.lock:
            self._epoll.close()
            self._bells.close()
            os.close(self._wake_fd)
            os.close(self._waker_fd)
            self._waker_fd = -1

    def _turn(self) -> bool:
        """Wait for something to happen and deal with it; true when all is over."""
        with self.lock:
            try:
                self._populate()
            finally:
                self.forked.set()
            timeout_s = self.timeout_s()
            self._sleeps_until = _NEVER if timeout_s is None else monotonic() + timeout_s
        events = self._epoll.poll(timeout_s)
        with self.lock:
            self._sleeps_until = -_NEVER
            for fd, _ in events:
                self._handle(fd)
            now = monotonic()
            for child in list(self._children.values()):
                self._look_after(child, now)
            if not self.terminated:
                self._hand_out()
            self._gather_calls()
            overdue, self._overdue = self._overdue, False
            ends = self.terminated or (self.closing and not self.roster.queue)
            over = ends and not self._children
        if self._loop is None:
            self._make_calls()
        elif self._calls:
            self._loop.post(self._tell)
        if overdue:
            self._options.overdue()
        return over

    def _populate(self) -> None:
        """Fork what is missing. Those about to leave count: the bound holds during a restart."""
        wanted = self.target
        if self.terminated:
            wanted = 0
        elif self.closing:
            wanted = min(wanted, len(self.roster.queue))
        while len(self._children) < wanted and monotonic() >= self._nursery.not_before:
            child = self._nursery.birth(self._children.values())
            if child is not None:
                self._children[child.pid] = child
                self._watched[child.bell_fd] = child
                # By its edge: nobody needs to read what the bell counts.
                self._bells.register(child.bell_fd, select.EPOLLIN | select.EPOLLET)
                if child.pidfd is not None:
                    self._watch(child.pidfd, child, select.EPOLLIN)

    def timeout_s(self) -> float | None:
        """How long nothing needs to be done unless something happens."""
        times: list[float] = []
        now = monotonic()
        hiring = not self.terminated and (not self.closing or self.roster.queue)
        if hiring and len(self._children) < self.target:
            times.append(self._nursery.not_before)
        for child in self._children.values():
            if not child.ready and not child.leaving:
                times.append(child.born + self._options.proc_alive_timeout_s)
            if child.pidfd is None:
                times.append(now + _SWEEP_S)
            if child.look_at is not None and child.unbegun:
                times.append(child.look_at)
            job = child.running
            if job is not None:
                if job.soft_at is not None:
                    times.append(job.soft_at)
                if job.hard_at is not None:
                    times.append(job.hard_at)
                if job.cost_s < LOAD_S and job.began is not None and child.unbegun:
                    times.append(job.began + LOAD_S)
        return max(0.0, min(times) - now) if times else None

    def _handle(self, fd: int) -> None:
        if fd == self._wake_fd:
            os.read(fd, 4096)
            return
        if fd == self.bells_fd:
            self._hear_bells()
            return
        child = self._watched.get(fd)
        if child is None or child.reaped:
            return
        if fd == child.pidfd:
            self._bury_if_dead(child)
        else:
            child.write_on()

    def _look_after(self, child: Child, now: float) -> None:
        """Limits of the order that it runs, its start, and its end where there is no pidfd."""
        if child.look_at is not None and child.unbegun and now >= child.look_at:
            self._look(child, now)
        if child.pidfd is None and self._bury_if_dead(child):
            return
        if not child.ready and not child.leaving:
            if now >= child.born + self._options.proc_alive_timeout_s:
                self._listen(child)  # the loop may not have heard it
                if not child.ready:
                    child.leaving = True
                    child.signal(signal.SIGKILL)
            return
        job = child.running
        if job is None:
            return
        if job.cost_s < LOAD_S and job.began is not None and now >= job.began + LOAD_S:
            self.roster.overdue(child, job)
            self._overdue = self._overdue or child.unbegun > 0
        if not job.due(now):
            return
        self._listen(child)  # it may have ended meanwhile
        if child.running is not job:
            return
        if job.soft_at is not None and now >= job.soft_at:
            job.soft_at = None
            child.strike_soft(job)
            self.roster.report(job.watcher.soft_limit, job.soft_s)
        if job.hard_at is not None and now >= job.hard_at:
            killed = self.roster.kill_for_limit(child, job)
            job.hard_at = None if killed else now + _RECHECK_S

    def _look(self, child: Child, now: float) -> None:
        """Hear what a child said without ringing, or rang to a loop that does not listen."""
        self._listen(child)
        waited_s = now - child.heard_at
        child.look_at = now + min(waited_s, _LOOK_S_MAX) if child.unbegun else None

    def _bury_if_dead(self, child: Child) -> bool:
        reason = child.reap()
        if reason is None:
            return False
        self._listen(child, to_the_end=True)
        self._bells.unregister(child.bell_fd)
        del self._watched[child.bell_fd]
        for fd in (child.pidfd, child.near.fileno()):
            if fd is not None:
                self._unwatch(fd)
        # Whoever terminates the pool has killed it: that is no failure to start.
        if not self.terminated and not (child.leaving and child.ready):
            self._nursery.died(child, reason)
        self.roster.bury(child, reason)
        child.close()
        return True

    def _watch(self, fd: int, child: Child | None, events: int) -> None:
        self._watched[fd] = child
        self._epoll.register(fd, events)

    def _unwatch(self, fd: int) -> None:
        if fd in self._watched:
            del self._watched[fd]
            self._epoll.unregister(fd)
