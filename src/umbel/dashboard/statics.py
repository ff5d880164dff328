"""Our own scripts and styles: read once, served by name. No path of a request reaches the disk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Static:
    """A file."""

    content: bytes
    media_type: str
    digest: str


class Statics:
    """The files of one directory, without those below."""

    def __init__(self, directory: Path) -> None:
        self._files = {
            path.name: _read(path) for path in sorted(directory.iterdir()) if path.suffix in TYPES
        }

    def get(self, name: str) -> Static | None:
        """A file by its exact name."""
        return self._files.get(name)

    def versioned(self, name: str) -> str:
        """A name that changes with the content, so that browsers may keep what they have."""
        return f"{name}?v={self._files[name].digest}"


def _read(path: Path) -> Static:
    content = path.read_bytes()
    return Static(content, TYPES[path.suffix], hashlib.sha256(content).hexdigest()[:12])
