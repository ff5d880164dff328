"""One simulated worker: the state machines of `umbel.cluster`, wired as a worker wires them.

| what comes                | what is done                                                       |
| ------------------------- | ------------------------------------------------------------------ |
| an event of another node  | its clock is witnessed, unless it is out of bounds; membership,    |
|                           | and for `worker-elect` the elections, hear of it all the same      |
| an own event              | the clock goes forward                                             |
| `election`, `revoke`      | the elections, or the refusals of who refuses; the revocations     |
| `hello`, and replies      | `mingle.answer`, and `Mingle`                                      |
| the heart, every 2 s      | a heartbeat with a summary of the revocations; membership's tick   |
| whoever membership loses  | elections and mingle do not wait for it any more                   |

A node has clocks of its own: its monotonic time and its wall clock differ from the world's by
something that nobody else knows. A *paused* node does nothing; what comes in waits, and its timers
are late. A node that has crashed never comes back: a restart makes another one of the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from umbel.cluster import election, membership, mingle
from umbel.cluster.election import Elections
from umbel.cluster.mingle import Mingle
from umbel.cluster.refusals import ClaimRefusal, Declined, Refusals
from umbel.cluster.refusals import Input as RefusalInput
from umbel.cluster.revocations import Revocation, Revocations
from umbel.sim.brokers import Link
from umbel.sim.messages import (
    ANSWER,
    BEAT,
    ELECT,
    EVENT_LAST,
    HELLO,
    OFFLINE,
    ONLINE,
    REPLY,
    REQUEST,
    REVOKE,
    Message,
)

if TYPE_CHECKING:
    from umbel.sim.plays import Play

FREQ_S: Final = 2.0
# Timers are a little late, and how late depends on the dice.
TIMER_LATE_S: Final = 0.02
WALL_S: Final = 1_000_000.0

_ELECTION_TICK = election.Tick()
_MEMBERSHIP_TICK = membership.Tick()
_MINGLE_TICK = mingle.Tick()


class Node:
    """See the module's text."""

    __slots__ = (
        "_beat_count",
        "_late_beat",
        "_late_wake",
        "_other",
        "_play",
        "_stamped",
        "_summary",
        "_wake_at",
        "_world",
        "alive",
        "backlog",
        "clock",
        "elections",
        "inc",
        "index",
        "informed",
        "link",
        "members",
        "mingle",
        "name",
        "paused",
        "pid",
        "refusals",
        "refused",
        "revocations",
        "shift_s",
        "sign",
        "unaware",
        "wall_shift_s",
    )

    def __init__(self, play: Play, index: int, life: int) -> None:
        world = self._world = play.world
        self._play = play
        self.index = index
        self.name = f"w{index + 1}"
        self.pid = 1 if play.one_pid else 10 * (index + 1) + life
        self.inc = 1_000 * life + 1
        self.shift_s = 500.0 * world.dice()
        self.wall_shift_s = 4.0 * world.dice() - 2.0
        parts = play.parts
        self.clock = parts.clock()
        self.members = membership.Membership(self.name)
        own = election.Candidate(self.name, self.pid, self.inc)
        self.elections: Elections = parts.elections(own, **play.limits)
        self.refusals: Refusals = parts.refusals(own)
        self.refused: set[str] = set()  # ids of elections that this node was asked for and refused
        self.revocations = Revocations(self.wall_s)
        self.mingle = Mingle(self.name, revocations=self.revocations)
        self.link = Link(self)
        self.alive = True
        self.paused = False
        self.unaware = False  # of having been connected anew during a pause
        self.backlog: list[Message] = []
        self.informed: set[str] = set()  # ids of elections that this node has opened
        self.sign = membership.Heard(self.name, self.pid, self.inc, FREQ_S)
        freq_s = FREQ_S if parts.elect_tells_freq else None
        self._other = membership.Heard(self.name, self.pid, self.inc, freq_s, "other")
        self._summary: str | None = ""
        self._stamped = 0
        self._beat_count = life  # so that nodes do not all look for lost ones at the same beat
        self._wake_at: float | None = None
        self._late_beat = self._late_wake = False

    # -- life --------------------------------------------------------------------------

    def start(self) -> None:
        """Connect, say so, and greet the others."""
        self._world.at(self._world.now + FREQ_S * self._world.dice(), self.beat)
        self.connected(known=False)

    def connected(self, *, known: bool = True) -> None:
        """The connection is there, or there again."""
        waiting, self.link.outbox = self.link.outbox, []
        online = membership.Heard(self.name, self.pid, self.inc, FREQ_S, "online")
        self.publish(Message(ONLINE, self, self.stamp(), online, self._told_summary()))
        for message in waiting:
            self.publish(message)
        expected = [one.node.hostname for one in self.members.alive()] if known else None
        self._carry_out_mingle(self.mingle.step(mingle.Begin(expected), self.now))
        self._plan()

    def stop(self) -> None:
        """Leave in order."""
        offline = membership.Offline(self.name, self.pid, self.inc)
        self.publish(Message(OFFLINE, self, self.stamp(), offline))
        self.alive = False

    def restore(self, before: Node) -> None:
        """Take over what a former life kept on disk."""
        self.clock.adjust(before.clock.value)
        self._note_revoked(self.revocations.restore(before.revocations.all(), self.wall_s()))

    def resume(self) -> None:
        """Go on after a pause, with what has waited, timers first or messages first."""
        self.paused = False
        if self.unaware:
            self.unaware = False
            self.connected()
        timers_first = self._world.dice() < 0.5
        if timers_first:
            self._run_late_timers()
        backlog, self.backlog = self.backlog, []
        for message in backlog:
            self.receive(message)
        if not timers_first:
            self._run_late_timers()

    def _run_late_timers(self) -> None:
        if self._late_wake:
            self._late_wake = False
            self.wake(self._wake_at)
        if self._late_beat:
            self._late_beat = False
            self.beat()

    # -- time --------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """This node's monotonic time."""
        return self._world.now + self.shift_s

    def wall_s(self) -> float:
        """This node's wall clock."""
        return WALL_S + self._world.now + self.wall_shift_s

    def beat(self, _a: None = None, _b: None = None) -> None:
        """The heart: a heartbeat goes out, and lost nodes are looked for at every second one."""
        if not self.alive:
            return
        if self.paused:
            self._late_beat = True
            return
        world = self._world
        self._play.checks.tables(self._play, self)
        self._beat_count += 1
        if self._beat_count & 1 or self._play.looks_often:
            effects = self.members.step(_MEMBERSHIP_TICK, self.now)
            if effects:
                self._carry_out_membership(effects)
        if self.link.up:
            clock = self.stamp()
            world.note(clock)
            self.publish(Message(BEAT, self, clock, self.sign, self._told_summary()))
        world.at(world.now + FREQ_S, self.beat)

    def wake(self, wanted: float | None, _: None = None) -> None:
        """A timer of elections or of mingle."""
        if not self.alive or wanted != self._wake_at:
            return
        if self.paused:
            self._late_wake = True
            return
        self._wake_at = None
        now = self.now
        if len(self.elections):
            self._carry_out_elections(self.elections.step(_ELECTION_TICK, now))
        if len(self.refusals):
            self._follow(_ELECTION_TICK)
        if self.mingle.due_at is not None:
            self._carry_out_mingle(self.mingle.step(_MINGLE_TICK, now))
        self._plan()

    def _plan(self) -> None:
        """Set the timer to whatever is due first."""
        due = self.elections.due_at
        for other in (self.mingle.due_at, self.refusals.due_at):
            if due is None or (other is not None and other < due):
                due = other
        if due is None:
            return
        when = max(due - self.shift_s, self._world.now) + TIMER_LATE_S * self._world.dice() + 1e-6
        if self._wake_at is None or when < self._wake_at:
            self._wake_at = when
            self._world.at(when, self.wake, when)

    # -- messages ----------------------------------------------------------------------

    def stamp(self) -> int:
        """The clock of something that is sent."""
        clock = self.clock.forward()
        if clock <= self._stamped:
            self._play.checks.clock_stands(self, self._stamped, clock)
        self._stamped = clock
        return clock

    @property
    def summary(self) -> str:
        """What the revocations come to."""
        if self._summary is None:
            self._summary = mingle.summary_of(self.revocations)
        return self._summary

    def _told_summary(self) -> str | None:
        return self.summary if self._play.parts.compares else None

    def publish(self, message: Message, to: int | None = None) -> None:
        """Send a message."""
        self._play.broker.publish(self.link, message, to)

    def receive(self, message: Message) -> None:
        """A message has come."""
        if self.paused:
            self.backlog.append(message)
        elif self.alive:
            kind = message.kind
            if kind <= EVENT_LAST:
                self._hear(message, kind)
            else:
                self._obey(message, kind)

    def _hear(self, message: Message, kind: int) -> None:
        """An event."""
        clock = self.clock
        if message.sender is self:
            clock.forward()
            return
        refused_count, before = clock.refused, clock.value
        after = clock.adjust(message.clock)
        if clock.refused != refused_count:
            if self._play.parts.drops_refused:
                return
        elif after <= before or after <= message.clock:
            self._play.checks.clock_stands(self, before, after)
        now = self._world.now + self.shift_s
        if message.sign is not None:
            changes = self.members.step(message.sign, now)
            if changes:
                self._carry_out_membership(changes)
        if kind == ELECT and self._play.refuses(self, message.body.id):
            self._follow(message.body)
        elif kind == ELECT:
            effects = self.elections.step(message.body, now)
            if effects:
                self._carry_out_elections(effects)
        elif message.body != self._summary or self.mingle.differing:
            self._compare(message, now)

    def _compare(self, message: Message, now: float) -> None:
        """A heartbeat tells of other revocations than ours, or did so before."""
        if message.body is None:
            return
        assert message.sender is not None
        name, agrees = message.sender.name, message.body == self.summary
        if agrees is (name in self.mingle.differing):  # otherwise it is nothing new
            self.mingle.step(mingle.Compared(name, agrees), now)
            self._plan()

    def _obey(self, message: Message, kind: int) -> None:
        """A control message, or an answer of the register."""
        if kind in (ANSWER, REQUEST) and self._play.refuses(self, message.body.id):
            what = message.body
            if kind == REQUEST:
                self.refused.add(what.id)
                what = Declined(what.id, f"{self.name} refuses {what.id}")
            self._follow(what)
        elif kind in (ANSWER, REQUEST):
            self._carry_out_elections(self.elections.step(message.body, self.now))
            if isinstance(message.body, election.ClaimFailed):
                self._plan()
        elif kind == REVOKE:
            task_id, stamp_s = message.body
            stamp_s = self.wall_s() if stamp_s is None else stamp_s
            self._note_revoked(self.revocations.revoke(task_id, stamp_s))
        elif kind == HELLO:
            self._answer_hello(message)
        else:
            self._hear_reply(message)

    # -- elections ---------------------------------------------------------------------

    def _carry_out_elections(self, effects: list[election.Effect]) -> None:
        play = self._play
        for effect in effects:
            kind = type(effect)
            if kind is election.PublishElect:
                self._publish_elect(effect)  # type: ignore[arg-type]
            elif isinstance(effect, election.Claim):
                if self._world.story is not None:
                    self._world.remark(self.name, f"claims {effect.id}")
                play.register.claim(self, effect)
                play.claimed(self)
            elif isinstance(effect, election.Act):
                self._act(effect, effects[-1])
            elif isinstance(effect, election.Decided):
                play.checks.decided(self, effect.id, effect.winner)

    def _act(self, act: election.Act, decided: election.Effect) -> None:
        assert isinstance(decided, election.Decided), decided
        token = decided.winner or ""
        if self._play.register.acts(act.topic):
            self._play.checks.learned_of_action(act.id, token)
        else:
            self._play.checks.acted(act.id, token)

    def _follow(self, what: RefusalInput) -> None:
        """What others do about an election that this node refuses."""
        for effect in self.refusals.step(what, self.now):
            if isinstance(effect, ClaimRefusal):
                claim = election.Claim(effect.id, "refusal", None, effect.token)
                self._play.register.claim(self, claim)
                self._play.claimed(self)
            else:
                self._play.checks.failed(self, effect.id)
        self._plan()

    def _publish_elect(self, effect: election.PublishElect) -> None:
        clock = self.stamp()
        heard = election.Heard(
            effect.id, effect.topic, effect.action, clock, self.name, self.pid, self.inc
        )
        if effect.id in self.informed:
            self._play.checks.stood_again(self, effect.id)
        self.informed.add(effect.id)
        if self._world.story is not None:
            self._world.remark(self.name, f"stands for {effect.id}, clock {clock}")
        self.publish(Message(ELECT, self, clock, self._other, heard))
        self._carry_out_elections(self.elections.step(heard, self.now))
        self._plan()

    # -- membership --------------------------------------------------------------------

    def _carry_out_membership(self, effects: list[membership.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, membership.SelfDoubt):
                self._world.tell(self.name, f"was stalled for {effect.stalled_s:.1f} s")
                continue
            other = effect.node
            self._world.note(other.inc or 0)
            if self._world.story is not None:
                said = f"{_SAID[type(effect)]} {other.hostname} (life {other.inc})"
                self._world.remark(self.name, said)
            if isinstance(effect, membership.Lost | membership.Left):
                self.elections.step(election.Gone(other.hostname), self.now)
                self._follow(election.Gone(other.hostname))
                self.mingle.step(mingle.Gone(other.hostname), self.now)
                self._plan()

    # -- revocations -------------------------------------------------------------------

    def _note_revoked(self, changed: list[Revocation]) -> None:
        if changed:
            self._summary = None
            self._world.note(len(changed))

    def _answer_hello(self, message: Message) -> None:
        asking = message.sender
        assert asking is not None
        answer = mingle.answer(self.name, message.body, self.revocations, self.wall_s())
        if answer is None:
            return
        self._note_revoked(answer.changed)
        reply = {**answer.reply, "clock": self.stamp()}
        self.publish(Message(REPLY, self, 0, None, (asking, self.name, reply)), asking.index)

    def _hear_reply(self, message: Message) -> None:
        asking, hostname, reply = message.body
        if asking is not self:
            return  # for a former life
        now = self.now
        self._carry_out_mingle(self.mingle.step(mingle.Answered(hostname, reply), now))
        self._carry_out_mingle(self.mingle.step(_MINGLE_TICK, now))
        self._plan()

    def _carry_out_mingle(self, effects: list[mingle.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, mingle.Hello):
                to = None if effect.destination is None else int(effect.destination[1:]) - 1
                self.publish(Message(HELLO, self, 0, None, effect.arguments), to)
            elif isinstance(effect, mingle.Witness):
                self.clock.adjust(effect.clock)
            elif isinstance(effect, mingle.Merge):
                self._note_revoked(self.revocations.merge(effect.told, self.wall_s()))
            elif isinstance(effect, mingle.MergeIds):
                self._note_revoked(self.revocations.merge_ids(effect.ids, self.wall_s()))
            elif isinstance(effect, mingle.Done) and self._world.story is not None:
                self._world.remark(self.name, f"has mingled with {len(effect.answered)}")


_SAID: dict[type[Any], str] = {
    membership.Joined: "sees",
    membership.Returned: "sees again",
    membership.Left: "is left by",
    membership.Lost: "has lost",
}
