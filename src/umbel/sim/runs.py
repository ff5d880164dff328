"""Many seeds, one after the other, and what came of them."""

from __future__ import annotations

import gc
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from umbel.sim.games import AGREEMENT, GAMES, Game
from umbel.sim.outcomes import Outcome

FAILURES_KEPT_MAX: Final = 20
# Plays are full of cycles, and short: they are swept away together.
_SWEEP_EVERY: Final = 200


@dataclass(slots=True)
class Summary:
    """What came of a run."""

    game: Game = AGREEMENT
    seeds: int = 0
    failed: int = 0
    failures: list[Outcome] = field(default_factory=list)  # the first ones
    totals: Counter[str] = field(default_factory=Counter)
    nodes_max: int = 0
    settled_s_max: float = 0.0
    cpu_s: float = 0.0

    @property
    def seeds_per_s(self) -> float:
        """Per second of processor time, so that other programs do not count."""
        return self.seeds / self.cpu_s if self.cpu_s else 0.0

    def add(self, outcome: Outcome) -> None:
        """Take one play into account."""
        figures = outcome.figures
        self.seeds += 1
        for name in self.game.counted:
            self.totals[name] += figures[name]
        self.nodes_max = max(self.nodes_max, figures["nodes"])
        self.settled_s_max = max(self.settled_s_max, figures["settled_s"] or 0.0)
        if outcome.violations:
            self.failed += 1
            if len(self.failures) < FAILURES_KEPT_MAX:
                self.failures.append(outcome)


def run(
    seeds: Iterable[int],
    setting: Any,
    *,
    game: Game = AGREEMENT,
    on_play: Callable[[Outcome], Any] | None = None,
) -> Summary:
    """Play every seed, and pass what comes of each to `on_play`."""
    summary = Summary(game)
    collects = gc.isenabled()
    gc.disable()
    try:
        started = time.process_time()
        for seed in seeds:
            outcome = game.play(seed, setting)
            summary.add(outcome)
            if on_play is not None:
                on_play(outcome)
            if summary.seeds % _SWEEP_EVERY == 0:
                gc.collect()
        summary.cpu_s = time.process_time() - started
    finally:
        if collects:
            gc.enable()
    return summary


def how_to_repeat(seed: int, setting: Any, game: Game = AGREEMENT) -> str:
    """The command that plays this seed once more, with every line of it."""
    words = ["umbel", "sim"]
    if game is not AGREEMENT:
        words += ["--what", next(name for name, one in GAMES.items() if one is game)]
    words += ["--seed", str(seed)]
    if setting.nodes is not None:
        words += ["--nodes", str(setting.nodes)]
    if setting.faults != game.faults:
        words += ["--faults", ",".join(setting.faults) or "none"]
    if setting.seconds is not None:
        words += ["--seconds", f"{setting.seconds:g}"]
    words += [
        word
        for name, mutation in game.mutations.items()
        if mutation.parts is setting.parts
        for word in ("--mutation", name)
    ]
    return shlex.join(words)
