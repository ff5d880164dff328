"""Files that Umbel writes: for their owner alone, unless `file_umask` lets others in.

Event logs, tables, state files and reports hold what tasks did and were called with. They are made
with 0600, folders with 0700, whatever the umask of the process is: that one belongs to the tasks of
a worker. `set_umask` lets others in, for the whole process: 0o027 lets a group read, as for a
recorder and a dashboard that run as two users of one group, 0o007 lets it write as well.

A folder that is there keeps its mode: somebody has made it that way. Files of ours that an older
version made too open are tightened, and never opened further. In a folder with the set-group-ID bit
new folders have it too.

Object stores and other remote places have no such modes; there this does nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Final

DEFAULT_UMASK: Final = 0o077
_OWNER: Final = 0o700
_umask = DEFAULT_UMASK


def set_umask(mask: int) -> None:
    """What to take away from the permissions of files and folders that are made from now on."""
    global _umask
    assert 0 <= mask <= 0o077, oct(mask)
    _umask = mask


def umask() -> int:
    """What is taken away."""
    return _umask


def read_umask(value: object) -> int:
    """`"027"`, `"0o027"` or 0o027 as a number; raises ValueError with the way out."""
    try:
        mask = int(value, 8) if isinstance(value, str) else value
    except ValueError:
        mask = None
    if type(mask) is not int or not 0 <= mask <= DEFAULT_UMASK:
        raise ValueError(
            "must be an octal number up to 077, such as '077' (nobody else) or '027' (the group "
            "may read)"
        )
    return mask


def file_mode() -> int:
    """The mode of a new file."""
    return 0o666 & ~_umask


def opener(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file; one that is made, or emptied, gets our mode. Use as the built-in's `opener`."""
    while True:
        try:
            if not flags & os.O_EXCL:
                fd = os.open(path, flags & ~os.O_CREAT)
                if flags & os.O_TRUNC:
                    _set_mode(fd)
                return fd
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            continue  # somebody else has just made it
        _set_mode(fd)
        return fd


def open_file(
    path: str | os.PathLike[str], mode: str, encoding: str | None = None, errors: str | None = None
) -> IO[Any]:
    """The built-in `open`, with our mode for a file that is made."""
    return open(path, mode, encoding=encoding, errors=errors, opener=opener)


def _set_mode(fd: int) -> None:
    with contextlib.suppress(PermissionError):  # somebody else's, which we may write
        os.fchmod(fd, file_mode())


def make_folders(path: Path) -> list[Path]:
    """Make a folder and those above it that are missing; which were made, the first one first."""
    if path.is_dir():
        return []
    made = make_folders(path.parent)
    try:
        path.mkdir(mode=_OWNER)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path)) from None
        return made  # somebody else has just made it
    inherited = path.stat().st_mode & stat.S_ISGID
    path.chmod(0o777 & ~_umask | inherited)
    return [*made, path]


def tighten(paths: Iterable[Path]) -> None:
    """Take away what files and folders of ours allow to others; those of others are left alone."""
    for path in paths:
        with contextlib.suppress(OSError):
            found = path.lstat()
            is_ours = found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)
            if is_ours and found.st_mode & _umask:
                path.chmod(stat.S_IMODE(found.st_mode) & ~_umask)
