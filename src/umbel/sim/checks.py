"""What must hold: at every step, and again after a time of calm.

A *violation* names its rule and what was seen. Checks of steps are made where the step is made, and
cost next to nothing. What must be true after calm is looked at once a second, until it is, and
once more at the end of the play.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from umbel.cluster.clock import CLOCK_MAX, FIRST_MAX, JUMP_MAX
from umbel.cluster.election_words import FORGOTTEN, node_of
from umbel.cluster.membership import Lost
from umbel.sim.outcomes import Verdicts
from umbel.sim.world import World

if TYPE_CHECKING:
    from umbel.sim.nodes import Node
    from umbel.sim.plays import Play

CALM_MAX_S: Final = 9.0
# More than any honest play comes to.
_HONEST_CLOCK_MAX: Final = 1_000_000

ONE_ACTION: Final = "at most one action per election"
ONE_OUTCOME: Final = "an election is carried out or refused, once"
ONE_WINNER: Final = "all agree about the winner"
STANDS_ONCE: Final = "a node stands once for an election"
ENDS: Final = "every election ends"
CARRIED_OUT: Final = "an election that was heard of is carried out, or refused"
CLOCKS_GROW: Final = "clocks grow and stay finite"
MEMBERSHIP: Final = "everybody knows who is there"
NOT_LOST: Final = "a node that others can hear is not lost"
REVOCATIONS: Final = "everybody has the same revocations"
PAUSES: Final = "everybody knows the same queues to be paused"
BOUNDS: Final = "tables stay within their bounds"


class Checks(Verdicts):
    """What has happened in a play, as far as rules are about it."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.actions: dict[str, str] = {}  # id -> token of who acted
        self.failures: dict[str, str] = {}  # id -> who has stored that nobody holds it
        self.winners: dict[str, str | None] = {}  # id -> as the first node that knew it says
        self.requested_at: dict[str, float] = {}
        self.acted_at: dict[str, float] = {}

    # -- at every step -----------------------------------------------------------------

    def acted(self, election_id: str, token: str) -> None:
        """An action was carried out."""
        self._world.tell(node_of(token), f"ACTS on {election_id}")
        before = self.actions.get(election_id)
        if before is not None:
            self.violated(ONE_ACTION, f"{election_id} by {before} and by {token}")
        if election_id in self.failures:
            self.violated(ONE_OUTCOME, f"{election_id} was refused, and {token} acts")
        self.actions[election_id] = token
        self.acted_at[election_id] = self._world.now

    def failed(self, node: Node, election_id: str) -> None:
        """A node has stored that nobody holds an election."""
        self._world.tell(node.name, f"reports that nobody holds {election_id}")
        before = self.actions.get(election_id) or self.failures.get(election_id)
        if before is not None:
            self.violated(ONE_OUTCOME, f"{election_id}: {before}, and {node.name} refuses it")
        self.failures[election_id] = node.name

    def requested(self, election_id: str) -> None:
        """A client asks for an election."""
        self.requested_at.setdefault(election_id, self._world.now)

    def slowest_s(self) -> float | None:
        """The longest that an action took from its first request on."""
        acted_at = self.acted_at
        took = [acted_at[one] - at for one, at in self.requested_at.items() if one in acted_at]
        return round(max(took), 3) if took else None

    def stood_again(self, node: Node, election_id: str) -> None:
        """A node stands twice; where tables are tight it may have had to forget the first time."""
        if node.elections.counts[FORGOTTEN] == 0:
            self.violated(STANDS_ONCE, f"{node.name} stands for {election_id} again")

    def learned_of_action(self, election_id: str, token: str) -> None:
        """A winner has heard that its claim was carried out."""
        if self.actions.get(election_id) != token:
            acted = self.actions.get(election_id)
            self.violated(ONE_WINNER, f"{election_id}: {token} thinks it acted, but {acted} did")

    def decided(self, node: Node, election_id: str, winner: str | None) -> None:
        """A node has come to know a winner."""
        if self._world.story is not None:
            self._world.remark(node.name, f"knows that {winner} has won {election_id}")
        first = self.winners.setdefault(election_id, winner)
        if first != winner:
            seen = f"{election_id}: {node.name} says {winner}, others say {first}"
            self.violated(ONE_WINNER, seen)

    def tables(self, play: Play, node: Node) -> None:
        """Look at the tables of a node: at every beat, and at the end."""
        if play.is_tight:  # elsewhere they are far from full
            for table, size in node.elections.sizes().items():
                if size > play.limits[f"{table}_max"]:
                    self.violated(BOUNDS, f"{node.name} has {size} {table}")
        if len(node.members) >= len(play.nodes):
            self.violated(BOUNDS, f"{node.name} knows {len(node.members)} other nodes")

    def clock_stands(self, node: Node, before: int, after: int) -> None:
        """A clock has not grown."""
        self.violated(CLOCKS_GROW, f"{node.name} went from {before} to {after}")

    def lost(self, play: Play, node: Node, gone: Lost) -> None:
        """A node has marked another one as lost, which may have been there all the time.

        Then it was this node that could not hear, unless messages were lost or delayed.
        """
        now = self._world.now
        since = now - gone.silent_s
        if play.noise_at <= now and since < play.calm_at:
            return
        for other in play.nodes:
            if (other.name, other.inc) != (gone.node.hostname, gone.node.inc):
                continue
            is_well = other.alive and not other.paused and other.link.up and not other.link.mute
            if is_well and other.well_since <= since:
                seen = f"{node.name} has not heard {other.name} for {gone.silent_s:.1f} s"
                self.violated(NOT_LOST, seen)

    # -- after calm --------------------------------------------------------------------

    def unsettled(self, play: Play) -> Iterator[tuple[str, str]]:
        """What is not as it must be after calm, as (rule, seen)."""
        alive = [node for node in play.nodes if node.alive]
        yield from _open_elections(alive)
        yield from _wrong_members(alive)
        yield from _knowledge_that_differs(alive)
        yield from _not_carried_out(play, alive, self.actions.keys() | self.failures.keys())

    def finish(self, play: Play) -> None:
        """The play is over: everything must hold."""
        for rule, seen in list(self.unsettled(play)):
            self.violated(rule, seen)
        clock_max = _HONEST_CLOCK_MAX
        if play.forged_count:
            clock_max += FIRST_MAX + play.forged_count * JUMP_MAX
        for node in play.nodes:
            self._world.note(node.clock.value)
            if node.clock.value > min(clock_max, CLOCK_MAX):
                self.violated(CLOCKS_GROW, f"{node.name} has come to {node.clock.value}")
            self.tables(play, node)


def _open_elections(alive: list[Node]) -> Iterator[tuple[str, str]]:
    for node in alive:
        if len(node.elections):
            yield ENDS, f"{node.name} has {', '.join(node.elections.view()['open'])} open"


def _not_carried_out(play: Play, alive: list[Node], ended: set[str]) -> Iterator[tuple[str, str]]:
    for node in alive:
        for election_id in sorted((node.informed | node.refused) - ended):
            token = play.register.records.get(election_id)
            if token is None or play.is_alive(token):
                yield CARRIED_OUT, f"nobody acted on {election_id}, which {node.name} has heard of"


def _wrong_members(alive: list[Node]) -> Iterator[tuple[str, str]]:
    lives = {node.name: node.inc for node in alive}
    for node in alive:
        known = {one.node.hostname: one.node.inc for one in node.members.alive()}
        known[node.name] = node.inc
        if known != lives:
            missing = [name for name in lives if name not in known]
            wrong = [name for name in known if known[name] != lives.get(name)]
            yield MEMBERSHIP, f"{node.name} misses {missing}, wrongly knows {wrong}"


def _knowledge_that_differs(alive: list[Node]) -> Iterator[tuple[str, str]]:
    if len({node.machine.summary() for node in alive}) < 2:
        return
    for node in alive[1:]:
        two = (alive[0], node)
        known = [f"{one.name} knows {one.revocations.all()}" for one in two]
        if known[0].partition(" ")[2] != known[1].partition(" ")[2]:
            yield REVOCATIONS, ", ".join(known)
        told = [one.machine.pauses.told() for one in two]
        if told[0] != told[1]:
            yield PAUSES, ", ".join(f"{one.name} knows {one.machine.pauses.told()}" for one in two)
