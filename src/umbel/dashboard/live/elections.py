"""Elections as the cluster tells them: who stood, in which order, and whom each node calls winner.

Every candidate says so with `worker-elect`; every Umbel node that learns the winner from the
register says whom, with `worker-elected`. The ranks are those by which nodes take turns to claim.
Two nodes that name different winners disagree: that must never happen, and is an alarm.

How long it took is measured where it is heard: from the first candidate to the first node that
knew. At most `ELECTIONS_MAX` are kept, and `CANDIDATES_MAX` of each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from umbel.cluster.election_words import read_elect

ELECTIONS_MAX: Final = 500
CANDIDATES_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class Standing:
    """One candidate; the lowest place is first."""

    clock: int
    origin: str
    hostname: str


@dataclass(slots=True)
class Election:
    """One election, as far as it was heard."""

    id: str
    first_at: float  # wall clock of the receiver
    first_s: float  # its monotonic time
    topic: str | None = None
    candidates: set[Standing] = field(default_factory=set)
    told: dict[str, str] = field(default_factory=dict)  # node -> the winner it names
    decided_after_s: float | None = None

    @property
    def ranked(self) -> list[Standing]:
        """The candidates in the order in which they take turns."""
        return sorted(self.candidates, key=lambda one: (one.clock, one.origin))

    @property
    def winners(self) -> list[str]:
        """Everybody who was called winner: one, unless nodes disagree."""
        return sorted(set(self.told.values()))

    @property
    def verdict(self) -> str:
        """`open`, `decided` or `disagreement`."""
        return ("open", "decided", "disagreement")[min(2, len(self.winners))]


class ElectionBook:
    """See the module's text. Not for several threads at a time."""

    def __init__(self) -> None:
        self._elections: OrderedDict[str, Election] = OrderedDict()
        self.disagreements = 0

    def __len__(self) -> int:
        return len(self._elections)

    def latest(self) -> list[Election]:
        """All that are remembered, the latest first."""
        return list(reversed(self._elections.values()))

    def leaders(self) -> dict[str, Election]:
        """The node that won last, for each topic."""
        found: dict[str, Election] = {}
        for one in self._elections.values():
            if one.verdict == "decided" and one.topic is not None:
                found[one.topic] = one
        return found

    def event(self, event: Mapping[str, Any], now_s: float) -> None:
        """Take an event of an election; whatever makes no sense is left."""
        if event["type"] == "worker-elect":
            heard = read_elect(event)
            if isinstance(heard, str):
                return
            one = self._election(heard.id, event, now_s)
            one.topic = one.topic or heard.topic
            if len(one.candidates) < CANDIDATES_MAX:
                origin = f"{heard.hostname}.{heard.pid}"
                one.candidates.add(Standing(heard.clock, origin, heard.hostname))
        elif event["type"] == "worker-elected":
            id_, winner = event.get("id"), event.get("winner")
            if not isinstance(id_, str) or not isinstance(winner, str) or not id_:
                return
            one = self._election(id_[:200], event, now_s)
            agreed = len(one.winners) < 2
            if len(one.told) < CANDIDATES_MAX:
                one.told[event["hostname"]] = winner[:1_000]
            if one.decided_after_s is None and one.candidates:
                one.decided_after_s = max(0.0, now_s - one.first_s)
            if agreed and len(one.winners) > 1:
                self.disagreements += 1

    def _election(self, id_: str, event: Mapping[str, Any], now_s: float) -> Election:
        found = self._elections.get(id_)
        if found is None:
            if len(self._elections) >= ELECTIONS_MAX:
                self._elections.popitem(last=False)
            at = event.get("local_received") or event["timestamp"]
            found = self._elections[id_] = Election(id_, at, now_s)
        return found
