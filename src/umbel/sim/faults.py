"""What goes wrong in a play, and when it stops.

Faults are of two kinds. *Noise* mistreats messages and claims for a while. *Incidents* happen to a
node at a time, and end by themselves or at the latest when calm begins:

| fault       | what happens                                                                      |
| ----------- | --------------------------------------------------------------------------------- |
| `loss`      | noise: messages get lost, up to a third                                           |
| `dup`       | noise: messages come twice                                                        |
| `delay`     | noise: messages take up to some seconds, in order                                 |
| `reorder`   | noise: messages overtake each other                                               |
| `register`  | noise: claims and their answers get lost or are slow                              |
| `break`     | a connection breaks and is there again soon                                       |
| `partition` | some nodes lose the broker; or hear nothing, or are not heard, and do not know it |
| `pause`     | a node stands still, often just when it claims                                    |
| `hold`      | a node's listening thread stands still, while its heartbeats go on                |
| `crash`     | a node dies, often just when it claims                                            |
| `restart`   | a node stops, in order or not, and its next life begins                           |
| `join`      | a new node comes                                                                  |
| `forge`     | a stranger publishes `worker-elect` with nonsense and forged clocks               |
| `refuse`    | some nodes, or all, refuse some elections; only where it is asked for             |
| `amnesia`   | the register loses its records: elections are not safe then, and need not be      |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from umbel.cluster.clock import CLOCK_MAX, JUMP_MAX
from umbel.cluster.election_words import Heard
from umbel.cluster.node import read
from umbel.sim.brokers import Noise
from umbel.sim.messages import ELECT, Message
from umbel.wire.events import check

if TYPE_CHECKING:
    from umbel.sim.nodes import Node
    from umbel.sim.plays import Play

NOISE: Final = ("loss", "dup", "delay", "reorder", "register")
INCIDENTS: Final = ("break", "partition", "pause", "hold", "crash", "restart", "join", "forge")
# What elections are promised to withstand; `amnesia` is not among it.
FAULTS: Final = NOISE + INCIDENTS
UNSAFE: Final = ("amnesia",)
REFUSE: Final = "refuse"
ALL: Final = (*FAULTS, REFUSE, *UNSAFE)

LOSS_MAX: Final = 0.35
DUP_MAX: Final = 0.3
DELAY_MAX_S: Final = 3.0
FORGED_COUNT: Final = 3  # messages at a time


def begin_noise(play: Play, kinds: list[str], calm_at: float) -> None:
    """Mistreat messages and claims, from now on until calm."""
    dice = play.world.dice
    noise = Noise(calm_at)
    if "loss" in kinds:
        noise.loss = LOSS_MAX * dice()
    if "dup" in kinds:
        noise.dup = DUP_MAX * dice()
    if "delay" in kinds:
        noise.delay_s = DELAY_MAX_S * dice()
    if "reorder" in kinds:
        noise.reorders = True
        noise.delay_s = noise.delay_s or 0.5 * dice()
    if "register" in kinds:
        play.register.noise_until = calm_at
    if kinds != ["register"]:
        play.broker.noise = noise
        play.noise_at = play.world.now
    play.world.tell("fault", f"noise: {', '.join(kinds)}")


def happen(play: Play, kind: str) -> None:
    """Let an incident happen now, to a node that the dice choose."""
    if kind == "join":
        play.join()
    elif kind == "forge":
        for _ in range(FORGED_COUNT):
            _forge(play)
    elif kind == "amnesia":
        play.register.forget()
    elif kind == "partition":
        _partition(play)
    else:
        node = play.somebody()
        if node is not None:
            happen_to(play, kind, node)


def happen_to(play: Play, kind: str, node: Node) -> None:
    """Let an incident happen to this node."""
    world = play.world
    if kind == "pause":
        if not node.paused:
            world.tell("fault", f"{node.name} stands still")
            node.paused = True
            world.at(world.now + world.between(0.2, 8.0), _resume, play, node)
    elif kind == "hold":
        if not node.paused and not node.held_up:
            world.tell("fault", f"{node.name} is held up")
            node.held_up = True
            world.at(world.now + world.between(0.2, 8.0), _resume, play, node)
    elif kind == "crash":
        if sum(one.alive for one in play.nodes) > 1:  # nobody left means nothing to see
            play.crash(node)
    elif kind == "restart":
        play.crash(node, in_order=not node.paused and world.dice() < 0.3)
        world.at(world.now + world.between(0.01, 3.0), _restart, play, node)
    else:
        assert kind == "break", kind
        _cut(play, [node], world.between(0.05, 1.5))


def end_all(play: Play) -> None:
    """Calm begins: what stands still goes on, and whoever is cut off comes back."""
    play.broker.noise = None
    for node in list(play.nodes):
        if node.alive:
            _mend(play, node)
            _resume(play, node)


def _partition(play: Play) -> None:
    world = play.world
    alive = [node for node in play.nodes if node.alive]
    group = [node for node in alive if world.dice() < 0.5]
    how = world.pick(("cut", "cut", "deaf", "mute"))
    if how == "cut":
        _cut(play, group, world.between(0.2, 6.0))
        return
    for node in group:
        world.tell("fault", f"{node.name} is {how}")
        node.link.deaf |= how == "deaf"
        node.link.mute |= how == "mute"
        world.at(world.now + world.between(0.2, 6.0), _mend, play, node)


def _cut(play: Play, nodes: list[Node], for_s: float) -> None:
    world = play.world
    for node in nodes:
        world.tell("fault", f"{node.name} loses its connection")
        play.broker.cut(node.link)
        world.at(world.now + for_s, _mend, play, node)


def _mend(play: Play, node: Node) -> None:
    if node.alive and play.broker.mend(node.link):
        play.world.tell("fault", f"{node.name} is connected again")
        node.connected()


def _resume(play: Play, node: Node) -> None:
    if node.alive and (node.paused or node.held_up):
        play.world.tell("fault", f"{node.name} goes on")
        node.resume()


def _restart(play: Play, node: Node) -> None:
    play.restart(node)


_BAD_CLOCKS: Final = (None, True, 1.5, "7", -1, CLOCK_MAX + 1, 10**30, float("inf"), [1])
_BAD_FIELDS: Final = ("id", "topic", "action", "clock", "hostname", "pid", "cver", "inc", "type")
_BAD_VALUES: Final[tuple[Any, ...]] = (
    None,
    "",
    {},
    [],
    -1,
    2**70,
    1.5,
    "x" * 5_000,
    "\ud800",
    True,
)


def _forge(play: Play) -> None:
    """Publish something hostile; what is well formed is passed on as every node would read it."""
    world = play.world
    stranger: dict[str, Any] = {
        "type": "worker-elect",
        "hostname": f"stranger{int(world.dice() * 3)}",
        "pid": 1,
        "timestamp": 0.0,
        "clock": 1,
        "id": world.pick((*play.election_ids, "forged")),
        "topic": "other",
        "action": None,
        "cver": 2,
        "inc": 7,
        "umbel_series": 1,  # no sign of life: nobody is to wait for it
    }
    chance = world.dice()
    if chance < 0.3:
        stranger["clock"] = world.pick(_BAD_CLOCKS)
    elif chance < 0.6:
        jump = world.pick((CLOCK_MAX, JUMP_MAX * 2, JUMP_MAX // 2, JUMP_MAX, 5))
        stranger["clock"] = min(play.clock_max() + jump, CLOCK_MAX)
    else:
        stranger[world.pick(_BAD_FIELDS)] = world.pick(_BAD_VALUES)
    play.forged_count += 1
    refusal = check(stranger)
    heard = None if refusal else read(stranger)
    if heard is None or not isinstance(heard.elect, Heard):
        world.tell("stranger", f"is refused: {refusal or (heard and heard.elect)}")
        return
    world.tell("stranger", f"stands for {heard.elect.id}, clock {heard.clock}")
    play.broker.publish(None, Message(ELECT, None, heard))
