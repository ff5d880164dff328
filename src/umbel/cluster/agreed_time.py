"""The wall-clock time that the nodes of a cluster agree on, although the clock of a host is off.

Revocations and pauses carry wall-clock times from node to node: of two commands the later one
holds, and a revocation ends some hours after it was made. That only works if all nodes mean the
same by a time. So each node adds a *shift* to its own clock:

| what is known                                      | the shift                                 |
| -------------------------------------------------- | ----------------------------------------- |
| more than half of the clocks agree, ours among them | none                                     |
| more than half of the clocks agree, ours does not   | the difference between theirs and ours   |
| no majority (two nodes, say)                        | as it is, or the time of who is behind   |
| nobody else                                         | as it is                                 |
| at the start, from those who answer the greeting    | the difference between theirs and ours   |

Two clocks agree if they differ by less than `TOLERANCE_S`; below that nothing is corrected. The
shift stays when nodes leave, so that times that were noted before keep their meaning, and a node
that starts takes over the time of those who are there. Between two halves of a cluster that have
agreed on different times the earlier one is taken: then nothing ends too early.

Heartbeats tell a node's clock and its shift. Of each node the median of the last `SAMPLES_MAX`
differences counts, taken `SPACING_S` apart, so that a delayed message, or a burst of them after a
break, changes little. Who is counted is up to the caller. A shift of more than `SHIFT_MAX_S` is
not believed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

# Clocks of hosts that are looked after differ by milliseconds; messages take up to a second.
TOLERANCE_S: Final = 5.0
SHIFT_MAX_S: Final = 86_400.0
SAMPLES_MIN, SAMPLES_MAX = 3, 9
SPACING_S: Final = 1.0
NODES_MAX: Final = 5_000


class _Peer:
    """What the heartbeats of one node tell of its clock."""

    __slots__ = ("ahead", "sampled_at", "shift_s")

    def __init__(self) -> None:
        self.ahead: deque[float] = deque(maxlen=SAMPLES_MAX)  # of our own clock, without shifts
        self.shift_s = 0.0
        self.sampled_at = -math.inf

    @property
    def ahead_s(self) -> float:
        return _middle(sorted(self.ahead))


class AgreedTime:
    """Call it for the time. One thread changes it; all may ask."""

    __slots__ = ("_clock", "_peers", "shift_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.shift_s = 0.0
        self._peers: dict[str, _Peer] = {}

    def __call__(self) -> float:
        return self._clock() + self.shift_s

    def heard(self, hostname: str, told_at: float, shift_s: Any, now: float) -> None:
        """Take note of a heartbeat that was sent at `told_at` by the sender's own clock.

        `now` is the caller's monotonic time.
        """
        peer = self._peers.get(hostname)
        if peer is None:
            if len(self._peers) >= NODES_MAX:
                return
            peer = self._peers[hostname] = _Peer()
        peer.shift_s = _shift(shift_s)
        if now >= peer.sampled_at + SPACING_S:
            peer.sampled_at = now
            peer.ahead.append(told_at - self._clock())

    def forget(self, hostname: str) -> None:
        """A node is gone."""
        self._peers.pop(hostname, None)

    def adopt(self, times_ahead: Sequence[float]) -> bool:
        """Take over the time of nodes that were there before; whether the shift changed.

        `times_ahead` is by how much the time that each of them goes by is ahead of ours.
        """
        known = sorted(one for one in times_ahead if math.isfinite(one))
        return bool(known) and self._move(_middle(known))

    def settle(self, counted: Collection[str]) -> bool:
        """Look at the clocks of these nodes and our own; whether the shift changed."""
        peers = [
            peer
            for hostname, peer in self._peers.items()
            if hostname in counted and len(peer.ahead) >= SAMPLES_MIN
        ]
        if not peers:
            return False
        ahead = sorted([0.0, *(peer.ahead_s for peer in peers)])
        most = _largest_group(ahead)
        if 2 * len(most) > len(ahead):
            wanted = 0.0 if most[0] <= 0.0 <= most[-1] else _middle(most)
            return self._move(wanted - self.shift_s)
        times = sorted([0.0, *(peer.ahead_s + peer.shift_s - self.shift_s for peer in peers)])
        return self._move(_middle(times))

    def _move(self, by_s: float) -> bool:
        shift_s = self.shift_s + by_s
        if abs(by_s) <= TOLERANCE_S or abs(shift_s) > SHIFT_MAX_S:
            return False
        self.shift_s = shift_s if abs(shift_s) > TOLERANCE_S else 0.0
        return True


def _largest_group(values: Sequence[float]) -> Sequence[float]:
    """The most values that differ by no more than the tolerance, of sorted ones."""
    best: Sequence[float] = ()
    first = 0
    for end in range(1, len(values) + 1):
        while values[end - 1] - values[first] > TOLERANCE_S:
            first += 1
        if end - first > len(best):
            best = values[first:end]
    return best


def _middle(values: Sequence[float]) -> float:
    """The median of sorted values; of an even number the lower one of the two."""
    return values[(len(values) - 1) // 2]


def _shift(told: Any) -> float:
    is_shift = type(told) in (int, float) and -SHIFT_MAX_S <= told <= SHIFT_MAX_S
    return float(told) if is_shift else 0.0
