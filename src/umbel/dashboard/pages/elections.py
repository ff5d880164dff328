"""Elections: who stood, in which order, who won, how long it took, and whether all agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from umbel.cluster.election import COLLECT_S, STEP_S
from umbel.dashboard.live.elections import Election
from umbel.dashboard.pages.page import Facts, Page, Params

if TYPE_CHECKING:
    from umbel.dashboard.site import Site

SHOWN_MAX: Final = 100
CANDIDATES_SHOWN_MAX: Final = 50


def facts(site: Site, params: Params, details: bool = False) -> Facts:
    """The latest elections, the latest first."""
    live = site.live
    with live.lock:
        known = len(live.elections)
        rows = [_row(site, one) for one in live.elections.latest()[:SHOWN_MAX]]
        leaders = {
            topic: {"node": one.winners[0], "election": one.id, "at": one.first_at}
            for topic, one in sorted(live.elections.leaders().items())
        }
        disagreements = live.elections.disagreements
    return {
        "condition": live.condition,
        "known": known,
        "disagreements": disagreements,
        "leaders": leaders,
        "elections": rows,
    }


def _row(site: Site, one: Election) -> dict[str, Any]:
    ranked = one.ranked[:CANDIDATES_SHOWN_MAX]
    winner = one.winners[0] if one.winners else None
    names = [standing.hostname for standing in ranked]
    task = site.live.state.tasks.get(one.id) if one.topic == "task" else None
    return {
        "id": one.id,
        "topic": one.topic,
        "at": one.first_at,
        "verdict": one.verdict,
        "winner": winner,
        "winners": one.winners,
        "winner_rank": names.index(winner) + 1 if winner in names else None,
        "decided_after_s": one.decided_after_s,
        "candidates": [
            {
                "rank": rank,
                "node": standing.hostname,
                "clock": standing.clock,
                "claims_after_s": COLLECT_S + (rank - 1) * STEP_S,
                "claim": _claim(one, standing.hostname, rank),
                "names": one.told.get(standing.hostname),
                "won": standing.hostname == winner,
            }
            for rank, standing in enumerate(ranked, 1)
        ],
        "candidates_count": len(one.candidates),
        "informed": len(one.told),
        "task_state": None if task is None else task.state,
    }


def _claim(one: Election, node: str, rank: int) -> str:
    """What came of a candidate's claim to the register, as far as it can be known from outside.

    Candidates claim in turn, unless the winner is known by then: who won has claimed, of the others
    those before the winner must have failed to, and those whose turn came later had no need to.
    """
    if node in one.winners:
        return "won"
    if not one.winners:
        return "open"
    names = [standing.hostname for standing in one.ranked]
    turns = [names.index(winner) + 1 for winner in one.winners if winner in names]
    if not turns:
        return "open"
    return "missed" if rank < min(turns) else "not needed"


PAGE: Final = Page("elections", "/elections", "Elections", facts, ("elections",))
