"""Disks that are full for real: a small one, mounted for a test."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A directory on a disk of its own, with a file that takes what room there is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / ".ballast"

    def fill(self, but_bytes: int = 0) -> None:
        """Leave so much room and no more."""
        room = os.statvfs(self.path)
        size = room.f_bavail * room.f_frsize - but_bytes
        with self._ballast.open("ab") as file:
            file.write(bytes(max(0, size)))

    def free(self) -> None:
        """Give the room back."""
        self._ballast.unlink()


@contextlib.contextmanager
def small_disk(path: Path, mebibytes: int) -> Iterator[SmallDisk]:
    """A disk of that size; the test is skipped where nobody may mount one."""
    path.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)]
    try:
        done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no program 'mount' here")
    if done.returncode:
        pytest.skip(f"a small disk can not be mounted, which takes root: {done.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
