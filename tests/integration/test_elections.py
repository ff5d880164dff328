"""Elections among real workers: each is held, and each acts once, whoever is killed or stopped.

`UMBEL_ELECTIONS` is how many each cluster holds; with it all clusters are of all kinds of pools.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kombu import Exchange, Producer

from tests.ears import Ears
from tests.servers import RabbitMQServer, RedisServer, wait_until
from tests.sites import APP, Site
from tests.workers import Program, WorkerProcess, run_umbel
from umbel.app.events.outlet import event_exchange
from umbel.app.results import AsyncResult
from umbel.broker.registers import register_for
from umbel.cluster.election import node_of
from umbel.wire.events import OWN_EXCHANGE

FULL = "UMBEL_ELECTIONS" in os.environ
ELECTIONS = int(os.environ.get("UMBEL_ELECTIONS", "10"))
SEED = int(os.environ.get("UMBEL_ELECTIONS_SEED", "6"))
# So many are held at a time, and during each such round one worker is killed or stopped.
ROUND = 10
SIZES = {
    "prefork": (1, 2, 3, 5, 8) if FULL else (1, 3, 5),
    "solo": (1, 2, 3, 5, 8) if FULL else (1, 2, 8),
}
DECISION_S = 5.0
WORK = "work"


def ask(site: Site, command: str, node: str, **arguments: Any) -> Any:
    """What one node answers."""
    replies = site.app.control.broadcast(
        command, arguments, destination=[node], reply=True, timeout=20
    )
    assert replies, f"{node} does not answer {command}"
    return replies[0][node]


def signature(site: Site, task: str, *args: Any, **options: Any) -> Any:
    return site.app.signature(f"{APP}.{task}", args=args, options=options)


# -- many, with faults -----------------------------------------------------------------------


class Cluster:
    """Workers that elect; the elected tasks run elsewhere, so that killing an elector kills none.

    Every worker has a name of its own, also one that takes the place of another.
    """

    def __init__(self, site: Site, pool: str, seed: int) -> None:
        self.site, self.pool = site, pool
        self.dice = random.Random(seed)
        self.workers: dict[str, WorkerProcess] = {}
        self.elected: list[str] = []
        self.gaps: list[str] = []  # claimed by who died before it could send; RabbitMQ only
        self.slowest_s = 0.0
        self._count = 0
        self._starting: list[WorkerProcess] = []
        self.runner = site.worker(
            "threads", "-n", "runner@test", "-Q", WORK, "--without-gossip", "--without-mingle",
            concurrency=4,
        )  # fmt: skip

    def grow(self, size: int) -> None:
        """Have so many workers, all of them ready."""
        while len(self.workers) < size:
            self._count += 1
            name = f"w{self._count}@test"
            self.workers[name] = worker = self.site.worker(
                self.pool, "-n", name, "-Q", "idle", concurrency=1, wait=False
            )
            self._starting.append(worker)
        while self._starting:
            self._starting.pop().wait_until_ready()

    def hold(self, count: int) -> None:
        """Hold so many elections, some at a time."""
        for start in range(0, count, ROUND):
            self.grow(len(self.workers))
            self._round(min(ROUND, count - start))
            for name, worker in self.workers.items():
                assert worker.process.poll() is None, f"{name} ended: {worker.output[-3_000:]}"

    def _round(self, count: int) -> None:
        victim = self.dice.choice(sorted(self.workers))
        # Nobody would be left to know of it if the only one was killed.
        kills = len(self.workers) > 1 and self.dice.random() < 0.5
        ids = [f"{self.pool}-{uuid.UUID(int=self.dice.getrandbits(128))}" for _ in range(count)]
        hit_s, back_s = self.dice.uniform(0, 1.2), self.dice.uniform(0.5, 1.5)
        again_later = []
        for number, id_ in enumerate(ids):
            election = signature(self.site, "record", id_, queue=WORK, task_id=id_)
            election.election()
            if number % 4 == 1:
                election.election()
            elif number % 4 == 3:
                again_later.append(election)
        began = time.monotonic()
        time.sleep(hit_s)
        self._harm(victim, kills)
        if len(self.workers) == 1 and not kills:
            time.sleep(back_s)
            self.workers[victim].signal(signal.SIGCONT)
            began = time.monotonic()
        open_ = self._await(ids, began)
        if not kills:
            self.workers[victim].signal(signal.SIGCONT)
        self._account(open_, victim, kills)
        for election in again_later:
            election.election()
        self.elected += ids

    def _harm(self, victim: str, kills: bool) -> None:
        if kills:
            self.workers.pop(victim).kill()
            self._replace()
        else:
            self.workers[victim].signal(signal.SIGSTOP)

    def _replace(self) -> None:
        self._count += 1
        name = f"w{self._count}@test"
        worker = self.site.worker(self.pool, "-n", name, "-Q", "idle", concurrency=1, wait=False)
        self.workers[name] = worker
        self._starting.append(worker)

    def _await(self, ids: list[str], began: float) -> list[str]:
        """Wait for the results; those that have none in time."""
        left = list(ids)
        while left and time.monotonic() < began + DECISION_S:
            left = [id_ for id_ in left if not self._ran(id_)]
            time.sleep(0.01)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        return left

    def _ran(self, id_: str) -> bool:
        return self.site.runs(id_) > 0

    def _account(self, late: list[str], victim: str, killed: bool) -> None:
        """Only RabbitMQ knows a moment between claiming and sending, and only for the victim."""
        for id_ in late:
            assert self.site.broker_url.startswith("amqp"), f"{id_} was not decided in time"
            winner = self._winner(id_)
            assert winner is not None, f"{id_} was not decided in time"
            assert node_of(winner) == victim, f"{id_}: {winner} has not sent it"
            if killed:
                self.gaps.append(id_)
            else:
                wait_until(lambda one=id_: self._ran(one), 10, f"{winner} to send {id_}")

    def _winner(self, id_: str) -> str | None:
        register = register_for(self.site.app.connection())
        assert register is not None
        try:
            return register.winner(id_)
        finally:
            register.close()

    def check(self) -> None:
        """Everything ran once, also after everybody had time to do it again."""
        for name in self.workers:
            wait_until(lambda one=name: not ask(self.site, "elections", one)["open"], 20, "calm")
        wait_until(lambda: self.site.waiting(WORK) == 0, 20, "all that was sent to be run")
        runs = {id_: self.site.runs(id_) for id_ in self.elected}
        wrong = {id_: count for id_, count in runs.items() if count != 1 and id_ not in self.gaps}
        assert wrong == {}
        assert all(runs[id_] == 0 for id_ in self.gaps)
        for id_ in self.elected:
            if id_ not in self.gaps:
                assert self.site.app.AsyncResult(id_).get(timeout=20) == 1


@pytest.mark.timeout(120 + 10 * ELECTIONS)
@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_each_election_acts_once_although_workers_are_killed_and_stopped(
    site: Site, pool: str
) -> None:
    cluster = Cluster(site, pool, SEED)
    began = time.monotonic()
    for size in SIZES[pool]:
        cluster.grow(size)
        cluster.hold(ELECTIONS)
    cluster.check()
    print(
        f"{len(cluster.elected)} elections in {time.monotonic() - began:.0f} s, the slowest round "
        f"{cluster.slowest_s:.1f} s, claimed and not sent {len(cluster.gaps)}"
    )
    for worker in cluster.workers.values():
        assert worker.stop() == 0
