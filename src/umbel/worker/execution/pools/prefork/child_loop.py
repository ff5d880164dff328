"""Life inside a child process: from the fork to `os._exit`.

The child was forked from a process with threads, so nothing here may wait for a lock that one of
them may have held. First it lets go of everything inherited: files and sockets other than its own
pipes, the standard streams and open log files are replaced by /dev/null. Replaced rather than
closed: objects of the parent still own those numbers, and closing such an object later would
close whatever had got its number. So the broker's connection of a parent that was killed
closes with the parent, and its messages are delivered again.

What the child sends goes into a pipe that nobody waits for; a bell (an eventfd) wakes the parent,
and that is what costs. The child rings before it waits for jobs, when a job begins that the
parent has marked, and when it has not rung or been listened to for `QUIET_S`. So the parent learns
of a job that begins unrung by looking into the pipe once, a while after it has listened.

The soft limit is SIGUSR1 plus a cell of shared memory with the sequence number of the job it is
meant for: a signal that comes late finds another number running, or none, and does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

from umbel.exceptions import SoftTimeLimitExceeded
from umbel.worker.execution.jobs import JobResult, decode_job, encode_result
from umbel.worker.execution.pools.base import PoolOptions, failure_of, logger, soft_limit_disarmer
from umbel.worker.execution.pools.prefork import frames
from umbel.worker.execution.pools.prefork.frames import Link

# Memory that is shared with the parent: the job that a soft limit is meant for, the epoch (see
# `frames`), and when the parent last listened.
CELL = struct.Struct("=Q")
EPOCH, EPOCH_AT = struct.Struct("=Q"), 8
HEARD, HEARD_AT = struct.Struct("=d"), 16
CELL_BYTES = 24
SOFT_SIGNAL = signal.SIGUSR1
# Sent by a terminal to the whole group; the parent decides what they mean.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
EXIT_START_FAILED = 70
# More rings mean more wake-ups of the parent, fewer mean that it learns later of what has begun.
QUIET_S = 0.008

_PR_SET_PDEATHSIG = 1


def run_child(options: PoolOptions, parent_pid: int, link: Link, cpu: int | None) -> NoReturn:
    """Be a pool child; never returns into the code of the parent."""
    code = EXIT_START_FAILED
    try:
        _tie_to_parent(parent_pid)
        if cpu is not None:
            _bind(cpu)
        _forget_begun_imports()
        loop = _ChildLoop(options, link)
        _reset_signals(loop)
        descriptors = (link.jobs.fileno(), link.results_fd, link.bell_fd, link.tokens_fd)
        _let_go({0, 1, 2, *descriptors, *_log_files()})
        _become_main_thread()
        gc.freeze()  # what was inherited is neither ours to collect nor worth scanning
        options.child_started()
        loop.run()
        options.child_ending()
        code = 0
    except (BrokenPipeError, ConnectionError):
        code = 0  # the parent is gone, and so are we
    except BaseException:  # noqa: BLE001 - nothing may unwind into the parent's frames
        with contextlib.suppress(Exception):
            logger.exception("pool process %d ends on an error", os.getpid())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _forget_begun_imports() -> None:
    """Imports that other threads of the parent had begun will not be finished here: begin anew.

    Else whoever imports the same module waits for the lock of a thread that does not exist.
    """
    bootstrap: Any = importlib._bootstrap
    for name, module in list(sys.modules.items()):
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            del sys.modules[name]
    for table in ("_module_locks", "_blocking_on"):
        getattr(bootstrap, table, {}).clear()


class _ChildLoop:
    """Reads jobs, runs them, sends their results."""

    def __init__(self, options: PoolOptions, link: Link) -> None:
        self._options = options
        self._jobs, self._results_fd, self._bell_fd, self._tokens_fd, self._cell = link
        self._rang = 0.0  # monotonic
        self._armed = 0  # sequence number that a soft limit may strike, 0 for none
        self._waiting: deque[tuple[int, bool, bytes]] = deque()  # read, and not begun
        self._epoch = 0
        self._unsent = bytearray()
        self._pid = os.getpid()
        self._left = options.max_tasks_per_child or 0

    def run(self) -> None:
        """Run jobs until the parent wants no more, or a limit of this child is reached."""
        soft_limit_disarmer.set(self.disarm)
        os.set_blocking(self._results_fd, False)
        self._unsent += frames.frame(frames.READY, self._pid)
        last = False
        while not last:
            received = self._next()
            if received is None:
                break
            seq, rings, data = received
            self._unsent += frames.accepted_frame(seq, monotonic())
            self._flush()
            # After the write: who is held up here rings, and what was written before is looked at.
            if rings or self._is_unheard():
                self._ring()
            result = self._perform(seq, data)
            if os.getpid() != self._pid:
                os._exit(0)  # the task forked and came back twice: this is the copy
            last = self._is_last()
            kind = frames.FINISHED_LAST if last else frames.FINISHED
            # Sent together with the next `accepted`, or before waiting for a job.
            self._unsent += frames.frame(kind, seq, encode_result(result))
            del data, result, received  # an idle child holds on to nothing
        self._flush()
        self._ring()

    def raise_soft_limit(self, signum: int, frame: FrameType | None) -> None:
        """The soft limit's signal: raise in the job it is meant for, once."""
        if self._armed and CELL.unpack_from(self._cell)[0] == self._armed:
            self._armed = 0
            raise SoftTimeLimitExceeded

    def disarm(self) -> None:
        """No soft limit until the next job."""
        self._armed = 0

    def _perform(self, seq: int, data: bytes | memoryview) -> JobResult:
        began = monotonic()
        ended: list[JobResult] = []
        error: BaseException | None = None
        try:
            job = decode_job(data)
            self._armed = seq
            # Stored before control returns to bytecode, where a late signal would lose it.
            ended.extend(map(self._options.run, (job,)))
        except BaseException as exc:  # noqa: BLE001 - becomes the result
            error = exc
        self._armed = 0
        if ended:
            return ended[0]
        assert error is not None
        return failure_of(error, monotonic() - began)

    def _next(self) -> tuple[int, bool, bytes] | None:
        """The next job, and whether to ring for it; None when there will be none."""
        if not self._claim():
            return None
        waiting = self._waiting
        (epoch,) = EPOCH.unpack_from(self._cell, EPOCH_AT)
        if epoch != self._epoch:
            self._epoch = epoch
            with contextlib.suppress(BlockingIOError):
                while self._read_packet(socket.MSG_DONTWAIT):
                    pass
        while not waiting:
            if not self._read_packet():
                return None
        return waiting.popleft()

    def _claim(self) -> bool:
        """Wait for a token, which allows to begin one job; False when there will be none."""
        try:
            os.eventfd_read(self._tokens_fd)
        except BlockingIOError:
            return self._wait_for_token()
        return True

    def _wait_for_token(self) -> bool:
        if self._unsent:
            self._flush()
            self._ring()
        waiter = select.poll()
        waiter.register(self._tokens_fd, select.POLLIN)
        waiter.register(self._jobs, select.POLLRDHUP)
        while True:
            found = dict(waiter.poll())
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._tokens_fd)
                return True
            if self._jobs.fileno() in found:
                return False

    def _read_packet(self, flags: int = 0) -> bool:
        """Read one packet, or all of a bulky job; False at the end."""
        packet = self._jobs.recv(frames.PACKET_BYTES_MAX, flags)
        if not packet:
            return False
        kind, number = frames.packet_header(packet)
        if kind == frames.JOBS:
            self._waiting.extend(frames.jobs(packet))
            return True
        if kind == frames.VOID:
            for _ in range(number):
                self._waiting.pop()
            return True
        parts = bytearray(packet[frames.PACKET_HEADER_BYTES :])
        while kind == frames.MORE:
            packet = self._jobs.recv(frames.PACKET_BYTES_MAX)
            if not packet:
                return False
            kind, number = frames.packet_header(packet)
            parts += packet[frames.PACKET_HEADER_BYTES :]
        self._waiting.append((number, True, bytes(parts)))
        return True

    def _is_unheard(self) -> bool:
        """Whether the parent may not have known what was said for too long."""
        since = monotonic() - QUIET_S
        return self._rang < since and HEARD.unpack_from(self._cell, HEARD_AT)[0] < since

    def _flush(self) -> None:
        unsent = self._unsent
        while unsent:
            try:
                del unsent[: os.write(self._results_fd, unsent)]
            except BlockingIOError:  # the parent does not know that there is something to read
                self._ring()
                select.select((), (self._results_fd,), ())

    def _ring(self) -> None:
        # Before the write: whoever hears it does so later than this, however long that takes.
        self._rang = monotonic()
        os.eventfd_write(self._bell_fd, 1)

    def _is_last(self) -> bool:
        if self._left:
            self._left -= 1
            if not self._left:
                return True
        limit_kib = self._options.max_memory_per_child_kib
        return limit_kib is not None and _resident_kib() > limit_kib


def _tie_to_parent(parent_pid: int) -> None:
    """Be killed when the parent is; it may have died before we asked."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)


def _bind(cpu: int) -> None:
    """Run on this CPU alone, if it may still be used."""
    try:
        os.sched_setaffinity(0, {cpu})
    except OSError as exc:
        logger.warning("pool process %d is not bound to CPU %d: %s", os.getpid(), cpu, exc)


def _reset_signals(loop: _ChildLoop) -> None:
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    for signum in IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(SOFT_SIGNAL, loop.raise_soft_limit)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _let_go(keep: set[int]) -> None:
    """Point every other inherited file number at /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in _open_files():
        if number not in keep and number != null:
            with contextlib.suppress(OSError):
                os.fstat(number)
                os.dup2(null, number, inheritable=False)
    os.close(null)


def _open_files() -> Iterable[int]:
    try:
        return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    except OSError:
        return range(3, min(os.sysconf("SC_OPEN_MAX"), 65_536))


def _log_files() -> Iterable[int]:
    """File numbers that handlers of the logging module write to."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for one in loggers:
        for handler in getattr(one, "handlers", ()):
            target = getattr(handler, "stream", None) or getattr(handler, "socket", None)
            with contextlib.suppress(AttributeError, OSError, ValueError):
                yield target.fileno()  # type: ignore[union-attr]


def _become_main_thread() -> None:
    """The forking thread is the main one here; threads of tasks should not inherit `daemon`."""
    thread = threading.current_thread()
    thread.name = "MainThread"
    thread._daemonic = False  # type: ignore[attr-defined]


def _resident_kib() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024
