"""One simulated worker: the machine of a node (`umbel.cluster.node`), and what is around it.

The machine decides everything, as in a worker. Here it gets a clock, a connection, and messages
that are read by the same code as those from a real broker; what it answers goes out over the
simulated broker and register.

A node has two threads, as far as it matters here. The *heart* sends a heartbeat every 2 s, or as
slowly as the machine says. The other one *listens*, and gives the machine a tick twice a second and
whenever something is due. A *paused* node does nothing at all; in one that is *held up* only the
listening thread stands still. What comes in meanwhile waits, timers are late, and afterwards either
timers or messages come first.

A node has clocks of its own: its monotonic time and its wall clock differ from the world's by
something that nobody else knows. A node that has crashed never comes back: a restart makes another
one of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from umbel.cluster import election_words as election
from umbel.cluster import membership, mingle
from umbel.cluster import node as nodes
from umbel.cluster.agreed_time import AgreedTime
from umbel.cluster.refusals import ClaimRefusal, Fail
from umbel.cluster.revocations import Revocations
from umbel.sim.brokers import Link
from umbel.sim.messages import (
    ANSWER,
    BEAT,
    ELECT,
    EVENT_LAST,
    EVENT_TYPES,
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
TURN_S: Final = 0.5
# Timers are a little late, and how late depends on the dice.
TIMER_LATE_S: Final = 0.02
WALL_S: Final = 1_000_000.0

Asking = TypeVar("Asking", election.Requested, election.Heard)


class Node:
    """See the module's text."""

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
        self.machine = parts.machine(
            self.name,
            clock=self.clock,
            wall=AgreedTime(self.wall_s),
            revocations=Revocations(self.wall_s),
            beat_s=FREQ_S,
            check_s=play.check_s,
            nodes_full=play.nodes_full,
        )
        own = election.Candidate(self.name, self.pid, self.inc)
        self.elections = parts.elections(own, **play.limits)
        self.machine.take_part(self.elections, parts.refusals(own), self.now)
        self.members = self.machine.membership
        self.revocations = self.machine.revocations
        self.refused: set[str] = set()  # ids of elections that this node was asked for and refused
        self.link = Link(self)
        self.alive = True
        self.paused = self.held_up = False
        self.well_since = world.now  # since when others can hear it
        self.unaware = False  # of having been connected anew while it stood still
        self.backlog: list[tuple[float, Message]] = []
        self.informed: set[str] = set()  # ids of elections that this node has opened
        self.beat_s = FREQ_S
        self._stamped = 0
        self._turn_at: float | None = None
        self._beat_at: float | None = None
        self._late_beat = self._late_turn = False

    # -- life --------------------------------------------------------------------------

    def start(self) -> None:
        """Connect, say so, and greet the others."""
        self.begin()
        self.greet(None)

    def begin(self) -> None:
        """Start both threads."""
        self._beat_within(FREQ_S * self._world.dice())
        self._plan()

    def connected(self) -> None:
        """The connection is there again; the listening thread finds out that it was away."""
        if self.paused or self.held_up:
            self.unaware = True
        else:
            self._do(nodes.Tick(connected=False))
            self.greet([one.node.hostname for one in self.members.alive()])
        if not self.paused:
            self.well_since = self._world.now

    def greet(self, expected: Sequence[str] | None) -> None:
        """Say that this node is there, with what has waited for the connection, and mingle."""
        waiting, self.link.outbox = self.link.outbox, []
        self.publish_event(ONLINE, revoked=self.machine.summary())
        for message in waiting:
            self.publish(message)
        self._do(mingle.Begin(expected))

    def stop(self) -> None:
        """Leave in order."""
        self.publish_event(OFFLINE)
        self.alive = False

    def restore(self, before: Node) -> None:
        """Take over what a former life kept on disk."""
        self.clock.adjust(before.clock.value)
        self.revocations.restore(before.revocations.all(), self.wall_s())

    def resume(self) -> None:
        """Go on after a pause, or a hold-up, with what has waited."""
        if self.paused:
            self.well_since = self._world.now
        self.paused = self.held_up = False
        if self.unaware:
            self.unaware = False
            self.connected()
        timers_first = self._world.dice() < 0.5
        if timers_first:
            self._run_late_timers()
        backlog, self.backlog = self.backlog, []
        oldest = self._world.now - self._play.broker.ttl_s
        for at, message in backlog:
            if at >= oldest or message.kind > EVENT_LAST:
                self.receive(message)
        if not timers_first:
            self._run_late_timers()

    def _run_late_timers(self) -> None:
        if self._late_turn:
            self._late_turn = False
            self.turn(self._turn_at)
        if self._late_beat:
            self._late_beat = False
            self.beat(self._beat_at)

    # -- time --------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """This node's monotonic time."""
        return self._world.now + self.shift_s

    def wall_s(self) -> float:
        """This node's wall clock."""
        return WALL_S + self._world.now + self.wall_shift_s

    def _beat_within(self, seconds: float) -> None:
        at = self._world.now + seconds
        if self._beat_at is None or at < self._beat_at:
            self._beat_at = at
            self._world.at(at, self.beat, at)

    def beat(self, wanted: float | None, _: None = None) -> None:
        """The heart."""
        if not self.alive or wanted != self._beat_at:
            return
        if self.paused:
            self._late_beat = True
            return
        self._play.checks.tables(self._play, self)
        if self.link.up:
            self._world.note(self.publish_event(BEAT, revoked=self.machine.summary()).clock or 0)
        self._beat_at = None
        self._beat_within(self.beat_s)

    def turn(self, wanted: float | None, _: None = None) -> None:
        """The listening thread looks at what is due."""
        if not self.alive or wanted != self._turn_at:
            return
        if self.paused or self.held_up:
            self._late_turn = True
            return
        self._turn_at = None
        self._do(nodes.Tick(self.link.up))
        if self.machine.mingle.due_at is not None:
            self._do(mingle.Tick())
        self._plan()

    def _plan(self) -> None:
        """Set the timer to whatever is due first."""
        world = self._world
        when = world.now + TURN_S
        for due in (self.machine.due_at, self.machine.mingle.due_at):
            if due is not None and due - self.shift_s < when:
                when = max(due - self.shift_s, world.now)
        if self._turn_at is None or when < self._turn_at:
            self._turn_at = when = when + TIMER_LATE_S * world.dice() + 1e-6
            world.at(when, self.turn, when)

    # -- messages ----------------------------------------------------------------------

    def event(self, kind: int, clock: int = 0, **fields: Any) -> nodes.Heard:
        """An event of this node, as all others read it."""
        if self._play.parts.elect_tells_freq or kind != ELECT:
            fields["freq"] = self.beat_s
        who = {"hostname": self.name, "pid": self.pid, "inc": self.inc}
        stamps = {"type": EVENT_TYPES[kind], "timestamp": self.wall_s(), "clock": clock}
        return nodes.read({**who, **stamps, **fields})

    def publish_event(self, kind: int, **fields: Any) -> nodes.Heard:
        """Stamp an event and send it."""
        clock = self.clock.forward()
        if clock <= self._stamped:
            self._play.checks.clock_stands(self, self._stamped, clock)
        self._stamped = clock
        event = self.event(kind, clock, **fields)
        self.publish(Message(kind, self, event))
        return event

    def publish(self, message: Message, to: int | None = None) -> None:
        """Send a message."""
        self._play.broker.publish(self.link, message, to)

    def receive(self, message: Message) -> None:
        """A message has come."""
        kind = message.kind
        if self.paused or (self.held_up and (kind <= EVENT_LAST or kind == ANSWER)):
            self.backlog.append((self._world.now, message))
        elif self.alive:
            if kind <= EVENT_LAST:
                self._hear(message.body, kind)
            else:
                self._obey(message, kind)

    def _hear(self, heard: nodes.Heard, kind: int) -> None:
        """An event."""
        if isinstance(heard.elect, election.Heard):
            heard = heard._replace(elect=self._judged(heard.elect))
        clock, told = self.clock, heard.clock or 0
        refused_count, before = clock.refused, clock.value
        effects = self.machine.step(heard, self._world.now + self.shift_s)
        least = before if heard.hostname == self.name else max(before, told)
        if clock.value <= least and clock.refused == refused_count:
            self._play.checks.clock_stands(self, before, clock.value)
        if effects:
            self._carry_out(effects)
        if kind != BEAT or effects:
            self._plan()

    def _obey(self, message: Message, kind: int) -> None:
        """A control message, or an answer of the register."""
        what = message.body
        if kind == REVOKE:
            task_id, stamp_s = what
            self.revocations.revoke(task_id, self.wall_s(), stamp_s)
        elif kind == REPLY:
            if what[0] is self:  # not a former life
                for one in (what[1], nodes.CallEnded(), mingle.Tick()):
                    self._do(one)
        else:
            self._do(self._judged(what) if kind == REQUEST else what, message.sender)

    def _judged(self, what: Asking) -> Asking:
        if not self._play.refuses(self, what.id):
            return what
        if isinstance(what, election.Requested):
            self.refused.add(what.id)
        return replace(what, objection="is refused here")

    # -- what the machine answers ------------------------------------------------------

    def _do(self, what: nodes.Input, asking: Node | None = None) -> None:
        effects = self.machine.step(what, self.now)
        if effects:
            self._carry_out(effects, asking)
        self._plan()

    def _carry_out(self, effects: list[nodes.Effect], asking: Node | None = None) -> None:
        for effect in effects:
            if isinstance(effect, nodes.BeatSlower):
                self.beat_s = FREQ_S * effect.times
                self._beat_within(self.beat_s)
            elif isinstance(effect, nodes.Reply):
                assert asking is not None
                reply = asking, mingle.Answered(self.name, effect.fields)
                self.publish(Message(REPLY, self, reply), asking.index)
            elif isinstance(effect, mingle.Hello):
                to = None if effect.destination is None else int(effect.destination[1:]) - 1
                self.publish(Message(HELLO, self, nodes.Greeted(effect.arguments)), to)
            elif isinstance(effect, membership.Effect | nodes.SelfDoubt | mingle.Done):
                self._report(effect)
            elif isinstance(effect, nodes.Learned | nodes.Paused):
                self._world.note(len(effect.changed))
            else:
                self._elect(effect, effects[-1])

    def _elect(self, effect: nodes.Effect, last: nodes.Effect) -> None:
        play = self._play
        if isinstance(effect, election.PublishElect):
            self._stand(effect)
        elif isinstance(effect, election.Claim | ClaimRefusal):
            self._remark(f"claims {effect.id}")
            play.register.claim(self, effect)
            play.claimed(self)
        elif isinstance(effect, election.Act):
            assert isinstance(last, election.Decided), last
            did = play.checks.learned_of_action if play.register.acts(effect) else play.checks.acted
            did(effect.id, last.winner or "")
        elif isinstance(effect, election.Decided):
            play.checks.decided(self, effect.id, effect.winner)
        elif isinstance(effect, Fail):
            play.checks.failed(self, effect.id)

    def _stand(self, effect: election.PublishElect) -> None:
        if effect.id in self.informed:
            self._play.checks.stood_again(self, effect.id)
        self.informed.add(effect.id)
        event = self.publish_event(
            ELECT, id=effect.id, topic=effect.topic, action=effect.action, cver=2
        )
        self._remark(f"stands for {effect.id}, clock {event.clock}")
        assert isinstance(event.elect, election.Heard), event
        self._do(event.elect)

    def _report(self, effect: membership.Effect | nodes.SelfDoubt | mingle.Done) -> None:
        if isinstance(effect, nodes.SelfDoubt):
            self._world.tell(self.name, f"has heard nobody for {effect.deaf_s:.1f} s")
        elif isinstance(effect, mingle.Done):
            self._remark(f"has mingled with {len(effect.answered)}")
        else:
            other = effect.node
            self._world.note(other.inc or 0)
            self._remark(f"{_SAID[type(effect)]} {other.hostname} (life {other.inc})")
            if isinstance(effect, membership.Lost):
                self._play.checks.lost(self._play, self, effect)

    def _remark(self, text: str) -> None:
        if self._world.story is not None:
            self._world.remark(self.name, text)


_SAID: dict[type[Any], str] = {
    membership.Joined: "sees",
    membership.Returned: "sees again",
    membership.Left: "is left by",
    membership.Lost: "has lost",
}
