"""Nothing that a test run starts outlives it, however the run ends.

A test run may be killed, or end itself without cleaning up when a test hangs. So every process
group that is started is told to a guard: a tiny process that reads from a pipe and kills what
was not taken off the list when the pipe closes, which the kernel does for a dead process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import IO

_pipe: IO[bytes] | None = None


def watch(group: int) -> None:
    """Have the process group killed when this process ends, unless `unwatch` comes first."""
    _tell(f"+{group}")


def unwatch(group: int) -> None:
    """The process group has ended by itself."""
    _tell(f"-{group}")


def kill_group(group: int, number: int = signal.SIGKILL) -> None:
    """Signal a whole process group; one that is gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _tell(line: str) -> None:
    global _pipe
    if _pipe is None:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        process.returncode = 0  # it ends after us: nobody waits for it
        assert process.stdin is not None
        _pipe = process.stdin
    _pipe.write(f"{line}\n".encode())
    _pipe.flush()


def _guard() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        kill_group(group)


if __name__ == "__main__":
    _guard()
