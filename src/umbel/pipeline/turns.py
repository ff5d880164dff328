"""One build of the same tables at a time, until the last of its processes is gone.

A build is two processes: Python and the Java that Spark runs in. Python killed, Java notices a
broken pipe and ends, but not at once: meanwhile it may still write. So both hold a lock, each one
of its own that the system takes back with the process: Python for the whole build, Java from before
the first job. Whoever comes next finds Python's lock held and is refused, at once or after
`wait_s`, since that build may take hours; or only Java's, and waits for it, since that is a matter
of seconds, and is refused after `ORPHAN_WAIT_S`.

A build that follows the log takes a turn for each time that it publishes, so that others can check
the tables or remove old days in between.

The files of the locks name their holder, for the message. On NFS both locks hold between machines
too. Object stores have no locks: there nothing keeps two builds apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from umbel.files import make_folders, opener
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.places import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PYTHON_LOCK, JAVA_LOCK = "_work/.lock", "_work/.java.lock"
# Longer: a build that a slow machine still cleans up after is waited for; shorter: a build whose
# Java hangs is told sooner.
ORPHAN_WAIT_S: Final = 30.0
POLL_S: Final = 0.1
# What is done now and then waits this long for its turn: longer than builds that follow a log take.
WAIT_S: Final = 300.0


class Busy(HistoryError):
    """Another build writes the tables."""


class Turn:
    """The right to write the tables of a place; `share` extends it to Spark's Java process."""

    def __init__(self, tables: Place) -> None:
        self._tables = tables
        self._java_file: Any = None

    def share(self, spark: SparkSession) -> None:
        """Have Java hold it too, for as long as it lives and the turn lasts."""
        if self._java_file is not None or not self._tables.is_local:
            return
        path, jvm = self._tables.path(JAVA_LOCK), spark.sparkContext._jvm
        assert jvm is not None
        pid = jvm.java.lang.ProcessHandle.current().pid()
        _name_holder(self._tables, JAVA_LOCK, "Java process", pid)
        self._java_file = jvm.java.io.RandomAccessFile(str(path), "rw")
        if self._java_file.getChannel().tryLock() is None:
            raise Busy(_refusal(self._tables, path))

    def end(self) -> None:
        """Java goes on to live: it gives the lock back."""
        if self._java_file is not None:
            with contextlib.suppress(Exception):  # Java is gone, and the lock with it
                self._java_file.close()


@contextlib.contextmanager
def turn(
    tables: Place, progress: Callable[[str], None] = lambda _: None, wait_s: float = 0.0
) -> Iterator[Turn]:
    """The only build of these tables, or `Busy`, after `wait_s`, which says who else is at it."""
    own = Turn(tables)
    if not tables.is_local:
        yield own
        return
    with _opened(tables, PYTHON_LOCK) as fd:
        _wait_for_other(tables, fd, progress, wait_s)
        _name_holder(tables, PYTHON_LOCK, "process", os.getpid())
        _wait_for_orphan(tables, progress)
        try:
            yield own
        finally:
            own.end()


def _wait_for_other(tables: Place, fd: int, progress: Callable[[str], None], wait_s: float) -> None:
    path, deadline = tables.path(PYTHON_LOCK), time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Busy(_refusal(tables, path)) from None
            progress(f"waiting for another build: {_holder_in(path)}")
            time.sleep(POLL_S)
        else:
            return


def _wait_for_orphan(tables: Place, progress: Callable[[str], None]) -> None:
    path, deadline = tables.path(JAVA_LOCK), time.monotonic() + ORPHAN_WAIT_S
    with _opened(tables, JAVA_LOCK) as fd:  # closed, it gives back what is taken here
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # EACCES or EAGAIN, by system
                if time.monotonic() >= deadline:
                    raise Busy(
                        f"{_refusal(tables, path)}; its build was killed {ORPHAN_WAIT_S:g} s ago "
                        "or earlier"
                    ) from None
                progress(f"waiting for the end of a build that was killed: {_holder_in(path)}")
                time.sleep(POLL_S)
            else:
                return


@contextlib.contextmanager
def _opened(tables: Place, path: str) -> Iterator[int]:
    with tables.doing("write"):
        target = tables.path(path)
        make_folders(target.parent)
        fd = opener(target, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _name_holder(tables: Place, path: str, kind: str, pid: int) -> None:
    with tables.doing("write"):
        tables.path(path).write_text(f"{kind} {pid} on {socket.gethostname()}")


def _holder_in(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")[:200].strip() or "a process"
    return "a process"


def _refusal(tables: Place, path: Path) -> str:
    return f"another build is writing {tables.shown}: wait for it, or stop it ({_holder_in(path)})"
