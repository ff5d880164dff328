"""Solo in the main thread, where limits are signals."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tests.unit.pools.bench import Bench, Recorder
from tests.unit.pools.conftest import StartBench
from umbel.worker.execution.jobs import Job, JobResult


@pytest.fixture
def solo(start_bench: StartBench) -> Bench:
    return start_bench("solo")


def submit(
    bench: Bench, task: str, soft_s: float | None = None, hard_s: float | None = None
) -> Recorder:
    recorder = Recorder()
    bench.pool.submit(bench.job(task), recorder, soft_s, hard_s)
    return recorder


def test_submit_returns_when_the_job_has_been_reported(solo: Bench) -> None:
    assert submit(solo, "echo").names == ["accepted", "finished"]


def test_the_soft_limit_is_an_alarm(solo: Bench) -> None:
    recorder = submit(solo, "catch", soft_s=0.05)
    assert recorder.names == ["accepted", "soft_limit", "finished"]
    assert recorder.result.text == "caught"


def test_the_hard_limit_interrupts_even_a_blocking_call(start_bench: StartBench) -> None:
    def block(job: Job) -> JobResult:
        try:
            time.sleep(60)
        except Exception:
            time.sleep(60)
        return JobResult("SUCCESS", 0.0, "", "")

    bench = start_bench("solo", run=block)
    assert submit(bench, "any", soft_s=0.05, hard_s=0.15).names == [
        "accepted",
        "soft_limit",
        "hard_limit",
    ]


def test_the_alarm_of_before_is_put_back(solo: Bench) -> None:
    before = signal.getsignal(signal.SIGALRM)
    submit(solo, "echo", soft_s=10, hard_s=20)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_signal_handler_can_leave_the_running_job(start_bench: StartBench) -> None:
    def wait(job: Job) -> JobResult:
        signal.raise_signal(signal.SIGUSR2)
        raise AssertionError("the handler left this job")

    bench = start_bench("solo", run=wait)
    before = signal.signal(signal.SIGUSR2, lambda signum, frame: bench.pool.terminate())
    try:
        assert submit(bench, "any").names == ["accepted"]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_jobs_without_limits_start_no_thread(solo: Bench) -> None:
    before = threading.active_count()
    submit(solo, "echo")
    assert threading.active_count() == before
