"""The steps that a user adds to the blueprints of a worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class Steps:
    """The steps that a user adds to a blueprint, each once, in the order in which they came."""

    def __init__(self) -> None:
        self._steps: dict[Any, None] = {}

    def add(self, step: Any) -> None:
        """Add a step class."""
        self._steps[step] = None

    def update(self, steps: Iterable[Any]) -> None:
        """Add several."""
        self._steps.update(dict.fromkeys(steps))

    def discard(self, step: Any) -> None:
        """Take a step class out again."""
        self._steps.pop(step, None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)
