"""One at a time works on a day of the log: a file with its owner's name and age, on a local disk.

Whoever dies leaves his file behind. It is taken over when its owner was a process of this host that
is gone, or when nobody has touched it for a while. Two that take over at the same moment may both
go on: what they do must be harmless when done twice, and is (see `compaction`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from umbel.files import open_file

STALE_S: Final = 900.0
NAME: Final = ".compacting"


class Owner(msgspec.Struct):
    """Who holds a day."""

    host: str
    pid: int
    token: str


@contextlib.contextmanager
def held(folder: Path, wall: Callable[[], float] = time.time) -> Iterator[bool]:
    """Hold a folder, or not, if somebody else does; the answer says which."""
    path = folder / NAME
    mine = msgspec.json.encode(Owner(socket.gethostname(), os.getpid(), secrets.token_hex(8)))
    if not _take(path, mine, wall):
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            if path.read_bytes() == mine:
                path.unlink()


def _take(path: Path, mine: bytes, wall: Callable[[], float]) -> bool:
    if _create(path, mine):
        return True
    return _push_aside(path, wall) and _create(path, mine)


def _create(path: Path, content: bytes) -> bool:
    try:
        with open_file(path, "xb") as file:
            file.write(content)
    except (FileExistsError, FileNotFoundError):  # held by another; the folder is gone
        return False
    return True


def _push_aside(path: Path, wall: Callable[[], float]) -> bool:
    """Whether the way is free, because the owner was gone."""
    try:
        content, touched_s = path.read_bytes(), path.stat().st_mtime
    except FileNotFoundError:
        return True
    if not _is_left(content) and wall() - touched_s < STALE_S:
        return False
    aside = path.with_name(f"{NAME}-{secrets.token_hex(8)}.part")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return True
    # Another one may have been quicker, and this be his.
    same = aside.read_bytes() == content
    if not same:
        with contextlib.suppress(OSError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)
    return same


def _is_left(content: bytes) -> bool:
    try:
        owner = msgspec.json.decode(content, type=Owner)
    except msgspec.DecodeError:
        return False  # somebody else's: only its age tells
    if owner.host != socket.gethostname():
        return False
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
