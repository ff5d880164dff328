"""What signals mean to a worker.

    TERM        warm shutdown: running tasks end
    INT         warm shutdown; cold when one is under way already
    QUIT        cold shutdown: running tasks are stopped, their messages go back
    USR1        the stack of every thread goes to the log; the worker works on

A handler interrupts code that may hold any lock, that of the log or of an event included, and may
be interrupted itself by the next signal. So it takes no lock: it writes a byte to a thread of its
own, the courier, which does what was asked for. Signals are handled between `install` and
`restore`, after which everything is as it was.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

logger = logging.getLogger("umbel.worker")

WARM = "umbel: warm shutdown: running tasks may end (press Ctrl-C again for a cold one)"
COLD = "umbel: cold shutdown: running tasks are stopped"

COURIER_JOIN_S = 2.0
_STOP, _STOP_COLD, _SHOW_STACKS = b"w", b"c", b"s"


class Stoppable(Protocol):
    """The part of a worker that signals reach."""

    def stop(self, *, cold: bool = False) -> None:
        """Ask for the end; safe from any thread."""


def say_on_stderr(text: str) -> None:
    """Write a line past all buffers and locks."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


class Signals:
    """The handlers of one worker; to be installed by the main thread."""

    def __init__(self, worker: Stoppable, say: Callable[[str], None] = say_on_stderr) -> None:
        self._worker = worker
        self._say = say
        self._stopping = False
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Take over, remembering who was in charge."""
        # Sockets rather than a pipe: waiting on one does not block the other greenlets.
        self._outlet, self._inlet = socket.socketpair()
        self._inlet.setblocking(False)
        self._courier = threading.Thread(target=self._carry, name="umbel-signals", daemon=True)
        self._courier.start()
        handlers: dict[int, Any] = {
            signal.SIGTERM: self._on_term,
            signal.SIGINT: self._on_int,
            signal.SIGQUIT: self._on_quit,
            signal.SIGUSR1: self._on_usr1,
        }
        for number, handler in handlers.items():
            self._before[number] = signal.signal(number, handler)

    def restore(self) -> None:
        """Give the signals back."""
        while self._before:
            number, handler = self._before.popitem()
            # None: the handler was not installed from Python and can not be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._inlet.close()
        self._courier.join(COURIER_JOIN_S)
        self._outlet.close()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In charge for the duration of the block."""
        self.install()
        try:
            yield
        finally:
            self.restore()

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        if not self._stopping:
            self._stopping = True
            self._say(WARM)
        self._send(_STOP)

    def _on_int(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            self._on_quit(number, frame)
        else:
            self._on_term(number, frame)

    def _on_quit(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        self._say(COLD)
        self._send(_STOP_COLD)

    def _on_usr1(self, number: int, frame: FrameType | None) -> None:
        self._send(_SHOW_STACKS)

    def _send(self, errand: bytes) -> None:
        # A full buffer holds enough of the same already.
        with contextlib.suppress(OSError):
            os.write(self._inlet.fileno(), errand)

    def _carry(self) -> None:
        """The courier thread: what was asked for, one byte each, until the inlet is closed."""
        while errand := self._outlet.recv(1):
            if errand == _SHOW_STACKS:
                _log_stacks()
            else:
                self._worker.stop(cold=errand == _STOP_COLD)


def _log_stacks() -> None:
    try:
        logger.warning("stacks of all threads (SIGUSR1)\n%s", stacks(threading.get_ident()))
    except Exception:
        logger.exception("the stacks could not be shown")


def stacks(hidden: int | None = None) -> str:
    """The stack of every thread (and greenlet) of this process as text, but the hidden one's."""
    if "gevent.monkey" in sys.modules:
        from gevent.monkey import is_module_patched
        from gevent.util import format_run_info

        if is_module_patched("threading"):
            return "\n".join(format_run_info())
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    for ident, frame in sys._current_frames().items():
        if ident != hidden:
            parts.append(f"--- thread {names.get(ident, '?')} ({ident}) ---")
            parts.append("".join(traceback.format_stack(frame)).rstrip())
    return "\n".join(parts)
