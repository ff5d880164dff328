"""Who is there: join, leave and loss of nodes, each told once.

Heartbeats and other signs of life go in, and ticks; what changed comes out. A *node* here is one
*incarnation*: one life of one worker, named by hostname, pid and, where it tells it, `inc`, the
time of its start. Celery's workers tell no `inc`: their pid has to do.

| what is heard                                       | the answer                         |
| --------------------------------------------------- | ---------------------------------- |
| an unknown hostname, whatever it says               | `Joined`                           |
| the incarnation that is there, also `online` again  | nothing: it is alive               |
| the incarnation that was lost                       | `Returned`                         |
| another one, while the known one is lost            | `Joined`, or `Returned`            |
| a newer one, while the known one is alive           | `Lost` of the old, then `Joined`   |
| an older one, or one that has left                  | nothing: it comes late             |
| `offline` of the incarnation that is there          | `Left`                             |
| nothing for two heartbeat intervals                 | `Lost`, at the next tick; see below |

So an incarnation joins once. Whoever joined or returned goes once, by leaving or by being lost,
and only who was lost can return. The newer of two is the one with the greater `inc`. Where one of
them has none, a heartbeat or `online` is believed, and the replaced one is not heard again while
the other lives: two workers with one name do not take turns. After `offline` an incarnation with
an `inc` is over for good; a pid may come back, so `online` begins another life of it. A sign of
life that tells no process at all counts for the one that is there.

Time is the caller's monotonic clock, never what a message says. A node is declared lost by a tick
only, and only if this node could have heard it, which the caller judges (`cluster.node`):

- After `Deaf` nobody is lost before two of its intervals, and `GRACE_S`, have passed anew.
- Where this node hears its own events, one of them must have come back an interval of the silent
  node, and `ECHO_S`, after that node's last sign of life: then the next sign should have been heard
  as well. A node that turns deaf has no such echo, whatever the intervals are.

Anybody can claim to be a node, and one message is cheap. So a node is *established* only after it
was heard `SIGNS_MIN` times, `SIGNS_SPACING_S` apart, over at least `ESTABLISHED_S`; until then it
counts for little. Whatever a node claims to be its interval, patience with it ends after two times
`freq_max_s`, which the caller derives from its own interval.

The own node is never in the table. All tables are bounded. When `nodes_max` are known, the first
of these makes room for a new one, and is counted:

1. the node that has been dead the longest,
2. of those that are not established, the one that was heard least often, and of these the one that
   has been silent the longest, if it has been so for `SPARED_S` (`Lost`),
3. nobody: then the new one is refused.

Whoever left is remembered for `memory_s`, so that what was still on its way does not raise the
dead.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

NODES_MAX: Final = 5_000
MEMORY_MAX: Final = 10_000
MEMORY_S: Final = 300.0
# Others need that long to find their broker again.
GRACE_S: Final = 5.0
# Messages may be delayed by this much. Raising it forgives slow brokers and delays losses.
ECHO_S: Final = 0.5

# So many heartbeat intervals without a sign of life.
PATIENCE: Final = 2
# What a sender may call its interval; less would make it flicker, more immortal. Whoever knows the
# settings of the cluster believes less (`freq_max_s`).
FREQ_MIN_S, FREQ_MAX_S = 0.5, 3_600.0
# How often, how far apart and for how long a node is heard before it is established. Raising them
# makes it costlier to invent nodes, and lets a big cluster that starts beat too often for longer.
SIGNS_MIN: Final = 3
SIGNS_SPACING_S: Final = 1.0
ESTABLISHED_S: Final = 30.0
# Whoever was heard within these seconds makes room for nobody: it may be about to be heard again.
SPARED_S: Final = 5.0
# The interval of somebody who has told none; Celery assumes the same.
FREQ_UNKNOWN_S: Final = 60.0

Kind = Literal["online", "heartbeat", "other"]


@dataclass(frozen=True, slots=True)
class Node:
    """One incarnation of one worker."""

    hostname: str
    pid: int | None = None
    inc: int | None = None

    @property
    def is_anonymous(self) -> bool:
        """Whether nothing tells one life of it from another."""
        return self.pid is None and self.inc is None


# -- what goes in ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heard:
    """A sign of life; `freq_s` is the heartbeat interval, as told or None."""

    hostname: str
    pid: int | None = None
    inc: int | None = None
    freq_s: Any = None
    kind: Kind = "heartbeat"


@dataclass(frozen=True, slots=True)
class Offline:
    """A node has said good-bye."""

    hostname: str
    pid: int | None = None
    inc: int | None = None


@dataclass(frozen=True, slots=True)
class Deaf:
    """This node may have missed what was sent until now."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. `echo_at` is when an own event was last heard; None: that is not known."""

    echo_at: float | None = None


Input = Heard | Offline | Deaf | Tick


# -- what comes out ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A node is there for the first time."""

    node: Node


@dataclass(frozen=True, slots=True)
class Returned:
    """A node that was lost is there again."""

    node: Node


@dataclass(frozen=True, slots=True)
class Left:
    """A node has gone in order."""

    node: Node


@dataclass(frozen=True, slots=True)
class Lost:
    """A node has gone without a word: silent for too long, replaced, or forgotten."""

    node: Node
    silent_s: float


Effect = Joined | Returned | Left | Lost


def is_alive(heard_at_s: float, freq_s: float, now_s: float) -> bool:
    """The one rule of liveness, all on the receiver's monotonic time."""
    return now_s < heard_at_s + PATIENCE * freq_s


def credible_freq_s(told: Any) -> float:
    """A heartbeat interval as far as it can be believed."""
    if type(told) not in (int, float) or not told > 0:  # which NaN is not either
        return FREQ_UNKNOWN_S
    return float(min(max(told, FREQ_MIN_S), FREQ_MAX_S))


class Member(NamedTuple):
    """What is known of a node; made anew with every sign of life, so it has to be cheap."""

    node: Node
    heard_at_s: float
    freq_s: float
    alive: bool = True


class _Signs(NamedTuple):
    """How often a node was heard that is not established yet."""

    since_s: float
    counted_at_s: float
    times: int = 1


@dataclass(frozen=True, slots=True)
class _Memory:
    """An incarnation that is not in the table any more."""

    left: bool  # in order; otherwise another one took its place
    until_s: float


class Membership:
    """The nodes that one node knows; the caller may change `freq_max_s` at any time."""

    def __init__(
        self,
        hostname: str | None = None,
        *,
        nodes_max: int = NODES_MAX,
        memory_max: int = MEMORY_MAX,
        memory_s: float = MEMORY_S,
        freq_max_s: float = FREQ_MAX_S,
    ) -> None:
        assert nodes_max > 0, nodes_max
        assert memory_max > 0, memory_max
        self.hostname = hostname
        self.freq_max_s = freq_max_s
        self.forgotten_count = 0  # nodes, and memories, that had to make room
        self.refused_count = 0  # nodes that found no room
        self.late_count = 0  # signs of life of those who are over
        self._nodes_max, self._memory_max, self._memory_s = nodes_max, memory_max, memory_s
        self._alive: dict[str, Member] = {}
        self._lost: OrderedDict[str, Member] = OrderedDict()  # the longest dead first
        self._memories: OrderedDict[Node, _Memory] = OrderedDict()  # the oldest first
        self._signs: dict[str, _Signs] = {}  # of those alive that are not established
        # The same ones by how often they were heard; the longest silent first.
        self._by_signs: tuple[OrderedDict[str, None], ...] = tuple(
            OrderedDict() for _ in range(SIGNS_MIN)
        )
        self._now = self._deaf_until = -math.inf

    def step(self, what: Input, now: float) -> list[Effect]:
        """Take one input; the changes that follow from it, in their order."""
        # Callers on several threads may read the time in one order and get here in another.
        self._now = max(self._now, now)
        if isinstance(what, Heard):
            member = self._alive.get(what.hostname)
            if member is not None and is_of(what, member.node):  # nearly always
                self._alive[what.hostname] = self._seen(member, what)
                return []
        elif isinstance(what, Tick):
            return self._tick(what.echo_at)
        elif isinstance(what, Deaf):
            self._deaf_until = self._now
            return []
        if what.hostname == self.hostname:
            return []
        node = self._named(Node(what.hostname, what.pid, what.inc))
        if isinstance(what, Offline):
            return self._offline(node)
        return self._heard(node, what)

    # -- questions ---------------------------------------------------------------------

    def alive(self) -> list[Member]:
        """Everybody who is there, as of the last step."""
        return list(self._alive.values())

    def member(self, hostname: str) -> Member | None:
        """What is known of a hostname, lost nodes included."""
        return self._alive.get(hostname) or self._lost.get(hostname)

    @property
    def established_count(self) -> int:
        """How many of those alive were heard again and again."""
        return len(self._alive) - len(self._signs)

    def established(self) -> set[str]:
        """The hostnames of those alive that were heard again and again."""
        return self._alive.keys() - self._signs.keys()

    def heard_again(self, hostname: str) -> bool:
        """Whether a node that is alive was heard more than once, at different times."""
        signs = self._signs.get(hostname)
        return hostname in self._alive and (signs is None or signs.times > 1)

    def __contains__(self, hostname: str) -> bool:
        return hostname in self._alive

    def __len__(self) -> int:
        return len(self._alive)

    # -- signs of life -----------------------------------------------------------------

    def _named(self, node: Node) -> Node:
        known = self.member(node.hostname) if node.is_anonymous else None
        return node if known is None else known.node

    def _heard(self, node: Node, what: Heard) -> list[Effect]:
        current = self.member(node.hostname)
        if current is not None and current.node == node:  # it was lost, or `step` had known it
            del self._lost[node.hostname]
            self._alive[node.hostname] = self._seen(current, what)
            self._keep_signs(node.hostname, _Signs(self._now, self._now))
            return [Returned(node)]
        memory = self._recall(node)
        if memory is not None and memory.left:
            if node.inc is not None or what.kind != "online":
                return self._late(node, memory)
            memory = None  # the pid begins another life
        if current is None or not current.alive:
            return self._enter(node, what, memory)
        if memory is not None or not _displaces(node, current.node, what.kind):
            return self._late(node, memory)
        gone = Lost(current.node, self._now - current.heard_at_s)
        return [gone, *self._enter(node, what, None)]

    def _seen(self, member: Member, what: Heard) -> Member:
        """The same node, which has just given a sign of life."""
        freq_s, told = member.freq_s, what.freq_s
        if told is not None and (told != freq_s or type(told) is not float):
            freq_s = credible_freq_s(told)
        signs = self._signs.get(what.hostname)
        if signs is not None:
            self._count_sign(what.hostname, signs)
        return Member(member.node, self._now, freq_s)

    def _count_sign(self, hostname: str, signs: _Signs) -> None:
        """Another sign of life of a node that is not established."""
        since_s, counted_at_s, times = signs
        if self._now >= counted_at_s + SIGNS_SPACING_S:
            counted_at_s, times = self._now, times + 1
        self._drop_signs(hostname)
        if times < SIGNS_MIN or self._now - since_s < ESTABLISHED_S:
            self._keep_signs(hostname, _Signs(since_s, counted_at_s, times))

    def _keep_signs(self, hostname: str, signs: _Signs) -> None:
        self._signs[hostname] = signs
        self._by_signs[min(signs.times, SIGNS_MIN) - 1][hostname] = None

    def _drop_signs(self, hostname: str) -> None:
        signs = self._signs.pop(hostname, None)
        if signs is not None:
            del self._by_signs[min(signs.times, SIGNS_MIN) - 1][hostname]

    def _enter(self, node: Node, what: Heard, memory: _Memory | None) -> list[Effect]:
        """Put a node into the place of its hostname, which nobody alive needs any more."""
        hostname = node.hostname
        before = self._alive.pop(hostname, None) or self._lost.pop(hostname, None)
        effects: list[Effect] = []
        if before is not None:
            self._drop_signs(hostname)
            self._remember(before.node, left=False)
        elif len(self._alive) + len(self._lost) >= self._nodes_max:
            gone = self._make_room()
            if gone is None:
                self.refused_count += 1
                return []
            effects += gone
        self._memories.pop(node, None)
        self._alive[hostname] = Member(node, self._now, credible_freq_s(what.freq_s))
        self._keep_signs(hostname, _Signs(self._now, self._now))
        return [*effects, Joined(node) if memory is None else Returned(node)]

    def _make_room(self) -> list[Effect] | None:
        """Forget the node that matters least; None when all of them matter."""
        if self._lost:
            self._lost.popitem(last=False)
            self.forgotten_count += 1
            return []
        spared_at = self._now - SPARED_S
        for names in self._by_signs:
            hostname = next(iter(names), None)
            if hostname is not None and self._alive[hostname].heard_at_s <= spared_at:
                self.forgotten_count += 1
                self._drop_signs(hostname)
                member = self._alive.pop(hostname)
                self._remember(member.node, left=False)
                return [Lost(member.node, self._now - member.heard_at_s)]
        return None

    def _late(self, node: Node, memory: _Memory | None) -> list[Effect]:
        self.late_count += 1
        if memory is not None and not memory.left:
            self._remember(node, left=False)  # for as long as it goes on talking
        return []

    # -- departures --------------------------------------------------------------------

    def _offline(self, node: Node) -> list[Effect]:
        current = self.member(node.hostname)
        self._remember(node, left=True)
        if current is None or current.node != node:
            return []
        if not current.alive:
            del self._lost[node.hostname]
            return []
        del self._alive[node.hostname]
        self._drop_signs(node.hostname)
        return [Left(node)]

    def _tick(self, echo_at: float | None) -> list[Effect]:
        now = self._now
        self._expire_memories()
        if now < self._deaf_until + GRACE_S:
            return []
        gone = [one for one in self._alive.values() if self._is_lost(one, echo_at)]
        for member in gone:
            hostname = member.node.hostname
            del self._alive[hostname]
            self._drop_signs(hostname)
            self._lost[hostname] = member._replace(alive=False)
        return [Lost(member.node, now - member.heard_at_s) for member in gone]

    def _is_lost(self, member: Member, echo_at: float | None) -> bool:
        since = max(member.heard_at_s, self._deaf_until)
        freq_s = min(member.freq_s, self.freq_max_s)
        if is_alive(since, freq_s, self._now):
            return False
        return echo_at is None or echo_at >= since + freq_s + ECHO_S

    # -- those who are over ------------------------------------------------------------

    def _remember(self, node: Node, *, left: bool) -> None:
        self._memories[node] = _Memory(left, self._now + self._memory_s)
        self._memories.move_to_end(node)
        if len(self._memories) > self._memory_max:
            self._memories.popitem(last=False)
            self.forgotten_count += 1

    def _recall(self, node: Node) -> _Memory | None:
        memory = self._memories.get(node)
        return None if memory is None or memory.until_s <= self._now else memory

    def _expire_memories(self) -> None:
        while self._memories:
            node, memory = next(iter(self._memories.items()))
            if memory.until_s > self._now:
                return
            del self._memories[node]


def is_of(what: Heard | Offline, node: Node) -> bool:
    """Whether a sign of life is one of this incarnation, as far as it tells."""
    if what.pid == node.pid and what.inc == node.inc:
        return True
    return what.pid is None and what.inc is None


def _displaces(node: Node, current: Node, kind: Kind) -> bool:
    """Whether another incarnation is the newer one, although the known one is alive."""
    if node.inc is not None and current.inc is not None:
        return node.inc > current.inc
    return kind != "other"
