"""A build that is killed between any two of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import SparkSession

    from umbel.pipeline.build import Options


class Killed(RuntimeError):
    """Stands for the end of the process: nothing after it runs."""


class Killer:
    """Ends the run at the n-th of the steps between which a kill could come."""

    STEPS = (
        "Place.write_json before",
        "Place.write_json after",
        "Publication._write after",
        "Publication._write_few after",
        "Place.remove before",
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from umbel.pipeline.places import Place
        from umbel.pipeline.storage import Publication

        self.left: int | None = None
        self.kills: list[str] = []
        for owner, name in (
            (Place, "write_json"),
            (Place, "remove"),
            (Publication, "_write"),
            (Publication, "_write_few"),
        ):
            label = f"{owner.__name__}.{name}"
            monkeypatch.setattr(owner, name, self._around(label, getattr(owner, name)))

    def _around(self, label: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self._maybe(f"{label} before")
            made = real(*args, **kwargs)
            self._maybe(f"{label} after")
            return made

        return step

    def _maybe(self, step: str) -> None:
        if self.left is None or step not in self.STEPS:
            return
        self.left -= 1
        if self.left == 0:
            self.left = None
            self.kills.append(step)
            raise Killed(step)

    def advance(self, spark: SparkSession, options: Options, steps: int) -> None:
        """Build what is new, killed after this many steps, and go on as a new process does."""
        from umbel.pipeline.build import Builder
        from umbel.pipeline.places import Place

        self.left = steps
        for _ in range(3):
            builder = Builder(Place(options.log), Place(options.tables), options, spark)
            try:
                builder.build()
            except Killed:
                assert self.left is None, "a kill ends a run"
            else:
                break
        self.left = None
