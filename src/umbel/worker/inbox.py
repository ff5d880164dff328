"""How other threads reach the consumer's loop.

`post` appends a callable and wakes the loop; the loop runs what was posted in the order in
which it came. Posting is safe from any thread: a deque append and a
one-byte write, no lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
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

    def fileno(self) -> int:
        """Readable when something was posted."""
        return self._read

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
        """Wait until something is posted, or so long; for a loop that does not watch `fileno`."""
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._read, selectors.EVENT_READ)
        self._selector.select(timeout_s)

    def run(self) -> None:
        """Run everything that was posted so far; one failure does not stop the rest."""
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

    def __len__(self) -> int:
        return len(self._work)

    def close(self) -> None:
        """No more wake-ups."""
        if self._selector is not None:
            self._selector.close()
        descriptors = self._read, self._write
        # Not the old numbers, which somebody else may get.
        self._read = self._write = -1
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
