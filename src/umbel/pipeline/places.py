"""A directory of the pipeline: here, or behind anything that fsspec knows.

Data goes through Spark. What goes through here is small: markers, manifests, what is in a folder,
and removing what nobody needs any more. A file is written whole or not at all. An object store has
one name for fsspec and another one for Spark (`umbel.stores`): `s3://` becomes `s3a://` there.

Paths are relative to the place, with slashes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from umbel.files import make_folders, open_file, tighten
from umbel.pipeline.errors import HistoryError
from umbel.stores import hadoop_url, open_store

# Spark takes a path with one of these for a pattern.
_PATTERN_SIGNS: Final = frozenset("[]{}*?\\")


class Place:
    """A directory by its path or URL; it need not be there yet."""

    def __init__(self, url: str) -> None:
        if not url:
            raise HistoryError("a directory has no name: give a path or a URL")
        if signs := sorted(_PATTERN_SIGNS & set(url)):
            raise HistoryError(
                f"{url}: Spark takes {' '.join(signs)} in a path for a pattern; "
                "give a directory without"
            )
        scheme, colon, rest = url.partition("://")
        self._fs: Any = None
        if colon and scheme not in {"file", "local"}:
            self._fs, self._root, self.url = _remote(url)
        else:
            self._root = str(Path(rest if colon else url).expanduser().absolute())
            self.url = f"file://{self._root}"  # Hadoop wants signs as they are, not as in a URL
        self.shown = url

    @property
    def is_local(self) -> bool:
        """Whether it is a directory of this machine."""
        return self._fs is None

    def at(self, path: str) -> str:
        """A path of the place as Spark takes it."""
        return f"{self.url}/{path}" if path else self.url

    def names(self, folder: str = "") -> list[str]:
        """What is in a folder, sorted; nothing when there is no such folder."""
        with self.doing("read"):
            try:
                if self._fs is None:
                    return sorted(path.name for path in Path(self._root, folder).iterdir())
                self._fs.invalidate_cache()
                found = self._fs.ls(self._inside(folder), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found} - {""})

    def size(self, path: str) -> int:
        """How many bytes a file has."""
        with self.doing("read"):
            if self._fs is None:
                return Path(self._root, path).stat().st_size
            return int(self._fs.size(self._inside(path)))

    def open(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A file for reading from anywhere in it."""
        if self._fs is None:
            return Path(self._root, path).open("rb")
        return cast("BinaryIO", self._fs.open(self._inside(path), "rb"))

    def bytes_in(self, folder: str) -> int:
        """How many bytes the files of a folder have, those in folders of it included."""
        with self.doing("read"):
            try:
                if self._fs is not None:
                    return int(self._fs.du(self._inside(folder)))
                return sum(_size(path) for path in Path(self._root, folder).rglob("*"))
            except FileNotFoundError:
                return 0

    def read_json(self, path: str) -> Any:
        """The content of a small file; None when there is none."""
        with self.doing("read"):
            try:
                with self.open(path) as file:
                    content = file.read()
            except FileNotFoundError:
                return None
        try:
            return json.loads(content)
        except ValueError:
            raise HistoryError(f"{self.shown}/{path} is damaged: it is no JSON") from None

    def write_json(self, path: str, content: Any) -> None:
        """Put a small file there, durably; whoever reads sees the old or the new one."""
        self.write(path, json.dumps(content, indent=1).encode())

    def write(self, path: str, data: bytes) -> None:
        """As `write_json`, of any content."""
        with self.doing("write"):
            if self._fs is not None:
                self._fs.pipe_file(self._inside(path), data)
                return
            target = Path(self._root, path)
            make_folders(target.parent)
            hidden = target.with_name(f".{target.name}.new")
            with open_file(hidden, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(target)
            _flush_folder(target.parent)

    def make(self) -> None:
        """Make the directory, and see that it can be written."""
        with self.doing("write"):
            if self._fs is None:
                make_folders(Path(self._root))
                probe = Path(self._root, f".try-{os.getpid()}")
                probe.touch()
                probe.unlink()

    def remove(self, path: str) -> None:
        """Take away a file, or a folder with all that is in it; what is not there already is."""
        with contextlib.suppress(FileNotFoundError), self.doing("write"):
            if self._fs is not None:
                self._fs.rm(self._inside(path), recursive=True)
            elif Path(self._root, path).is_dir():
                shutil.rmtree(Path(self._root, path))
            else:
                Path(self._root, path).unlink(missing_ok=True)

    def flush(self, folder: str) -> None:
        """Have the files of a folder on the disk before this returns."""
        if self._fs is not None:
            return
        with self.doing("write"):
            top = Path(self._root, folder)
            paths = [*top.rglob("*"), top]
            tighten((*paths, top.parent))  # a session of somebody else's has its own ideas
            for path in (*paths, top.parent):
                _flush_folder(path)

    def tighten(self, path: str) -> None:
        """Take from others what they may do with a file, or a folder and all that is in it."""
        if self._fs is None:
            top = Path(self._root, path)
            tighten((top, *top.rglob("*")))

    def path(self, path: str) -> Path:
        """A path of a place on this machine's disks."""
        assert self.is_local
        return Path(self._root, path)

    def _inside(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextlib.contextmanager
    def doing(self, verb: str) -> Iterator[None]:
        """What goes wrong meanwhile is told with the place."""
        try:
            yield
        except (HistoryError, FileNotFoundError):
            raise
        except OSError as exc:
            raise HistoryError(f"cannot {verb} {self.shown}: {exc.strerror or exc}") from exc
        except Exception as exc:
            if self._fs is None:
                raise
            raise HistoryError(f"cannot {verb} {self.shown}: {exc}") from exc


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # removed meanwhile
        return 0


def _flush_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remote(url: str) -> tuple[Any, str, str]:
    """The file system, the path in it, and the URL for Spark."""
    try:
        return *open_store(url), hadoop_url(url).rstrip("/")
    except ValueError as exc:
        raise HistoryError(f"cannot use {url}: {exc}") from exc
