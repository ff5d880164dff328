"""What a worker costs: processor time when idle, time to start, memory over many tasks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.sites import APP, Site
from tests.sizes import size
from tests.workers import ROOT, Program, WorkerProcess

IDLE_S = 5.0
SHARE_MAX = 0.01


def cpu_s(pid: int) -> float:
    """Processor time of a process and everything below it."""
    parent = psutil.Process(pid)
    times = [p.cpu_times() for p in (parent, *parent.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def idle_share(worker: Program) -> float:
    """The share of a core that an idle worker uses; the least of up to three looks.

    What it does after its start, and a machine that is busy with others, spoil a look.
    """
    shares: list[float] = []
    while len(shares) < 3 and min(shares, default=1.0) >= SHARE_MAX:
        before, began = cpu_s(worker.pid), time.monotonic()
        threading.Event().wait(IDLE_S)  # the thing measured is the absence of events
        shares.append((cpu_s(worker.pid) - before) / (time.monotonic() - began))
    return min(shares)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_an_idle_worker_uses_less_than_a_hundredth_of_a_core(redis_site: Site, pool: str) -> None:
    worker = redis_site.worker(pool)
    assert redis_site.works()
    assert idle_share(worker) < SHARE_MAX


def embedded(start_worker: Callable[..., WorkerProcess], tmp_path: Path) -> WorkerProcess:
    environment = {"PROBE_URL": "redis://127.0.0.1:1/0"}  # these tasks are not sent here
    return start_worker(
        APP, ["-P", "threads", "-c", "2"], cwd=tmp_path, env=environment, fresh=True
    )


def test_a_worker_on_the_embedded_broker_starts_quickly_and_idles_cheaply(
    start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    seconds = []
    for _ in range(2):
        began = time.monotonic()
        worker = embedded(start_worker, tmp_path)
        seconds.append(time.monotonic() - began)
        if len(seconds) == 2:
            assert idle_share(worker) < SHARE_MAX
        assert worker.stop() == 0
    assert min(seconds) < 2, f"start to ready took {seconds} s"


@pytest.mark.slow
def test_memory_after_ten_times_as_many_tasks_is_the_same(
    start: Callable[..., Program],
) -> None:
    some = size(3_000, 10_000)
    script = str(ROOT / "tests/integration/memory_growth.py")
    program = start([sys.executable, script, str(some), str(10 * some)])
    assert program.wait(110) == 0
    readings = [line.split() for line in program.lines if line and line[0].isdigit()]
    (_, early), (_, late) = readings
    assert int(late) <= int(early) * 1.05, f"{early} KiB after {some} tasks, {late} KiB after"
