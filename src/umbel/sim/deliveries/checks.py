"""What must hold for deliveries: at every step, and when all is calm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from umbel.sim.deliveries.brokers import VISIBILITY_S
from umbel.sim.outcomes import Verdicts
from umbel.worker.delivery.states import State

if TYPE_CHECKING:
    from umbel.sim.deliveries.plays import Play
    from umbel.sim.deliveries.tasks import Letter, Task
    from umbel.sim.deliveries.workers import SimWorker

NOT_LOST: Final = "a late-acknowledged task is not lost"
LOST_RUNNING: Final = "an early-acknowledged task is lost only if it was running"
SETTLED_ONCE: Final = "a message is settled once, on the connection that brought it"
RUNS_ONCE: Final = "a task runs twice only where docs/guarantees says so"
WINDOW: Final = "the prefetch window equals its formula"
NOTHING_STAYS: Final = "nothing stays held, parked, in the pool or in the broker"
ORDER: Final = "what is given back keeps its order"
TABLE: Final = "every transition is in the table"
CHORDS: Final = "the body of a chord is sent once, when all parts have ended"
REVOKED: Final = "a task that a worker knows to be revoked does not begin there"

LEASES: Final = "no message waits for the visibility timeout while its worker is there"

# The counts of a worker are compared with its states at this many turns, and at the end.
_LOOK_EVERY: Final = 8


class Checks(Verdicts):
    """What has happened in a play, as far as rules are about it."""

    def __init__(self, play: Play) -> None:
        super().__init__(play.world)
        self._play = play
        self._turns = 0

    def started(self, worker: SimWorker, task: Task) -> None:
        """The code of a task begins."""
        if task.runs > 1 + task.excuses:
            self.violated(RUNS_ONCE, f"{task.header.id} begins for the {task.runs}. time")
        if worker.revocations.any and worker.revocations.revokes(task.header.id, None):
            self.violated(REVOKED, f"{worker.name} begins {task.header.id}")

    def settled_twice(self, letter: Letter, how: str) -> None:
        """A message was settled that had been."""
        self.violated(SETTLED_ONCE, f"{letter.stored.task.header.id}: {how}, and before")

    def foreign(self, worker: SimWorker, letter: Letter, how: str) -> None:
        """A message was settled on another connection."""
        seen = f"{worker.name}, {letter.stored.task.header.id}: {how} on another connection"
        self.violated(SETTLED_ONCE, seen)

    def order(self, letter: Letter) -> None:
        """A message was given back before a newer one."""
        self.violated(ORDER, f"{letter.stored.task.header.id} lies before an older one")

    def gone_back(self, letter: Letter) -> None:
        """A message went back because nobody has renewed it for long."""
        worker, now = letter.channel.worker, self._play.world.now
        was_there = now - worker.went_on_at > 2 * VISIBILITY_S
        if worker.is_alive and not worker.is_paused and was_there:
            seen = f"{worker.name} has not renewed {letter.stored.task.header.id}"
            self.violated(LEASES, seen)

    def worker(self, worker: SimWorker) -> None:
        """Compare the counts of a worker with its states, now and then."""
        self._turns += 1
        if self._turns % _LOOK_EVERY == 0:
            self.counts(worker)

    def counts(self, worker: SimWorker) -> None:
        """Compare the counts of a worker with its states."""
        machine, prefetch = worker.machine, worker.prefetch
        held = parked = in_pool = owed = ready = 0
        for one in machine.reserved.values():
            state = one.state
            owed += one.owed
            if state is State.HELD:
                held += 1
            elif state is State.PARKED:
                parked += 1
            elif state is State.READY:
                ready += 1
            else:
                in_pool += 1
        adopted = len(machine.redeliveries.adopted)
        seen = prefetch.held, prefetch.parked, machine.in_pool, prefetch.debtors, prefetch.adopted
        true = held, parked, in_pool, owed, adopted
        if seen != true or ready != len(machine.ready):
            self.violated(WINDOW, f"{worker.name} counts {seen}, and has {true}")
        multiplier = prefetch.multiplier
        window = max(multiplier, (worker.concurrency - owed) * multiplier) + parked + adopted
        window += held if prefetch.held_max is None else min(held, prefetch.held_max)
        if prefetch.window != window:
            self.violated(WINDOW, f"{worker.name}: {prefetch.window}, not {window}")

    def finish(self) -> None:
        """The play is over, and everything has had its time."""
        play = self._play
        for worker in play.workers:
            if worker.is_alive:
                self._idle(worker)
        if not play.broker.is_empty():
            self.violated(NOTHING_STAYS, "messages are left in the broker")
        for task in play.tasks:
            if task.done:
                continue
            if task.kind.acks_late:
                self.violated(NOT_LOST, f"{task.header.id} has no outcome")
            elif not task.killed:
                self.violated(LOST_RUNNING, f"{task.header.id} was not running, and is lost")
        for number, parts in enumerate(play.chords):
            sent, whole = play.bodies[number], all(part.done for part in parts)
            if sent != whole:
                self.violated(CHORDS, f"the body of chord {number} was sent {sent} times")

    def _idle(self, worker: SimWorker) -> None:
        self.counts(worker)
        machine, prefetch = worker.machine, worker.prefetch
        left = {
            "reserved": len(machine.reserved),
            "leaving": len(machine.leaving),
            "active": len(machine.active),
            "in pool": machine.in_pool,
            "adopted": prefetch.adopted,
        }
        for name, count in left.items():
            if count:
                self.violated(NOTHING_STAYS, f"{worker.name} has {count} {name}")
        if prefetch.window != prefetch.base:
            self.violated(WINDOW, f"{worker.name} is idle at {prefetch.window}")
