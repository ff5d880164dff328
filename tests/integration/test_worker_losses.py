"""Processes that die: of a pool, or a whole worker, with or without acknowledged messages."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading

import psutil
import pytest

from tests.servers import wait_until
from tests.sites import Site
from tests.sizes import size
from tests.workers import WorkerProcess
from umbel.exceptions import WorkerLostError
from umbel.worker.delivery.machine import LOSSES_MAX

# Messages of a worker that was killed come back after a second, instead of an hour.
SOON_BACK = {
    "broker_transport_options": {
        "visibility_timeout": 1,
        "unacked_restore_interval": 0.25,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 1,
    }
}
TASKS_COUNT, KILLS_COUNT, WORKER_KILLS_COUNT = size(160, 400), size(8, 20), size(3, 6)


def test_no_late_acknowledged_task_is_lost_when_processes_are_killed_under_load(
    site: Site,
) -> None:
    seed = 20
    dice = random.Random(seed)
    settings = SOON_BACK if site.broker_url.startswith("redis") else {}
    workers = [site.worker("prefork", settings=settings) for _ in range(2)]
    tokens = {f"token-{n}" for n in range(TASKS_COUNT)}
    for token in tokens:
        site.send("record_late", token, 0.03, ignore_result=True)
    kills = ["worker"] * WORKER_KILLS_COUNT + ["process"] * (KILLS_COUNT - WORKER_KILLS_COUNT)
    dice.shuffle(kills)
    done = 0
    for number, kind in enumerate(kills):
        goal = number * 3 * TASKS_COUNT // (4 * KILLS_COUNT)
        wait_until(lambda goal=goal: site.notes.hlen("runs") >= goal, 20, f"{goal} tasks")
        done = site.notes.hlen("runs")
        victim = dice.randrange(len(workers))
        if kind == "process":
            kill_a_pool_process(workers, dice)
        else:
            children = psutil.Process(workers[victim].pid).children()
            workers[victim].signal(signal.SIGKILL)
            assert workers[victim].process.wait(10) == -signal.SIGKILL
            wait_until(lambda c=children: not any(map(lives, c)), 5, "the end of its processes")
            workers[victim] = site.worker("prefork", settings=settings, wait=False)
    assert done < TASKS_COUNT, "the load was over before the last kill"
    wait_until(lambda: site.notes.hlen("runs") == TASKS_COUNT, 20, f"all tasks (seed {seed})")
    assert {token.decode() for token in site.notes.hkeys("runs")} == tokens
    wait_until(lambda: site.waiting() == 0, what="an empty queue")
    for worker in workers:
        worker.wait_until_ready()
        assert worker.stop() == 0


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    return False


def kill_a_pool_process(workers: list[WorkerProcess], dice: random.Random) -> None:
    def kill() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            children = [c for w in workers for c in psutil.Process(w.pid).children()]
            if children:
                os.kill(dice.choice(children).pid, signal.SIGKILL)
                return True
        return False

    wait_until(kill, what="a pool process to kill")


def test_an_early_acknowledged_task_whose_process_is_killed_fails(site: Site) -> None:
    site.worker("prefork")
    lost = site.send("die", "early")
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        lost.get(timeout=30)
    assert site.runs("early") == 1
    assert site.works(), "the process was not replaced"
    assert site.waiting() == 0


def test_a_late_acknowledged_task_whose_process_is_killed_runs_again(site: Site) -> None:
    site.worker("prefork")
    assert site.send("die_late", "late", 2).get(timeout=30) == 3


def test_a_task_that_always_takes_its_process_with_it_fails_in_the_end(site: Site) -> None:
    site.worker("prefork", concurrency=1)
    with pytest.raises(WorkerLostError):
        site.send("die_late", "deadly", 10_000).get(timeout=30)
    assert site.runs("deadly") == LOSSES_MAX + 1
    assert site.works()
    assert site.waiting() == 0


def test_a_late_acknowledged_task_that_must_not_run_again_fails(site: Site) -> None:
    site.worker("prefork")
    with pytest.raises(WorkerLostError):
        site.send("die_late_once", "once").get(timeout=30)
    assert site.works()
    assert site.runs("once") == 1
    assert site.waiting() == 0


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_messages_of_a_killed_worker_are_delivered_to_another_one(site: Site, pool: str) -> None:
    settings = SOON_BACK if site.broker_url.startswith("redis") else {}
    first = site.worker(pool, settings=settings)
    result = site.send("wait_late", "taken over")
    site.wait_until_begun("taken over")
    first.signal(signal.SIGKILL)
    first.process.wait(10)
    site.worker(pool, settings=settings)
    site.wait_until_begun("taken over")
    site.open_gate("taken over")
    site.open_gate("taken over")
    assert result.get(timeout=30) == "taken over"


def test_other_tasks_go_on_while_pool_processes_are_killed(redis_site: Site) -> None:
    site = redis_site
    worker = site.worker("prefork")
    stop = threading.Event()

    def kill_now_and_then() -> None:
        dice = random.Random(1)
        while not stop.wait(0.3):
            kill_a_pool_process([worker], dice)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        results = [site.send("record_late", f"{n}", 0.02) for n in range(100)]
        assert all(result.get(timeout=30) for result in results)
    finally:
        stop.set()
        killer.join()
    assert site.works()
