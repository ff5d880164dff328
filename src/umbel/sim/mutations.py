"""Clusters with one thing taken out, to see that the checks find it.

A check that never fails may be one that cannot. Each mutation names the rule that must be found
broken by it: `umbel sim --mutation no-register --seeds 100`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from umbel.cluster import election
from umbel.cluster.clock import Clock
from umbel.cluster.election import Effect, Elections, Gone, Input
from umbel.cluster.node import Effect as NodeEffect
from umbel.cluster.node import Heard, NodeMachine, Tick
from umbel.cluster.refusals import Refusals
from umbel.sim import checks
from umbel.sim.plays import Parts
from umbel.sim.registers import Register


class NoRegister(Register):
    """Every claim wins."""

    __slots__ = ()

    def _execute(self, claim: Any, _: Any = None) -> Any:
        self.records.pop(claim.id, None)
        return super()._execute(claim)


class NoOvertaking(Elections):
    """Only the lowest in rank ever claims, and the dead keep their rank."""

    def __init__(self, own: election.Candidate, **options: Any) -> None:
        super().__init__(own, **{**options, "step_s": 1e6})

    def step(self, what: Input, now: float) -> list[Effect]:
        return [] if isinstance(what, Gone) else super().step(what, now)


class NoTombstones(Elections):
    """A decided election is forgotten at once."""

    def step(self, what: Input, now: float) -> list[Effect]:
        effects = super().step(what, now)
        self._tombstones.clear()
        return effects


class SameToken(Elections):
    """The token is that of the node, whatever election it claims, and tombstones are few."""

    def __init__(self, own: election.Candidate, **options: Any) -> None:
        super().__init__(own, **{**options, "tombstones_max": 1})

    def step(self, what: Input, now: float) -> list[Effect]:
        self._opened_count = 0
        return super().step(what, now)


class NoRefusals(Refusals):
    """Who refuses an election does not care what comes of it."""

    def step(self, what: Any, now: float) -> list[Any]:
        return []


class NoBounds(Elections):
    """Tables grow as they like."""

    def __init__(self, own: election.Candidate, **_: Any) -> None:
        super().__init__(own)


class GullibleClock(Clock):
    """Whatever it hears is believed."""

    __slots__ = ()

    def accepts(self, other: Any) -> bool:
        return isinstance(other, int)


class NoComparing(NodeMachine):
    """What heartbeats tell of revocations is ignored: what a node has missed it never learns."""

    def _compare(self, what: Heard, now: float) -> None:
        return


class NoHearing(NodeMachine):
    """Events whose clock is refused are dropped: who has taken over a forged one is not heard."""

    def _heard(self, what: Heard, now: float) -> list[NodeEffect]:
        if what.clock is None or self.clock.accepts(what.clock):
            return super()._heard(what, now)
        self.clock.adjust(what.clock)
        return []


class NoEcho(NodeMachine):
    """Whether its own heartbeats come back is nothing to it."""

    def _echo(self) -> float | None:
        return None


class NoHoldUp(NodeMachine):
    """It does not notice that it was held up."""

    def _was_held_up(self, before: float, now: float) -> bool:
        return False


class NoGrace(NodeMachine):
    """Once it hears again it looks for lost nodes at once."""

    def _judge_itself(self, what: Tick, now: float) -> list[NodeEffect]:
        return []


class Mutation(NamedTuple):
    """What is different, the rule that must be found broken, and faults that show it soon."""

    parts: Parts
    rule: str
    faults: tuple[str, ...] = ()


MUTATIONS: Final = {
    "no-register": Mutation(Parts(register=NoRegister), checks.ONE_ACTION),
    "no-overtaking": Mutation(Parts(elections=NoOvertaking), checks.CARRIED_OUT, ("crash",)),
    "no-tombstones": Mutation(Parts(elections=NoTombstones), checks.STANDS_ONCE, ("dup",)),
    "same-token": Mutation(Parts(elections=SameToken), checks.ONE_ACTION, ("dup",)),
    "no-refusals": Mutation(Parts(refusals=NoRefusals), checks.CARRIED_OUT, ("refuse",)),
    "no-bounds": Mutation(Parts(elections=NoBounds), checks.BOUNDS),
    "gullible-clock": Mutation(Parts(clock=GullibleClock), checks.CLOCKS_GROW, ("forge",)),
    "no-comparing": Mutation(Parts(machine=NoComparing), checks.REVOCATIONS, ("loss",)),
    # Whoever dies after its first `worker-elect`, before its first heartbeat, seems to live on.
    "no-interval": Mutation(Parts(elect_tells_freq=False), checks.MEMBERSHIP, ("join", "crash")),
    "no-hearing": Mutation(Parts(machine=NoHearing), checks.MEMBERSHIP, ("forge", "join", "loss")),
    "no-echo": Mutation(Parts(machine=NoEcho), checks.NOT_LOST, ("partition",)),
    "no-hold-up": Mutation(Parts(machine=NoHoldUp), checks.NOT_LOST, ("hold",)),
    "no-grace": Mutation(Parts(machine=NoGrace), checks.NOT_LOST, ("partition",)),
}
