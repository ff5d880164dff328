"""One seed: a cluster, some elections and revocations, some faults, then calm.

The seed chooses the broker, the nodes, the faults and the times, unless the caller does. Faults go
on for some seconds; then all of them end at once, and the cluster gets up to nine seconds, or as
much longer as its heartbeats are slow, to set itself right. The play ends as soon as it has; or,
one time in thirty, when the time is over: what is right once must stay right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from umbel.cluster.clock import Clock
from umbel.cluster.election import Elections
from umbel.cluster.election_words import REFUSING, Requested
from umbel.cluster.membership import ESTABLISHED_S, SIGNS_SPACING_S
from umbel.cluster.node import NODES_FULL, NodeMachine, PauseCommanded
from umbel.cluster.refusals import Refusals
from umbel.sim import faults
from umbel.sim.brokers import AmqpModel, Broker, RedisModel
from umbel.sim.checks import CALM_MAX_S, Checks
from umbel.sim.messages import BEAT, PAUSE, REQUEST, REVOKE, Message
from umbel.sim.nodes import FREQ_S, TURN_S, WALL_S, Node
from umbel.sim.outcomes import Outcome
from umbel.sim.registers import Register
from umbel.sim.world import World

NODES_MAX: Final = 9
SECONDS_MIN, SECONDS_MAX = 0.8, 2.6
# Some last longer than a node may be silent, so that it matters who could not hear.
LONG_MIN_S, LONG_MAX_S, LONG_SHARE = 6.0, 12.0, 0.2
NODES_JOINED_MAX: Final = 3
CALM_STEP_S: Final = 0.5  # how often it is looked whether all is well
LIMITS: Final = {"ids_max": 100, "candidates_max": 64, "tombstones_max": 100}
# So small that every table overflows.
TIGHT: Final = {"ids_max": 2, "candidates_max": 2, "tombstones_max": 1}


@dataclass(frozen=True, slots=True)
class Parts:
    """What nodes and the register are made of; `mutations` has others."""

    machine: Callable[..., NodeMachine] = NodeMachine
    elections: Callable[..., Elections] = Elections
    refusals: Callable[..., Refusals] = Refusals
    clock: Callable[[], Clock] = Clock
    register: Callable[..., Register] = Register
    elect_tells_freq: bool = True  # whether `worker-elect` tells the heartbeat interval


HONEST: Final = Parts()


@dataclass(frozen=True, slots=True)
class Setting:
    """What the caller chooses instead of the seed."""

    nodes: int | None = None
    faults: tuple[str, ...] = faults.FAULTS
    seconds: float | None = None
    parts: Parts = field(default=HONEST)


DEFAULT: Final = Setting()


def play(seed: int, setting: Setting = DEFAULT, *, tells: bool = False) -> Outcome:
    """Run one seed."""
    return Play(seed, setting, tells=tells).run()


class Play:
    """The cluster of one seed, and what happens to it."""

    def __init__(self, seed: int, setting: Setting = DEFAULT, *, tells: bool = False) -> None:
        self.seed, self.parts = seed, setting.parts
        world = self.world = World(seed, tells=tells)
        dice = world.dice
        self.checks = Checks(world)
        redis = dice() < 0.5
        self.broker: Broker = RedisModel(world) if redis else AmqpModel(world)
        self.register = self.parts.register(world, self.checks, atomic=redis)
        self.is_tight = dice() < 0.15
        self.limits: dict[str, Any] = TIGHT if self.is_tight else LIMITS
        self.one_pid = dice() < 0.3
        self.check_s = TURN_S if dice() < 0.75 else FREQ_S  # how often lost nodes are looked for
        self.keeps_state = dice() < 0.5
        self.runs_to_the_end = dice() < 0.03
        self.forged_count = 0
        is_long = dice() < LONG_SHARE
        span = (LONG_MIN_S, LONG_MAX_S) if is_long else (SECONDS_MIN, SECONDS_MAX)
        self.calm_at = setting.seconds or world.between(*span)
        self.noise_at = math.inf
        self._traps: list[str] = []
        count = setting.nodes or _draw_count(world)
        # One time in five there are twice as many nodes as should beat at the full pace.
        self.nodes_full = count / 2 if count > 1 and dice() < 0.2 else NODES_FULL
        self._lives = [1] * count
        self.nodes = [Node(self, index, 1) for index in range(count)]
        self._count_max = count + NODES_JOINED_MAX
        self.broker.links = [node.link for node in self.nodes]
        # Who asks for longer plays gets more of everything in them.
        self._busy = max(1.0, (setting.seconds or 0.0) / SECONDS_MAX)
        self.election_ids = [f"e{n + 1}" for n in range(1 + int(dice() * 2.2 * self._busy))]
        self._setting = setting
        # For each election the nodes that refuse it, by their index; None is everybody.
        self._refusers: dict[str, frozenset[int] | None] = {}
        if faults.REFUSE in setting.faults:
            self._choose_refusers()

    def _choose_refusers(self) -> None:
        dice = self.world.dice
        for election_id in self.election_ids:
            some = frozenset(node.index for node in self.nodes if dice() < 0.6)
            self._refusers[election_id] = None if dice() < 0.3 else some

    def refuses(self, node: Node, election_id: str) -> bool:
        """Whether a node takes no part in an election."""
        if not self._refusers:
            return False
        refusers = self._refusers.get(election_id, frozenset())
        return refusers is None or node.index in refusers

    # -- the course of it --------------------------------------------------------------

    def run(self) -> Outcome:
        """Let it happen."""
        world = self.world
        self._settle_in()
        times = self._ask_for_elections()
        self._revoke_some()
        self._pause_some()
        kinds = self._choose_faults(times)
        world.run(self.calm_at)
        world.tell("calm", "all faults end")
        faults.end_all(self)
        settled_s = self._calm_down()
        self.checks.finish(self)
        return Outcome(
            self.seed,
            world.hash,
            self.checks.violations,
            world.story or [],
            self._figures(kinds, settled_s),
        )

    def _settle_in(self) -> None:
        """Everybody knows everybody, as in a cluster that has been there for a while."""
        heartbeats = [node.event(BEAT) for node in self.nodes]
        for node in self.nodes:
            node.begin()
            for ago_s in (ESTABLISHED_S, SIGNS_SPACING_S, 0.0):
                for heartbeat in heartbeats:
                    node.machine.step(heartbeat, node.now - ago_s)

    def _ask_for_elections(self) -> list[float]:
        world = self.world
        times = []
        for election_id in self.election_ids:
            at = world.between(0.05, 0.6 * self.calm_at)
            topic = "task" if world.dice() < 0.6 else "other"
            request = Message(REQUEST, None, Requested(election_id, topic, None))
            times.append(at)
            for again in range(2 if world.dice() < 0.5 else 1):  # every second one comes twice
                later = at + again * world.between(0.001, 2.0)
                to = int(world.dice() * len(self.nodes)) if world.dice() < 0.2 else None
                world.at(min(later, self.calm_at), self._request, request, to)
        return times

    def _request(self, request: Message, to: int | None) -> None:
        self.checks.requested(request.body.id)
        if self.world.story is not None:
            whom = "all" if to is None else f"w{to + 1}"
            self.world.remark("client", f"asks {whom} for election {request.body.id}")
        self.broker.publish(None, request, to)

    def _revoke_some(self) -> None:
        world = self.world
        if world.dice() < 0.75:
            return
        for n in range(1 + int(world.dice() * 2 * self._busy)):
            at = world.between(0.05, self.calm_at)
            # A Celery client tells no time: then each node has its own.
            stamp_s = WALL_S + at if world.dice() < 0.8 else None
            message = Message(REVOKE, None, (f"t{n + 1}", stamp_s))
            world.at(at, self._command, message, f"revokes t{n + 1}")

    def _pause_some(self) -> None:
        world = self.world
        if world.dice() < 0.75:
            return
        for _ in range(1 + int(world.dice() * 3)):
            at, paused = world.between(0.05, self.calm_at), world.dice() < 0.6
            command = PauseCommanded(world.pick(("q1", "q2")), WALL_S + at, paused)
            text = f"{'pauses' if paused else 'resumes'} {command.queue}"
            world.at(at, self._command, Message(PAUSE, None, command), text)

    def _command(self, message: Message, text: str) -> None:
        if self.world.story is not None:
            self.world.remark("client", text)
        self.broker.publish(None, message)

    def _choose_faults(self, election_times: Sequence[float]) -> list[str]:
        """Some of the faults that may be, and when."""
        world = self.world
        allowed = [kind for kind in self._setting.faults if kind != faults.REFUSE]
        chosen: list[str] = []
        for _ in range(min(len(allowed), 1 + int(world.dice() * 3))):
            kind = world.pick(allowed)
            allowed.remove(kind)
            chosen.append(kind)
        noise = [kind for kind in faults.NOISE if kind in chosen]
        if noise:
            at = world.between(0.0, 0.4 * self.calm_at)
            world.at(at, self._begin_noise, noise)
        for kind in chosen:
            if kind in faults.NOISE:
                continue
            if kind in ("pause", "hold", "crash") and world.dice() < 0.5:
                self._traps.append(kind)
            for _ in range(1 if kind == "join" else 1 + int(world.dice() * 2 * self._busy)):
                at = world.between(0.0, 0.95 * self.calm_at)
                if world.dice() < 0.5:  # where it hurts
                    at = min(world.pick(election_times) + world.dice(), 0.99 * self.calm_at)
                world.at(at, self._happen, kind)
        return chosen

    def _begin_noise(self, kinds: list[str], _: None) -> None:
        faults.begin_noise(self, kinds, self.calm_at)

    def _happen(self, kind: str, _: None) -> None:
        faults.happen(self, kind)

    def _calm_down(self) -> float | None:
        """Wait until all is well, for nine seconds at most; how long it took.

        Where heartbeats are slow everything takes as much longer.
        """
        settled_s = None
        slowest_s = max(node.beat_s for node in self.nodes)
        for step in range(1, round(CALM_MAX_S * slowest_s / FREQ_S / CALM_STEP_S) + 1):
            calm_s = step * CALM_STEP_S
            self.world.run(self.calm_at + calm_s)
            if settled_s is None and next(self.checks.unsettled(self), None) is None:
                settled_s = calm_s
                if not self.runs_to_the_end:
                    break
        return settled_s

    def _figures(self, kinds: list[str], settled_s: float | None) -> dict[str, Any]:
        return {
            "broker": self.broker.name,
            "nodes": len(self.nodes),
            "faults": kinds,
            "seconds": round(self.calm_at, 3),
            "settled_s": settled_s,
            "elections": len(self.election_ids),
            "actions": len(self.checks.actions),
            "slowest_s": self.checks.slowest_s(),
            "claims": self.register.claim_count,
            "delivered": self.broker.delivered_count,
            "lost": self.broker.lost_count,
            "events": self.world.event_count,
        }

    # -- what happens to nodes ---------------------------------------------------------

    def claimed(self, node: Node) -> None:
        """A node has claimed: the moment at which it hurts most."""
        if self._traps and self.world.now < self.calm_at and len(self.nodes) > 1:
            faults.happen_to(self, self._traps.pop(), node)

    def somebody(self) -> Node | None:
        """One of the nodes that live."""
        alive = [node for node in self.nodes if node.alive]
        return self.world.pick(alive) if alive else None

    def is_alive(self, token: str) -> bool:
        """Whether the node that has this token lives."""
        own = token.removeprefix(REFUSING)
        return any(
            node.alive and own.startswith(f"{node.name}/{node.pid}/{node.inc}/")
            for node in self.nodes
        )

    def clock_max(self) -> int:
        """The greatest clock of all."""
        return max(node.clock.value for node in self.nodes)

    def crash(self, node: Node, *, in_order: bool = False) -> None:
        """A node ends, with or without a word."""
        if not node.alive:
            return
        self.world.tell("fault", f"{node.name} {'stops' if in_order else 'dies'}")
        if in_order:
            node.stop()
        node.alive = False
        self.broker.cut(node.link)

    def join(self) -> None:
        """A node of a new name comes."""
        if len(self.nodes) >= self._count_max:
            return
        node = Node(self, len(self.nodes), 1)
        self.nodes.append(node)
        self._lives.append(1)
        self.broker.links.append(node.link)
        self.world.tell("fault", f"{node.name} comes")
        node.start()

    def restart(self, before: Node) -> None:
        """The next life of a node begins, with what it had on disk, if it keeps a state file."""
        index = before.index
        if self.nodes[index].alive:
            return
        self._lives[index] += 1
        node = Node(self, index, self._lives[index])
        if self.keeps_state:
            node.restore(before)
        if self.world.dice() < 0.5:  # its queues are still there
            node.link.kept, node.link.got = before.link.kept, before.link.got
            node.link.up = False
        self.nodes[index] = node
        self.broker.links[index] = node.link
        self.world.tell("fault", f"{node.name} begins its life {self._lives[index]}")
        self.broker.mend(node.link)
        node.start()


def _draw_count(world: World) -> int:
    """How many nodes, from one to nine: many cost more, and rarely show what few do not."""
    chance = world.dice()
    if chance < 0.08:
        return 1
    low, high = (2, 4) if chance < 0.88 else (5, 6) if chance < 0.97 else (7, NODES_MAX)
    return low + int(world.dice() * (high - low + 1))
