"""What every pool promises: one suite for all of them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.unit.pools.bench import WAIT_S, Bench, Recorder, wait_until
from tests.unit.pools.conftest import StartBench
from umbel.worker.execution.pools.base import PoolClosed

pytestmark = pytest.mark.timeout(60)


def several(bench: Bench) -> bool:
    return not bench.pool.blocks_loop


def test_each_job_is_reported_exactly_once(bench: Bench) -> None:
    recorders = [bench.submit("echo", str(number)) for number in range(100)]
    assert [recorder.result.text for recorder in recorders] == [str(n) for n in range(100)]
    assert bench.pool.close_and_join(WAIT_S)
    assert all(recorder.names == ["accepted", "finished"] for recorder in recorders)


@pytest.mark.parametrize(
    ("task", "text"),
    [("raise", "ValueError('no')"), ("exit", "SystemExit(3)"), ("memory", "MemoryError()")],
)
def test_whatever_escapes_run_is_a_result(bench: Bench, task: str, text: str) -> None:
    result = bench.submit(task, "no").result
    assert result.state == "FAILURE"
    assert result.text == text
    assert "Traceback" in result.traceback
    assert bench.submit("echo", "next").result.text == "next"


def test_the_concurrency_is_reached_and_not_exceeded(bench: Bench) -> None:
    size = bench.pool.size
    recorders = [bench.submit("hold", job_id=f"hold-{n}") for n in range(size + 2)]
    wait_until(lambda: bench.began() == size, "a full pool")
    done = [n for n in range(size + 2) if (bench.directory / f"hold-{n}.began").exists()]
    bench.go(f"hold-{done[0]}")
    recorders[done[0]].wait_final()
    wait_until(lambda: bench.began() == size + 1, "the next one begins")
    running = [r for r in recorders if "accepted" in r.names and not r.finals]
    assert len(running) <= size
    bench.go()
    assert all(recorder.result.state == "SUCCESS" for recorder in recorders)


def test_it_takes_as_many_as_it_has_room_for_and_asks_for_more_when_some_have_ended(
    kind: str, start_bench: StartBench
) -> None:
    room = threading.Event()
    bench = start_bench(kind, on_room=room.set)
    if bench.pool.blocks_loop:  # it runs one after the other meanwhile
        assert all(one.finals for one in bench.fill([bench.job("echo") for _ in range(3)], None))
        return
    offered = iter([bench.job("hold") for _ in range(bench.pool.size + 3)])
    taken: list[Recorder] = []

    def is_full() -> bool:
        taken.extend(bench.fill(offered, None))
        return len(taken) >= bench.pool.size

    wait_until(is_full, "a full pool")
    assert len(taken) == bench.pool.size
    assert not bench.pool.has_room()
    assert bench.fill(offered, None) == []
    bench.go()
    assert all(one.succeeded for one in taken)
    assert room.wait(WAIT_S)
    wait_until(bench.pool.has_room, "room")
    assert bench.fill(offered, None)[0].succeeded
    assert bench.pool.close_and_join(WAIT_S)
    assert not bench.pool.has_room()
    assert bench.fill(offered, None) == []


def test_a_soft_limit_is_raised_inside_and_can_be_caught(bench: Bench) -> None:
    recorder = bench.submit("catch", soft_s=0.05)
    assert recorder.result.text == "caught"
    assert recorder.wait_for("soft_limit") == 0.05


def test_a_soft_limit_that_is_not_caught_fails_the_job(bench: Bench) -> None:
    result = bench.submit("hold", soft_s=0.05).result
    assert result.state == "FAILURE"
    assert "SoftTimeLimitExceeded" in result.text
    assert bench.submit("echo", "next").result.text == "next"


def test_a_disarmed_soft_limit_does_not_strike(bench: Bench) -> None:
    recorder = bench.submit("disarmed", "whole", soft_s=0.05, job_id="late")
    later = bench.submit("catch", soft_s=0.1) if several(bench) else None
    if later is not None:
        assert later.result.text == "caught"
    else:
        wait_until(lambda: bench.began() == 1, "it holds")
    bench.go("late")
    assert recorder.result.text == "whole"


def test_a_hard_limit_ends_the_job_and_the_pool_goes_on(bench: Bench) -> None:
    recorders = [bench.submit("hold", hard_s=0.05) for _ in range(3)]
    assert [recorder.wait_final() for recorder in recorders] == [("hard_limit", 0.05)] * 3
    assert bench.submit("echo", "next").result.text == "next"
    assert bench.pool.close_and_join(WAIT_S)
    assert all(recorder.names == ["accepted", "hard_limit"] for recorder in recorders)


def test_a_hard_limit_comes_after_a_soft_one_that_was_ignored(bench: Bench) -> None:
    if bench.pool.blocks_loop:
        pytest.skip("what refuses to end cannot be ended in the calling thread")
    recorder = bench.submit("stuck", soft_s=0.05, hard_s=0.15)
    assert recorder.wait_final() == ("hard_limit", 0.15)
    assert recorder.names == ["accepted", "soft_limit", "hard_limit"]
    assert bench.submit("echo", "next").result.text == "next"


def test_limits_that_do_not_pass_change_nothing(bench: Bench) -> None:
    recorders = [bench.submit("echo", "in time", soft_s=30, hard_s=60) for _ in range(50)]
    assert {recorder.result.text for recorder in recorders} == {"in time"}
    assert bench.pool.close_and_join(WAIT_S)
    assert all(recorder.names == ["accepted", "finished"] for recorder in recorders)


def test_a_running_job_can_be_cancelled(bench: Bench) -> None:
    recorder = bench.submit("hold", job_id="unwanted")
    wait_until(lambda: bench.began() == 1, "it holds")
    assert bench.pool.cancel("unwanted", signal.SIGTERM)
    assert recorder.wait_final() == ("terminated", signal.SIGTERM)
    assert bench.submit("echo", "next").result.text == "next"
    assert not bench.pool.cancel("unwanted", signal.SIGTERM)


def test_a_waiting_job_can_be_cancelled_and_never_runs(bench: Bench) -> None:
    if bench.pool.blocks_loop:
        pytest.skip("nothing waits in the solo pool")
    holding = [bench.submit("hold") for _ in range(bench.pool.size)]
    wait_until(lambda: bench.began() == bench.pool.size, "a full pool")
    waiting = bench.submit("hold", job_id="unwanted")
    assert bench.pool.cancel("unwanted", signal.SIGTERM)
    assert waiting.wait_final() == ("terminated", signal.SIGTERM)
    bench.go()
    assert all(recorder.succeeded for recorder in holding)
    assert waiting.names == ["terminated"]
    assert not (bench.directory / "unwanted.began").exists()


def test_it_grows_and_shrinks(bench: Bench) -> None:
    if bench.pool.blocks_loop:
        with pytest.raises(ValueError, match="cannot grow the solo pool"):
            bench.pool.grow(1)
        return
    bench.pool.grow(1)
    assert bench.pool.size == 3
    held = [bench.submit("hold") for _ in range(3)]
    wait_until(lambda: bench.began() == 3, "three at once")
    bench.pool.shrink(2)
    assert bench.pool.size == 1
    bench.go()
    assert all(recorder.succeeded for recorder in held)
    (bench.directory / "all.go").unlink()
    first, second = bench.submit("hold", job_id="a"), bench.submit("hold", job_id="b")
    first.wait_for("accepted")
    bench.go("a")
    assert first.succeeded
    second.wait_for("accepted")
    bench.go("b")
    assert second.succeeded


def test_it_never_shrinks_to_nothing(bench: Bench) -> None:
    with pytest.raises(ValueError, match="at least one must stay"):
        bench.pool.shrink(bench.pool.size)


def test_a_warm_close_waits_for_running_and_waiting_jobs(bench: Bench) -> None:
    recorders = [bench.submit("hold") for _ in range(1 if bench.pool.blocks_loop else 5)]
    wait_until(lambda: bench.began() == bench.pool.size, "a full pool")
    assert not bench.pool.close_and_join(0.02)
    with pytest.raises(PoolClosed):
        bench.pool.submit(bench.job("echo"), Recorder(), None, None)
    bench.go()
    assert bench.pool.close_and_join(WAIT_S)
    told = [["accepted", "finished"]] * len(recorders)
    # Where a loop reports, it may have to get to that first.
    wait_until(lambda: [recorder.names for recorder in recorders] == told, "the ends")


def test_a_cold_stop_is_quick_and_silent(bench: Bench) -> None:
    recorders = [bench.submit("stuck") for _ in range(1 if bench.pool.blocks_loop else 5)]
    wait_until(lambda: bench.began() == bench.pool.size, "a full pool")
    began = time.monotonic()
    bench.pool.terminate()
    bench.pool.terminate()
    assert time.monotonic() - began < 5
    bench.go()
    assert not any(recorder.finals for recorder in recorders)
    with pytest.raises(PoolClosed):
        bench.pool.submit(bench.job("echo"), Recorder(), None, None)


def test_info_has_the_shape_that_monitors_read(bench: Bench) -> None:
    assert bench.submit("echo").succeeded
    info = bench.pool.info()
    assert info["implementation"].startswith("umbel.worker.execution.pools.")
    assert info["max-concurrency"] == bench.pool.size
    assert info["timeouts"] == [0, 0]
    assert info["put-guarded-by-semaphore"] is False
    assert info["max-tasks-per-child"] == "N/A"
    assert {"processes", "threads", "greenlets"} & info.keys()


def test_a_restart_loses_nothing(bench: Bench) -> None:
    held = bench.submit("hold")
    wait_until(lambda: bench.began() == 1, "it holds")
    waiting = [bench.submit("echo", str(n)) for n in range(0 if bench.pool.blocks_loop else 20)]
    bench.pool.restart()
    bench.go()
    assert held.succeeded
    assert [recorder.result.text for recorder in waiting] == [str(n) for n in range(len(waiting))]
    assert bench.submit("echo", "after").result.text == "after"


def test_jobs_may_come_from_several_threads(bench: Bench) -> None:
    recorders: list[Recorder] = []

    def submit() -> None:
        for _ in range(25):
            recorder = Recorder()
            recorders.append(recorder)
            bench.pool.submit(bench.job("echo", "yes"), recorder, None, None)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [recorder.result.text for recorder in recorders] == ["yes"] * 100
    assert bench.pool.close_and_join(WAIT_S)
    assert all(len(recorder.finals) == 1 for recorder in recorders)


def test_a_watcher_may_submit_the_next_job(bench: Bench) -> None:
    class Chained(Recorder):
        def __init__(self, then: Callable[[], None]) -> None:
            super().__init__()
            self.then = then

        def finished(self, result: object) -> None:
            self.then()

    last = Recorder()
    first = Chained(lambda: bench.pool.submit(bench.job("echo", "second"), last, None, None))
    bench.pool.submit(bench.job("echo", "first"), first, None, None)
    assert last.result.text == "second"


def test_a_watcher_that_fails_does_not_disturb_the_pool(bench: Bench) -> None:
    class Broken(Recorder):
        def accepted(self, pid: int, when: float) -> None:
            raise RuntimeError("broken watcher")

        def finished(self, result: object) -> None:
            raise RuntimeError("broken watcher")

    bench.pool.submit(bench.job("echo"), Broken(), None, None)
    assert bench.submit("echo", "next").result.text == "next"
    assert bench.pool.close_and_join(WAIT_S)
