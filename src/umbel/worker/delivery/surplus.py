"""Rate-limited tasks beyond the bound of parked ones.

They wait as parked ones do, outside of the window, up to as many again (`room`). When there are
more, or after a pause, because another worker may have a place for them, they all go back behind
the others of their queue, and the worker sees what comes next. So a long queue is gone through from
one end to the other and other types in it are reached.

Once through a queue is a *round*. It is over when a task comes by that went back in it: the next
one would find nothing new. So the queue *rests*: nothing is taken from it, while others are. The
rest ends when the queue has grown, when half of the parked tasks have run, when a limit changes,
or when it was so long that no more than `RETURNS_PER_S` tasks go back in a second on average. Who
finds that only more of the same has come waits longer before the next look, and no longer when
something else was found. Pauses grow in the same way.

A queue that its broker deletes when nobody consumes it does not rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic

from umbel.worker.delivery.effects import D, Effects, Timer

ROOM_MIN = 16
SHORT_S, LONG_S = 0.05, 2.0
LOOK_S = 0.5
# A task that goes back and comes again costs worker and broker up to a millisecond each.
RETURNS_PER_S = 25
# So many tasks of a round are remembered to find its end.
MARKS_MAX = 1_000
FOUND_MAX = 100


class Round:
    """Once through one queue, and the rest after it."""

    __slots__ = (
        "for_news",
        "is_over",
        "length",
        "marks_count",
        "not_before",
        "returned_count",
        "timer",
        "until",
        "vain_count",
    )

    def __init__(self) -> None:
        self.returned_count = 0
        self.marks_count = 0
        self.is_over = False
        self.timer: Timer | None = None  # while the queue rests: when to look at it
        self.not_before = self.until = 0.0  # the rest ends
        self.length = 0  # of the queue, of which all was seen
        self.for_news = False  # it was begun because the queue had grown
        self.vain_count = 0  # of those in a row that found nothing

    def end(self, now: float, *, found: bool) -> None:
        """It is over: for how long to rest."""
        if found:
            self.vain_count = 0
        elif self.for_news:
            self.vain_count = min(self.vain_count + 1, 20)
        due_s = max(LONG_S, self.returned_count / RETURNS_PER_S)
        self.not_before = now + min(SHORT_S * 2**self.vain_count, due_s)
        self.until = now + due_s
        self.returned_count = self.marks_count = 0
        self.is_over = False

    def should_go_on(self, now: float, length: int | None) -> bool:
        """Whether the rest is over; the length is unknown while tasks are on their way back."""
        self.for_news = length is not None and length > self.length
        if now >= self.until or (self.for_news and now >= self.not_before):
            self.length = self.length if length is None else length
            return True
        if length is not None:
            self.length = min(self.length, length)
        return False


class Surplus(Generic[D]):
    """What one worker has beyond its bound. On the loop thread.

    `add`, `found` and `shrink` are called while messages are received, and leave everything that
    may talk to the broker to timers.
    """

    def __init__(
        self,
        effects: Effects[D],
        room: int,
        give_back: Callable[[Sequence[D]], None],
        clock: Callable[[], float],
    ) -> None:
        self._do = effects
        self.room = max(room, ROOM_MIN)
        self._give_back = give_back
        self._clock = clock
        self._deliveries: dict[int, D] = {}
        self._since = 0.0  # when the first of these came
        self._timer: Timer | None = None
        self._pause_s = SHORT_S
        self.rounds: dict[str, Round] = {}
        self._marks: dict[str, str] = {}  # tasks that went back in a round; their queues
        self._found: dict[Any, Any] = {}  # by origin, a message of something else that came

    def __len__(self) -> int:
        return len(self._deliveries)

    @property
    def is_resting(self) -> bool:
        """Whether a queue is not consumed for a while."""
        return any(one.timer is not None for one in self.rounds.values())

    def add(self, delivery: D) -> None:
        """One more than may be parked."""
        if not self._deliveries:
            self._since = self._clock()
        self._deliveries[id(delivery)] = delivery
        if self._marks and (queue := self._marks.get(delivery.id)) is not None:
            self._end_round(queue)
        if len(self._deliveries) == self.room:
            self._call_after(0, self._push_out)
        elif self._timer is None:
            self._call_after(self._pause_s, self._look)

    def found(self, delivery: D) -> None:
        """Something may run; asked while there are rounds."""
        if len(self._found) < FOUND_MAX:
            self._found[self._do.origin_of(delivery.message)] = delivery.message

    def shrink(self, delivery: D) -> None:
        """This delivery waits no longer: it was surplus, or the oldest that is can be parked."""
        if not self._deliveries:
            return
        if self._deliveries.pop(id(delivery), None) is None:
            del self._deliveries[next(iter(self._deliveries))]
        if not self._deliveries and not self.is_resting:
            self.forget()

    def wake(self) -> None:
        """Go on at once: there is room, or a limit has changed."""
        self._pause_s = SHORT_S
        now = self._clock()
        for queue, one in self.rounds.items():
            one.vain_count = 0
            if one.timer is not None and one.until > now:
                one.until = now
                one.timer.cancel()
                one.timer = self._do.call_after(0, self._look_at, queue)

    def forget(self) -> None:
        """Begin anew; nothing is resting, or the consumer has stopped."""
        self._deliveries.clear()
        for one in self.rounds.values():
            if one.timer is not None:
                one.timer.cancel()
        self.rounds.clear()
        self._marks.clear()
        self._found.clear()
        self._pause_s = SHORT_S
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- by timers ---------------------------------------------------------------------

    def _call_after(self, wait_s: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._do.call_after(wait_s, call)

    def _look(self) -> None:
        """The pause is over."""
        self._timer = None
        if not self._deliveries:
            return
        early_s = len(self._deliveries) / RETURNS_PER_S - (self._clock() - self._since)
        if early_s > 0 and self._pause_s > SHORT_S:
            self._call_after(max(early_s, SHORT_S), self._look)
            return
        self._pause_s = min(2 * self._pause_s, LONG_S)
        self._return()

    def _push_out(self) -> None:
        """There is no more room."""
        self._timer = None
        queue_of = self._do.queue_of
        for delivery in self._deliveries.values():
            queue = queue_of(delivery.message)
            if queue is None:
                continue
            one = self.rounds.setdefault(queue, Round())
            one.returned_count += 1
            if one.marks_count < MARKS_MAX:
                one.marks_count += 1
                self._marks[delivery.id] = queue
        self._return()

    def _return(self) -> None:
        deliveries, self._deliveries = list(self._deliveries.values()), {}
        if deliveries:
            self._give_back(deliveries)

    def _end_round(self, queue: str) -> None:
        one = self.rounds[queue]
        if not one.is_over:
            one.is_over = True
            self._do.call_after(0, self._rest, queue)

    def _rest(self, queue: str) -> None:
        """A round is over: take nothing from its queue for a while."""
        one = self.rounds.get(queue)
        if one is None or one.timer is not None:
            return
        # Those that went back since it was over would end the next one too soon.
        self._marks = {task: own for task, own in self._marks.items() if own != queue}
        one.end(self._clock(), found=self._was_found(queue))
        if self._do.can_rest(queue):
            one.timer = self._do.call_after(SHORT_S, self._look_at, queue)
            self._do.rest(queue)
            self._return()  # what is here does not lie in it when its length is taken

    def _was_found(self, queue: str) -> bool:
        queue_of = self._do.queue_of
        own = [key for key, message in self._found.items() if queue_of(message) == queue]
        for key in own:
            del self._found[key]
        return bool(own)

    def _look_at(self, queue: str) -> None:
        one, now = self.rounds.get(queue), self._clock()
        if one is None:
            return
        if one.should_go_on(now, self._do.length_of(queue)):
            one.timer = None
            self._do.resume(queue)
        else:
            wait_s = min(LOOK_S, max(one.until - now, SHORT_S))
            one.timer = self._do.call_after(wait_s, self._look_at, queue)
