"""Mingle: a node that starts, or is connected again, catches up with the others.

Clocks and revocations are told by broadcast, and a broadcast passes by whoever is not there. So a
node greets all others when its connection is up (`hello`), takes over their clocks, and compares
revocations. Between nodes of our own kind that takes as little as there is to tell:

| who asks                | `hello` carries           | the reply carries                        |
| ----------------------- | ------------------------- | ---------------------------------------- |
| we, of everybody        | our digest                | clock, digest                            |
| we, of one that differs | digest, what it may lack  | clock, its digest then, what we may lack |
| a Celery worker         | its ids                   | clock, all our ids                       |
| we, of a Celery worker  | (after its reply) our ids | clock, all its ids                       |

Greetings and replies between nodes of our own kind also carry which queues are paused, all of it
(`cluster.pauses`), added and checked by the caller.

One *exchange* at a time: after the first one the others usually agree with us too. It goes on with
the same node until the two agree, or nothing changes any more, or `ROUNDS_MAX`; and, while we
mingle, with one node after the other until all that have answered agree.

`Done` is told once per `Begin`: when all that were expected have answered, or, where nobody knows
whom to expect, at the end of the window; and when there is nothing left to exchange, at the
latest after `limit_s`. What comes later is taken all the same.

A broadcast may also be lost on the way to a node that has no reason to mingle. Heartbeats of our
kind therefore carry a `summary` of the revocations. Whoever differs from us for longer than
`patience_s`, two heartbeats, is asked for an exchange; those first that have answered before, as
anybody can send a heartbeat and who does not answer costs `exchange_s`. So all nodes come to the
same set, whatever was lost, as long as they hear each other's heartbeats.

Replies come from outside: what is wrong in them is counted in `counts`, never raised. Clocks and
revocations are merged by the caller, before the next tick, and check themselves. Time is the
caller's monotonic clock, but for `wall_s`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import msgspec

from umbel.cluster.lives import read_digest
from umbel.cluster.revocations import Revocation, Revocations

# Raising it waits longer for nodes that do not answer; Celery's workers wait as long.
WINDOW_S: Final = 1.0
# Raising it lets more be exchanged before a node takes tasks; afterwards it is exchanged as well.
LIMIT_S: Final = 5.0
EXCHANGE_S: Final = 2.0
PATIENCE_S: Final = 3.0
REST_S: Final = 60.0
ROUNDS_MAX: Final = 64
PEERS_MAX: Final = 5_000

# What was wrong: the keys of `Mingle.counts`.
BAD_REPLY: Final = "bad-reply"
BAD_DIGEST: Final = "bad-digest"
TOO_MANY: Final = "too-many"

Digest = dict[str, Any]


# -- what goes in ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """The connection is up. `expected` are the nodes known to be alive; None: nobody knows."""

    expected: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """A node has answered a `hello`."""

    hostname: str
    reply: Any


@dataclass(frozen=True, slots=True)
class Compared:
    """A heartbeat came with a summary: whether it is our own as well."""

    hostname: str
    agrees: bool


@dataclass(frozen=True, slots=True)
class Gone:
    """A node is lost or has left: nobody waits for it."""

    hostname: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed, or an answer is merged; wanted after each answer, and at `due_at`."""


Input = Begin | Answered | Compared | Gone | Tick


# -- what comes out ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Send `hello` with these arguments, to one node or, without a destination, to all."""

    destination: str | None
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Take:
    """Take over a part of a reply: `clock`, `told`, `paused`, or `revoked` by a Celery worker."""

    name: str
    told: Any


@dataclass(frozen=True, slots=True)
class Done:
    """There is nothing left to wait for. `silent` were expected and have not answered."""

    answered: tuple[str, ...]
    silent: tuple[str, ...]


Effect = Hello | Take | Done


@dataclass(slots=True)
class _Exchange:
    """What goes on with one node."""

    hostname: str
    began_with: Digest
    rounds: int = 0
    seen: tuple[Digest, Digest | None] | None = None  # ours and its, at the last round
    until: float | None = None  # how long an answer is waited for; None: it has come


class Mingle:
    """See the module's text."""

    def __init__(
        self,
        own: str,
        expected: Collection[str] | None = None,
        *,
        revocations: Revocations,
        window_s: float = WINDOW_S,
        limit_s: float = LIMIT_S,
        exchange_s: float = EXCHANGE_S,
        patience_s: float = PATIENCE_S,
        rest_s: float = REST_S,
    ) -> None:
        self.own = own
        self.counts: Counter[str] = Counter()
        self._expected = _names(own, expected)
        self._revocations = revocations
        self._window_s, self._limit_s, self._exchange_s = window_s, limit_s, exchange_s
        self._patience_s, self._rest_s = patience_s, rest_s
        self._begun_at: float | None = None  # None: there is nothing to be done with
        self._window_over = False
        self._answered: dict[str, None] = {}
        self._digests: dict[str, Digest] = {}  # of those who have answered, as of then
        self.differing: dict[str, float] = {}  # whose heartbeats differ, and when to ask them
        self._exchange: _Exchange | None = None

    def step(self, what: Input, now: float) -> list[Effect]:
        """Take one input; what has to be done about it, in this order."""
        if isinstance(what, Tick):
            return self._tick(now)
        if isinstance(what, Compared):
            self._compared(what, now)
            return []
        if isinstance(what, Answered):
            return self._answer(what)
        if isinstance(what, Begin):
            return self._begin(what, now)
        self._forget(what.hostname)
        return []

    def expect(self, hostnames: Collection[str]) -> None:
        """Somebody who answered knows who is there: wait for these."""
        if self.busy:
            self._expected = tuple(one for one in hostnames if one != self.own)

    # -- questions ---------------------------------------------------------------------

    @property
    def all_answered(self) -> bool:
        """Whether everybody that is expected has answered; False where nobody knows whom."""
        return self._expected is not None and not self._silent()

    @property
    def busy(self) -> bool:
        """Whether `Done` is still to come."""
        return self._begun_at is not None

    @property
    def due_at(self) -> float | None:
        """When the next tick has something to do; ticks after answers come on top of it."""
        if self._begun_at is None and self._exchange is None and not self.differing:
            return None
        times = []
        if self._begun_at is not None:
            times.append(self._begun_at + (self._limit_s if self._window_over else self._window_s))
        if self._exchange is not None:
            if self._exchange.until is not None:
                times.append(self._exchange.until)
        else:
            times += self.differing.values()
        return min(times, default=None)

    # -- greeting ----------------------------------------------------------------------

    def _begin(self, what: Begin, now: float) -> list[Effect]:
        if what.expected is not None:
            self._expected = _names(self.own, what.expected)
        self._begun_at = now
        self._window_over = False
        self._answered.clear()
        self._digests.clear()
        self.differing.clear()
        self._exchange = None
        digest = _digest_of(self._revocations)
        return [Hello(None, {"from_node": self.own, "revoked": [], "digest": digest})]

    def _answer(self, what: Answered) -> list[Effect]:
        hostname, reply = what.hostname, what.reply
        if hostname == self.own:
            return []
        exchange = self._exchange
        if exchange is not None and exchange.hostname == hostname:
            exchange.until = None
        first = hostname not in self._answered
        if len(self._answered) >= PEERS_MAX and first:
            self.counts[TOO_MANY] += 1
            return []
        self._answered[hostname] = None
        if type(reply) is not dict or "error" in reply:
            self.counts[BAD_REPLY] += 1
            return []
        effects: list[Effect] = [Take("clock", reply["clock"])] if "clock" in reply else []
        if "digest" in reply:
            return effects + self._own_kind(hostname, reply)
        if reply.get("revoked"):
            effects.append(Take("revoked", reply["revoked"]))
        if first and self._revocations.any:
            arguments = {"from_node": self.own, "revoked": self._revocations.ids()}
            effects.append(Hello(hostname, arguments))
        return effects

    def _own_kind(self, hostname: str, reply: dict[str, Any]) -> list[Effect]:
        digest = reply["digest"]
        if digest == _NOTHING and not self._revocations.any:
            self._digests.pop(hostname, None)  # the usual case, at no cost
        elif _is_digest(digest):
            self._digests[hostname] = digest
        else:
            self.counts[BAD_DIGEST] += 1
        return [Take(name, reply[name]) for name in ("told", "paused") if reply.get(name)]

    # -- comparing ---------------------------------------------------------------------

    def _compared(self, what: Compared, now: float) -> None:
        if what.agrees:
            self.differing.pop(what.hostname, None)
        elif what.hostname in self.differing or what.hostname == self.own:
            return
        elif len(self.differing) < PEERS_MAX or self._forget_stranger(what.hostname):
            self.differing[what.hostname] = now + self._patience_s
        else:
            self.counts[TOO_MANY] += 1

    def _forget_stranger(self, hostname: str) -> bool:
        """Make room for a node that has answered before at the expense of one that has not."""
        strangers = (name for name in self.differing if name not in self._answered)
        stranger = next(strangers, None) if hostname in self._answered else None
        if stranger is None:
            return False
        self.counts[TOO_MANY] += 1
        del self.differing[stranger]
        return True

    def _forget(self, hostname: str) -> None:
        self._digests.pop(hostname, None)
        self.differing.pop(hostname, None)
        self._expected = _names(hostname, self._expected)
        if self._exchange is not None and self._exchange.hostname == hostname:
            self._exchange = None

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        exchange = self._exchange
        if exchange is not None and exchange.until is not None:
            if now < exchange.until:
                return self._done(now)
            self._end_exchange(None)  # it does not answer
        if self._exchange is not None or self._digests or self._most_patient(now) is not None:
            effects += self._compare(now)
        return effects + self._done(now)

    def _compare(self, now: float) -> list[Effect]:
        """Go on with the exchange, or begin the next one."""
        own = _digest_of(self._revocations)
        exchange = self._exchange
        if exchange is not None:
            theirs = self._digests.get(exchange.hostname)
            if theirs == own:
                self._end_exchange(own)
                if exchange.began_with != own:  # so we do not differ from others as we did
                    self.differing = dict.fromkeys(self.differing, now + self._patience_s)
            elif exchange.seen == (own, theirs) or exchange.rounds >= ROUNDS_MAX:
                # Full tables, or clocks that disagree about what has ended: it does not help.
                self._end_exchange(None)
                self.differing[exchange.hostname] = now + self._rest_s
            else:
                return self._ask(exchange, own, now)
        differ = (name for name, theirs in self._digests.items() if theirs != own)
        hostname = next(differ, None) or self._most_patient(now)
        if hostname is None:
            return []
        self._exchange = _Exchange(hostname, own)
        return self._ask(self._exchange, own, now)

    def _most_patient(self, now: float) -> str | None:
        """A node whose heartbeats have differed for long enough; one that answers, if there is."""
        due = [hostname for hostname, at in self.differing.items() if at <= now]
        known = (hostname for hostname in due if hostname in self._answered)
        return next(known, next(iter(due), None))

    def _ask(self, exchange: _Exchange, own: Digest, now: float) -> list[Effect]:
        theirs = self._digests.get(exchange.hostname)
        exchange.rounds += 1
        exchange.seen = (own, theirs)
        exchange.until = now + self._exchange_s
        told = {} if theirs is None else self._revocations.difference(theirs)
        arguments = {"from_node": self.own, "revoked": [], "digest": own, "told": told}
        return [Hello(exchange.hostname, arguments)]

    def _end_exchange(self, agreed: Digest | None) -> None:
        assert self._exchange is not None
        hostname = self._exchange.hostname
        self._exchange = None
        self.differing.pop(hostname, None)  # the next heartbeat tells anew
        self._digests.pop(hostname, None)
        if agreed is not None and self.busy:
            self._digests[hostname] = agreed  # behind all others: what they know it may not

    def _done(self, now: float) -> list[Effect]:
        if self._begun_at is None:
            return []
        self._window_over = now >= self._begun_at + self._window_s
        if now < self._begun_at + self._limit_s:
            if not self.all_answered and not self._window_over:
                return []
            if self._exchange is not None:
                return []
        self._begun_at = None
        if self._exchange is None:
            self._digests.clear()
        return [Done(tuple(self._answered), self._silent())]

    def _silent(self) -> tuple[str, ...]:
        return tuple(one for one in self._expected or () if one not in self._answered)


# -- the other side ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to a `hello`, to which the caller adds its clock, and what was learned from it."""

    reply: dict[str, Any]
    changed: list[Revocation]


def answer(
    own: str, arguments: Mapping[str, Any], revocations: Revocations, wall_s: float
) -> Answer | None:
    """Answer a `hello`: see the table above. None for our own, as Celery's workers do it."""
    if arguments.get("from_node") == own:
        return None
    told, digest, ids = (arguments.get(name) for name in ("told", "digest", "revoked"))
    changed = [] if not told else revocations.merge(told, wall_s)
    if ids:
        changed += revocations.merge_ids(ids, wall_s)
    if digest is None:
        return Answer({"revoked": revocations.ids()}, changed)
    ours = _digest_of(revocations)
    reply: dict[str, Any] = {"revoked": [], "digest": ours}
    if told is not None:
        reply["told"] = {} if ours == digest else revocations.difference(digest)
    return Answer(reply, changed)


def summary_of(revocations: Revocations) -> str:
    """What heartbeats tell of the revocations: equal for equal sets, empty for none."""
    digest = _digest_of(revocations)
    if not any(digest.values()):
        return ""
    return blake2b(_encode(digest), digest_size=8).hexdigest()


def _digest_of(revocations: Revocations) -> Digest:
    """The digest, at no cost where nothing is revoked."""
    return revocations.digest() if revocations.any else _NOTHING


def _names(without: str, names: Collection[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(one for one in names if one != without)


def _is_digest(value: Any) -> bool:
    if type(value) is not dict or value.keys() != {"tasks", "headers"}:
        return False
    return all(read_digest(one) is not None for one in value.values())


_NOTHING: Final[Digest] = {"tasks": {}, "headers": {}}
_encode = msgspec.json.Encoder(order="deterministic").encode
