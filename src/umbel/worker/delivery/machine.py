"""The state machine of everything that a worker has taken from the broker and not settled.

| input                                | method                                                 |
| ------------------------------------ | ------------------------------------------------------ |
| a message arrived                    | `came_again` if it was delivered before, `arrived`     |
| the pool has room                    | `dispatch`, which calls `Effects.fill_pool`            |
| a task began, ended, or was ended    | `began`; `ended`, `child_lost`, `failed`, `terminated` |
| its outcome is stored                | `stored`                                               |
| a time has come                      | what was passed to `Effects.call_after`                |
| tasks are revoked                    | `discard_waiting`                                      |
| a rate limit changed                 | `limits.set`                                           |
| messages are to go back              | `return_waiting`                                       |
| they are back, or cannot go          | `returned`, `copied`, `not_returned`                   |
| the connection is lost, or is back   | `connection_lost`, `connection_back`                   |
| the worker stops                     | `give_back` if it is warm; a cold stop asks nothing    |

Every delivery is in one state of `states.State`. The prefetch window follows from the counts of
states (`prefetch`). Deliveries that are not GONE and whose message is not settled are listed in
`reserved`, or, once nothing is to be run any more, in `leaving`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic

from umbel.worker.delivery.effects import (
    ACK,
    COPIED,
    REJECT,
    REQUEUE,
    RETURN,
    D,
    Delivery,
    Effects,
)
from umbel.worker.delivery.limits import RateLimits
from umbel.worker.delivery.redelivery import Redeliveries, Settled
from umbel.worker.delivery.states import MessageState, State
from umbel.worker.delivery.stored import StoredStates

if TYPE_CHECKING:
    from umbel.cluster.revocations import Revocations
    from umbel.wire.tasks import TaskHeader
    from umbel.worker.delivery.prefetch import Prefetch

# A held task looks at the wall clock at least this often, as it may be set while the task waits.
HOLD_MAX_S: Final = 60.0
# A late-acknowledged task whose process dies goes back to its queue. One that takes a process
# of this worker with it more often than this is taken for the cause and fails instead.
LOSSES_MAX: Final = 10
# Tasks of which is remembered how often they took a pool process with them.
LOSSES_REMEMBERED_MAX: Final = 10_000
# Looked up for every task, several times.
_HELD: Final = State.HELD
_PARKED: Final = State.PARKED
_READY: Final = State.READY
_IN_POOL: Final = State.IN_POOL
_RUNNING: Final = State.RUNNING
_STORING: Final = State.STORING
_RETURNING: Final = State.RETURNING
_GONE: Final = State.GONE
_OURS: Final = MessageState.OURS
_SETTLED: Final = MessageState.SETTLED
_VOID: Final = MessageState.VOID
_IN_DOUBT: Final = MessageState.IN_DOUBT


class Deliveries(Generic[D]):
    """The deliveries of one worker. All methods are called on one thread.

    Other threads may read numbers and copy tables.
    """

    def __init__(
        self,
        effects: Effects[D],
        prefetch: Prefetch,
        revocations: Revocations,
        *,
        parked_max: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._do = effects
        self.prefetch = prefetch
        self.revocations = revocations
        self._wall = wall
        self._is_stopping = is_stopping
        self.reserved: dict[int, D] = {}  # by their identity, in the order of their arrival
        self.active: dict[int, D] = {}  # those of them that run
        self.leaving: dict[int, D] = {}  # not settled yet, and nothing is to be run: see states
        self.in_pool = 0
        self.ready: deque[D] = deque()
        self.limits: RateLimits[D] = RateLimits(self, effects, prefetch, parked_max, clock)
        self.stored_states: StoredStates[D] = StoredStates(self, effects)
        self.redeliveries: Redeliveries[D] = Redeliveries(clock)
        self._dispatching = False
        self._by_task_id: dict[str, D] = {}  # those in `reserved`
        self._repeated: dict[str, list[D]] = {}  # further messages of an id, sent twice
        self._losses: OrderedDict[str, int] = OrderedDict()
        # Whether messages belong to their connection: then the broker delivers them again when it
        # is lost, and else they are settled, or put back, on the next one.
        self._tied = True
        self._unsettled: list[tuple[Any, str]] = []  # and how they are to be settled
        self._orphans: list[Any] = []  # which nobody works on
        prefetch.count_taken = self.reserved.__len__

    # -- arrival -------------------------------------------------------------------------

    def came_again(self, message: Any, header: TaskHeader) -> bool:
        """A message was delivered again: settle it, now or later, if its task is known here."""
        known = self.redeliveries.recognise(header)
        if known is None:
            return False
        if isinstance(known, Settled):
            self._do.already_settled(header, known.how)
            if self.settle_message(message, known.how):
                self.redeliveries.note(header, known.how)  # this, too, may not reach the broker
            else:
                self.redeliveries.remember(header, known.how)
            return True
        self._do.adopted(known)
        known.message, known.message_state = message, _OURS
        self.redeliveries.adopted.add(id(known))
        self.prefetch.adopted = len(self.redeliveries.adopted)
        return True

    def arrived(self, delivery: D) -> None:
        """A message arrived: its task is discarded, held, parked or ready."""
        task_id = delivery.header.id
        self.reserved[id(delivery)] = delivery
        if self._by_task_id.setdefault(task_id, delivery) is not delivery:
            self._repeated.setdefault(task_id, []).append(delivery)
        may_be_bad = delivery.expires_s is not None or self.revocations.any
        if may_be_bad and self._is_discarded(delivery):
            return
        self._do.received(delivery)
        waits = delivery.eta_s is not None or delivery.redelivered
        if waits or self.stored_states.line_count:
            self.stored_states.enter(delivery)
        else:
            self._admit(delivery)

    def proceed(self, delivery: D) -> None:
        """Revoked, expired, not due yet, or admitted: on receipt and when its eta has come."""
        if self._is_discarded(delivery):
            return
        if delivery.eta_s is not None:
            left_s = delivery.eta_s - self._wall()
            if left_s > 0:
                self.hold(delivery, min(left_s, HOLD_MAX_S), self.proceed)
                return
        self._unhold(delivery)
        self._admit(delivery)

    def judge_again(self, delivery: D) -> None:
        """It has a token of its rate limit; it may have expired or been revoked while it waited."""
        if not self._is_discarded(delivery):
            self.make_ready(delivery)

    def _admit(self, delivery: D) -> None:
        if self.limits.lanes:
            self.limits.admit(delivery.policy.name, delivery)
        else:
            self.make_ready(delivery)

    def make_ready(self, delivery: D) -> None:
        """It waits for nothing but the pool."""
        delivery.state = _READY
        self.ready.append(delivery)
        if self.in_pool < self.prefetch.concurrency:  # else with others, before the loop waits
            self.dispatch()

    # -- what may not run ----------------------------------------------------------------

    def _objection(self, delivery: D) -> str | None:
        """Why it may not run, `revoked` or `expired`; None if it may."""
        revocations = self.revocations
        if revocations.any and revocations.revokes(delivery.id, delivery.header.stamps):
            return "revoked"
        if delivery.expires_s is not None and self._wall() > delivery.expires_s:
            return "expired"
        return None

    def _is_discarded(self, delivery: D) -> bool:
        why = self._objection(delivery)
        if why is not None:
            self.discard(delivery, why)
        return why is not None

    def discard(self, delivery: D, why: str) -> None:
        """Answer a delivery that may not run, and that neither waits nor is in the pool."""
        self._unhold(delivery)
        self._leave(delivery, _STORING)
        self._do.store_revoked(delivery, why, None)

    def discard_waiting(self, deliveries: Sequence[D], why: str) -> None:
        """Answer those of these that have not begun; what runs goes on."""
        taken = self._take_waiting(deliveries)
        for one in taken:
            self.discard(one, why)
        if taken:
            self.limits.made_room()
            self.dispatch()

    # -- held ----------------------------------------------------------------------------

    def hold(self, delivery: D, wait_s: float, then: Callable[[D], None]) -> None:
        """Let it wait; it does not count against the window."""
        timer = delivery.timer
        if timer is None:
            self.prefetch.hold(delivery)
            delivery.state = _HELD
        else:
            timer.cancel()
        delivery.timer = self._do.call_after(wait_s, then, delivery)

    def _unhold(self, delivery: D) -> None:
        timer = delivery.timer
        if timer is not None:
            timer.cancel()
            delivery.timer = None
            self.prefetch.unhold(delivery)

    # -- the pool ------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Fill the pool from what is ready."""
        if self._dispatching or not self.ready:
            return  # a pool that runs tasks here comes back from within `fill_pool`
        self._dispatching = True
        refused: list[tuple[D, str]] = []
        try:
            self._do.fill_pool(self._startable(refused))
        finally:
            self._dispatching = False
            for delivery, why in refused:
                self.discard(delivery, why)

    def _startable(self, refused: list[tuple[D, str]]) -> Iterator[D]:
        """What is ready, as the pool asks for it, without what must not start any more."""
        ready, revocations, is_stopping = self.ready, self.revocations, self._is_stopping
        while ready and not is_stopping():
            delivery = ready.popleft()
            if revocations.any or delivery.expires_s is not None:
                why = self._objection(delivery)
                if why is not None:
                    refused.append((delivery, why))
                    continue
            delivery.state = _IN_POOL
            self.in_pool += 1
            yield delivery

    def recall(self) -> None:
        """What the pool has taken and not begun is ready again, before all others."""
        recalled = self._do.recall()
        self.in_pool -= len(recalled)
        for one in recalled:
            one.state = _READY
        self.ready.extendleft(reversed(recalled))

    def reconsider(self) -> None:
        """Something has changed for tasks that the pool may have in hand: decide once more."""
        if self.in_pool > self.prefetch.concurrency:
            self.recall()
            self.dispatch()

    def resize(self, concurrency: int) -> None:
        """The pool runs another number of tasks at a time."""
        grown = concurrency > self.prefetch.concurrency
        self.prefetch.concurrency = concurrency
        if grown:
            self.dispatch()

    def began(self, delivery: D) -> None:
        """The code of its task begins."""
        self.active[id(delivery)] = delivery
        delivery.state = _RUNNING
        if not delivery.policy.acks_late:
            self.settle(delivery, ACK)

    def ended(self, delivery: D, how: str) -> None:
        """The code of its task ended by itself, and this is what that means for the message."""
        try:
            self.settle(delivery, how)
        finally:
            self._left_pool(delivery, _GONE)

    def how_failed(self, delivery: D) -> str:
        """How the message of a failed task is settled."""
        return ACK if delivery.policy.acks_on_failure else REJECT

    def child_lost(self, delivery: D) -> bool:
        """Its process died. Whether it goes back to its queue; otherwise it has `failed`."""
        policy = delivery.policy
        if not (policy.acks_late and policy.requeue_lost):
            return False
        if self._lost_again(delivery.id) > LOSSES_MAX:
            return False
        self.ended(delivery, REQUEUE)
        return True

    def failed(self, delivery: D) -> None:
        """It did not end by itself, and an outcome is being stored: `stored` is next."""
        self._left_pool(delivery, _STORING)

    def terminated(self, delivery: D, signum: int) -> bool:
        """It was ended from outside; false if that was because its message comes again."""
        if delivery.cancelled:
            self._left_pool(delivery, _GONE)
            return False
        self._left_pool(delivery, _STORING)
        self._do.store_revoked(delivery, "terminated", signum)
        return True

    def stored(self, delivery: D, how: str) -> None:
        """Its outcome is stored."""
        self.leaving.pop(id(delivery), None)
        delivery.state = _GONE
        try:
            self.settle(delivery, how)
        finally:
            self._comes_no_more(delivery)

    def _left_pool(self, delivery: D, state: State) -> None:
        self.active.pop(id(delivery), None)
        self._leave(delivery, state)
        self.in_pool -= 1
        if delivery.owed:
            self._owe_no_more(delivery)
        if state is _GONE:  # else when its outcome is stored
            self._comes_no_more(delivery)

    def _comes_no_more(self, delivery: D) -> None:
        """Stop expecting its message to be delivered again."""
        if delivery.message_state is not _SETTLED or self.redeliveries.adopted:
            self.redeliveries.ended(delivery)
            self.prefetch.adopted = len(self.redeliveries.adopted)

    def _lost_again(self, task_id: str) -> int:
        count = self._losses.pop(task_id, 0) + 1
        self._losses[task_id] = count
        if len(self._losses) > LOSSES_REMEMBERED_MAX:
            self._losses.popitem(last=False)
        return count

    # -- settling ------------------------------------------------------------------------

    def settle(self, delivery: D, how: str) -> None:
        """Settle its message, unless that was done."""
        state = delivery.message_state
        if state is _OURS:
            delivery.message_state = _SETTLED
            if self._do.settle(delivery.message, how):
                if self.redeliveries.recent is not None:
                    self.redeliveries.note(delivery.header, how)
                return
        elif state is not _VOID:
            return
        delivery.message_state = _IN_DOUBT
        self._settle_later(delivery.message, how)
        self.redeliveries.remember(delivery.header, how)

    def settle_message(self, message: Any, how: str) -> bool:
        """Settle a message that became no delivery; whether that was written."""
        if self._do.settle(message, how):
            return True
        self._settle_later(message, how)
        return False

    def _settle_later(self, message: Any, how: str) -> None:
        if not self._tied:
            self._unsettled.append((message, how))

    # -- going back ----------------------------------------------------------------------

    def return_waiting(self, deliveries: Sequence[D]) -> None:
        """Return those of these that have not begun to the ends of their queues."""
        for one in self._take_waiting(deliveries):
            self.return_behind(one)
        self.dispatch()

    def return_behind(self, delivery: D) -> None:
        """Return it to the end of its queue, for any worker to run."""
        self._unhold(delivery)
        self._leave(delivery, _RETURNING)
        self._do.return_behind(delivery)

    def returned(self, delivery: D) -> None:
        """Its message was moved behind the others."""
        if self._has_returned(delivery):
            delivery.message_state = _SETTLED

    def copied(self, delivery: D) -> None:
        """A copy of its message is behind the others, so this one is acknowledged."""
        if self._has_returned(delivery):
            self.settle(delivery, COPIED)

    def not_returned(self, delivery: D) -> None:
        """Its message cannot go behind the others: it goes to where rejected ones do."""
        if self._has_returned(delivery):
            self.settle(delivery, REQUEUE)

    def _has_returned(self, delivery: D) -> bool:
        if delivery.state is not _RETURNING:
            return False  # its connection was lost meanwhile
        self.leaving.pop(id(delivery), None)
        delivery.state = _GONE
        return True

    def give_back(self) -> None:
        """The worker stops: all that has not begun goes back to its place, newest first."""
        self.recall()
        waiting = [one for one in self.reserved.values() if _waits(one)]
        self.limits.clear()
        self.ready.clear()
        for one in reversed(waiting):
            self._unhold(one)
            self._leave(one, _GONE)
            self.settle(one, RETURN)

    def _take_waiting(self, deliveries: Iterable[D]) -> list[D]:
        """Those of these that nothing works on; but for timers they wait no longer."""
        chosen = {id(one): one for one in deliveries if one.message_state is _OURS}
        parked = {key for key, one in chosen.items() if one.state is _PARKED}
        if parked:
            self.limits.take_out(parked)
        if any(one.state is _IN_POOL for one in chosen.values()):
            self.recall()
        ready = {key for key, one in chosen.items() if one.state is _READY}
        if ready:
            kept = [one for one in self.ready if id(one) not in ready]
            self.ready.clear()  # in place: the pool may be taking from it
            self.ready.extend(kept)
        return [one for one in chosen.values() if _waits(one)]

    def _leave(self, delivery: D, state: State) -> None:
        """Nothing of it is to be run any more."""
        delivery.state = state
        key, task_id = id(delivery), delivery.header.id
        if state is not _GONE:
            self.leaving[key] = delivery
        if self.reserved.pop(key, None) is None:
            return
        known = self._by_task_id.pop(task_id)
        if self._repeated and (others := self._repeated.pop(task_id, None)):
            kept = [one for one in (known, *others) if one is not delivery]
            self._by_task_id[task_id] = kept[0]
            if kept[1:]:
                self._repeated[task_id] = kept[1:]

    # -- the connection ------------------------------------------------------------------

    def connection_lost(self, *, cancel: bool, reduce: bool) -> None:
        """The connection is gone, and what it brought cannot be settled on it any more.

        Running tasks go on, unless `cancel` says that those whose messages will be delivered again
        are to end. `reduce` says whether the window is smaller until they have ended.
        """
        tied = self._tied
        self.recall()
        self.limits.clear()
        self.ready.clear()
        self.redeliveries.adopted.clear()
        self.prefetch.adopted = 0
        for one in list(self.reserved.values()):
            before = one.message_state
            _void(one)
            if _waits(one):
                self._unhold(one)
                self._leave(one, _GONE)
                if not tied:
                    self._orphans.append(one.message)
                continue
            if reduce and not one.owed:
                one.owed = True
                self.prefetch.debtors += 1
            is_new = before is not one.message_state
            if cancel and tied and is_new and one.policy.acks_late and not one.cancelled:
                one.cancelled = True
                self._do.cancel(one)
            if tied and not one.cancelled:
                self.redeliveries.expect(one)
        for one in list(self.leaving.values()):
            if one.message_state is _OURS:
                _void(one)
                if one.state is _RETURNING:
                    self._leave_returning(one)
                elif tied:  # it has run, or may not run
                    self.redeliveries.expect(one)
        self.redeliveries.connection_lost(tied=tied)
        self._do.drop_timers()
        self.prefetch.forget_sent()

    def _leave_returning(self, delivery: D) -> None:
        # It has not run: a copy of it, which looks the same, must not be taken for it.
        del self.leaving[id(delivery)]
        delivery.state = _GONE
        delivery.message_state = _IN_DOUBT
        self._settle_later(delivery.message, REQUEUE)

    def connection_back(self, *, tied: bool) -> None:
        """There is a new connection: where messages outlive connections, see to the old ones.

        Those of running tasks are settled here when the tasks end; those of ended ones are now. All
        others go back at once.
        """
        self._tied = tied
        self.redeliveries.connection_back(tied=tied)
        if tied:
            return
        while self._unsettled:  # tried once more; if it was no matter of the connection, no more
            message, how = self._unsettled.pop(0)
            self._do.adopt(message)
            self._do.settle(message, how)
        while self._orphans:  # newest first; one that fails to go back is tried again later
            self._do.put_back(self._orphans[-1])
            self._orphans.pop()
        for one in (*self.reserved.values(), *self.leaving.values()):
            if one.message_state is _VOID and not one.cancelled:
                one.message_state = _OURS
                if one.owed:
                    self._owe_no_more(one)
                self._do.adopt(one.message)

    def _owe_no_more(self, delivery: D) -> None:
        delivery.owed = False
        self.prefetch.debtors -= 1

    # -- questions -----------------------------------------------------------------------

    def of(self, task_id: str) -> tuple[D, ...]:
        """The deliveries of one task, in constant time."""
        known = self._by_task_id.get(task_id)
        return () if known is None else (known, *self._repeated.get(task_id, ()))

    def held_of(self, ids: Iterable[str], *, headers: bool = False) -> list[D]:
        """What is here of these tasks, begun or not, and, if wanted, of revoked headers."""
        found = [one for task_id in ids for one in self.of(task_id)]
        if headers:
            matching = self.revocations.matching
            everything = list(self.reserved.values())
            found += [one for one in everything if matching(one.header.stamps) is not None]
        return found

    def unsettled(self) -> list[D]:
        """The deliveries whose messages wait on this connection to be settled."""
        every = (*self.reserved.values(), *self.leaving.values())
        return [one for one in every if one.message_state is _OURS]


def _waits(delivery: Delivery) -> bool:
    return delivery.state in _WAITING


_WAITING: Final = frozenset({_HELD, _PARKED, _READY})


def _void(delivery: Delivery) -> None:
    state = delivery.message_state
    if state is _OURS:
        delivery.message_state = _VOID
    elif state is _SETTLED:
        delivery.message_state = _IN_DOUBT
