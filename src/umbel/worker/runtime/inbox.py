"""How other threads reach the consumer's loop.

`post` appends a callable and wakes the loop; the loop runs what was posted in the order in
which it came. Posting is safe from any thread: a deque append and a
one-byte write, no lock.

`watch` adds a descriptor: the loop calls back when it is readable. Then `fileno` is that of an
epoll object, which is readable when anything in it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("umbel.worker")


class Inbox:
    """Work for the loop, first in, first out."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._posted = False  # since the loop last looked
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._selector: selectors.BaseSelector | None = None
        self._epoll: select.epoll | None = None
        self._watched: dict[int, Callable[[], None]] = {}
        self._ident = 0  # of the thread that ran it last

    def fileno(self) -> int:
        """Readable when something was posted, or something watched is."""
        return self._read if self._epoll is None else self._epoll.fileno()

    @property
    def is_here(self) -> bool:
        """Whether this is the loop's thread."""
        return threading.get_ident() == self._ident

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Let the loop call `call` when `fd` is readable; before the loop begins, and on Linux."""
        if self._epoll is None:
            self._epoll = select.epoll()
            self._epoll.register(self._read, select.EPOLLIN)
        self._watched[fd] = call
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`, from any thread."""
        if self._watched.pop(fd, None) is not None and self._epoll is not None:
            with contextlib.suppress(ValueError, OSError):  # closed, or the descriptor is
                self._epoll.unregister(fd)

    def post(self, work: Callable[[], None]) -> None:
        """Let the loop run `work`."""
        self._work.append(work)
        # One byte is enough for all that is posted until the loop gets to it.
        if not self._posted:
            self._posted = True
            self.wake()

    def wake(self) -> None:
        """Make the loop turn once."""
        # A full pipe means that the loop will wake up anyway; a closed one that it has ended.
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something, or so long; for a loop that does not watch `fileno`."""
        if self._epoll is not None:
            self._epoll.poll(timeout_s)
            return
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._read, selectors.EVENT_READ)
        self._selector.select(timeout_s)

    def run(self) -> None:
        """Run everything that was posted so far; one failure does not stop the rest."""
        self._ident = threading.get_ident()
        if self._epoll is None or self._call_watchers(self._epoll):
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 4096)
        # After the read, which could take the byte of somebody who posts now, and before the
        # count: whoever is not counted finds that he has to wake the loop again.
        self._posted = False
        work = self._work
        for _ in range(len(work)):
            try:
                work.popleft()()
            except Exception:
                logger.exception("posted work failed")

    def _call_watchers(self, epoll: select.epoll) -> bool:
        """Call those whose descriptors are readable; whether ours is."""
        posted = False
        for fd, _ in epoll.poll(0):
            call = self._watched.get(fd)
            if call is None:
                posted = True
                continue
            try:
                call()
            except Exception:
                logger.exception("work for a watched descriptor failed")
        return posted

    def __len__(self) -> int:
        """How much there is to run, at least."""
        if not self._work and self._epoll is not None:
            return len(self._epoll.poll(0))
        return len(self._work)

    def close(self) -> None:
        """No more wake-ups."""
        if self._selector is not None:
            self._selector.close()
        if self._epoll is not None:
            self._epoll.close()
        descriptors = self._read, self._write
        # Not the old numbers, which somebody else may get.
        self._read = self._write = -1
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
