"""The supervisor: starts the children of one pool, hands them jobs, notices limits and deaths.

Its thread sleeps until a child dies or rings, a deadline passes, or another thread wakes it; then
it forks what is missing, reads what children have sent, enforces limits and hands out what waits.
Handing out follows these rules:

- a job goes to a child that holds nothing, else to the one that has least to do, as long as that
  is less than `LOAD_S` and fewer than `DEPTH` jobs; in the order of arrival;
- a job whose duration is unknown counts as `LOAD_S`: nothing is put behind it;
- a job that a child has not begun may be taken back, and goes to the head of the queue;
- no child is idle while another has jobs to spare (`_level`);
- before a child is signalled for one job, its others are taken back. If it then still holds
  another, it has just read that one, so the job in question has ended: no signal is sent.

Where watchers have a loop, bells ring there and `listen` runs on the loop's thread: the supervisor
then reads only what no bell announced (see `child_loop`), or what a loop that stands still has not
read. Whichever thread reads, calls of watchers go through one queue that is emptied on one thread,
so that they come in order. After `close` the supervisor listens in any case: the loop may have
ended.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic, sleep
from typing import Any

from umbel.worker.execution.jobs import decode_result
from umbel.worker.execution.pools.base import PoolOptions, logger, watcher_failed
from umbel.worker.execution.pools.prefork import child_loop, frames
from umbel.worker.execution.pools.prefork.child import Child, WorkItem
from umbel.worker.execution.pools.prefork.forker import Forker

DEPTH = 64
"""Jobs per child, the running one included. More saves waits between short jobs and wake-ups of
both sides; what a child has not begun can be taken back."""
LOAD_S = 0.020
"""Nothing is given to a child that has so much to do. More helps jobs of this length, whose child
else waits a moment for the next one; less lets them begin in the order of their arrival."""
LEVEL_S = 0.002
"""From a child that is through with all it holds in this time nothing is taken for an idle one."""

_SWEEP_S = 0.5  # looking after children without a pidfd
_RECHECK_S = 0.01  # a job over its limit that seems to have ended: its frame is on the way
# This long after a child was heard it has begun a job unrung, or will ring for the next one.
_LOOK_S = child_loop.QUIET_S + 0.012
# A child that was not heard for this long is listened to when another one rings.
_ALSO_S = child_loop.QUIET_S / 2
# If it is found to have more jobs than it runs the bells may be unheard: look again, less often.
_LOOK_S_MAX = 0.5
_NEVER = float("inf")

Call = tuple[Callable[..., None], tuple[Any, ...]]


class Supervisor:
    """The state of one pool, and the thread that looks after it; all under one lock."""

    def __init__(self, options: PoolOptions) -> None:
        self.lock = threading.Lock()
        self.target = options.concurrency
        self.closing = False
        self.terminated = False
        self.accepted_count = 0
        self.forked = threading.Event()
        self.queue: deque[WorkItem] = deque()  # what no child has
        self.children: dict[int, Child] = {}  # by pid; alive, or dead and not yet waited for
        self._options = options
        self._loop = options.loop
        self._max_tasks = options.max_tasks_per_child
        self._forker = Forker(options)
        self._calls: deque[Call] = deque()  # of watchers, to be made without the lock
        self._overdue = False
        self._sleeps_until = -_NEVER  # monotonic; the supervisor's thread, if it sleeps
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

    # -- called by the pool, with the lock held ------------------------------------------

    def wake(self) -> None:
        """Make the supervisor look around."""
        if self._waker_fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.write(self._waker_fd, b"\0")

    def close(self) -> None:
        """End when all jobs have."""
        self.closing = True
        if self._waker_fd >= 0 and self.bells_fd not in self._watched:
            self._watch(self.bells_fd, None, select.EPOLLIN)
        self.wake()

    def terminate(self, last_words: bool) -> list[Call]:
        """Kill every child and drop all jobs; no watcher is called any more.

        With `last_words`, returns the calls for what children had sent before.
        """
        for child in self.children.values():
            child.signal(signal.SIGKILL)
        calls: list[Call] = []
        if last_words and not self.terminated:
            for child in self.children.values():
                self._listen(child)
            calls.extend(self._calls)
        self.terminated = True
        self.queue.clear()
        self._calls.clear()
        self.wake()
        return calls

    @property
    def has_room(self) -> bool:
        """Whether some child would begin one more job soon."""
        return not self.queue and any(True for _ in self._open_children())

    def submit(self, item: WorkItem) -> None:
        """Send the job to a child that has room, else queue it."""
        if item.bulky:
            self.queue.append(item)
            self.wake()  # only the supervisor can wait for a socket to take more
        elif self.queue or not self._give(item):
            self.queue.append(item)
        else:
            self._send()

    def fill(self, items: Iterator[WorkItem]) -> None:
        """Send to each child as many of these as it has room for, many in one packet."""
        if not self.queue:
            self._give_all(items)
        self._send()
        if self.queue:
            self.wake()

    def recall(self) -> list[WorkItem]:
        """Take back everything that no child has begun, oldest first; it is no longer ours."""
        for child in self.children.values():
            self._reclaim(child)
        items = sorted(self.queue, key=lambda item: item.seq)
        self.queue.clear()
        return items

    def dismiss(self, child: Child) -> None:
        """Let the child exit when its present job has ended."""
        self._reclaim(child)
        child.hang_up()

    def cancel(self, job_id: str, signum: int) -> bool:
        """End a job, wherever it is."""
        found = False
        for child in self.children.values():
            for item in [item for item in child.held.values() if item.job_id == job_id]:
                item.cancelled = signum
                found = True
            if found:
                self._signal_cancelled(child)
        kept: deque[WorkItem] = deque()
        for item in self.queue:
            if item.job_id == job_id:
                self._report(item.watcher.terminated, signum)
                found = True
            else:
                kept.append(item)
        self.queue = kept
        self.wake()
        return found

    # -- handing out ---------------------------------------------------------------------

    def _give_all(self, items: Iterator[WorkItem]) -> None:
        # The one that has least to do is first; numbers of processes tell equal ones apart.
        able = [(child.load_s, child.pid, child) for child in self._open_children()]
        heapq.heapify(able)
        while able:
            child = able[0][2]
            item = next(items, None)
            if item is None:
                return
            if item.bulky:
                self.queue.append(item)  # until the supervisor has looked for an idle child
                return
            child.give(item)
            if len(child.held) == 1:
                self._send()  # the others wait for the last one: they have something to do
                if self.queue:
                    return  # it came back: that child is dead, which is not known yet
            if child.is_open(self._depth(child), LOAD_S):
                heapq.heapreplace(able, (child.load_s, child.pid, child))
            else:
                heapq.heappop(able)

    def _open_children(self) -> Iterator[Child]:
        return (one for one in self.children.values() if one.is_open(self._depth(one), LOAD_S))

    def _depth(self, child: Child) -> int:
        if self._max_tasks is None:
            return DEPTH
        return min(DEPTH, self._max_tasks - child.served)

    def _give(self, item: WorkItem) -> bool:
        """Give the job to the child with the least to do; false if none has room."""
        chosen: Child | None = None
        for child in self._open_children():
            if not child.held:
                chosen = child
                break
            if not item.bulky and (chosen is None or child.load_s < chosen.load_s):
                chosen = child
        if chosen is not None:
            chosen.give(item)
        return chosen is not None

    def _send(self) -> None:
        """Send what children were given."""
        before = monotonic()
        for child in self.children.values():
            count = child.given_count
            if not count:
                continue
            self._requeue(child.send())
            if child.unbegun == count and child.look_at is not None and before > child.look_at:
                child.look_at = None  # it rang long ago, so it will ring for the first of these
            self._has_more(child)

    def _has_more(self, child: Child) -> None:
        """The child holds jobs that have not begun: it may begin one without ringing for it, or
        be kept from it for too long."""
        if child.look_at is not None:
            self._hasten(child.look_at)
        item = child.running
        if item is not None and item.began is not None and item.cost_s < LOAD_S:
            self._hasten(item.began + LOAD_S)

    def _hasten(self, when: float) -> None:
        """The supervisor must not sleep any longer than that."""
        if when < self._sleeps_until:
            self._sleeps_until = when
            self.wake()

    def _hand_out(self) -> None:
        """Hand out what waits, then even out what has been handed out."""
        while self.queue and self._give(self.queue[0]):
            self.queue.popleft()
        self._send()
        if not self.queue:
            self._level()
        for child in self.children.values():
            if child.unbegun:
                self._has_more(child)
            near = child.near.fileno()
            if child.writing:
                if near not in self._watched:
                    self._watch(near, child, select.EPOLLOUT)
            elif near in self._watched:
                self._unwatch(near)
            if self.closing and not self.queue and not child.held:
                child.hang_up()

    def _level(self) -> None:
        """Give each idle child a job that another one holds in reserve."""
        idle = sum(1 for child in self.children.values() if child.idle)
        while idle > 0:
            donor = max(self.children.values(), key=_spare_load)
            taken = donor.take_back(1) if _spare_load(donor) >= LEVEL_S else []
            if not taken:
                return
            idle -= 1
            if not self._give(taken[0]):
                self._requeue(taken)
                return
            self._send()

    def _reclaim(self, child: Child) -> None:
        """Take back everything that the child has not read."""
        self._requeue(child.take_back(len(child.held)))

    def _requeue(self, items: Sequence[WorkItem]) -> None:
        """Put jobs that never began back to the head, in their order."""
        for item in reversed(items):
            if item.cancelled is not None:
                self._report(item.watcher.terminated, item.cancelled)
            else:
                self.queue.appendleft(item)

    # -- reading what children send: on the loop's thread, where there is one ------------

    def listen(self) -> None:
        """Read from all that have rung, give them more to do, and call the watchers."""
        with self.lock:
            if self._bells.closed:
                return
            self._hear_bells()
            if not self.terminated:
                self._hand_out()
        self._call_watchers()

    def _call_watchers(self) -> None:
        # First more to do for the children that were heard: they go on while watchers are called.
        self._options.on_room()
        self._make_calls()
        self._options.on_room()

    def _make_calls(self) -> None:
        """Call watchers, unless the pool was terminated meanwhile."""
        calls = self._calls
        while calls and not self.terminated:
            call, args = calls.popleft()
            try:
                call(*args)
            except Exception as exc:  # noqa: BLE001 - the pool must go on
                watcher_failed(call, exc)

    def _report(self, call: Callable[..., None], *args: Any) -> None:
        """Have a watcher called once the lock is free."""
        self._calls.append((call, args))

    def _hear_bells(self) -> None:
        rung = {fd for fd, _ in self._bells.poll(0)}
        now = monotonic()
        for child in self.children.values():
            # Others have sent something too, and then need not ring.
            if child.bell_fd in rung or (child.held and now - child.heard_at > _ALSO_S):
                child.listened(now)
                child.look_at = now + _LOOK_S
                self._listen(child)

    def _listen(self, child: Child, to_the_end: bool = False) -> None:
        """Read what the child has sent."""
        try:
            for found in child.listen(to_the_end):
                self._hear(child, found)
        except Exception:  # noqa: BLE001 - whatever a broken pipe may hold
            # Something else wrote into it: the child cannot be believed any more.
            logger.exception("pool process %d sent rubbish and is killed", child.pid)
            child.results_open = False
            child.signal(signal.SIGKILL)

    def _hear(self, child: Child, found: Iterable[frames.Frame]) -> None:
        calls, pid = self._calls, child.pid
        begun: WorkItem | None = None  # whose watcher does not know yet
        try:
            for kind, seq, content in found:
                if kind == frames.ACCEPTED:
                    begun = child.begin(seq, content)
                    self.accepted_count += 1
                    if begun.is_special:
                        self._attend(child, begun)
                    continue
                if kind == frames.READY:
                    child.ready = True
                    continue
                result = decode_result(content)  # what is none leaves the job where it is
                item = child.end(seq)
                if item is begun:
                    calls.append((item.watcher.ran, (pid, item.began, result)))
                    begun = None
                else:
                    calls.append((item.watcher.finished, (result,)))
                if kind == frames.FINISHED_LAST:
                    child.leaving = True
                    self._requeue(child.let_go())
        finally:
            if begun is not None:
                calls.append((begun.watcher.accepted, (pid, begun.began)))
        if child.started_any:
            self._forker.thrives()

    # -- limits and cancelled jobs -----------------------------------------------------

    def _attend(self, child: Child, item: WorkItem) -> None:
        """A job has begun that has limits, or was cancelled meanwhile."""
        if item.cancelled is not None:
            self._signal_cancelled(child)
        for due in (item.soft_at, item.hard_at):
            if due is not None:
                self._hasten(due)

    def _signal_cancelled(self, child: Child) -> None:
        """Signal the child if the job that it runs was cancelled, once."""
        if any(item.cancelled is not None for item in child.held.values()):
            self._reclaim(child)
        item = child.running
        if item is None or item.cancelled is None or item.signalled or len(child.held) > 1:
            return
        item.signalled = True
        if item.cancelled == child_loop.SOFT_SIGNAL:
            child.raise_soft(item)
        elif item.cancelled in child_loop.IGNORED_SIGNALS:
            child.signal(signal.SIGTERM)
        else:
            child.signal(item.cancelled)

    def _enforce_limits(self, child: Child, item: WorkItem, now: float) -> None:
        self._listen(child)  # it may have ended meanwhile
        if child.running is not item:
            return
        if item.soft_at is not None and now >= item.soft_at:
            item.soft_at = None
            child.raise_soft(item)
            self._report(item.watcher.soft_limit, item.soft_s)
        if item.hard_at is not None and now >= item.hard_at:
            killed = self._kill_for_limit(child, item)
            item.hard_at = None if killed else now + _RECHECK_S

    def _kill_for_limit(self, child: Child, item: WorkItem) -> bool:
        """Kill the child for the job that it runs; False when that seems to have ended."""
        self._reclaim(child)
        if child.running is not item or len(child.held) > 1:
            return False
        item.over_limit = child.leaving = True
        child.signal(signal.SIGKILL)
        return True

    # -- the supervisor's thread ---------------------------------------------------------

    def run(self) -> None:
        """Be the supervisor's thread until the pool has ended."""
        over = False
        while not over:
            try:
                over = self._turn()
            except Exception:  # noqa: BLE001 - without a supervisor the pool would stand still
                logger.exception("the supervisor of the prefork pool failed; it goes on")
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
                self._fork_missing()
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
            for child in list(self.children.values()):
                self._look_after(child, now)
            if not self.terminated:
                self._hand_out()
            overdue, self._overdue = self._overdue, False
            ends = self.terminated or (self.closing and not self.queue)
            over = ends and not self.children
        if self._loop is None:
            self._call_watchers()
        elif self._calls:
            self._loop.post(self._call_watchers)
        if overdue:
            self._options.overdue()
        return over

    def _fork_missing(self) -> None:
        """Fork what is missing. Those about to leave count: the bound holds during a restart."""
        wanted = self.target
        if self.terminated:
            wanted = 0
        elif self.closing:
            wanted = min(wanted, len(self.queue))
        while len(self.children) < wanted and monotonic() >= self._forker.not_before:
            child = self._forker.fork(self.children.values())
            if child is not None:
                self.children[child.pid] = child
                self._watched[child.bell_fd] = child
                # By its edge: nobody needs to read what the bell counts.
                self._bells.register(child.bell_fd, select.EPOLLIN | select.EPOLLET)
                if child.pidfd is not None:
                    self._watch(child.pidfd, child, select.EPOLLIN)

    def timeout_s(self) -> float | None:
        """How long nothing needs to be done unless something happens."""
        times: list[float] = []
        now = monotonic()
        hiring = not self.terminated and (not self.closing or self.queue)
        if hiring and len(self.children) < self.target:
            times.append(self._forker.not_before)
        for child in self.children.values():
            if not child.ready and not child.leaving:
                times.append(child.born + self._options.proc_alive_timeout_s)
            if child.pidfd is None:
                times.append(now + _SWEEP_S)
            if child.look_at is not None and child.unbegun:
                times.append(child.look_at)
            item = child.running
            if item is not None:
                times += [due for due in (item.soft_at, item.hard_at) if due is not None]
                if item.cost_s < LOAD_S and item.began is not None and child.unbegun:
                    times.append(item.began + LOAD_S)
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
            self._reap(child)
        else:
            child.write_on()

    def _look_after(self, child: Child, now: float) -> None:
        """Limits of the job that it runs, its start, and its end where there is no pidfd."""
        if child.look_at is not None and child.unbegun and now >= child.look_at:
            # It may have sent something without ringing, or rung to a loop that does not listen.
            self._listen(child)
            waited_s = now - child.heard_at
            child.look_at = now + min(waited_s, _LOOK_S_MAX) if child.unbegun else None
        if child.pidfd is None and self._reap(child):
            return
        if not child.ready and not child.leaving:
            if now >= child.born + self._options.proc_alive_timeout_s:
                self._listen(child)  # the loop may not have heard it
                if not child.ready:
                    child.leaving = True
                    child.signal(signal.SIGKILL)
            return
        item = child.running
        if item is None:
            return
        if item.cost_s < LOAD_S and item.began is not None and now >= item.began + LOAD_S:
            # It takes longer than was expected.
            child.load_s += LOAD_S - item.cost_s
            item.cost_s = LOAD_S
            self._overdue = self._overdue or child.unbegun > 0
        if item.due(now):
            self._enforce_limits(child, item, now)

    def _reap(self, child: Child) -> bool:
        """Settle what the child held if it is dead: one job may have begun, the others go on."""
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
            self._forker.died(child, reason)
        del self.children[child.pid]
        item = child.running
        if item is not None:
            child.drop(item.seq)
            if item.over_limit:
                self._report(item.watcher.hard_limit, item.hard_s)
            elif item.cancelled is not None:
                self._report(item.watcher.terminated, item.cancelled)
            else:
                self._report(item.watcher.lost, reason)
        self._requeue(child.let_go())
        child.close()
        return True

    def _watch(self, fd: int, child: Child | None, events: int) -> None:
        self._watched[fd] = child
        self._epoll.register(fd, events)

    def _unwatch(self, fd: int) -> None:
        if fd in self._watched:
            del self._watched[fd]
            self._epoll.unregister(fd)


def _spare_load(child: Child) -> float:
    return child.load_s if child.unbegun else 0.0
