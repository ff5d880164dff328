"""Fresh environments, made of what is installed here: each has what one extra asks for, only that.

Nothing is downloaded. The requirements of a wheel are followed as an installer follows them, in the
metadata of the packages at hand, and the files of each package that is needed are linked into an
empty virtual environment. A package that an extra forgets to name is missing there, as it would be
for whoever installs it.
"""

from __future__ import annotations

import subprocess
import venv
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


class Wheel:
    """A built wheel: its files, and what its metadata asks for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self.files = {name for name in archive.namelist() if not name.endswith("/")}
            (found,) = [name for name in self.files if name.endswith(".dist-info/METADATA")]
            self.metadata = HeaderParser().parsestr(archive.read(found).decode())

    @property
    def extras(self) -> list[str]:
        return self.metadata.get_all("Provides-Extra", [])

    def requirements(self, extra: str) -> list[Requirement]:
        """What it needs with an extra, or without one (``""``)."""
        texts = self.metadata.get_all("Requires-Dist", [])
        return [one for text in texts if _applies(one := Requirement(text), {extra})]

    def unpack(self, place: Path) -> list[Path]:
        """Its directories, unpacked to a place."""
        with zipfile.ZipFile(self.path) as archive:
            archive.extractall(place)
        return sorted(place.iterdir())


class Environment:
    """A virtual environment without pip; packages are linked into it."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self.python = directory / "bin" / "python"
        (self.packages,) = (directory / "lib").glob("python*/site-packages")

    def link(self, requirements: Iterable[Requirement], own: Wheel) -> None:
        """Link what is asked for, and what that asks for in turn."""
        for found in closure(requirements, own):
            for file in found.files or ():
                source, target = Path(str(found.locate_file(file))), self.packages / file
                if ".." in file.parts or target.exists() or not source.exists():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run Python there, with nothing from here in its path."""
        return subprocess.run(
            [str(self.python), "-I", *argv], cwd=self.packages.parents[2], env={"PATH": "/usr/bin"},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


def closure(requirements: Iterable[Requirement], own: Wheel) -> list[Distribution]:
    """The installed packages that fulfil `requirements`, their own included; each once."""
    waiting, seen = list(requirements), set()
    found: dict[str, Distribution] = {}
    while waiting:
        asked = waiting.pop()
        name = canonicalize_name(asked.name)
        key = (name, frozenset(asked.extras))
        if key in seen:
            continue
        seen.add(key)
        if name == "umbel":
            waiting += [one for extra in asked.extras for one in own.requirements(extra)]
            continue
        one = found.setdefault(name, distribution(name))
        assert one.version in asked.specifier, f"{asked} is asked for, {one.version} is here"
        further = [Requirement(text) for text in one.requires or ()]
        waiting += [each for each in further if _applies(each, asked.extras)]
    return list(found.values())


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or [""])
