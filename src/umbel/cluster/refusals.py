"""Elections that nobody holds: one of the nodes that refused says so, once.

A node that refuses a request takes no part in the election (`umbel.cluster.election`). Where some
refuse and others stand, as during a deployment, the others decide and nothing else happens. Where
nobody stands, whoever asked would wait for ever. So a node that refused waits too, for longer than
any candidate waits for its turn, and then claims the register of the election itself, with a token
that says so (`refused:...`). Whoever is first there stores a FAILURE with its reason.

1. `Declined` is a request that this node refuses, or an election that it has given up. It waits
   `wait_s` for a candidate.
2. `Heard` is a candidate: then this node does not claim, unless all candidates are known to be gone
   (`Gone`). After `watch_s` it stops watching.
3. A claim that fails is repeated, with the same token, for `life_s`.

The register is written once. So an election is either acted upon or refused, never both, whatever
happens to messages: a refusal that comes too early turns out candidates who were late, and one that
comes too late finds the register taken. When full (`ids_max`), the oldest refusal is dropped and
counted; its asker is not told. Time is the caller's monotonic clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from umbel.cluster.election import (
    ANSWER_S,
    COLLECT_S,
    IDS_MAX,
    RANK_MAX,
    RETRY,
    STEP_S,
)
from umbel.cluster.election_words import (
    Candidate,
    Claimed,
    ClaimFailed,
    Gone,
    Heard,
    Tick,
    refusing,
)

# One step after the last turn of a candidate.
WAIT_S: Final = COLLECT_S + (RANK_MAX + 1) * STEP_S
# Raising it reports deaths of the only candidate that are noticed late, and keeps more in memory.
WATCH_S: Final = 30.0
LIFE_S: Final = 600.0
CANDIDATES_MAX: Final = 64

DROPPED: Final = "refusals-dropped"


@dataclass(frozen=True, slots=True)
class Declined:
    """This node refuses a request, or has given up the election after having claimed.

    `reply_to` is where a failure is sent to, for results that are messages. `token` is the one with
    which this node holds the register already.
    """

    id: str
    reason: str
    reply_to: str | None = None
    token: str = ""


@dataclass(frozen=True, slots=True)
class ClaimRefusal:
    """Put `token` into the register of this id, if it is empty, and tell what it holds then."""

    id: str
    token: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Nobody holds it: store a failure as its result."""

    id: str
    reason: str
    reply_to: str | None


Input = Declined | Heard | Gone | Claimed | ClaimFailed | Tick
Effect = ClaimRefusal | Fail


@dataclass(slots=True)
class _Refusal:
    since: float
    due_at: float
    said: Declined | None = None  # None: only a candidate was heard, no request
    token: str = ""
    claims: bool = False
    failed_count: int = 0
    candidates: set[tuple[str, int, int]] = field(default_factory=set)


class Refusals:
    """The elections that one node takes no part in."""

    def __init__(
        self,
        own: Candidate,
        *,
        wait_s: float = WAIT_S,
        watch_s: float = WATCH_S,
        ids_max: int = IDS_MAX,
    ) -> None:
        assert wait_s < watch_s < LIFE_S, (wait_s, watch_s)
        self.counts: Counter[str] = Counter()
        self._own = own
        self._wait_s, self._watch_s, self._ids_max = wait_s, watch_s, ids_max
        self._open: OrderedDict[str, _Refusal] = OrderedDict()  # the oldest first
        self._opened_count = 0

    def step(self, what: Input, now: float) -> list[Effect]:
        """Take one input; what has to be done about it."""
        if isinstance(what, Declined):
            self._declined(what, now)
        elif isinstance(what, Heard):
            self._heard(what, now)
        elif isinstance(what, Gone):
            self._gone(what.hostname, now)
        elif isinstance(what, ClaimFailed):
            self._claim_failed(what.id, now)
        elif isinstance(what, Claimed):
            return self._claimed(what)
        else:
            return self._tick(now)
        return []

    @property
    def due_at(self) -> float | None:
        """When the next tick has something to do."""
        return min([one.due_at for one in self._open.values()], default=None)

    def __contains__(self, election_id: object) -> bool:
        """Whether this node waits for somebody else to hold the election."""
        return election_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def view(self, now: float, limit: int = 100) -> dict[str, Any]:
        """The refused requests that are not settled, ready for JSON; ages are in seconds."""
        said = [(key, one, one.said) for key, one in self._open.items() if one.said is not None]
        return {
            key: {
                "age": round(now - one.since, 3),
                "reason": what.reason,
                "candidates": sorted(hostname for hostname, _, _ in one.candidates),
            }
            for key, one, what in said[-limit:]
        }

    def _declined(self, what: Declined, now: float) -> None:
        refusal = self._find(what.id, now)
        if refusal.said is None:
            refusal.said, refusal.since = what, now
            refusal.token = what.token or self._token()
            refusal.due_at = now + self._wait_s

    def _heard(self, what: Heard, now: float) -> None:
        if not what.stands:
            return
        refusal = self._find(what.id, now)
        if len(refusal.candidates) < CANDIDATES_MAX:
            refusal.candidates.add((what.hostname, what.pid, what.inc))

    def _find(self, election_id: str, now: float) -> _Refusal:
        refusal = self._open.get(election_id)
        if refusal is None:
            if len(self._open) >= self._ids_max:
                _, dropped = self._open.popitem(last=False)
                self.counts[DROPPED] += dropped.said is not None
            refusal = self._open[election_id] = _Refusal(now, now + self._watch_s)
        return refusal

    def _token(self) -> str:
        self._opened_count += 1
        own = self._own
        return refusing(f"{own.hostname}/{own.pid}/{own.inc}/{self._opened_count}")

    def _gone(self, hostname: str, now: float) -> None:
        for refusal in self._open.values():
            gone = {key for key in refusal.candidates if key[0] == hostname}
            refusal.candidates -= gone
            if gone and not refusal.candidates and refusal.said is not None:
                refusal.due_at = max(now, refusal.since + self._wait_s)

    def _tick(self, now: float) -> list[Effect]:
        due = [(key, one) for key, one in self._open.items() if one.due_at <= now]
        return [effect for key, one in due for effect in self._come_due(key, one, now)]

    def _come_due(self, election_id: str, refusal: _Refusal, now: float) -> list[Effect]:
        waits = refusal.said is None or bool(refusal.candidates and not refusal.claims)
        if now >= refusal.since + (self._watch_s if waits else LIFE_S):
            del self._open[election_id]
            return []
        if waits:
            refusal.due_at = refusal.since + self._watch_s
            return []
        refusal.claims = True
        refusal.due_at = now + ANSWER_S
        return [ClaimRefusal(election_id, refusal.token)]

    def _claim_failed(self, election_id: str, now: float) -> None:
        refusal = self._open.get(election_id)
        if refusal is not None:
            refusal.failed_count += 1
            refusal.due_at = now + RETRY.pause_s(refusal.failed_count)

    def _claimed(self, what: Claimed) -> list[Effect]:
        refusal = self._open.pop(what.id, None)
        if refusal is None or refusal.said is None or not refusal.claims:
            return []
        if not what.won and what.winner != refusal.token:
            return []
        return [Fail(what.id, refusal.said.reason, refusal.said.reply_to)]
