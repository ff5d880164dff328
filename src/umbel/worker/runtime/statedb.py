"""What a worker remembers beyond its own end: revocations and the clock, in a SQLite file.

A revocation is on disk before the command that made it is answered: one transaction, synchronised,
in a write-ahead log, so that a worker that is killed at any point, or a machine that loses power,
leaves a file with all that was answered. Rows join as the revocations do (oldest stamp, latest
end), so the order in which threads write makes no difference.

The clock is saved every now and then only. What was lost by a sudden end is made up for by
`CLOCK_STEP` on loading, more than a cluster counts between two saves, so that no message gets a
clock that an earlier one had.

One worker, one file. The file is locked as long as it is open; the lock belongs to the process,
not to its children, and ends with it. A file that is in use, damaged, or something else is
refused with the way out; it is never overwritten. Celery's state file is a pickle, which is
never loaded here: it is recognised and refused like any other file.

SQLite must not be carried through a fork: a child that closed its copy would delete the log
under its parent. So no operation is under way during a fork, and a child forgets the file without
closing it.

Bounds: what has ended, and what is too many, is deleted on loading, by `purge`, and while writing.
"""

from __future__ import annotations

import contextlib
import ctypes
import dbm
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from umbel.cluster.clock import CLOCK_MAX, Clock, is_clock
from umbel.cluster.revocations import COUNT_MAX, HEADER, HEADER_COUNT_MAX, TASK, Revocations
from umbel.exceptions import ImproperlyConfigured, UmbelError
from umbel.files import opener, tighten

logger = logging.getLogger("umbel.statedb")

# Events of the whole cluster that can pass between two saves of the clock.
CLOCK_STEP: Final = 2**24
# Who has waited so long for the lock of a file waits for a worker that goes on.
LOCK_WAIT_S: Final = 1.0

APPLICATION_ID: Final = 0x554D424C  # "UMBL", in the header of the file
VERSION: Final = 1

_MAGIC: Final = b"SQLite format 3\0"
_SCHEMA: Final = (
    """
    CREATE TABLE revoked (
        kind TEXT NOT NULL, key TEXT NOT NULL, stamp REAL NOT NULL, until REAL NOT NULL,
        PRIMARY KEY (kind, key)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX revoked_until ON revoked (kind, until, key)",
    "CREATE TABLE clock (one INTEGER PRIMARY KEY CHECK (one = 1), value INTEGER NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)
_JOIN: Final = (
    "INSERT INTO revoked VALUES (?, ?, ?, ?) ON CONFLICT (kind, key) DO UPDATE SET"
    " stamp = min(stamp, excluded.stamp), until = max(until, excluded.until)"
)
_EXCESS: Final = (
    "DELETE FROM revoked WHERE (kind, key) IN (SELECT kind, key FROM revoked WHERE kind = ?"
    " ORDER BY until DESC, key DESC LIMIT -1 OFFSET ?)"
)


class StateFileRefused(ImproperlyConfigured):
    """The file can not be a worker's state; the text names it and the way out."""


class StateNotSaved(UmbelError):
    """Something is known in memory only: it will be forgotten with the worker."""


class Loaded(NamedTuple):
    """What was found in the file."""

    revoked: int
    clock: int


class StateDB:
    """One open state file; every method may be called by any thread."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        wall: Callable[[], float] = time.time,
        count_max: int = COUNT_MAX,
        header_count_max: int = HEADER_COUNT_MAX,
    ) -> None:
        """Open the file, or make it; refuses what is not ours (`StateFileRefused`)."""
        self.path = Path(path)
        self._wall = wall
        self._bounds = {TASK: count_max, HEADER: header_count_max}
        self._written = 0  # rows since the last purge
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        with _opening:
            _refuse_strangers(self.path, in_use=any(one.is_file(self.path) for one in _open_files))
            self._connection = _connected(self.path)
            _open_files.add(self)

    @classmethod
    def open(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """The same as the class itself, for those who look for the counterpart of `close`."""
        return cls(path, **options)

    @property
    def closed(self) -> bool:
        """Whether nothing can be saved any more."""
        return self._connection is None

    def is_file(self, path: Path) -> bool:
        """Whether this is open and the file at `path`, by whatever name."""
        with contextlib.suppress(OSError):
            return not self.closed and self.path.samefile(path)
        return False

    def load(self, revocations: Revocations, clock: Clock) -> Loaded:
        """Bring back what was saved; the clock moves on, so that it never goes back."""
        now = self._wall()
        try:
            self.purge(now)
            with self._transaction() as connection:
                rows = connection.execute("SELECT kind, key, stamp, until FROM revoked").fetchall()
                found = connection.execute("SELECT value FROM clock").fetchone()
        except StateNotSaved as exc:
            raise _unreachable(self.path, exc.__cause__ or exc) from exc
        value = found[0] if found else 0
        if not is_clock(value):
            raise _damaged(self.path, f"its clock is {value!r}")
        restored = revocations.restore(rows, now)
        if value:
            clock.adjust(min(value + CLOCK_STEP, CLOCK_MAX))
            if clock.value < value:
                logger.warning(
                    "the clock in state file %s is %d, too far from %d: it is not taken over",
                    self.path, value, clock.value,
                )  # fmt: skip
            self.save_clock(clock.value)
        return Loaded(len(restored), value)

    def save_revoked(self, revoked: Iterable[tuple[str, str, float, float]]) -> None:
        """Keep these (kind, key, stamp, until); they are on disk when this returns."""
        rows = [tuple(one) for one in revoked]
        if not rows:
            return
        with self._transaction() as connection:
            connection.executemany(_JOIN, rows)
            self._written += len(rows)
            if self._written > self._bounds[TASK] // 4:
                self._delete(connection, self._wall())

    def save_clock(self, value: int) -> None:
        """Keep the clock, unless a greater one is kept."""
        assert is_clock(value), f"not a clock: {value!r}"
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO clock VALUES (1, ?) ON CONFLICT (one) DO UPDATE SET"
                " value = max(value, excluded.value)",
                (value,),
            )

    def purge(self, now: float | None = None) -> int:
        """Delete what has ended and what is too many; how many."""
        with self._transaction() as connection:
            return self._delete(connection, self._wall() if now is None else now)

    def close(self, clock: int | None = None) -> None:
        """Save the clock, if it is given, and let go of the file; a second time does nothing."""
        with self._lock:
            try:
                if clock is not None and not self.closed:
                    self.save_clock(clock)
            finally:
                connection, self._connection = self._connection, None
                _open_files.discard(self)
                if connection is not None:
                    with contextlib.suppress(sqlite3.Error):
                        connection.close()

    def _delete(self, connection: sqlite3.Connection, now: float) -> int:
        deleted = 0
        for kind, count_max in self._bounds.items():
            ended = "DELETE FROM revoked WHERE kind = ? AND until <= ?"
            deleted += connection.execute(ended, (kind, now)).rowcount
            deleted += connection.execute(_EXCESS, (kind, count_max)).rowcount
        self._written = 0
        return deleted

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            connection = self._connection
            if connection is None:
                raise StateNotSaved(f"state file {self.path} is closed: nothing is saved any more")
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except BaseException as exc:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                if not isinstance(exc, sqlite3.Error):
                    raise
                raise StateNotSaved(
                    f"state file {self.path} can not be used ({exc}): what changed now will be "
                    "forgotten when this worker ends; see to the disk"
                ) from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StateDB {self.path}{' (closed)' if self.closed else ''}>"

    # -- forks -------------------------------------------------------------------------

    def hold(self) -> None:
        """Before a fork: nothing is under way."""
        self._lock.acquire()

    def release(self) -> None:
        """After a fork, in the parent."""
        self._lock.release()

    def forget(self) -> None:
        """After a fork, in the child: let go without closing, not even at the very end."""
        self._lock = threading.RLock()
        connection, self._connection = self._connection, None
        if connection is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


# -- opening -------------------------------------------------------------------------------


def _refuse_strangers(path: Path, *, in_use: bool) -> None:
    """Look at the file before SQLite does: it may be no database, or not be reachable."""
    if in_use:
        # Not even opened: closing it again would end the lock that this process has on it.
        raise _in_use(path)
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except FileNotFoundError:
        _refuse_missing(path)
        start = b""
    except OSError as exc:
        raise _unreachable(path, exc) from exc
    if start != _MAGIC and _is_shelve(path):
        raise _celerys(path)
    if start and start != _MAGIC:
        raise StateFileRefused(
            f"{path} is no state file of a worker and is left alone: give another file"
        )


def _refuse_missing(path: Path) -> None:
    directory = path.parent
    if not directory.is_dir():
        raise StateFileRefused(
            f"state file {path} can not be made: there is no directory {directory}; make it, or "
            "give another file"
        )


def _is_shelve(path: Path) -> bool:
    """Whether Python's shelve, in which Celery keeps its state, has written here.

    Some of its formats are files with a suffix of their own beside `path`.
    """
    try:
        return bool(dbm.whichdb(str(path)))
    except (*dbm.error, OSError):
        return False


def _connected(path: Path) -> sqlite3.Connection:
    try:
        # SQLite gives the files beside it the mode that this one has.
        os.close(opener(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))
    except OSError as exc:
        raise _unreachable(path, exc.strerror) from exc
    try:
        connection = sqlite3.connect(
            path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as exc:
        raise _unreachable(path, exc) from exc
    try:
        _take(path, connection)
    except sqlite3.OperationalError as exc:
        connection.close()
        # The lowest byte is the kind of error, the others say more about it.
        if exc.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise _in_use(path) from exc
        raise _unreachable(path, exc) from exc
    except sqlite3.DatabaseError as exc:
        connection.close()
        raise _damaged(path, exc) from exc
    except BaseException:
        connection.close()
        raise
    tighten(path.with_name(f"{path.name}{suffix}") for suffix in ("", "-wal", "-shm"))
    return connection


def _take(path: Path, connection: sqlite3.Connection) -> None:
    """Lock the file, see whose it is, and make the tables if it is new."""
    run = connection.execute
    run("PRAGMA locking_mode = EXCLUSIVE")
    run("BEGIN EXCLUSIVE")  # nothing is written before the file is known to be ours
    application_id, version = run("PRAGMA application_id").fetchone()[0], _version(connection)
    tables = {name for (name,) in run("SELECT name FROM sqlite_master WHERE type = 'table'")}
    run("ROLLBACK")
    if application_id == 0 and tables == {"Dict"}:
        raise _celerys(path)  # Python's shelve, since 3.13
    if tables and application_id != APPLICATION_ID:
        raise StateFileRefused(
            f"{path} is a database of something else and is left alone: give another file"
        )
    if version > VERSION:
        raise StateFileRefused(
            f"state file {path} was written by a newer Umbel (format {version}, this one knows "
            f"{VERSION}): give another file, or use that version"
        )
    verdict = run("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise _damaged(path, verdict)
    if tables and not tables >= {"revoked", "clock"}:
        raise _damaged(path, "it lacks a table")
    run("PRAGMA journal_mode = WAL")
    run("PRAGMA synchronous = FULL")
    run(f"PRAGMA journal_size_limit = {16 * 2**20}")
    run("BEGIN EXCLUSIVE")
    if not tables:
        for statement in _SCHEMA:
            run(statement)
    run("COMMIT")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _in_use(path: Path) -> StateFileRefused:
    return StateFileRefused(
        f"state file {path} is in use by another worker: give each worker its own, "
        f"such as {path.with_name('%n' + path.suffix)} (%n is the name of the node)"
    )


def _celerys(path: Path) -> StateFileRefused:
    return StateFileRefused(
        f"{path} is a state file of Celery, which is another format (a pickle) and is not read: "
        "give another file, and revoke again what must stay revoked; workers that still run "
        "hand on what they know"
    )


def _damaged(path: Path, why: object) -> StateFileRefused:
    said = " ".join(str(why).split())
    return StateFileRefused(
        f"state file {path} is damaged ({said}): move it away, with {path.name}-wal if there is "
        "one, and start again; revocations come back from other workers, as far as they know them"
    )


def _unreachable(path: Path, why: object) -> StateFileRefused:
    return StateFileRefused(
        f"state file {path} can not be used ({why}): let this user read and write it and its "
        "directory, or give another file"
    )


# -- forks ---------------------------------------------------------------------------------

_opening = threading.Lock()
_open_files: weakref.WeakSet[StateDB] = weakref.WeakSet()
_held: list[StateDB] = []


def _before_fork() -> None:
    _opening.acquire()
    _held.extend(_open_files)
    for one in _held:
        one.hold()


def _after_in_parent() -> None:
    while _held:
        _held.pop().release()
    _opening.release()


def _after_in_child() -> None:
    global _opening
    while _held:
        _held.pop().forget()
    _open_files.clear()
    _opening = threading.Lock()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_in_parent,
    after_in_child=_after_in_child,
)
