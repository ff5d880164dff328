"""Where a log is: a local directory, or anything that fsspec knows.

One promise carries the log: a file under its final name is whole and durable. On a local disk it is
written under a name that begins with a dot, which every reader ignores, flushed to the disk,
renamed, and the directory is flushed too. An object store shows an object only when all of it is
there, so it is put under its final name at once; other remote systems get a hidden name and a move.

Whoever writes a hidden file holds a lock on it. One that nobody holds was left behind by a process
that died, and is removed by the next one that opens the log.

Paths are relative to the log, with slashes. What fails on reading raises OSError; what fails on
writing raises `LogFull`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from umbel.files import make_folders, opener, tighten
from umbel.recorder.errors import LogError, LogFull
from umbel.stores import open_store

HIDDEN_SUFFIX = ".part"
# A hidden file on a disk without locks is taken for left behind after so long.
LEFT_BEHIND_S = 3_600.0
# A write to these is there whole or not at all.
OBJECT_STORES = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "r2", "memory"}
)


class Disk(Protocol):
    """What a log needs of the place where it is."""

    is_local: bool
    place: str  # as the user named it

    def names(self, folder: str) -> list[str]:
        """What is in a folder, sorted; nothing when the folder is not there."""

    def open(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A file for reading from anywhere in it."""

    def write(self, path: str, content: Any) -> None:
        """Put a file there, durably, whole or not at all; folders are made. Raises `LogFull`."""

    def remove(self, path: str) -> None:
        """Take a file away; one that is not there already is."""

    def move(self, path: str, target: str) -> None:
        """Give a file another name, durably; where it has that name already, nothing is done.

        Raises FileNotFoundError if there is no file of either name.
        """

    def size(self, path: str) -> int:
        """How many bytes a file has; 0 when it is not there."""

    def remove_folder(self, folder: str) -> None:
        """Take a folder away if nothing is in it."""

    def flush(self, folder: str) -> None:
        """Have on the disk which files are in a folder, before this returns."""

    def clean(self, folder: str) -> int:
        """Remove half-written files whose writers are dead; how many."""


def disk_of(url: str) -> Disk:
    """The place that a path or URL names."""
    scheme, colon, rest = url.partition("://")
    if not colon:
        return LocalDisk(url)
    if scheme in {"file", "local"}:
        return LocalDisk(rest)
    return StoreDisk(url)


class LocalDisk:
    """A directory."""

    is_local = True

    def __init__(self, path: str) -> None:
        if not path:
            raise LogError("the log has no name: give a directory")
        self.place = path
        self.root = Path(path).expanduser().absolute()

    def names(self, folder: str) -> list[str]:
        """What is in a folder, sorted; nothing when the folder is not there."""
        try:
            return sorted(entry.name for entry in (self.root / folder).iterdir())
        except FileNotFoundError:
            return []

    def open(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A file for reading from anywhere in it."""
        return (self.root / path).open("rb")

    def write(self, path: str, content: Any) -> None:
        """Put a file there, durably, whole or not at all; folders are made. Raises `LogFull`."""
        target = self.root / path
        # Several may write the same file at once, each under a name of its own.
        hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}{HIDDEN_SUFFIX}")
        try:
            _make_durable_folder(target.parent)
            with _held(hidden) as fd:
                _write_all(fd, content)
                os.fsync(fd)
                hidden.rename(target)
            _flush_folder(target.parent)
        except OSError as exc:
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)
            raise LogFull(f"cannot write {target}: {exc.strerror or exc}") from exc

    def remove(self, path: str) -> None:
        """Take a file away; one that is not there already is."""
        (self.root / path).unlink(missing_ok=True)

    def move(self, path: str, target: str) -> None:
        """Give a file another name, durably; where it has that name already, nothing is done."""
        origin, wanted = self.root / path, self.root / target
        try:
            origin.rename(wanted)
        except FileNotFoundError:
            if not wanted.exists():
                raise
        _flush_folder(wanted.parent)

    def size(self, path: str) -> int:
        """How many bytes a file has; 0 when it is not there."""
        try:
            return (self.root / path).stat().st_size
        except FileNotFoundError:
            return 0

    def remove_folder(self, folder: str) -> None:
        """Take a folder away if nothing is in it."""
        with contextlib.suppress(OSError):  # not empty, or gone
            (self.root / folder).rmdir()

    def flush(self, folder: str) -> None:
        """Have on the disk which files are in a folder, before this returns."""
        with contextlib.suppress(FileNotFoundError):
            _flush_folder(self.root / folder)

    def clean(self, folder: str) -> int:
        """Remove half-written files whose writers are dead; how many. Tighten the others."""
        count, names = 0, self.names(folder)
        tighten(self.root / folder / name for name in names)
        for name in names:
            if name.startswith(".") and name.endswith(HIDDEN_SUFFIX):
                with contextlib.suppress(OSError):
                    count += _remove_if_left(self.root / folder / name)
        return count


@contextlib.contextmanager
def _held(hidden: Path) -> Iterator[int]:
    """The file, new, open for writing, and locked, until it is renamed or given up."""
    while True:
        fd = opener(hidden, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # a disk without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink == 0:  # taken for left behind before it was locked
                continue
            yield fd
            return
        finally:
            os.close(fd)


def _write_all(fd: int, content: Any) -> None:
    left = memoryview(content).cast("B")
    while left:
        left = left[os.write(fd, left) :]


def _make_durable_folder(folder: Path) -> None:
    if not folder.is_dir():
        for made in make_folders(folder):
            _flush_folder(made.parent)


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_if_left(hidden: Path) -> bool:
    fd = os.open(hidden, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a disk without locks
            if time.time() - os.fstat(fd).st_mtime < LEFT_BEHIND_S:
                return False
        if os.fstat(fd).st_nlink == 0:
            return False
        hidden.unlink()
        return True
    finally:
        os.close(fd)


class StoreDisk:
    """A place behind fsspec: an object store, or another remote file system."""

    is_local = False

    def __init__(self, url: str) -> None:
        self.place = url
        try:
            self._fs, self._root = open_store(url)
        except ValueError as exc:
            raise LogError(f"cannot use {url}: {exc}") from exc
        kinds = self._fs.protocol
        self._puts_whole = bool(OBJECT_STORES & {kinds, *kinds})

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def names(self, folder: str) -> list[str]:
        """What is in a folder, sorted; nothing when the folder is not there."""
        place = self._at(folder)
        with _reading(self.place):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(place, detail=False)
            except FileNotFoundError:
                return []
        return sorted(
            name.rstrip("/").rpartition("/")[2] for name in found if name.rstrip("/") != place
        )

    def open(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A file for reading from anywhere in it."""
        with _reading(self.place):
            return self._fs.open(self._at(path), "rb")

    def write(self, path: str, content: Any) -> None:
        """Put a file there, durably, whole or not at all; folders are made. Raises `LogFull`."""
        target = self._at(path)
        folder, _, name = target.rpartition("/")
        hidden = f"{folder}/.{name}{HIDDEN_SUFFIX}"
        try:
            if self._puts_whole:
                self._fs.pipe_file(target, bytes(content))
                return
            self._fs.makedirs(folder, exist_ok=True)
            self._fs.pipe_file(hidden, bytes(content))
            self._fs.mv(hidden, target)
        except Exception as exc:  # each store has exceptions of its own
            raise LogFull(f"cannot write {self.place}: {type(exc).__name__}: {exc}") from exc

    def remove(self, path: str) -> None:
        """Take a file away; one that is not there already is."""
        with _reading(self.place), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def move(self, path: str, target: str) -> None:
        """Give a file another name: stores have no such thing, so it is written again."""
        if self.size(path):
            with self.open(path) as file:
                content = file.read()
            self.write(target, content)
            self.remove(path)
        elif not self.size(target):
            raise FileNotFoundError(f"{self.place}/{path}")

    def size(self, path: str) -> int:
        """How many bytes a file has; 0 when it is not there."""
        with _reading(self.place):
            self._fs.invalidate_cache()
            try:
                return int(self._fs.size(self._at(path)) or 0)
            except FileNotFoundError:
                return 0

    def remove_folder(self, folder: str) -> None:
        """Nothing: object stores have no folders, and an empty one elsewhere does no harm."""

    def flush(self, folder: str) -> None:
        """Nothing: what a store has answered is done."""

    def clean(self, folder: str) -> int:
        """Nothing: who writes there can not be asked, and a store keeps nothing half-written."""
        return 0


@contextlib.contextmanager
def _reading(place: str) -> Iterator[None]:
    """Whatever a store raises becomes an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as exc:  # each store has exceptions of its own
        raise OSError(f"cannot read {place}: {type(exc).__name__}: {exc}") from exc
