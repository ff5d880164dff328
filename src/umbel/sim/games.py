"""What can be played: agreement between nodes, or the deliveries of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from umbel.sim import faults, mutations, plays
from umbel.sim.deliveries import mutations as delivery_mutations
from umbel.sim.deliveries import plays as deliveries
from umbel.sim.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class Game:
    """One kind of play."""

    play: Callable[..., Outcome]
    setting: Callable[..., Any]
    honest: Any  # the parts of nodes or workers
    faults: tuple[str, ...]  # those that there may be unless the caller chooses
    all_faults: tuple[str, ...]
    mutations: Mapping[str, Any]
    counted: tuple[str, ...]  # figures that are added up over many plays


GAMES: Final = {
    "agreement": Game(
        plays.play,
        plays.Setting,
        plays.HONEST,
        faults.FAULTS,
        faults.ALL,
        mutations.MUTATIONS,
        ("elections", "actions", "claims", "delivered", "lost", "events"),
    ),
    "deliveries": Game(
        deliveries.play,
        deliveries.Setting,
        deliveries.HONEST,
        deliveries.FAULTS,
        deliveries.FAULTS,
        delivery_mutations.MUTATIONS,
        ("tasks", "runs", "again", "lost", "events"),
    ),
}
AGREEMENT, DELIVERIES = GAMES["agreement"], GAMES["deliveries"]
