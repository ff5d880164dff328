"""Clusters with one thing taken out, to see that the checks find it.

A check that never fails may be one that cannot. Each mutation names the rule that must be found
broken by it: `umbel sim --mutation no-register --seeds 100`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from umbel.cluster.clock import Clock
from umbel.cluster.election import Elections
from umbel.cluster.election_words import Effect, Gone, Input
from umbel.cluster.node import Effect as NodeEffect
from umbel.cluster.node import Heard, NodeMachine
from umbel.cluster.refusals import Refusals
from umbel.sim import checks
from umbel.sim.plays import Parts
from umbel.sim.registers import Register

T = TypeVar("T")


class NoOvertaking(Elections):
    """Only the lowest in rank ever claims, and the dead keep their rank."""

    def step(self, what: Input, now: float) -> list[Effect]:
        self._step_s = 1e6
        return [] if isinstance(what, Gone) else super().step(what, now)


class NoTombstones(Elections):
    """A decided election is forgotten at once."""

    def step(self, what: Input, now: float) -> list[Effect]:
        effects = super().step(what, now)
        self._tombstones.clear()
        return effects


class SameToken(Elections):
    """The token is that of the node, whatever election it claims, and tombstones are few."""

    def step(self, what: Input, now: float) -> list[Effect]:
        self._opened_count, self._tombstones_max = 0, 1
        return super().step(what, now)


class NoHearing(NodeMachine):
    """Events whose clock is refused are dropped: who has taken over a forged one is not heard."""

    def _heard(self, what: Heard, now: float) -> list[NodeEffect]:
        if what.clock is None or self.clock.accepts(what.clock):
            return super()._heard(what, now)
        self.clock.adjust(what.clock)
        return []


def _without(part: type[T], **methods: Callable[..., Any]) -> type[T]:
    """A part some of whose methods do something else."""
    return type(f"Without{part.__name__}", (part,), methods)


def _claim_wins(register: Register, claim: Any, _: Any = None) -> Any:
    register.records.pop(claim.id, None)
    return Register._execute(register, claim)


class Mutation(NamedTuple):
    """What is different, the rule that must be found broken, and faults that show it soon."""

    parts: Parts
    rule: str
    faults: tuple[str, ...] = ()


MUTATIONS: Final = {
    "no-register": Mutation(
        Parts(register=_without(Register, _execute=_claim_wins)), checks.ONE_ACTION
    ),
    "no-overtaking": Mutation(Parts(elections=NoOvertaking), checks.CARRIED_OUT, ("crash",)),
    "no-tombstones": Mutation(Parts(elections=NoTombstones), checks.STANDS_ONCE, ("dup",)),
    "same-token": Mutation(Parts(elections=SameToken), checks.ONE_ACTION, ("dup",)),
    # Who refuses an election does not care what comes of it.
    "no-refusals": Mutation(
        Parts(refusals=_without(Refusals, step=lambda *_: [])), checks.CARRIED_OUT, ("refuse",)
    ),
    "no-bounds": Mutation(Parts(elections=lambda own, **_: Elections(own)), checks.BOUNDS),
    "gullible-clock": Mutation(
        Parts(clock=_without(Clock, accepts=lambda _, other: isinstance(other, int))),
        checks.CLOCKS_GROW,
        ("forge",),
    ),
    # What heartbeats tell of revocations is ignored: what a node has missed it never learns.
    "no-comparing": Mutation(
        Parts(machine=_without(NodeMachine, _compare=lambda *_: None)),
        checks.REVOCATIONS,
        ("loss",),
    ),
    # Whoever dies after its first `worker-elect`, before its first heartbeat, seems to live on.
    "no-interval": Mutation(Parts(elect_tells_freq=False), checks.MEMBERSHIP, ("join", "crash")),
    "no-hearing": Mutation(Parts(machine=NoHearing), checks.MEMBERSHIP, ("forge", "join", "loss")),
    # Whether its own heartbeats come back is nothing to a node.
    "no-echo": Mutation(
        Parts(machine=_without(NodeMachine, _echo=lambda _: None)), checks.NOT_LOST, ("partition",)
    ),
    # It does not notice that it was held up.
    "no-hold-up": Mutation(
        Parts(machine=_without(NodeMachine, _was_held_up=lambda *_: False)),
        checks.NOT_LOST,
        ("hold",),
    ),
    # Once it hears again it looks for lost nodes at once.
    "no-grace": Mutation(
        Parts(machine=_without(NodeMachine, _judge_itself=lambda *_: [])),
        checks.NOT_LOST,
        ("partition",),
    ),
}
