"""Elections: exactly one node carries something out, however many hear of it.

Messages choose who *tries*, a write-once *register* on the broker decides. So no message has to
arrive, once or in order, for an election to be safe; it only has to reach somebody to be held.

1. A request, or anybody's `worker-elect`, opens the election of an unknown id here: our own
   `worker-elect` goes out at once, and whoever publishes it tells us its clock (`Heard`).
2. *Candidates* are kept by (hostname, pid, inc) and ranked by (clock, "hostname.pid"), lowest
   first, as Celery's workers rank them. Without a clock of our own we come last.
3. At `collect_s + rank * step_s` after the first word we claim, if nobody has told us the winner.
   Whoever is first at the register acts; everybody else learns the winner there. A winner that is
   dead or stopped is overtaken by the next in rank, at once if it is known to be gone.
   Nobody waits for more than `rank_max` others, so `collect_s + rank_max * step_s` is the longest.
4. A claim that fails is repeated, with the same token: it may have arrived. A token belongs to one
   opening of one election, so an answer that names it can only mean that claim.
5. A decided id leaves a *tombstone*: requests and candidates that come later do nothing. Where the
   tombstone had to make room the election opens again, and loses at the register.

Celery's workers (`cver` 1) know no register: whoever they find to rank lowest acts. With one of
them as the lowest we therefore stand back, and take it for the winner; and we send the ack that
they count. Nothing here waits for an ack.

| when full or late                              | then                                        |
| ---------------------------------------------- | ------------------------------------------- |
| `ids_max` open elections, or their actions big | a new id is refused                         |
| `candidates_max` candidates of an election     | the highest ranked is dropped               |
| `tombstones_max`, or `tombstone_s` old         | the oldest tombstone is dropped             |
| no answer from the register for `answer_s`     | the claim is repeated                       |
| undecided for `life_s`                         | given up: the register forgets in the end,  |
|                                                | and a late claim must not find it empty     |

Everything that is refused or dropped is counted in `counts`. Time is the caller's monotonic clock;
threads share an `Elections` under a lock of theirs.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from umbel.cluster.backoff import Backoff
from umbel.cluster.election_words import (
    BAD_ACTION,
    CELERY_CVER,
    CLAIM_FAILED,
    CROWDED_OUT,
    FORGOTTEN,
    GIVEN_UP,
    LATE,
    REPEATED,
    TOO_BIG,
    TOO_MANY,
    Act,
    Candidate,
    Claim,
    Claimed,
    ClaimFailed,
    Decided,
    Effect,
    Gone,
    Heard,
    Input,
    PublishAck,
    PublishElect,
    Refused,
    Requested,
    Tick,
)
from umbel.wire.jsontext import EncodeError, dumps_json

# Raising it lets more candidates be known before the first one claims, and delays every election.
COLLECT_S: Final = 0.5
# Raising it spares claims where registers are slow, and delays what overtakes a dead winner.
STEP_S: Final = 1.0
# Raising it spreads the claims of many nodes, and with them the time until the last one knows.
RANK_MAX: Final = 4

IDS_MAX: Final = 1_000
# As JSON; in memory the worst takes some twenty times as much.
ACTION_BYTES_MAX: Final = 2**17
ACTIONS_BYTES_MAX: Final = 2**23
CANDIDATES_MAX: Final = 64
TOMBSTONES_MAX: Final = 20_000
TOMBSTONE_S: Final = 86_400.0
LIFE_S: Final = 3_600.0
ANSWER_S: Final = 5.0
RETRY: Final = Backoff(0.25, 2.0)

_Key = tuple[str, int, int]
_Order = tuple[int, str, int]


@dataclass(slots=True)
class _Election:
    """One election that is not decided yet."""

    topic: str
    action: Any
    action_bytes: int
    token: str
    first_at: float
    due_at: float
    candidates: dict[_Key, _Order] = field(default_factory=dict)
    celery: set[_Key] = field(default_factory=set)
    acked: bool = False
    own_turn: bool = False  # we have claimed, and only the answer is missing
    failed_count: int = 0


class _Tombstone(NamedTuple):
    winner: str | None
    decided_at: float


class Elections:
    """The elections that one node takes part in; see the module's text."""

    def __init__(
        self,
        own: Candidate,
        *,
        collect_s: float = COLLECT_S,
        step_s: float = STEP_S,
        rank_max: int = RANK_MAX,
        ids_max: int = IDS_MAX,
        candidates_max: int = CANDIDATES_MAX,
        tombstones_max: int = TOMBSTONES_MAX,
        tombstone_s: float = TOMBSTONE_S,
        life_s: float = LIFE_S,
        answer_s: float = ANSWER_S,
        yields_to_celery: bool = True,
    ) -> None:
        assert min(ids_max, candidates_max, tombstones_max) > 0, "an empty table holds nothing"
        assert rank_max >= 0, rank_max
        assert life_s < tombstone_s, f"{life_s} s: elections live longer than their tombstones"
        self.own = own
        self.counts: Counter[str] = Counter()
        self._key: _Key = (own.hostname, own.pid, own.inc)
        self._collect_s, self._step_s, self._rank_max = collect_s, step_s, rank_max
        self._ids_max, self._candidates_max = ids_max, candidates_max
        self._tombstones_max, self._tombstone_s = tombstones_max, tombstone_s
        self._life_s, self._answer_s = life_s, answer_s
        self._yields = yields_to_celery
        self._open: dict[str, _Election] = {}
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()  # the oldest first
        self._action_bytes = 0
        self._opened_count = 0
        self._now = -math.inf

    def step(self, what: Input, now: float) -> list[Effect]:
        """Take one input; what has to be done about it, in this order."""
        # Callers on several threads may read the time in one order and get here in another.
        self._now = max(now, self._now)
        kind = type(what)
        if kind is Heard:
            return self._heard(what)  # type: ignore[arg-type]
        if kind is Tick:
            return self._tick()
        if isinstance(what, Requested):
            return self._requested(what)
        if isinstance(what, Claimed):
            return self._claimed(what)
        if isinstance(what, ClaimFailed):
            return self._claim_failed(what)
        assert isinstance(what, Gone), what
        return self._gone(what.hostname)

    # -- questions ---------------------------------------------------------------------

    @property
    def due_at(self) -> float | None:
        """When the next tick has something to do, as far as is known now."""
        return min([one.due_at for one in self._open.values()], default=None)

    def __contains__(self, election_id: object) -> bool:
        """Whether this id is known here: open, or decided and not forgotten."""
        return election_id in self._open or election_id in self._tombstones

    def __len__(self) -> int:
        """How many elections are open."""
        return len(self._open)

    def sizes(self) -> dict[str, int]:
        """How big the tables are; of the candidates those of the fullest election."""
        crowds = (len(one.candidates) for one in self._open.values())
        return {
            "ids": len(self._open),
            "candidates": max(crowds, default=0),
            "tombstones": len(self._tombstones),
        }

    def winner(self, election_id: str) -> str | None:
        """The winner, as long as it is remembered."""
        tombstone = self._tombstones.get(election_id)
        return None if tombstone is None else tombstone.winner

    def view(self, limit: int = 100) -> dict[str, Any]:
        """What is open, and the last decisions, ready for JSON; some of them where there are many.

        Ages are in seconds, as of the last step.
        """
        return {
            "open": {key: self._shown(self._open[key]) for key in list(self._open)[-limit:]},
            "decided": {
                key: {"winner": one.winner, "age": round(self._now - one.decided_at, 3)}
                for key, one in list(self._tombstones.items())[-limit:]
            },
            "counts": dict(self.counts),
        }

    def _shown(self, one: _Election) -> dict[str, Any]:
        ranked = sorted(one.candidates, key=one.candidates.__getitem__)
        return {
            "topic": one.topic,
            "age": round(self._now - one.first_at, 3),
            "candidates": [hostname for hostname, _, _ in ranked],
            "claimed": one.own_turn,
        }

    # -- opening -----------------------------------------------------------------------

    def _requested(self, what: Requested) -> list[Effect]:
        if what.id in self._open:
            return []
        if what.id in self._tombstones:
            return self._refuse(REPEATED)
        return self._begin(what)

    def _heard(self, what: Heard) -> list[Effect]:
        effects: list[Effect] = []
        election = self._open.get(what.id)
        if election is None:
            if what.id in self._tombstones:
                return self._refuse(LATE)
            effects = self._begin(what)
            election = self._open.get(what.id)
            if election is None:
                return effects
        key = (what.hostname, what.pid, what.inc)
        if what.hostname == self.own.hostname and key != self._key:
            return effects  # a former life of ours: nobody waits for it
        order = (what.clock, f"{what.hostname}.{what.pid}", what.inc)
        known = election.candidates.get(key)
        if known is None or order < known:
            self._enter(election, key, order)
        if what.cver == CELERY_CVER and key != self._key:
            if key in election.candidates:
                election.celery.add(key)
            if not election.acked:
                election.acked = True
                effects.append(PublishAck(what.id))
        return effects

    def _begin(self, what: Requested | Heard) -> list[Effect]:
        if len(self._open) >= self._ids_max:
            return self._refuse(TOO_MANY)
        try:
            action_bytes = len(dumps_json(what.action))
        except EncodeError:
            return self._refuse(BAD_ACTION)
        if action_bytes > ACTION_BYTES_MAX:
            return self._refuse(TOO_BIG)
        if self._action_bytes + action_bytes > ACTIONS_BYTES_MAX:
            return self._refuse(TOO_MANY)
        self._opened_count += 1
        self._action_bytes += action_bytes
        own = self.own
        token = f"{own.hostname}/{own.pid}/{own.inc}/{self._opened_count}"
        election = self._open[what.id] = _Election(
            what.topic, what.action, action_bytes, token, self._now, self._now
        )
        self._rank_anew(election)
        return [PublishElect(what.id, what.topic, what.action)]

    def _enter(self, election: _Election, key: _Key, order: _Order) -> None:
        candidates = election.candidates
        candidates[key] = order
        if key == self._key:
            self._rank_anew(election)
        if len(candidates) > self._candidates_max:
            others = (one for one in candidates if one != self._key)
            highest = max(others, key=candidates.__getitem__)
            del candidates[highest]
            election.celery.discard(highest)
            self.counts[CROWDED_OUT] += 1

    def _gone(self, hostname: str) -> list[Effect]:
        if hostname == self.own.hostname:
            return []
        for election in self._open.values():
            gone = [key for key in election.candidates if key[0] == hostname]
            for key in gone:
                del election.candidates[key]
                election.celery.discard(key)
            if gone:
                self._rank_anew(election)
        return []

    # -- claiming ----------------------------------------------------------------------

    def _rank_anew(self, election: _Election) -> None:
        """Our turn may come earlier than we thought: the next tick works it out."""
        if not election.own_turn:
            election.due_at = election.first_at + self._collect_s

    def _tick(self) -> list[Effect]:
        now = self._now
        while self._tombstones:
            election_id, tombstone = next(iter(self._tombstones.items()))
            if tombstone.decided_at + self._tombstone_s > now:
                break
            del self._tombstones[election_id]
        due = [election_id for election_id, one in self._open.items() if one.due_at <= now]
        return [effect for election_id in due for effect in self._come_due(election_id)]

    def _come_due(self, election_id: str) -> list[Effect]:
        election, now = self._open[election_id], self._now
        if now - election.first_at > self._life_s:
            self._close(election_id, None)
            return self._refuse(GIVEN_UP)
        if not election.own_turn:
            rank = min(self._rank(election), self._rank_max)
            election.due_at = election.first_at + self._collect_s + rank * self._step_s
            if election.due_at > now:
                return []
            if self._yields and election.celery:
                lowest = min(election.candidates, key=election.candidates.__getitem__)
                if lowest in election.celery:
                    winner = election.candidates[lowest][1]
                    self._close(election_id, winner)
                    return [Decided(election_id, winner)]
        election.own_turn = True
        election.due_at = now + self._answer_s
        return [Claim(election_id, election.topic, election.action, election.token)]

    def _rank(self, election: _Election) -> int:
        own = election.candidates.get(self._key)
        if own is None:
            return len(election.candidates)
        return sum(order < own for order in election.candidates.values())

    def _claim_failed(self, what: ClaimFailed) -> list[Effect]:
        election = self._open.get(what.id)
        if election is None:
            return []
        self.counts[CLAIM_FAILED] += 1
        election.failed_count += 1
        election.due_at = self._now + RETRY.pause_s(election.failed_count)
        return []

    def _claimed(self, what: Claimed) -> list[Effect]:
        election = self._open.get(what.id)
        if election is None:
            return []  # an answer to a claim that was repeated
        won = what.won or what.winner == election.token
        winner = election.token if won else what.winner
        self._close(what.id, winner)
        decided = Decided(what.id, winner)
        if not won:
            return [decided]
        return [Act(what.id, election.topic, election.action), decided]

    def _close(self, election_id: str, winner: str | None) -> None:
        election = self._open.pop(election_id)
        self._action_bytes -= election.action_bytes
        self._tombstones[election_id] = _Tombstone(winner, self._now)
        if len(self._tombstones) > self._tombstones_max:
            self._tombstones.popitem(last=False)
            self.counts[FORGOTTEN] += 1

    def _refuse(self, reason: str) -> list[Effect]:
        self.counts[reason] += 1
        return [Refused(reason)]
