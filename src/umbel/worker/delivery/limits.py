"""Rate limits: how many tasks of one type this worker starts per second, minute or hour.

Each limited type has a token bucket of one token: tasks are spread evenly rather than let through
in bursts. A task that finds no token is *parked*. Parked tasks take no place in the prefetch
window, so that other types flow past them. Their number is bounded over all types; those beyond
the bound are the surplus, which goes back to the queues (`surplus.py`).

A new limit applies at once: what is parked waits for the new bucket, or runs now when the limit
was lifted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Generic, Protocol

from umbel.worker.delivery.effects import D, D_contra, Effects, Timer
from umbel.worker.delivery.prefetch import Prefetch
from umbel.worker.delivery.states import State
from umbel.worker.delivery.surplus import Surplus


class Bucket:
    """One token, filled at `rate` per second; time is an argument."""

    __slots__ = ("rate", "ready_at")

    def __init__(self, rate: float) -> None:
        assert rate > 0, "no limit means no bucket"
        self.rate = rate
        self.ready_at = 0.0

    def take(self, now: float) -> bool:
        """Take the token if it is there."""
        if now < self.ready_at:
            return False
        # From the moment it was due, so that a timer's lateness does not lower the rate; a
        # bucket that was full for longer does not save up.
        interval_s = 1 / self.rate
        due = self.ready_at if now - self.ready_at < interval_s else now
        self.ready_at = due + interval_s
        return True

    def wait_s(self, now: float) -> float:
        """How long until the token is there."""
        return max(0.0, self.ready_at - now)


class Lane(Generic[D]):
    """The bucket of one task type and what waits for it."""

    __slots__ = ("bucket", "parked", "timer")

    def __init__(self, rate: float) -> None:
        self.bucket = Bucket(rate)
        self.parked: deque[D] = deque()
        self.timer: Timer | None = None


class Ways(Protocol[D_contra]):
    """Where deliveries go from here."""

    def make_ready(self, delivery: D_contra) -> None:
        """It may run as soon as the pool has room."""

    def judge_again(self, delivery: D_contra) -> None:
        """It has its token; meanwhile it may have expired or been revoked."""

    def return_behind(self, delivery: D_contra) -> None:
        """Another worker shall run it."""


class RateLimits(Generic[D]):
    """All limited types of one worker."""

    def __init__(
        self,
        ways: Ways[D],
        effects: Effects[D],
        prefetch: Prefetch,
        parked_max: int,
        clock: Callable[[], float],
    ) -> None:
        self._ways = ways
        self._do = effects
        self._prefetch = prefetch
        self._clock = clock
        self._known: set[str] = set()  # types whose limit was set, if only to none
        self.lanes: dict[str, Lane[D]] = {}
        self.parked_max = max(parked_max, 1)
        self._waiting_count = 0  # parked, and surplus
        self.surplus = Surplus(effects, parked_max, self._give_back, clock)
        self.given_back = 0

    @property
    def parked_count(self) -> int:
        """How many wait within the bound."""
        return self._waiting_count - len(self.surplus)

    def begin(self, name: str, per_s: float | None) -> None:
        """The limit that a type begins with; one that was set before stays."""
        if name not in self._known:
            self.set(name, per_s)

    def set(self, name: str, per_s: float | None) -> None:
        """Limit a task type to `per_s` tasks per second, or lift its limit with 0 or None."""
        self._known.add(name)
        lane = self.lanes.get(name)
        if lane is None:
            if per_s:
                self.lanes[name] = Lane(per_s)
            return
        self.surplus.wake()
        if per_s:
            lane.bucket = Bucket(per_s)
            self._schedule(name, lane)
            return
        del self.lanes[name]
        self._cancel(lane)
        while lane.parked:
            self._unpark(lane)

    def admit(self, name: str, delivery: D) -> None:
        """Let the delivery run now, or when its type has a token again."""
        lane = self.lanes.get(name)
        if lane is None or (not lane.parked and lane.bucket.take(self._clock())):
            if self.surplus.rounds:
                self.surplus.found(delivery)
            self._ways.make_ready(delivery)
            return
        delivery.state = State.PARKED
        lane.parked.append(delivery)
        self._waiting_count += 1
        self._prefetch.park(delivery)
        if lane.timer is None:
            self._schedule(name, lane)
        if self._waiting_count > self.parked_max:
            self.surplus.add(delivery)

    def waiting(self) -> list[D]:
        """Everything that is parked, or surplus."""
        return [delivery for lane in self.lanes.values() for delivery in lane.parked]

    def clear(self) -> list[D]:
        """Forget everything that is parked, or surplus; returns it."""
        dropped = self.waiting()
        self.surplus.forget()
        for lane in self.lanes.values():
            self._cancel(lane)
            lane.parked.clear()
        self._count_off(dropped)
        return dropped

    def _schedule(self, name: str, lane: Lane[D]) -> None:
        self._cancel(lane)
        if lane.parked:
            wait_s = lane.bucket.wait_s(self._clock())
            lane.timer = self._do.call_after(wait_s, self._release, name, lane)

    def _release(self, name: str, lane: Lane[D]) -> None:
        lane.timer = None
        while lane.parked and lane.bucket.take(self._clock()):
            self._unpark(lane)
        self._schedule(name, lane)

    def _unpark(self, lane: Lane[D]) -> None:
        delivery = lane.parked.popleft()
        self._count_off((delivery,))
        self.surplus.shrink(delivery)
        self.made_room()
        # Its time may have run out, or it may have been revoked, while it was parked.
        self._ways.judge_again(delivery)

    def made_room(self) -> None:
        """Fewer are parked than before: queues that rest may go on."""
        if self.surplus.is_resting and 2 * self.parked_count < self.parked_max:
            self.surplus.wake()

    def take_out(self, keys: Container[int]) -> list[int]:
        """Forget the deliveries of these identities; which of them were parked, or surplus."""
        gone: list[D] = []
        for lane in self.lanes.values():
            chosen = [one for one in lane.parked if id(one) in keys]
            if chosen:
                gone += chosen
                lane.parked = deque(one for one in lane.parked if id(one) not in keys)
                if not lane.parked:
                    self._cancel(lane)
        self._count_off(gone)
        for delivery in gone:
            self.surplus.shrink(delivery)
        return [id(delivery) for delivery in gone]

    def _give_back(self, deliveries: Sequence[D]) -> None:
        self.take_out({id(delivery) for delivery in deliveries})
        if not self.given_back:
            self._do.surplus_returned(self.parked_max)
        self.given_back += len(deliveries)
        for delivery in deliveries:
            self._ways.return_behind(delivery)

    def _count_off(self, deliveries: Sequence[D]) -> None:
        self._waiting_count -= len(deliveries)
        for delivery in deliveries:
            self._prefetch.unpark(delivery)

    @staticmethod
    def _cancel(lane: Lane[D]) -> None:
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None
