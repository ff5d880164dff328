"""One node's part in agreement: a machine made of all the machines of this package.

Workers run it on a thread (`worker.gossip`, `worker.mingling`), the simulator in virtual time
(`sim.nodes`). Both hand it what happens and carry out what it answers; they decide nothing.

| what goes in                   | what is done with it                                          |
| ------------------------------ | ------------------------------------------------------------- |
| `Heard`: an event              | its clock is taken over; membership, and for `worker-elect`   |
|                                | the elections; a heartbeat's summary is compared with ours    |
| `Heard`, not believed          | its sender is displayed, that is all                          |
| `election.Requested`           | this node stands, or declines and watches (`refusals`)        |
| `election.Heard`: our own      | our candidacy as it was published, with its clock             |
| `ClaimAnswered`                | the election ends, is claimed again or is given up            |
| `Greeted`: a `hello`           | what it tells is taken over, as far as `may` permits; `Reply` |
| `mingle.Begin`, `Answered`,    | greetings of ours; answers are taken over when the call ends  |
| `CallEnded`, `mingle.Tick`     |                                                               |
| `PauseCommanded`               | a queue is paused or resumed in the whole cluster             |
| `Tick`: time has passed        | everything that is due, but for mingle, which has its own     |

**Who is lost, and who is deaf.** A node that hears nobody must not take the others for lost. It
could not hear

- while its subscription is not connected,
- while its own heartbeats, which come back over the broker, are `ECHO_S` late,
- after more than `HELD_UP_S` between two ticks: the process was stopped, or the thread waited.

What is promised: whoever could not hear until some moment marks nobody as lost until two intervals
of that node, and `GRACE_S`, have passed after it (`cluster.membership`). So a node that runs, sends
its heartbeats and whose messages the broker delivers is never lost to others because they were
stopped, cut off or deaf.

**How often nodes beat.** Heartbeats cost every node what all others send. Above `nodes_full` nodes
each beats more slowly, in proportion, so that what a node hears per second stays the same. Only
established nodes count. Heartbeats tell their interval, and patience follows it, up to
`FREQ_TIMES_MAX` times our own interval at the number of nodes that are heard: strangers neither
slow the heartbeats down nor live for ever.

**Declining.** What this node could not carry out is known to the caller, who gives the objection
with the request or the candidacy; `Declined` is the answer. A Celery worker that found itself the
only candidate would end; so where one is there, a node that declines publishes a `worker-elect`
that does not stand, with a clock behind all others (`PublishElect.spares_at`).

Time is the caller's monotonic clock; `wall` is the time that the nodes agree on. Threads share a
machine under a lock of theirs. All tables are bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from umbel.cluster import election_words as election
from umbel.cluster import membership, mingle, refusals
from umbel.cluster.agreed_time import AgreedTime
from umbel.cluster.clock import CLOCK_JUMP, Clock
from umbel.cluster.election import Elections
from umbel.cluster.membership import ECHO_S, Membership
from umbel.cluster.pauses import Pauses
from umbel.cluster.revocations import Revocation, Revocations
from umbel.wire.events import Event

# The first place at which heartbeats are not worth their price any more.
NODES_FULL: Final = 50
# Raising it believes slower nodes, and keeps invented ones for longer.
FREQ_TIMES_MAX: Final = 4
HELD_UP_S: Final = 1.0
# Shorter times without hearing are not worth a line in the log.
DOUBT_S: Final = 5.0
# How long others take to answer the call for heartbeats with which this node begins to listen.
SETTLE_S: Final = 1.0

# Nodes that are only displayed.
UNSIGNED_MAX: Final = 1_000
CELERY_MAX: Final = 1_000
# How many elections are remembered for which a Celery worker was spared, and how far behind others
# this node ranks in them.
SPARED_MAX: Final = 1_000
SPARED_CLOCK: Final = 1_000
REASON_CHARS_MAX: Final = 1_000
# What heartbeats call the software of our kind.
OWN_IDENT: Final = "py-umbel"

_KINDS: Final[dict[str, membership.Kind]] = {
    "worker-online": "online",
    "worker-heartbeat": "heartbeat",
}
# What revokes the kinds of things that are told.
_COMMANDS: Final = {"tasks": "revoke", "headers": "revoke_by_stamped_headers"}
_ELECTION_TICK: Final = election.Tick()


# -- what goes in ------------------------------------------------------------------------------


class Heard(NamedTuple):
    """An event of a worker, our own included, as `read` reads it.

    Without a `sign` it says nothing about the worker's being there. `elect` is the candidacy in it,
    or the reason for which it is none. One that is not `believed` is not signed as it has to be.
    """

    hostname: str
    sign: membership.Heard | membership.Offline | None = None
    clock: int | None = None
    elect: election.Heard | str | None = None
    summary: Any = None
    sent_at: float = 0.0
    shift_s: Any = None
    is_celery: bool = False
    believed: bool = True


class Tick(NamedTuple):
    """Time has passed; wanted a few times per second, and at `due_at`."""

    connected: bool


class ClaimAnswered(NamedTuple):
    """What came of a claim."""

    claim: election.Claim | refusals.ClaimRefusal
    answer: election.Claimed | election.ClaimFailed


class Greeted(NamedTuple):
    """A node greets us. One that `is_new` False may be a copy: it is answered, and not believed."""

    arguments: Mapping[str, Any]
    is_new: bool = True


class CallEnded(NamedTuple):
    """A `Hello` was sent, and whoever answers it has done so."""


class PauseCommanded(NamedTuple):
    """A queue is paused or resumed, at a wall-clock time; raises ValueError for nonsense."""

    queue: str
    stamp: Any
    paused: bool


Input = (
    Heard | Tick | ClaimAnswered | Greeted | CallEnded | PauseCommanded | mingle.Input
    | election.Requested | election.Heard
)  # fmt: skip


# -- what comes out ----------------------------------------------------------------------------


class Malformed(NamedTuple):
    """Something in an event was refused."""

    reason: str


class SelfDoubt(NamedTuple):
    """This node could not hear the others for a while, and marked nobody as lost for it."""

    deaf_s: float


class BeatSlower(NamedTuple):
    """Make the interval of our heartbeats this many times as long as it was set to."""

    times: float


class TimeMoved(NamedTuple):
    """The time that the nodes agree on has changed."""


class Learned(NamedTuple):
    """Revocations that other nodes have sent are new here."""

    changed: list[Revocation]


class Paused(NamedTuple):
    """Of these queues another word holds now: whether they are paused."""

    changed: dict[str, bool]


class Reply(NamedTuple):
    """The answer to a greeting."""

    fields: dict[str, Any]


OwnEffect = Malformed | SelfDoubt | BeatSlower | TimeMoved | Learned | Paused | Reply
Effect = (
    OwnEffect
    | refusals.Declined
    | membership.Effect
    | election.Effect
    | refusals.Effect
    | mingle.Effect
)


class NodeMachine:
    """One node. Before `take_part` it hears and greets, but holds no elections."""

    def __init__(
        self,
        hostname: str,
        *,
        clock: Clock,
        wall: AgreedTime,
        revocations: Revocations,
        beat_s: float,
        check_s: float,
        nodes_full: float = NODES_FULL,
        may: Callable[[str], bool] = lambda command: True,
        hide: Callable[[str], str] = str,
    ) -> None:
        """`beat_s` is the interval that was set, `check_s` that of looks for lost nodes.

        `may` says whether this node obeys a command, `hide` takes secrets out of reasons.
        """
        self.hostname = hostname
        self.clock, self.wall, self.revocations = clock, wall, revocations
        self.pauses = Pauses()
        self.membership = Membership(hostname)
        self.unsigned = Membership(hostname, nodes_max=UNSIGNED_MAX)
        self.mingle = mingle.Mingle(hostname, revocations=revocations)
        self.elections: Elections | None = None
        self.refusals: refusals.Refusals | None = None
        self.settled_at: float | None = None  # from then on this node knows who is there
        self._beat_s, self._check_s, self._nodes_full = beat_s, check_s, nodes_full
        self._may, self._hide = may, hide
        self._turned_at = math.inf  # before it takes part nothing is late
        self._check_at = 0.0
        self._echo_at: float | None = None  # when an own event was last heard
        self._next_echo_s: float | None = None  # how long after it the next one comes at the latest
        self._deaf_since: float | None = None
        self._celery: set[str] = set()  # who is there and not of our kind
        self._spared: deque[str] = deque(maxlen=SPARED_MAX)
        self._answers: list[mingle.Effect] = []  # of the call that goes on
        self._times_ahead: list[float] | None = []  # of those who answer; None after the start

    def take_part(self, elections: Elections, declined: refusals.Refusals, now: float) -> None:
        """Listen, and be a candidate, from now on; what went before was no stall."""
        self.elections, self.refusals = elections, declined
        self._turned_at, self.settled_at = now, None

    def step(self, what: Input, now: float) -> list[Effect]:
        """Take one input; what has to be done about it, in this order."""
        effects: list[Effect] = getattr(self, _METHODS[type(what)])(what, now)
        return effects

    # -- questions ---------------------------------------------------------------------

    @property
    def due_at(self) -> float | None:
        """When the next `Tick` has something to do for elections."""
        machines = [one for one in (self.elections, self.refusals) if one is not None]
        return min([one.due_at for one in machines if one.due_at is not None], default=None)

    def names(self, now: float) -> list[str]:
        """The nodes that are there, itself included; empty before this node can know them."""
        if self.settled_at is None or now < self.settled_at:
            return []
        return [self.hostname, *(one.node.hostname for one in self.membership.alive())]

    def summary(self) -> str:
        """A digest of revocations and pauses for heartbeats: equal for equal knowledge."""
        return mingle.summary_of(self.revocations) + self.pauses.summary()

    # -- events ------------------------------------------------------------------------

    def _heard(self, what: Heard, now: float) -> list[Effect]:
        if not what.believed:
            if what.sign is not None:
                self.unsigned.step(what.sign, now)
            return []
        effects: list[Effect] = []
        elect = what.elect
        own = what.hostname == self.hostname
        if own or what.clock is None:
            self.clock.forward()
        elif self.clock.adjust(what.clock) < what.clock:
            # A clock that is too far ahead is not believed; that somebody is there is.
            effects.append(Malformed(CLOCK_JUMP))
            elect = None
        if isinstance(elect, str):
            effects.append(Malformed(elect))
        elif elect is not None:
            effects += self._elect(elect, now)
        if what.sign is None:
            return effects
        if own:
            self._hear_itself(what.sign, now)
            return effects
        if what.is_celery and len(self._celery) < CELERY_MAX:
            self._celery.add(what.hostname)
        changes = self.membership.step(what.sign, now)
        if changes:
            effects += self._changed(changes, now)
        if what.summary is not None:
            self._compare(what, now)
        return effects

    def _hear_itself(self, sign: membership.Heard | membership.Offline, now: float) -> None:
        """An own event came back. Only heartbeats promise when the next one comes."""
        self._echo_at = now
        if isinstance(sign, membership.Heard) and sign.kind != "other" and sign.freq_s is not None:
            self._next_echo_s = membership.credible_freq_s(sign.freq_s)

    def _compare(self, what: Heard, now: float) -> None:
        """The heartbeat of a node of our kind tells its clock, and what it knows."""
        if self.membership.heard_again(what.hostname):
            self.wall.heard(what.hostname, what.sent_at, what.shift_s, now)
        self.mingle.step(mingle.Compared(what.hostname, what.summary == self.summary()), now)

    # -- time --------------------------------------------------------------------------

    def _tick(self, what: Tick, now: float) -> list[Effect]:
        effects = self._judge_itself(what, now)
        if now >= self._check_at:
            self._check_at = now + self._check_s
            effects += self._look_for_losses(now)
        if self.elections is not None and self.refusals is not None:
            effects += self.elections.step(_ELECTION_TICK, now)
            effects += self.refusals.step(_ELECTION_TICK, now)
        return effects

    def _judge_itself(self, what: Tick, now: float) -> list[Effect]:
        """Whether this node can have heard the others since the last tick."""
        before, self._turned_at = min(self._turned_at, now), now
        if what.connected and self.settled_at is None:
            self.settled_at = now + SETTLE_S
        if not what.connected or self._was_held_up(before, now) or self._is_deaf(now):
            if self._deaf_since is None:
                self._deaf_since = before
            for one in (self.membership, self.unsigned):
                one.step(membership.Deaf(), now)
        elif self._deaf_since is not None:
            deaf_s, self._deaf_since = now - self._deaf_since, None
            if deaf_s > DOUBT_S:
                return [SelfDoubt(deaf_s)]
        return []

    def _was_held_up(self, before: float, now: float) -> bool:
        return now - before > HELD_UP_S

    def _is_deaf(self, now: float) -> bool:
        echo_at, next_s = self._echo(), self._next_echo_s
        return echo_at is not None and next_s is not None and now > echo_at + next_s + ECHO_S

    def _echo(self) -> float | None:
        """When an own event was last heard; None where there are no heartbeats to be heard."""
        return None if self._next_echo_s is None else self._echo_at

    def _look_for_losses(self, now: float) -> list[Effect]:
        members = self.membership
        # All nodes count that are heard, as those of a big cluster beat slowly when we start.
        believed_s = self._beat_s * FREQ_TIMES_MAX * self._crowd(len(members))
        members.freq_max_s = max(membership.FREQ_UNKNOWN_S, believed_s)
        tick = membership.Tick(self._echo())
        effects = self._changed(members.step(tick, now), now)
        self.unsigned.step(tick, now)
        effects.append(BeatSlower(self._crowd(members.established_count)))
        if self.wall.settle(members.established()):
            effects.append(TimeMoved())
        return effects

    def _crowd(self, others_count: int) -> float:
        """How many times as long as for a few nodes the interval is with this many others."""
        return max(1.0, (others_count + 1) / self._nodes_full)

    def _changed(self, changes: list[membership.Effect], now: float) -> list[Effect]:
        """What follows from changes of membership: nobody waits for who is gone."""
        effects: list[Effect] = [*changes]
        for change in changes:
            if not isinstance(change, membership.Lost | membership.Left):
                continue
            hostname = change.node.hostname
            self._celery.discard(hostname)
            self.wall.forget(hostname)
            self.mingle.step(mingle.Gone(hostname), now)
            if self.elections is not None and self.refusals is not None:
                effects += self.elections.step(election.Gone(hostname), now)
                effects += self.refusals.step(election.Gone(hostname), now)
        return effects

    # -- elections ---------------------------------------------------------------------

    def _elect(self, what: election.Requested | election.Heard, now: float) -> list[Effect]:
        """An election is asked for, or somebody stands: so does this node, or it declines."""
        elections, objection = self.elections, what.objection
        if elections is None:
            return []
        is_heard = isinstance(what, election.Heard)
        is_known = election.is_word(what.id) and what.id in elections
        if objection is None or (is_heard and is_known):
            effects = elections.step(what, now)
            full = [one.reason for one in effects if isinstance(one, election.Refused)]
            if is_heard or full in ([], [election.REPEATED]):
                return [*effects]
            objection = f"this node cannot take on election {what.id}: {full[0]}"
        elif is_known:
            return [refusals.Declined(what.id, objection)]
        return self._decline(what, objection, now)

    def _decline(
        self, what: election.Requested | election.Heard, reason: str, now: float
    ) -> list[Effect]:
        effects: list[Effect] = [refusals.Declined(what.id, reason)]
        if not election.is_word(what.id):
            return effects  # nobody can wait for it
        if isinstance(what, election.Requested):
            self._give_reason(what.id, reason, what.action, now)
        elif self.refusals is not None:
            self.refusals.step(what, now)
        return effects + self._spare_celery(what)

    def _give_reason(self, id_: str, reason: str, action: Any, now: float, token: str = "") -> None:
        """Note why this node does not hold an election, for the case that nobody does."""
        shown = f"{self.hostname}: {self._hide(reason)[:REASON_CHARS_MAX]}"
        if self.refusals is not None:
            self.refusals.step(refusals.Declined(id_, shown, _reply_to(action), token), now)

    def _spare_celery(self, what: election.Requested | election.Heard) -> list[Effect]:
        if isinstance(what, election.Heard) and what.cver != election.CELERY_CVER:
            return []  # of our kind, and unimpressed by it; nor is there an echo without end
        if not self._celery or what.id in self._spared:
            return []
        id_, topic, action = what.id, what.topic, what.action
        if isinstance(election.read_request({"id": id_, "topic": topic, "action": action}), str):
            return []  # Celery's workers make nothing of it either
        self._spared.append(id_)
        return [election.PublishElect(id_, topic, action, self.clock.value + SPARED_CLOCK)]

    def _claim_answered(self, what: ClaimAnswered, now: float) -> list[Effect]:
        claim, answer = what
        if self.elections is None or self.refusals is None:
            return []
        if isinstance(claim, refusals.ClaimRefusal):
            return [*self.refusals.step(answer, now)]
        effects = self.elections.step(answer, now)
        if isinstance(answer, election.Claimed) and answer.winner is None and not answer.won:
            token = claim.token if answer.owns else ""
            self._give_reason(claim.id, answer.reason, claim.action, now, token)
        return [*effects]

    # -- mingle ------------------------------------------------------------------------

    def _greeted(self, what: Greeted, now: float) -> list[Effect]:
        arguments, wall_s = dict(what.arguments), self.wall()
        told = arguments.get("told")
        # Who may not revoke here may not do so by a greeting either.
        arguments["told"] = self._permitted(told) if what.is_new or told is None else {}
        if not what.is_new or not self._may("revoke"):
            arguments["revoked"] = []
        found = mingle.answer(self.hostname, arguments, self.revocations, wall_s)
        if found is None:
            return []
        effects = _learned(found.changed)
        if what.is_new and arguments.get("paused"):
            effects += self._merge_pauses(arguments["paused"])
        reply = {**found.reply, "clock": self.clock.forward()}
        if "digest" in reply:
            nodes = self.names(now)
            reply |= {"at": wall_s, **({"nodes": nodes} if nodes else {}), **self._told()}
        return [*effects, Reply(reply)]

    def _answered(self, what: mingle.Answered, now: float) -> list[Effect]:
        reply = what.reply
        if isinstance(reply, dict):
            nodes, at = reply.get("nodes"), reply.get("at")
            if isinstance(nodes, list) and len(nodes) <= mingle.PEERS_MAX:
                self.mingle.expect({one for one in nodes if isinstance(one, str)})
            if type(at) is float and self._times_ahead is not None:
                self._times_ahead.append(at - self.wall())
        self._answers += self.mingle.step(what, now)
        return []

    def _call_ended(self, _: CallEnded, now: float) -> list[Effect]:
        """Take over what was answered; before all else, once, the time of those who were there."""
        answers, self._answers = self._answers, []
        times_ahead, self._times_ahead = self._times_ahead, None
        moved = bool(times_ahead) and self.wall.adopt(times_ahead or ())
        return [*([TimeMoved()] if moved else []), *self._take_over(answers)]

    def _mingle(self, what: mingle.Input, now: float) -> list[Effect]:
        return self._take_over(self.mingle.step(what, now))

    def _take_over(self, found: list[mingle.Effect]) -> list[Effect]:
        effects: list[Effect] = []
        for one in found:
            if isinstance(one, mingle.Take):
                effects += self._take(one.name, one.told)
            elif isinstance(one, mingle.Hello) and "digest" in one.arguments:
                effects.append(mingle.Hello(one.destination, {**one.arguments, **self._told()}))
            else:
                effects.append(one)
        return effects

    def _take(self, name: str, told: Any) -> list[Effect]:
        if name == "clock":
            self.clock.adjust(told)
        elif name == "paused":
            return self._merge_pauses(told)
        elif name == "told":
            return _learned(self.revocations.merge(self._permitted(told), self.wall()))
        elif self._may("revoke"):
            return _learned(self.revocations.merge_ids(told, self.wall()))
        return []

    def _permitted(self, told: Any) -> Any:
        """What a node tells of revocations, without what nobody may revoke here."""
        if not isinstance(told, dict):
            return told
        return {
            kind: lives for kind, lives in told.items() if self._may(_COMMANDS.get(kind, "revoke"))
        }

    # -- pauses ------------------------------------------------------------------------

    def _pause_commanded(self, what: PauseCommanded, now: float) -> list[Effect]:
        holds = self.pauses.say(what.queue, what.stamp, what.paused, self.wall())
        return [Paused({what.queue: what.paused})] if holds else []

    def _merge_pauses(self, told: Any) -> list[Effect]:
        changed = self.pauses.merge(told, self.wall())
        return [Paused(changed)] if changed else []

    def _told(self) -> dict[str, Any]:
        """Which queues are paused, for nodes of our kind; nothing where none was ever."""
        told = self.pauses.told()
        return {"paused": told} if told else {}


_METHODS: Final[dict[type, str]] = {
    Heard: "_heard",
    Tick: "_tick",
    election.Requested: "_elect",
    election.Heard: "_elect",
    ClaimAnswered: "_claim_answered",
    Greeted: "_greeted",
    mingle.Begin: "_mingle",
    mingle.Answered: "_answered",
    CallEnded: "_call_ended",
    mingle.Tick: "_mingle",
    PauseCommanded: "_pause_commanded",
}


def sign_in(event: Event) -> membership.Heard | membership.Offline:
    """What an event of a worker tells about its being there."""
    kind, node = event["type"], (event["hostname"], event.get("pid"), event.get("inc"))
    if kind == "worker-offline":
        return membership.Offline(*node)
    return membership.Heard(*node, event.get("freq"), _KINDS.get(kind, "other"))


def read(event: Event) -> Heard:
    """An event of a worker, or of a pool process of one, which may outlive it."""
    kind = event["type"]
    return Heard(
        event["hostname"],
        None if "umbel_series" in event else sign_in(event),
        event.get("clock"),
        election.read_elect(event) if kind == "worker-elect" else None,
        event.get("revoked") if kind == "worker-heartbeat" else None,
        event["timestamp"],
        event.get("clock_shift"),
        event.get("sw_ident", OWN_IDENT) != OWN_IDENT,
    )


def _learned(changed: list[Revocation]) -> list[Effect]:
    return [Learned(changed)] if changed else []


def _reply_to(action: Any) -> str | None:
    """Where the result of an elected task goes, if it is a message."""
    options = action.get("options") if isinstance(action, dict) else None
    reply_to = options.get("reply_to") if isinstance(options, dict) else None
    return reply_to if isinstance(reply_to, str) else None
