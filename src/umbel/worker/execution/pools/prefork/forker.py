"""Forking children, and not forking too many of those that die at birth.

A child that dies before its first job and within a second of its birth failed to start. The
first such failure is retried at once, the next ones after 0.1 s, 0.2 s, ... up to 10 s; each
distinct reason is logged once until a child has started well again.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Collection
from time import monotonic

from umbel.exceptions import ImproperlyConfigured
from umbel.worker.execution.pools.base import PoolOptions, logger
from umbel.worker.execution.pools.prefork import child_loop
from umbel.worker.execution.pools.prefork.child import Child
from umbel.worker.execution.pools.prefork.frames import Link

_YOUNG_S = 1.0
_DELAY_S_MIN = 0.1
_DELAY_S_MAX = 10.0


class Forker:
    """Forks children for one pool; used by the supervisor's thread only."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._failures = 0
        self._reasons: set[str] = set()
        self.not_before = 0.0  # monotonic: no fork until then

    def fork(self, siblings: Collection[Child]) -> Child | None:
        """Fork a child; None when the system refused, which counts as a failed start."""
        taken = Counter(child.cpu for child in siblings)
        cpu = min(self._options.cpus, key=taken.__getitem__, default=None)
        try:
            return fork_child(self._options, cpu)
        except OSError as exc:
            self._failed(f"cannot fork: {exc}")
            return None

    def died(self, child: Child, reason: str) -> None:
        """Take note of an unexpected death."""
        young = monotonic() - child.born < _YOUNG_S
        if not child.started_any and (young or not child.ready):
            self._failed(reason)

    def thrives(self) -> None:
        """A child does its work: the next failure is a first one."""
        if self._failures:
            self._failures = 0
            self._reasons.clear()

    def _failed(self, reason: str) -> None:
        self._failures += 1
        doublings = min(self._failures - 2, 10)
        delay_s = 0.0 if doublings < 0 else min(_DELAY_S_MIN * 2**doublings, _DELAY_S_MAX)
        self.not_before = monotonic() + delay_s
        if self._failures > 1 and reason not in self._reasons and len(self._reasons) < 32:
            self._reasons.add(reason)
            logger.error("pool processes die at start (%s): trying again, less often", reason)


def check_platform() -> None:
    """ImproperlyConfigured where there is no fork or no packet socket."""
    if not hasattr(os, "fork") or not hasattr(socket, "SOCK_SEQPACKET") or sys.platform == "darwin":
        raise ImproperlyConfigured(
            f"pool 'prefork' does not run on {sys.platform}: choose threads, asyncio or solo"
        )


def fork_child(options: PoolOptions, cpu: int | None = None) -> Child:
    """A new child process, bound to this CPU; OSError when there can be none."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    results_fd, write_fd = os.pipe()
    bell_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    tokens_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
    cell = mmap.mmap(-1, child_loop.CELL_BYTES)
    parent_pid = os.getpid()
    try:
        pid = _fork()
    except OSError:
        near.close()
        far.close()
        for fd in (results_fd, write_fd, bell_fd, tokens_fd):
            os.close(fd)
        raise
    if pid == 0:
        ends = Link(far, write_fd, bell_fd, tokens_fd, cell)
        child_loop.run_child(options, parent_pid, ends, cpu)
    os.close(write_fd)
    far.close()
    return Child(pid, Link(near, results_fd, bell_fd, tokens_fd, cell), cpu)


def _fork() -> int:
    """Fork with signals held back, so that none reaches the parent's handlers in the child."""
    with warnings.catch_warnings():
        # Newer Pythons warn of forking beside threads; `child_loop` is written for that.
        warnings.simplefilter("ignore", DeprecationWarning)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            return_pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        if return_pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return return_pid
