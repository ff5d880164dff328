"""The parent's view of one child: the orders it holds, its pipes, its signals, its end.

All of it is used under the pool's lock. `held` is the truth about who has an order: an order is in
the `held` of exactly one child or in the pool's FIFO, from submit to its final call.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
from collections import deque
from collections.abc import Iterator
from time import monotonic

from umbel.worker.orders import Order, encode_order, portable
from umbel.worker.pools.base import Watcher
from umbel.worker.pools.prefork import frames, inside

_READ_BYTES = 256 * 1024
# A child rings when it begins an order that is so far behind the one it runs when it is sent: it
# has that many left then, and gets more before it runs out.
_RINGS_AT = frozenset({2, 4, 8})


class Job:
    """One order on its way through the pool."""

    __slots__ = (
        "began",
        "cancelled",
        "cost_s",
        "data",
        "hard_at",
        "hard_s",
        "order_id",
        "over_limit",
        "seq",
        "soft_at",
        "soft_s",
        "struck",
        "watcher",
    )

    def __init__(
        self,
        seq: int,
        order: Order,
        watcher: Watcher,
        soft_s: float | None,
        hard_s: float | None,
        cost_s: float,
    ) -> None:
        self.seq = seq
        self.order_id = order.id
        self.watcher = watcher
        self.soft_s = soft_s
        self.hard_s = hard_s
        self.cost_s = cost_s  # how long it may keep a child, as far as anybody knows
        self.data = encode_order(order if order.decoded is None else portable(order))
        self.began: float | None = None  # monotonic, once accepted
        self.soft_at: float | None = None  # monotonic, once accepted
        self.hard_at: float | None = None
        self.over_limit = False  # its child was killed for the hard limit
        self.cancelled: int | None = None  # the signal asked for
        self.struck = False  # that signal was sent

    @property
    def bulky(self) -> bool:
        """Needs several packets, so it cannot be taken back."""
        return len(self.data) > frames.PACKET_PAYLOAD_BYTES_MAX

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

    def __init__(
        self,
        pid: int,
        near: socket.socket,
        far: socket.socket,
        results_fd: int,
        bell_fd: int,
        cell: mmap.mmap,
    ) -> None:
        self.pid = pid
        self.born = monotonic()
        self.pidfd = _pidfd(pid)
        self.near = near
        self.results_fd = results_fd
        self.bell_fd = bell_fd
        self.results_open = True
        self.heard_at = 0.0  # monotonic: when it was last listened to because it rang
        self.look_at: float | None = None  # monotonic: what it says unrung it has said by then
        self.held: dict[int, Job] = {}  # by sequence number, in the order sent
        self.load_s = 0.0  # the cost of all that it holds
        self.running: Job | None = None  # the one that it has accepted
        self.ready = False
        self.leaving = False  # gets no more orders and will exit
        self.full = False  # its socket is; until it says something
        self.started_any = False
        self.reaped = False
        self.served = 0
        self._far = far
        self._cell = cell
        self._reader = frames.FrameReader()
        self._outbox: deque[bytes] = deque()
        self._hangs_up = False
        near.setblocking(False)
        os.set_blocking(results_fd, False)

    @property
    def unbegun(self) -> int:
        """How many orders it holds that it has not begun, as far as it was heard."""
        return len(self.held) if self.running is None else len(self.held) - 1

    @property
    def idle(self) -> bool:
        """It waits for orders and may have some."""
        return self.ready and not self.leaving and not self.held

    @property
    def writing(self) -> bool:
        """Part of a bulky order has yet to be written."""
        return bool(self._outbox)

    def is_open(self, depth: int, load_s_max: float) -> bool:
        """It may get one more order, which then begins soon."""
        if not self.ready or self.leaving or self._outbox:
            return False
        if not self.held:
            return True
        if self.full or self.load_s >= load_s_max or len(self.held) >= depth:
            return False
        running = self.running
        if running is not None and running.cancelled is not None:
            return False  # a signal is on its way: wait and see
        return not self._bulky_ahead()

    def send(self, job: Job) -> bool:
        """Write the order, or begin to; False when the socket is full."""
        held = self.held
        if job.bulky:
            self._outbox.extend(frames.packets(job.seq, job.data))
            self.write_on()
        else:
            try:
                self.near.send(frames.packet(job.seq, job.data, len(held) in _RINGS_AT))
            except OSError:  # full; or broken, and then waitpid will tell
                self.full = True
                return False
        held[job.seq] = job
        self.load_s += job.cost_s
        return True

    def drop(self, seq: int) -> Job:
        """Forget an order that it does not hold any more."""
        job = self.held.pop(seq)
        self.load_s = self.load_s - job.cost_s if self.held else 0.0
        return job

    def write_on(self) -> None:
        """Write what the socket takes of a bulky order."""
        try:
            while self._outbox:
                self.near.send(self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._outbox.clear()
        if self._hangs_up:
            self.hang_up()

    def take_back(self, count: int) -> list[Job]:
        """Up to `count` orders that it has not read, oldest first; they are no longer its own."""
        jobs: list[Job] = []
        if self._outbox or self._bulky_ahead():
            return jobs
        with contextlib.suppress(BlockingIOError):
            while len(jobs) < count:
                packet = self._far.recv(frames.PACKET_BYTES_MAX, socket.MSG_DONTWAIT)
                if not packet:
                    break
                jobs.append(self.drop(frames.packet_header(packet)[1]))
        return jobs

    def let_go(self) -> list[Job]:
        """The orders of a child that will never begin them."""
        jobs = list(self.held.values())
        self.held.clear()
        self.load_s = 0.0
        self._outbox.clear()
        return jobs

    def hang_up(self) -> None:
        """No more orders: it exits once it has read what was sent."""
        self.leaving = self._hangs_up = True
        if not self._outbox:
            with contextlib.suppress(OSError):
                self.near.shutdown(socket.SHUT_WR)

    def frames(self, to_the_end: bool) -> Iterator[tuple[int, int, bytes]]:
        """What it has said since the last call; never waits. `to_the_end` is for a dead one."""
        while self.results_open:
            try:
                data = os.read(self.results_fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.results_open = False
                return
            self.full = False
            yield from self._reader.feed(data)
            if not to_the_end and len(data) < _READ_BYTES:
                return  # if more has come it has rung again

    def signal(self, signum: int) -> None:
        """Send a signal; never to a number that is no longer this child's."""
        if self.reaped:
            return
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, signum)
            else:
                os.kill(self.pid, signum)

    def strike_soft(self, job: Job) -> None:
        """Raise the soft limit's exception in that order, if it still runs."""
        inside.CELL.pack_into(self._cell, 0, job.seq)
        self.signal(inside.SOFT_SIGNAL)

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
        self._far.close()
        os.close(self.results_fd)
        os.close(self.bell_fd)
        if self.pidfd is not None:
            os.close(self.pidfd)
        self._cell.close()

    def _bulky_ahead(self) -> bool:
        """A bulky order was sent and not accepted yet (it is then the only one held)."""
        if self.running is not None or len(self.held) != 1:
            return False
        (job,) = self.held.values()
        return job.bulky


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # an old kernel, or not allowed here
        return None
