"""A model of the write-once register that decides elections.

One record per election id: the first token stays. In an *atomic* register (Redis) the claim of a
task and its sending are one step, so the action happens here. Otherwise (RabbitMQ, and topics with
a handler) the winner acts when it gets the answer, or never if it dies before.

With `noise` requests and answers get lost or are slow. Then the node hears of a failure after
`TIMEOUT_S`, and does not know whether its claim arrived. A *forgetful* register loses records, as
a failover may: no election is safe on it, and the checks must say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from umbel.cluster.election_words import Act, Claim, Claimed, ClaimFailed
from umbel.cluster.node import ClaimAnswered
from umbel.cluster.refusals import ClaimRefusal
from umbel.sim.messages import ANSWER, Message
from umbel.sim.world import World

if TYPE_CHECKING:
    from umbel.sim.checks import Checks
    from umbel.sim.nodes import Node

TIMEOUT_S: Final = 1.0
REFUSED_S: Final = 0.05
TASK_TOPIC: Final = "task"


class Register:
    """See the module's text."""

    __slots__ = ("_checks", "_world", "atomic", "claim_count", "noise_until", "records")

    def __init__(self, world: World, checks: Checks, *, atomic: bool) -> None:
        self._world, self._checks = world, checks
        self.atomic = atomic
        self.noise_until = 0.0
        self.claim_count = 0
        self.records: dict[str, str] = {}

    def acts(self, what: Claim | ClaimRefusal | Act) -> bool:
        """Whether the claim carries the action out as well."""
        return self.atomic and getattr(what, "topic", "") == TASK_TOPIC

    def claim(self, node: Node, claim: Claim | ClaimRefusal) -> None:
        """A node claims; it gets an answer, or hears of a failure."""
        world = self._world
        self.claim_count += 1
        if not node.link.up:
            self._fail(node, claim, REFUSED_S)
            return
        go_s, back_s = 0.0005 + 0.001 * world.dice(), 0.0005
        if node.link.mute:
            self._fail(node, claim, TIMEOUT_S)
            return
        if node.link.deaf:
            back_s = TIMEOUT_S
        elif world.now < self.noise_until:
            chance = world.dice()
            if chance < 0.15:  # the request is lost
                self._fail(node, claim, TIMEOUT_S)
                return
            if chance < 0.3:  # the answer is lost
                back_s = TIMEOUT_S
            elif chance < 0.5:  # it takes its time, and may be executed when nobody waits for it
                go_s = min(3 * world.dice(), max(0.001, self.noise_until - world.now))
        if go_s + back_s >= TIMEOUT_S:
            self._fail(node, claim, TIMEOUT_S)
            world.at(world.now + go_s, self._execute, claim)
        else:
            world.at(world.now + go_s, self._answer, node, claim)

    def _fail(self, node: Node, claim: Claim | ClaimRefusal, after_s: float) -> None:
        answer = ClaimFailed(claim.id, "no answer")
        failed = Message(ANSWER, None, ClaimAnswered(claim, answer))
        self._world.at(self._world.now + after_s, _hand_over, node, failed)

    def _execute(self, claim: Claim | ClaimRefusal, _: Any = None) -> Any:
        """The winner, after this claim."""
        holder = self.records.get(claim.id)
        if holder is None:
            self.records[claim.id] = holder = claim.token
            self._world.tell("register", f"{claim.id} belongs to {claim.token}")
            if self.acts(claim):
                self._checks.acted(claim.id, claim.token)
        return holder

    def _answer(self, node: Node, claim: Claim | ClaimRefusal) -> None:
        holder = self._execute(claim)
        answer = ClaimAnswered(claim, Claimed(claim.id, holder == claim.token, holder))
        message = Message(ANSWER, None, answer)
        self._world.at(self._world.now + 0.0005, _hand_over, node, message)

    def forget(self) -> None:
        """Lose everything, as a failover to an empty replica does."""
        self._world.tell("register", "forgets everything")
        self.records.clear()


def _hand_over(node: Node, answer: Message) -> None:
    node.receive(answer)
