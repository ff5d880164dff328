"""A worker of a play: the machine of deliveries, a pool, and the connection between them.

Everything that a worker does happens on its loop, one thing after the other. What the pool reports
and what the broker delivers waits while the worker is paused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from umbel.cluster.revocations import Revocations
from umbel.exceptions import TaskRevokedError
from umbel.sim.deliveries.brokers import (
    COPY_EXCUSES,
    VISIBILITY_S,
    AmqpModel,
    Channel,
    RedisModel,
)
from umbel.sim.deliveries.tasks import (
    FAILURE,
    REJECTED,
    REQUEUED,
    SUCCESS,
    CheckedDelivery,
    Letter,
)
from umbel.worker.delivery.effects import ACK, REJECT, REQUEUE, RETURN
from umbel.worker.delivery.prefetch import Limit, Prefetch

if TYPE_CHECKING:
    from umbel.sim.deliveries.plays import Play
    from umbel.wire.tasks import TaskHeader

SIGTERM: Final = 15
EVENTS_MAX: Final = 500_000
# What is stored or read by the side thread takes up to this long; longer where the result backend
# is slow.
SIDE_S, SLOW_SIDE_S = 0.01, 1.5
REPORT_S: Final = 0.003
NOTICE_S: Final = 0.2
RECONNECT_S: Final = 0.3
RENEW_S: Final = VISIBILITY_S / 3
SOLO, PLAIN, BATCHES = "solo", "threads", "prefork"
POOLS: Final = (PLAIN, BATCHES, BATCHES, SOLO)


class Timer:
    """Something that will be called, unless it is cancelled."""

    __slots__ = ("args", "call")

    def __init__(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.call: Callable[..., None] | None = call
        self.args = args

    def cancel(self) -> None:
        """Do not call it."""
        self.call = None

    def fire(self) -> None:
        """Its time has come."""
        call, self.call = self.call, None
        if call is not None:
            call(*self.args)


class Endless(Exception):
    """More happens than an honest play has events."""


class Run:
    """The code of a task, running in a pool."""

    __slots__ = ("delivery", "ends", "is_over")

    def __init__(self, delivery: CheckedDelivery) -> None:
        self.delivery = delivery
        self.ends = delivery.task.ends
        if self.ends == REQUEUED:
            delivery.task.ends = SUCCESS  # the next time
        self.is_over = False


class SimWorker:
    """One life of one worker."""

    def __init__(self, play: Play, index: int, life: int) -> None:
        self.play, self.index, self.life = play, index, life
        self.name = f"w{index + 1}" if life == 1 else f"w{index + 1}/{life}"
        world, dice = play.world, play.world.dice
        self._world = world
        self.concurrency = 1 + int(dice() * 4)
        self.pool_kind = world.pick(POOLS)
        self.cancels = dice() < 0.2
        self.is_alive, self.is_stopping, self.is_paused = True, False, False
        self.went_on_at = 0.0
        self.channel: Channel | None = None
        self._lost: Channel | None = None  # the last one, where messages outlive connections
        self.seen: set[int] = set()  # tags of what has arrived
        self.doubts: list[Any] = []  # tasks whose messages come again after a lost connection
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._timers: list[Timer] = []
        self._waiting: deque[CheckedDelivery] = deque()  # in the pool, not begun
        self.running: list[Run] = []
        self._asides = 0
        self._side_s = SIDE_S if dice() < 0.8 else SLOW_SIDE_S
        self._returning: list[CheckedDelivery] = []
        self._copying = 0
        held_max = 3 if dice() < 0.1 else None
        self.prefetch = Prefetch(self.concurrency, 1 + int(dice() * 4), held_max)
        self.revocations = Revocations(play.wall)
        effects: Any = self
        self.machine = play.parts.machine(
            effects, self.prefetch, self.revocations,
            parked_max=2 if dice() < 0.3 else 1_000,
            clock=play.clock, wall=play.wall, is_stopping=lambda: self.is_stopping,
        )  # fmt: skip
        for kind in play.kinds:
            if kind.per_s is not None:
                self.machine.limits.begin(kind.name, kind.per_s)
        self.connect()

    # -- the loop ------------------------------------------------------------------------

    def act(self, call: Callable[..., None], *args: Any) -> None:
        """Do something on the loop, now or when the worker goes on."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._backlog.append((call, args))
            return
        call(*args)
        if self.is_alive:
            self._turn()

    def later(self, wait_s: float, call: Callable[..., None], *args: Any) -> None:
        """Do something on the loop after a while."""
        if self._world.event_count > EVENTS_MAX:
            raise Endless
        self._world.at(self._world.now + wait_s, self._fire, call, args)

    def _fire(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.act(call, *args)

    def _turn(self) -> None:
        """What the loop does before it waits."""
        channel = self.channel
        if channel is not None and not self.is_stopping:
            if self.prefetch.is_due:
                self.prefetch.apply(self._ask_for)
                self.play.broker.pump()
            self.machine.dispatch()
        elif self.is_stopping:
            self._end_when_idle()
        self.play.checks.worker(self)

    def _ask_for(self, limit: Limit) -> None:
        assert self.channel is not None
        self.channel.window = limit.count

    def stand_still(self) -> None:
        """The process stands still; what runs in its pool does not."""
        self.is_paused = True

    def go_on(self) -> None:
        """The process goes on with what has waited."""
        self.is_paused = False
        self.went_on_at = self._world.now
        backlog, self._backlog = self._backlog, []
        for call, args in backlog:
            self.act(call, *args)

    # -- the connection ------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, or try again later."""
        if self.is_stopping:
            return
        broker = self.play.broker
        channel = broker.connect(self)
        if channel is None:
            self.later(RECONNECT_S, self.connect)
            return
        self.channel = channel
        if isinstance(broker, RedisModel):
            if self._lost is not None:
                broker.resume(self._lost, channel)
                self._lost = None
            self._timer(RENEW_S, self._renew)
        self.machine.connection_back(tied=broker.tied)
        self.prefetch.forget_sent()
        self.prefetch.apply(self._ask_for)
        channel.consuming = dict.fromkeys(broker.queues)
        broker.pump()

    def cut(self, *, silent: bool) -> None:
        """The connection breaks; the worker does not know yet."""
        channel = self.channel
        if channel is None or not channel.is_open:
            return
        self._excuse(channel)
        channel.is_silent = silent
        self.play.broker.cut(channel)
        self.later(NOTICE_S * self._world.dice(), self._notice, channel)

    def _notice(self, channel: Channel) -> None:
        if self.channel is not channel:
            return
        if self._world.story is not None:
            self._world.remark(self.name, "notices that its connection is lost")
        self.machine.connection_lost(
            cancel=self.cancels and self.pool_kind != SOLO, reduce=self.play.reduces
        )
        self._returning.clear()
        self.channel = None
        if not self.play.broker.tied:
            self._lost = channel
        self.later(RECONNECT_S * self._world.dice(), self.connect)

    def _renew(self) -> None:
        broker = self.play.broker
        assert isinstance(broker, RedisModel)
        broker.renew([one.message.tag for one in self.machine.unsettled()])
        self._timer(RENEW_S, self._renew)

    def receive(self, channel: Channel, letter: Letter) -> None:
        """A message arrives."""
        self.act(self._receive, channel, letter)

    def _receive(self, channel: Channel, letter: Letter) -> None:
        if channel is not self.channel or (self.is_stopping and not channel.is_open):
            return
        self.seen.add(letter.tag)
        task = letter.stored.task
        if self._world.story is not None:
            again = ", again" if letter.stored.redelivered else ""
            self._world.remark(self.name, f"receives {task.header.id}{again}")
        if letter.stored.redelivered and self.machine.came_again(letter, task.header):
            return
        self.machine.arrived(CheckedDelivery(letter))

    # -- the end -------------------------------------------------------------------------

    def stop(self, *, cold: bool) -> None:
        """Ask it to stop."""
        self.act(self._stop, cold)

    def _stop(self, cold: bool) -> None:
        if self.is_stopping and not cold:
            return
        self.is_stopping = True
        if self.channel is not None:
            self.channel.consuming.clear()
        if cold:
            for run in self.running:
                self._kill(run)
            self._leave()
        elif self.channel is not None:
            self.machine.give_back()

    def _end_when_idle(self) -> None:
        if not self.machine.in_pool and not self._asides and not self._copying:
            if self._returning and self.channel is not None:
                return
            self._leave()

    def _leave(self) -> None:
        self.is_alive = False
        self._excuse(None)
        if self.channel is not None and self.channel.is_open:
            self.play.broker.close(self.channel)
        self.play.ended(self)

    def die(self) -> None:
        """The whole process is killed."""
        self.is_alive = False
        self._excuse(self.channel)
        for run in self.running:
            self._kill(run)
        if self.channel is not None and self.channel.is_open:
            self.play.broker.cut(self.channel)
        self.play.ended(self)

    def _kill(self, run: Run) -> None:
        if not run.is_over:
            run.is_over = True
            run.delivery.task.killed = True

    def _excuse(self, channel: Channel | None) -> None:
        """Tasks that have begun here, and whose messages may come again, may run once more.

        On RabbitMQ those of a lost connection come again; this worker recognises them, others do
        not. On Redis only the end of the worker matters.
        """
        play = self.play
        begun = [one.task for one in self.machine.reserved.values() if one.task.runs]
        begun += [one.task for one in self.machine.leaving.values() if one.task.runs]
        if channel is not None:
            begun += [letter.stored.task for letter, _ in channel.writing.values()]
        if self._lost is not None:
            begun += [letter.stored.task for letter, _ in self._lost.writing.values()]
        if not self.is_alive:
            begun += self.doubts
            # In the inbox, or in doubt: this worker is done with them, and the broker is not.
            known = set(map(id, begun))
            begun += [
                letter.stored.task
                for one in (self.channel, self._lost)
                if one is not None
                for letter in one.unacked.values()
                if letter.stored.task.runs and id(letter.stored.task) not in known
            ]
        elif not play.broker.tied:
            return
        self._allow_again(begun)

    def _allow_again(self, tasks: list[Any]) -> None:
        """The messages of these come again: to this worker, which knows them, or to another."""
        if self.is_alive and self.play.is_alone:
            self.doubts += tasks
        else:
            for task in tasks:
                task.excuses += 1

    # -- effects: messages ---------------------------------------------------------------

    def settle(self, letter: Letter, how: str) -> bool:
        """Settle a message; false when the connection is found broken."""
        if letter.channel is not self.channel:
            self.play.checks.foreign(self, letter, how)
            return True
        return self._write(letter, how)

    def _write(self, letter: Letter, how: str) -> bool:
        channel = letter.channel
        if letter.settled:
            self.play.checks.settled_twice(letter, how)
            return True
        if self._world.story is not None:
            self._world.remark(self.name, f"settles {letter.stored.task.header.id}: {how}")
        if not channel.is_open and not channel.is_silent:
            self.later(0.0, self._notice, channel)
            return False
        letter.settled, letter.is_last_word = True, self.is_stopping
        if channel.is_open or not self.play.broker.tied:
            self.play.broker.write(letter, how)
        return True

    def adopt(self, letter: Letter) -> None:
        """Let a message of a lost connection be settled on this one."""
        assert self.channel is not None
        letter.channel = self.channel
        self.channel.unacked[letter.tag] = letter

    def put_back(self, letter: Letter) -> None:
        """Give a message of a lost connection back to its queue."""
        self.adopt(letter)
        self._write(letter, RETURN)

    def return_behind(self, delivery: CheckedDelivery) -> None:
        """Give a message back behind the others, when the loop turns next."""
        if not self._returning:
            self._timer(0.0, self._flush)
        self._returning.append(delivery)

    def _flush(self) -> None:
        deliveries, self._returning = self._returning, []
        broker = self.play.broker
        for one in deliveries:
            if isinstance(broker, AmqpModel):
                self._copying += 1
                at = self._world.now + SIDE_S * self._world.dice()
                self._world.at(at, self._copy, one)
            elif self.channel is not None and self.channel.is_open:
                one.message.settled = True
                assert isinstance(broker, RedisModel)
                broker.move(one.message)
                self.machine.returned(one)
            elif self.channel is not None:
                self.later(0.0, self._notice, self.channel)

    def _copy(self, delivery: CheckedDelivery, _: Any) -> None:
        """On the side thread: whether the worker hears of it is another matter."""
        if not self.is_alive:
            return
        broker = self.play.broker
        assert isinstance(broker, AmqpModel)
        done = not broker.is_down and self._world.dice() < 0.9
        if done:
            broker.copy(delivery.message)
            if not delivery.message.channel.is_open:  # the original is back already
                delivery.task.excuses += COPY_EXCUSES
        self.later(SIDE_S * self._world.dice(), self._copied, delivery, done)

    def _copied(self, delivery: CheckedDelivery, done: bool) -> None:
        self._copying -= 1
        if done:
            self.machine.copied(delivery)
        else:
            self.machine.not_returned(delivery)

    # -- effects: the pool ---------------------------------------------------------------

    def fill_pool(self, ready: Iterator[CheckedDelivery]) -> None:
        """Take as many as there is room for; batches are twice as many as can run."""
        room = self.concurrency * (2 if self.pool_kind == BATCHES else 1)
        while self.machine.in_pool < room:
            delivery = next(ready, None)
            if delivery is None:
                break
            if self.pool_kind == SOLO:
                self._run_here(delivery)
            else:
                self._waiting.append(delivery)
        self._begin_some()

    def _run_here(self, delivery: CheckedDelivery) -> None:
        run = Run(delivery)
        self._starts(delivery)
        self._began(run)
        self.play.finished(delivery.task, run.ends)
        self._ends(run)

    def _begin_some(self) -> None:
        world = self._world
        while self._waiting and len(self.running) < self.concurrency:
            delivery = self._waiting.popleft()
            run = Run(delivery)
            self.running.append(run)
            self._starts(delivery)
            takes_s = delivery.task.takes_s
            dies = self.play.loses_child(self)
            if not dies or world.dice() < 0.7:  # else before it could report anything
                self.later(REPORT_S * world.dice(), self._began, run)
            if dies:
                world.at(world.now + takes_s * world.dice(), self._child_dies, run)
            else:
                world.at(world.now + max(takes_s, REPORT_S), self._over, run)

    def _starts(self, delivery: CheckedDelivery) -> None:
        task = delivery.task
        if self._world.story is not None:
            self._world.remark(self.name, f"runs {delivery.id}")
        if self.play.broker.tied and not delivery.message.channel.is_open:
            self._allow_again([task])  # it does not know yet that the message comes again
        task.runs += 1
        self.play.checks.started(self, task)

    def _began(self, run: Run) -> None:
        self.machine.began(run.delivery)

    def _over(self, run: Run, _: Any) -> None:
        """In the pool: the code ends, and its result is stored there."""
        if run.is_over:
            return
        run.is_over = True
        self.play.finished(run.delivery.task, run.ends)
        self.later(REPORT_S * self._world.dice() + REPORT_S, self._ended, run)

    def _ended(self, run: Run) -> None:
        self.running.remove(run)
        self._ends(run)
        self._has_room()

    def _ends(self, run: Run) -> None:
        delivery, ends = run.delivery, run.ends
        if ends == SUCCESS:
            self.machine.ended(delivery, ACK)
        elif ends == FAILURE:
            self.machine.ended(delivery, self.machine.how_failed(delivery))
        elif ends == REJECTED:
            self.machine.ended(delivery, REJECT)
        else:
            assert ends == REQUEUED
            delivery.task.excuses += 1
            self.machine.ended(delivery, REQUEUE)

    def _child_dies(self, run: Run, _: Any) -> None:
        if run.is_over:
            return
        self._kill(run)
        self.later(REPORT_S, self._child_lost, run)

    def _child_lost(self, run: Run) -> None:
        delivery = run.delivery
        self.running.remove(run)
        if self.machine.child_lost(delivery):
            delivery.task.excuses += 1
        else:
            self.machine.failed(delivery)
            self._aside(self._failed, delivery)
        self._has_room()

    def _failed(self, delivery: CheckedDelivery) -> None:
        self.play.stored(delivery.task, FAILURE)
        self.machine.stored(delivery, self.machine.how_failed(delivery))

    def _has_room(self) -> None:
        self._begin_some()
        self.machine.dispatch()

    def recall(self) -> Sequence[CheckedDelivery]:
        """Take back what has not begun."""
        recalled, self._waiting = list(self._waiting), deque()
        return recalled

    def cancel(self, delivery: CheckedDelivery) -> None:
        """End a running task."""
        for run in self.running:
            if run.delivery is delivery and not run.is_over:
                run.is_over = True
                delivery.task.excuses += 1
                self.later(REPORT_S, self._terminated, run)

    def _terminated(self, run: Run) -> None:
        self.running.remove(run)
        self.machine.terminated(run.delivery, SIGTERM)
        self._has_room()

    # -- effects: the side thread --------------------------------------------------------

    def _aside(self, done: Callable[..., None], *args: Any) -> None:
        self._asides += 1
        self.later(self._side_s * self._world.dice(), self._done_aside, done, args)

    def _done_aside(self, done: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._asides -= 1
        done(*args)

    def store_revoked(self, delivery: CheckedDelivery, why: str, signum: int | None) -> None:
        """Store that it is revoked, or has expired."""
        self._aside(self._stored_revoked, delivery, why)

    def _stored_revoked(self, delivery: CheckedDelivery, why: str) -> None:
        self.play.stored(delivery.task, why)
        self.machine.stored(delivery, ACK)

    def read_states(self, ids: Sequence[str], then: Callable[[dict[str, Any]], None]) -> None:
        """What the result backend knows."""
        moment = datetime.fromtimestamp(self.play.wall(), UTC).isoformat()
        cause = TaskRevokedError("revoked")
        revoked = {"status": "REVOKED", "result": cause, "date_done": moment}
        self._aside(then, {one: revoked for one in ids if self.play.is_revoked(one)})

    def return_old(self) -> None:
        """What waits is too old for the broker, and goes back behind the others."""
        self.act(self._return_old)

    def _return_old(self) -> None:
        if self.channel is not None and not self.is_stopping:
            self.machine.return_waiting(self.machine.unsettled())

    def learn_revoked(self, task_id: str) -> None:
        """It hears of a revocation."""
        self.act(self._learn_revoked, task_id)

    def _learn_revoked(self, task_id: str) -> None:
        self.revocations.revoke(task_id, self.play.wall())
        self.machine.discard_waiting(self.machine.held_of([task_id]), "revoked")

    # -- effects: timers and queues ------------------------------------------------------

    def call_after(self, wait_s: float, call: Callable[..., None], *args: Any) -> Timer:
        """Call something later."""
        return self._timer(wait_s, call, *args)

    def _timer(self, wait_s: float, call: Callable[..., None], *args: Any) -> Timer:
        timer = Timer(call, args)
        self._timers.append(timer)
        if len(self._timers) > 200:
            self._timers = [one for one in self._timers if one.call is not None]
        self.later(wait_s, timer.fire)
        return timer

    def drop_timers(self) -> None:
        """A lost connection takes all timers with it."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def queue_of(self, letter: Letter) -> str:
        """The queue that a message came from."""
        return letter.stored.task.queue

    origin_of = queue_of

    def can_rest(self, queue: str) -> bool:
        """Queues last."""
        return self.channel is not None

    def rest(self, queue: str) -> None:
        """Consume a queue no longer."""
        if self.channel is not None:
            self.channel.consuming.pop(queue, None)

    def resume(self, queue: str) -> None:
        """Consume a queue again."""
        if self.channel is not None and not self.is_stopping:
            self.channel.consuming[queue] = None
            self.play.broker.pump()

    def length_of(self, queue: str) -> int | None:
        """How many messages are in a queue."""
        pending = self._returning or self._copying
        return None if pending else len(self.play.broker.queues[queue])

    # -- effects: logs and events --------------------------------------------------------

    def received(self, delivery: CheckedDelivery) -> None:
        """Events are not played."""

    adopted = received

    def already_settled(self, header: TaskHeader, how: str) -> None:
        """Nor are logs."""

    def states_are_late(self, patience_s: float) -> None:
        """Nor are logs."""

    surplus_returned = states_are_late
