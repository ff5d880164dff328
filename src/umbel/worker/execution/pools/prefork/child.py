"""The parent's view of one child: the jobs it holds, its pipes, its signals, its end.

All of it is used under the pool's lock. `held` is the truth about who has a job: a job is in
the `held` of exactly one child or in the pool's FIFO, from submit to its final call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

from umbel.worker.execution.pools.base import Watcher
from umbel.worker.execution.pools.prefork import child_loop, frames

_READ_BYTES = 256 * 1024
# A child rings when it begins a job that is so far behind the one it runs when it is given: the
# parent knows at once what a child that was idle does, and gives it more before it runs out.
_RINGS_AT = frozenset({0, 2, 8, 24})


@dataclass(slots=True, eq=False)
class WorkItem:
    """One job on its way through the pool."""

    seq: int
    job_id: str
    watcher: Watcher
    soft_s: float | None
    hard_s: float | None
    cost_s: float  # how long it may keep a child, as far as anybody knows
    data: bytes
    bulky: bool  # needs several packets, so it cannot be taken back
    began: float | None = None  # monotonic, once accepted
    soft_at: float | None = None  # monotonic, once accepted
    hard_at: float | None = None
    rings: bool = False  # its child rings when it begins
    over_limit: bool = False  # its child was killed for the hard limit
    cancelled: int | None = None  # the signal asked for
    signalled: bool = False  # that signal was sent

    @property
    def is_special(self) -> bool:
        """Somebody has to see to it while it runs."""
        return self.cancelled is not None or self.soft_s is not None or self.hard_s is not None

    def due(self, now: float) -> bool:
        """One of its limits has passed."""
        soft_at, hard_at = self.soft_at, self.hard_at
        return (soft_at is not None and now >= soft_at) or (hard_at is not None and now >= hard_at)

    def begin(self, when: float) -> None:
        """Limits count from here."""
        self.began = when
        self.soft_at = None if self.soft_s is None else when + self.soft_s
        self.hard_at = None if self.hard_s is None else when + self.hard_s


class Child:
    """One child process, alive or not yet waited for."""

    def __init__(self, pid: int, link: frames.Link, cpu: int | None = None) -> None:
        self.pid = pid
        self.near, self.results_fd, self.bell_fd, self._tokens_fd, self._cell = link
        self.cpu = cpu  # that it is bound to
        self.born = monotonic()
        self.pidfd = _pidfd(pid)
        self.results_open = True
        self.heard_at = 0.0  # monotonic: when it was last listened to because it rang
        self.look_at: float | None = None  # monotonic: what it says unrung it has said by then
        self.held: dict[int, WorkItem] = {}  # by sequence number, in the order sent
        self.load_s = 0.0  # the cost of all that it holds
        self.running: WorkItem | None = None  # the one that it has accepted
        self.ready = False
        self.leaving = False  # gets no more jobs and will exit
        self.full = False  # its socket is; until it says something
        self.started_any = False
        self.reaped = False
        self.served = 0
        self._epoch = 0
        self._reader = frames.FrameReader()
        self._given: list[WorkItem] = []  # held, and yet to be sent
        self._outbox: deque[bytes] = deque()  # of a bulky job, or a word of what is taken back
        self._hangs_up = False
        self.near.setblocking(False)
        os.set_blocking(self.results_fd, False)

    @property
    def unbegun(self) -> int:
        """How many jobs it holds that it has not begun, as far as it was heard."""
        return len(self.held) if self.running is None else len(self.held) - 1

    @property
    def idle(self) -> bool:
        """It waits for jobs and may have some."""
        return self.ready and not self.leaving and not self.held

    @property
    def writing(self) -> bool:
        """The socket has yet to take something."""
        return bool(self._outbox)

    @property
    def given_count(self) -> int:
        """How many jobs it holds that were not sent."""
        return len(self._given)

    def is_open(self, depth: int, load_s_max: float) -> bool:
        """It may get one more job, which then begins soon."""
        if not self.ready or self.leaving or self._outbox:
            return False
        held = self.held
        if not held:
            return True
        if self.load_s >= load_s_max or len(held) >= depth or self.full:
            return False
        running = self.running
        if running is None:
            return not self._bulky_ahead()
        return running.cancelled is None  # else a signal is on its way: wait and see

    def give(self, item: WorkItem) -> None:
        """The job is this child's now; `send` tells it, for a bulky one this does."""
        item.rings = len(self.held) in _RINGS_AT
        self.held[item.seq] = item
        self.load_s += item.cost_s
        if item.bulky:
            self._outbox.extend(frames.packets(item.seq, item.data))
            self._add_tokens(1)
            self.write_on()
        else:
            self._given.append(item)

    def send(self) -> list[WorkItem]:
        """Send what it was given; what does not fit is not its own any more, and returned."""
        given = self._given
        while given:
            size = count = 0
            for item in given:
                size += len(item.data) + frames.JOB_HEADER_BYTES
                if count and size > frames.PACKET_PAYLOAD_BYTES_MAX:
                    break
                count += 1
            packed = frames.packet((item.seq, item.rings, item.data) for item in given[:count])
            try:
                self.near.send(packed)
            except OSError:  # full; or broken, and then waitpid will tell
                self.full = True
                return self._take_given(len(given))
            del given[:count]
            self._add_tokens(count)
        return []

    def _add_tokens(self, count: int) -> None:
        os.eventfd_write(self._tokens_fd, count)

    def _take_given(self, count: int) -> list[WorkItem]:
        taken = self._given[len(self._given) - count :]
        del self._given[len(self._given) - count :]
        for item in taken:
            self.drop(item.seq)
        return taken

    def begin(self, seq: int, when: float) -> WorkItem:
        """It has begun this job."""
        item = self.running = self.held[seq]
        self.started_any = True
        item.begin(when)
        return item

    def end(self, seq: int) -> WorkItem:
        """It is through with this job."""
        item = self.drop(seq)
        self.running = None
        self.served += 1
        return item

    def drop(self, seq: int) -> WorkItem:
        """Forget a job that it does not hold any more."""
        item = self.held.pop(seq)
        self.load_s = self.load_s - item.cost_s if self.held else 0.0
        return item

    def write_on(self) -> None:
        """Write what the socket takes."""
        try:
            while self._outbox:
                self.near.send(self._outbox[0])
                if frames.is_void(self._outbox.popleft()):
                    self._epoch += 1
                    child_loop.EPOCH.pack_into(self._cell, child_loop.EPOCH_AT, self._epoch)
        except BlockingIOError:
            return
        except OSError:
            self._outbox.clear()
        if self._hangs_up:
            self.hang_up()

    def take_back(self, count: int) -> list[WorkItem]:
        """Up to `count` jobs that it has not begun, the newest, in their order; they are no
        longer its own."""
        if self._bulky_ahead():
            return []
        items = self._take_given(min(count, len(self._given)))
        taken = 0
        with contextlib.suppress(BlockingIOError):
            while taken < count - len(items):
                os.eventfd_read(self._tokens_fd)
                taken += 1
        if not taken:
            return items
        # Without tokens it begins nothing, and until this is written it gets none.
        self._outbox.append(frames.void(taken))
        self.write_on()
        sent = list(self.held)[-taken:]
        return [self.drop(seq) for seq in sent] + items

    def let_go(self) -> list[WorkItem]:
        """The jobs of a child that will never begin them."""
        items = list(self.held.values())
        self.held.clear()
        self.load_s = 0.0
        self._given.clear()
        self._outbox.clear()
        return items

    def hang_up(self) -> None:
        """No more jobs: it exits once it has read what was sent."""
        self.leaving = self._hangs_up = True
        if not self._outbox:
            with contextlib.suppress(OSError):
                self.near.shutdown(socket.SHUT_WR)

    def listen(self, to_the_end: bool) -> Iterator[list[frames.Frame]]:
        """What it has said since the last call, in parts; never waits. `to_the_end` is for a dead
        one."""
        while self.results_open:
            try:
                data = os.read(self.results_fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.results_open = False
                return
            self.full = False
            try:
                found = self._reader.feed(data)
            except frames.BrokenFrame as broken:
                yield broken.before
                raise
            yield found
            if not to_the_end and len(data) < _READ_BYTES:
                return  # if more has come it has rung again

    def listened(self, now: float) -> None:
        """Whoever listens to it says so before: it need not ring for a while."""
        self.heard_at = now
        child_loop.HEARD.pack_into(self._cell, child_loop.HEARD_AT, now)

    def signal(self, signum: int) -> None:
        """Send a signal; never to a number that is no longer this child's."""
        if self.reaped:
            return
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, signum)
            else:
                os.kill(self.pid, signum)

    def raise_soft(self, item: WorkItem) -> None:
        """Raise the soft limit's exception in that job, if it still runs."""
        child_loop.CELL.pack_into(self._cell, 0, item.seq)
        self.signal(child_loop.SOFT_SIGNAL)

    def reap(self) -> str | None:
        """Why it died, once; None while it lives."""
        if self.reaped:
            return None
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # somebody else waited for it
            self.reaped = True
            return "unknown exit code"
        if pid == 0:
            return None
        self.reaped = True
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"signal {-code} ({signal.Signals(-code).name})"
        return f"signal {-code}"

    def close(self) -> None:
        """Let go of pipes and memory, after `reap`."""
        self.near.close()
        for fd in (self.results_fd, self.bell_fd, self._tokens_fd):
            os.close(fd)
        if self.pidfd is not None:
            os.close(self.pidfd)
        self._cell.close()

    def _bulky_ahead(self) -> bool:
        """A bulky job was sent and not accepted yet (it is then the only one held)."""
        if self.running is not None or len(self.held) != 1:
            return False
        (item,) = self.held.values()
        return item.bulky


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # an old kernel, or not allowed here
        return None
