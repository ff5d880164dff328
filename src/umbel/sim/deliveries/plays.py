"""One seed of deliveries: a broker, some workers, tasks and faults, then calm.

Faults go on for some seconds of virtual time. Then connections stay, and the workers that are left
get as long as it takes, up to a bound, to run and settle everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from umbel.sim.deliveries.brokers import AmqpModel, Broker, RedisModel
from umbel.sim.deliveries.checks import NOTHING_STAYS, TABLE, Checks
from umbel.sim.deliveries.tasks import (
    FAILURE,
    KINDS,
    REJECTED,
    REQUEUED,
    SUCCESS,
    CheckedDelivery,
    ForbiddenTransition,
    Letter,
    Task,
)
from umbel.sim.deliveries.workers import Endless, SimWorker
from umbel.sim.outcomes import Outcome
from umbel.sim.world import World
from umbel.worker.delivery.machine import Deliveries

WALL_S: Final = 1.7e9
WORKERS_MAX: Final = 9
CALM_MAX_S: Final = 400.0
LOOK_S: Final = 0.5
FAULTS: Final = (
    "kill", "pause", "cut", "silent-cut", "broker", "slow", "warm", "cold", "child", "revoke",
    "too-old",
)  # fmt: skip
# One play in this many has thousands of tasks.
LARGE_SHARE, LARGE_COUNT = 0.001, 2_000


@dataclass(frozen=True, slots=True)
class Parts:
    """What workers are made of; `mutations` has others."""

    machine: Callable[..., Deliveries[CheckedDelivery]] = Deliveries


HONEST: Final = Parts()


@dataclass(frozen=True, slots=True)
class Setting:
    """What the caller chooses instead of the seed."""

    nodes: int | None = None
    faults: tuple[str, ...] = FAULTS
    seconds: float | None = None
    parts: Parts = HONEST


DEFAULT: Final = Setting()


def play(seed: int, setting: Setting = DEFAULT, *, tells: bool = False) -> Outcome:
    """Run one seed."""
    return Play(seed, setting, tells=tells).run()


class Play:
    """The workers of one seed, and what happens to them."""

    def __init__(self, seed: int, setting: Setting, *, tells: bool) -> None:
        self.seed, self.parts = seed, setting.parts
        world = self.world = World(seed, tells=tells)
        dice = world.dice
        self.checks = Checks(self)
        self.kinds = KINDS
        self.broker: Broker = RedisModel(self) if dice() < 0.5 else AmqpModel(self)
        queues = ["q"] if dice() < 0.7 else ["q", "r"]
        self.broker.queues = {name: deque() for name in queues}
        self.calm_at = setting.seconds or world.between(0.5, 4.0)
        self.reduces = dice() < 0.8
        count = setting.nodes or self._draw_count()
        self.is_alone = count == 1
        chosen = [name for name in setting.faults if dice() < 0.3]
        self.faults = chosen or list(setting.faults[:1])
        self._revoked: set[str] = set()
        self.tasks: list[Task] = []
        self.chords: list[list[Task]] = []
        self.bodies: list[int] = []
        self.workers = [SimWorker(self, index, 1) for index in range(count)]
        self._send_some(queues)
        self._plan_faults()

    def _draw_count(self) -> int:
        dice = self.world.dice
        chance = dice()
        return 1 if chance < 0.45 else 2 if chance < 0.8 else 3 + int(dice() * (WORKERS_MAX - 2))

    # -- what there is to do -------------------------------------------------------------

    def _send_some(self, queues: list[str]) -> None:
        world, dice = self.world, self.world.dice
        count = 2 + int(dice() ** 3 * 60)
        is_large = dice() < LARGE_SHARE
        if is_large:
            count = LARGE_COUNT
        for number in range(count):
            at = world.between(0.0, 0.8 * self.calm_at) if dice() < 0.5 else 0.0
            task = self._make(f"t{number + 1}", world.pick(queues))
            if is_large:
                task.takes_s /= 50
            if dice() < 0.15:
                task.eta_s = WALL_S + at + world.between(-1.0, 3.0)
            if dice() < 0.05:
                task.expires_s = WALL_S + at + world.between(0.0, 3.0)
            world.at(at, self._send, task)
        if dice() < 0.2:
            parts = [self._make(f"c{n + 1}", queues[0]) for n in range(2 + int(dice() * 4))]
            self.chords.append(parts)
            self.bodies.append(0)
            for part in parts:
                part.chord = 0
                world.at(0.0, self._send, part)

    def _make(self, id_: str, queue: str) -> Task:
        world, dice = self.world, self.world.dice
        takes_s = 0.01 * dice() if dice() < 0.6 else world.between(0.1, 2.0)
        chance = dice()
        ends = SUCCESS
        if chance > 0.8:
            ends = FAILURE if chance < 0.9 else REJECTED if chance < 0.95 else REQUEUED
        kind = world.pick(self.kinds)
        if ends == REQUEUED and not kind.acks_late:
            ends = SUCCESS
        task = Task(id_, kind, queue, takes_s, ends)
        if kind.name.startswith("slow"):
            task.takes_s = 0.01 * dice()
        self.tasks.append(task)
        return task

    def _send(self, task: Task, _: Any) -> None:
        self.broker.send(task)

    # -- faults --------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        world = self.world
        for kind in self.faults:
            if kind == "child":
                continue
            for _ in range(1 + int(world.dice() * 3)):
                world.at(world.between(0.0, self.calm_at), self._happen, kind)

    def _happen(self, kind: str, _: Any) -> None:
        world = self.world
        alive = [worker for worker in self.workers if worker.is_alive]
        if kind == "revoke":
            self._revoke()
        elif kind == "slow":
            world.tell("broker", "is slow")
            self.broker.slow_until = world.now + world.between(0.1, 1.0)
        elif kind == "broker":
            self._restart_broker()
        elif alive:
            self._happen_to(world.pick(alive), kind)

    def _happen_to(self, worker: SimWorker, kind: str) -> None:
        world = self.world
        world.tell(worker.name, kind)
        if kind == "kill":
            worker.die()
        elif kind == "pause" and not worker.is_paused:
            worker.stand_still()
            world.at(world.now + world.between(0.05, 6.0), self._go_on, worker)
        elif kind in ("cut", "silent-cut"):
            worker.cut(silent=kind == "silent-cut")
        elif kind == "too-old":
            worker.return_old()
        elif kind in ("warm", "cold"):
            worker.stop(cold=kind == "cold")

    def _go_on(self, worker: SimWorker, _: Any) -> None:
        if worker.is_paused:
            self.world.tell(worker.name, "goes on")
            worker.go_on()

    def _restart_broker(self) -> None:
        world = self.world
        world.tell("broker", "restarts")
        self.broker.is_down = True
        for worker in self.workers:
            if worker.is_alive:
                worker.cut(silent=False)
        world.at(world.now + world.between(0.05, 0.8), self._broker_is_back)

    def _broker_is_back(self, _a: Any = None, _b: Any = None) -> None:
        self.broker.is_down = False
        self.broker.pump()

    def _revoke(self) -> None:
        world = self.world
        task = world.pick(self.tasks)
        if task.revoked:
            return
        task.revoked = True
        world.tell("client", f"revokes {task.header.id}")
        self._revoked.add(task.header.id)
        for worker in self.workers:
            worker.later(0.02 * world.dice(), worker.learn_revoked, task.header.id)

    def is_revoked(self, task_id: str) -> bool:
        """Whether the result backend knows that a task is revoked."""
        return task_id in self._revoked

    def loses_child(self, worker: SimWorker) -> bool:
        """Whether the process of a task that begins will die."""
        if "child" not in self.faults or self.world.now > self.calm_at:
            return False
        return self.world.dice() < 0.1

    def ended(self, worker: SimWorker) -> None:
        """A worker has ended: one time in two its next life begins soon."""
        world = self.world
        others = any(one.is_alive and one is not worker for one in self.workers)
        if world.dice() < 0.6 or not others:
            world.at(world.now + world.between(0.05, 1.0), self._restart, worker)

    def _restart(self, before: SimWorker, _: Any) -> None:
        worker = SimWorker(self, before.index, before.life + 1)
        self.world.tell(worker.name, "begins")
        self.workers.append(worker)
        for task_id in self._revoked:  # which the other workers send it
            worker.revocations.revoke(task_id, self.wall())

    # -- what happens to tasks -----------------------------------------------------------

    def clock(self) -> float:
        """Monotonic time, the same for all."""
        return self.world.now

    def wall(self) -> float:
        """Unix time, the same for all."""
        return WALL_S + self.world.now

    def finished(self, task: Task, ends: str) -> None:
        """The code of a task has ended like this, and its result is stored."""
        if ends != REQUEUED:
            self.stored(task, ends)

    def rejected(self, task: Task) -> None:
        """The broker has dropped a message."""

    def gone_back(self, letter: Letter) -> None:
        """Redis has taken a message from a worker that has not renewed it for long."""
        self.checks.gone_back(letter)
        letter.stored.task.excuses += 1

    def stored(self, task: Task, outcome: str) -> None:
        """An outcome is in the result backend; a part of a chord counts once."""
        is_first, task.done = not task.done, outcome
        if task.chord is None or not is_first:
            return
        parts = self.chords[task.chord]
        if all(part.done for part in parts):
            self.bodies[task.chord] += 1
            body = self._make(f"body{task.chord}", task.queue)
            self._send(body, None)

    # -- the course of it ----------------------------------------------------------------

    def run(self) -> Outcome:
        """Let it happen."""
        world = self.world
        settled_s = None
        try:
            world.run(self.calm_at)
            world.tell("calm", "all faults end")
            self.broker.is_down, self.broker.slow_until = False, 0.0
            for worker in list(self.workers):
                if worker.is_paused and worker.is_alive:
                    worker.go_on()
            calm_s = 0.0
            while calm_s < CALM_MAX_S and settled_s is None:
                calm_s += LOOK_S
                world.run(self.calm_at + calm_s)
                if self._is_settled():
                    settled_s = calm_s
        except ForbiddenTransition as exc:
            self.checks.violated(TABLE, str(exc))
        except Endless:
            self.checks.violated(NOTHING_STAYS, "the play does not end")
        else:
            self.checks.finish()
        for task in self.tasks:
            world.note(task.runs)
        figures = {
            "broker": self.broker.name,
            "nodes": len(self.workers),
            "faults": self.faults,
            "seconds": round(self.calm_at, 3),
            "settled_s": settled_s,
            "tasks": len(self.tasks),
            "runs": sum(task.runs for task in self.tasks),
            "again": sum(task.runs > 1 for task in self.tasks),
            "lost": sum(not task.done for task in self.tasks),
            "events": world.event_count,
        }
        return Outcome(self.seed, world.hash, self.checks.violations, world.story or [], figures)

    def _is_settled(self) -> bool:
        if not self.broker.is_empty():
            return False
        return not any(
            worker.machine.reserved or worker.machine.leaving or worker.machine.in_pool
            for worker in self.workers
            if worker.is_alive
        )
