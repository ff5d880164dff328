"""What comes of one seed, and the rules that were broken in it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from umbel.sim.world import Line, World

VIOLATIONS_MAX: Final = 20


class Violation(NamedTuple):
    """A rule that was broken, when, and what was seen."""

    rule: str
    at_s: float
    seen: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.seen} (at {self.at_s:.3f} s)"


class Verdicts:
    """The violations of one play, as they are found."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[Violation] = []

    def violated(self, rule: str, seen: str) -> None:
        """A rule is broken."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(Violation(rule, self._world.now, seen))
            self._world.tell("VIOLATION", f"{rule}: {seen}")


class Outcome(NamedTuple):
    """What came of a play."""

    seed: int
    hash: int
    violations: list[Violation]
    story: list[Line]
    figures: dict[str, Any]
