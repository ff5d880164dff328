"""What comes of one seed."""

from __future__ import annotations

from typing import Any, NamedTuple

from umbel.sim.checks import Violation
from umbel.sim.world import Line


class Outcome(NamedTuple):
    """What came of a play."""

    seed: int
    hash: int
    violations: list[Violation]
    story: list[Line]
    figures: dict[str, Any]
