"""Importing the modules that define tasks."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

Packages = Iterable[str] | Callable[[], Iterable[str]]


class ModuleLoader:
    """Remembers what to import and imports it once, when a worker or a command needs it."""

    def __init__(self, include: Iterable[str]) -> None:
        self._include = [include] if isinstance(include, str) else list(include)
        self._discover: list[tuple[Packages, str | None]] = []
        self._loaded: set[str] = set()

    def discover(self, packages: Packages, related_name: str | None) -> None:
        """Import `<package>.<related_name>` of each package where it exists."""
        named = [packages] if isinstance(packages, str) else packages
        self._discover.append((named, related_name))

    def load(self, app: Umbel) -> None:
        """Import what is not imported yet; errors inside the modules are the caller's to see."""
        conf = app.conf
        for name in [*self._include, *(conf.imports or ()), *(conf.include or ())]:
            self._import(name)
        for packages, related in self._discover:
            for package in packages() if callable(packages) else packages:
                self._import_related(package, related)

    def _import(self, name: str) -> None:
        if name not in self._loaded:
            importlib.import_module(name)
            self._loaded.add(name)

    def _import_related(self, package: str, related: str | None) -> None:
        if related is None:
            self._import(package)
            return
        found = importlib.import_module(package)
        name = f"{package}.{related}"
        if hasattr(found, "__path__") and importlib.util.find_spec(name) is not None:
            self._import(name)
