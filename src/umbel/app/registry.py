"""The tasks of one application, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umbel.exceptions import NotRegistered

if TYPE_CHECKING:
    from umbel.app.task import Task


class TaskRegistry(dict[str, "Task"]):
    """A dictionary whose missing names are reported as unregistered tasks."""

    def __missing__(self, name: str) -> Task:
        raise NotRegistered(name)

    def own(self) -> list[str]:
        """The names of the user's tasks, sorted: all but the built-in ones."""
        return sorted(name for name in self if not name.startswith("celery."))
