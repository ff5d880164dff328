"""Who may read what is on disk."""

from __future__ import annotations

import stat
from pathlib import Path

# Of files and of folders.
OWNER, GROUP = (0o600, 0o700), (0o640, 0o750)


def modes_of(place: Path) -> dict[str, int]:
    """Of all that is below a directory, links and sockets aside."""
    found = [path for path in place.rglob("*") if not path.is_symlink()]
    return {
        str(path.relative_to(place)): stat.S_IMODE(path.stat().st_mode)
        for path in found
        if path.is_file() or path.is_dir()
    }


def check(place: Path, allowed: tuple[int, int] = OWNER) -> None:
    modes = modes_of(place)
    assert modes
    file_mode, folder_mode = allowed
    wrong = {
        name: oct(mode)
        for name, mode in modes.items()
        if mode != (folder_mode if (place / name).is_dir() else file_mode)
    }
    assert wrong == {}
