"""Several short jobs in the hand of one process: fewer wake-ups, nothing else is different."""

from __future__ import annotations

import collections
import os
import random
import select
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.unit.pools.bench import WAIT_S, Bench, Recorder, wait_until
from tests.unit.pools.conftest import StartBench
from umbel.worker.execution.jobs import Job, JobError, encode_job
from umbel.worker.execution.pools.prefork import PreforkPool, child_loop
from umbel.worker.execution.pools.prefork import pool as prefork_pool
from umbel.worker.execution.pools.prefork.frames import (
    ACCEPTED,
    FINISHED,
    FINISHED_LAST,
    PACKET_PAYLOAD_BYTES_MAX,
    accepted_frame,
    frame,
)
from umbel.worker.execution.pools.prefork.supervisor import DEPTH, LOAD_S

pytestmark = pytest.mark.timeout(60)

SHORT_S = 0.000_01


@pytest.fixture(params=["prefork", "prefork-loop"])
def flavour(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def first_child(bench: Bench) -> tuple[PreforkPool, int]:
    pool = bench.pool
    assert isinstance(pool, PreforkPool)
    return pool, pool.info()["processes"][0]


def ready_children(bench: Bench) -> list[int]:
    pool, _ = first_child(bench)
    with pool._supervisor.lock:
        return [pid for pid, child in pool._supervisor.children.items() if child.ready]


def rings(pool: PreforkPool) -> int:
    """How often the children have rung: nobody reads what their bells count."""
    with pool._supervisor.lock:
        bells = [os.dup(child.bell_fd) for child in pool._supervisor.children.values()]
    try:
        return sum(map(os.eventfd_read, bells))
    finally:
        for bell in bells:
            os.close(bell)


@pytest.fixture
def rings_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children do not ring because time has passed."""
    monkeypatch.setattr(child_loop, "QUIET_S", 1_000.0)


@pytest.mark.usefixtures("rings_rarely")
def test_many_short_jobs_cost_few_wake_ups(flavour: str, start_bench: StartBench) -> None:
    bench = start_bench(flavour, concurrency=1)
    assert bench.submit("echo").succeeded
    pool, pid = first_child(bench)
    rings(pool)  # from here on
    os.kill(pid, signal.SIGSTOP)
    recorders = [bench.submit("echo", str(n), expected_s=SHORT_S) for n in range(DEPTH)]
    assert not pool.has_room()
    os.kill(pid, signal.SIGCONT)
    assert [recorder.result.text for recorder in recorders] == [str(n) for n in range(DEPTH)]
    assert 2 <= rings(pool) <= 5  # as it gets through with them, and at the end
    assert pool.close_and_join(WAIT_S)
    assert all(recorder.names == ["accepted", "finished"] for recorder in recorders)


def test_a_pool_asks_for_as_many_jobs_as_begin_soon(flavour: str, start_bench: StartBench) -> None:
    bench = start_bench(flavour, concurrency=2)
    wait_until(lambda: len(ready_children(bench)) == 2, "both are ready")
    long = bench.fill((bench.job("hold") for _ in range(5)), LOAD_S)
    assert len(long) == 2
    bench.go()
    assert all(recorder.succeeded for recorder in long)
    wait_until(bench.pool.has_room, "an idle child")
    pids = first_child(bench)[0].info()["processes"]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    offered = [bench.job("echo", str(n)) for n in range(3 * DEPTH)]
    short = bench.fill(offered, SHORT_S)
    assert len(short) == 2 * DEPTH
    assert not bench.pool.has_room()
    assert bench.fill(offered, SHORT_S) == []
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert [recorder.result.text for recorder in short] == [str(n) for n in range(2 * DEPTH)]
    assert len({recorder.wait_for("accepted") for recorder in short}) == 2
    assert bench.pool.close_and_join(WAIT_S)
    assert bench.fill(offered, SHORT_S) == []


@pytest.mark.parametrize("error", [JobError, MemoryError])
def test_a_job_that_can_not_be_handed_over_is_unfit_and_the_others_run(
    flavour: str, start_bench: StartBench, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def encode(job: Job) -> bytes:
        if "too big" in job.headers:
            raise MemoryError
        return encode_job(job)

    monkeypatch.setattr(prefork_pool, "encode_job", encode)
    bench = start_bench(flavour, concurrency=1)
    wait_until(bench.pool.has_room, "a child that is ready")
    jobs = [bench.job("echo", str(n)) for n in range(3)]
    jobs[1].headers["odd" if error is JobError else "too big"] = object()
    before, unfit, after = bench.fill(jobs, SHORT_S)
    name, exc = unfit.wait_final()
    assert (name, type(exc)) == ("unfit", error)
    assert before.result.text == "0"
    assert after.result.text == "2"
    assert unfit.names == ["unfit"]


@pytest.mark.parametrize(
    "said",
    [
        frame(FINISHED, 1, b"\xc1 is no result"),
        frame(FINISHED, 99, b"of nobody"),
        frame(FINISHED_LAST, 99, b"of nobody"),
        accepted_frame(99, 0.0),
        frame(ACCEPTED, 1, b"no time"),
        b"\xff" * 20,
    ],
    ids=["no result", "end of nobody", "last of nobody", "begin of nobody", "no time", "no frame"],
)
def test_a_child_that_sends_rubbish_is_lost_with_the_job_that_it_runs(
    flavour: str, start_bench: StartBench, said: bytes
) -> None:
    bench = start_bench(flavour, concurrency=1)
    bad = bench.submit("rubbish", said.hex())  # the pool's first: number 1
    ran = bench.directory / "ran"
    wait_until(ran.exists, "it runs")
    next_one = bench.submit("echo", "next")
    assert next_one.succeeded
    assert bad.wait_final()[0] == "lost"
    assert bad.names == ["accepted", "lost"]
    assert ran.read_text().splitlines() == ["job-1"]


def test_no_more_is_asked_for_when_a_child_turns_out_to_be_dead(
    flavour: str, start_bench: StartBench
) -> None:
    bench = start_bench(flavour, concurrency=2)
    wait_until(lambda: len(ready_children(bench)) == 2, "both are ready")
    pool, victim = first_child(bench)[0], min(ready_children(bench))
    pidfd = pool._supervisor.children[victim].pidfd

    def jobs() -> Iterator[Job]:
        for n in range(1000):
            if n == 0:  # the pool's lock is held: nobody can find out meanwhile
                os.kill(victim, signal.SIGKILL)
                assert select.select([pidfd], [], [], WAIT_S)[0]
            yield bench.job("count", str(n), f"number-{n}")

    asked = bench.fill(jobs(), None)
    assert len(asked) <= 2
    rest = [bench.submit("count", job_id=f"later-{n}") for n in range(3)]
    assert all(one.succeeded for one in asked + rest)
    assert len((bench.directory / "ran").read_text().splitlines()) == len(asked) + 3


def test_a_job_of_several_packets_is_filled_in_too(flavour: str, start_bench: StartBench) -> None:
    bench = start_bench(flavour, concurrency=1)
    wait_until(bench.pool.has_room, "a child that is ready")
    large = "x" * (3 * PACKET_PAYLOAD_BYTES_MAX)
    waiting = [bench.job("echo", text) for text in ("a", large, "b", large)]
    texts: list[str] = []
    while waiting:
        taken = bench.fill(waiting, SHORT_S)
        del waiting[: len(taken)]
        texts += [recorder.result.text for recorder in taken]
    assert texts == ["a", large, "b", large]


def test_a_job_that_begins_right_behind_another_is_known_as_begun(
    flavour: str, start_bench: StartBench
) -> None:
    bench = start_bench(flavour, concurrency=1)
    for n in range(30):  # sooner or later it begins without a ring
        short = bench.submit("echo", expected_s=SHORT_S)
        held = bench.submit("hold", job_id=f"held-{n}", expected_s=SHORT_S)
        assert held.wait_for("accepted")
        assert not held.finals
        assert short.succeeded
        bench.go(f"held-{n}")
        assert held.succeeded


@pytest.mark.parametrize("pause_s", [0.001, 0.01])
def test_a_child_that_is_held_up_after_it_rang_does_not_begin_in_secret(
    flavour: str, start_bench: StartBench, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    ring = os.eventfd_write

    def ring_and_pause(bell: int, count: int) -> None:
        ring(bell, count)
        time.sleep(pause_s)  # as on a machine that has other things to do

    monkeypatch.setattr(os, "eventfd_write", ring_and_pause)
    bench = start_bench(flavour, concurrency=1)
    for n in range(5):
        assert bench.submit("echo", expected_s=SHORT_S).succeeded
        held = bench.submit("hold", job_id=f"held-{n}", expected_s=SHORT_S)
        assert held.wait_for("accepted")
        bench.go(f"held-{n}")
        assert held.succeeded


def test_jobs_of_unknown_or_long_duration_are_not_put_behind_each_other(
    flavour: str, start_bench: StartBench
) -> None:
    bench = start_bench(flavour, concurrency=1)
    for expected_s in (None, LOAD_S, 60.0):
        held = bench.submit("hold", job_id=f"held-{expected_s}", expected_s=expected_s)
        held.wait_for("accepted")
        assert not bench.pool.has_room()
        bench.go(f"held-{expected_s}")
        assert held.succeeded
        wait_until(bench.pool.has_room, "an idle child")


def test_what_waits_behind_a_job_that_turns_out_long_can_be_recalled(
    flavour: str, start_bench: StartBench
) -> None:
    overdue = threading.Event()
    bench = start_bench(flavour, concurrency=1, overdue=overdue.set)
    held = bench.submit("hold", expected_s=SHORT_S)
    behind = [bench.submit("count", job_id=f"o{n}", expected_s=SHORT_S) for n in range(5)]
    assert overdue.wait(WAIT_S)
    assert not bench.pool.has_room()
    assert bench.pool.recall() == behind
    assert bench.pool.recall() == []
    bench.go()
    assert held.succeeded
    assert bench.pool.close_and_join(WAIT_S)
    assert all(recorder.calls == [] for recorder in behind)
    assert not (bench.directory / "ran").exists()


def test_what_a_child_has_read_with_others_is_recalled_and_sent_again(
    flavour: str, start_bench: StartBench
) -> None:
    bench = start_bench(flavour, concurrency=1)
    pool = bench.pool
    rounds, left = 20, 3
    for n in range(rounds):
        counts = [bench.job("count", job_id=f"{n}-{k}") for k in range(10)]
        short, long = bench.job("echo"), bench.job("hold", job_id=f"held-{n}")
        wait_until(pool.has_room, "a child that is ready")
        # The first one alone, and all others in one packet.
        first, held, *behind = bench.fill([short, long, *counts], SHORT_S)
        held.wait_for("accepted")
        assert pool.recall() == behind
        again = [bench.submit("count", job_id=f"{n}-{k}", expected_s=SHORT_S) for k in range(left)]
        bench.go(f"held-{n}")
        assert first.succeeded
        assert held.succeeded
        assert all(recorder.succeeded for recorder in again)
        assert all(recorder.calls == [] for recorder in behind)
    ran = (bench.directory / "ran").read_text().split()
    assert ran == [f"{n}-{k}" for n in range(rounds) for k in range(left)]


def test_whatever_is_taken_back_while_children_go_on_runs_once(
    flavour: str, start_bench: StartBench
) -> None:
    bench = start_bench(flavour, concurrency=2)
    pool = bench.pool
    ids = [f"o{n}" for n in range(600)]
    recorders = {name: Recorder() for name in ids}
    waiting = collections.deque(ids)
    names = {id(recorder): name for name, recorder in recorders.items()}
    while waiting:
        for _ in range(min(random.randint(1, 40), len(waiting))):
            name = waiting.popleft()
            pool.submit(bench.job("count", job_id=name), recorders[name], None, None, SHORT_S)
        time.sleep(random.random() * 0.003)
        waiting.extendleft(names[id(one)] for one in reversed(pool.recall()))
    assert all(recorder.succeeded for recorder in recorders.values())
    assert sorted((bench.directory / "ran").read_text().split()) == sorted(ids)
    assert all(recorder.names == ["accepted", "finished"] for recorder in recorders.values())


def test_what_waits_behind_a_long_job_goes_to_an_idle_child(
    flavour: str, start_bench: StartBench
) -> None:
    bench = start_bench(flavour, concurrency=2)
    long = [bench.submit("hold", job_id=name, expected_s=SHORT_S) for name in "ab"]
    behind = [bench.submit("echo", str(n), expected_s=SHORT_S) for n in range(10)]
    long[0].wait_for("accepted")
    long[1].wait_for("accepted")
    bench.go("a")
    assert [recorder.result.text for recorder in behind] == [str(n) for n in range(10)]
    assert not long[1].finals
    bench.go("b")
    assert long[1].succeeded


def test_a_child_that_dies_loses_one_job_and_those_in_its_hand_run_once(
    flavour: str, start_bench: StartBench
) -> None:
    bench = start_bench(flavour, concurrency=1)
    held = bench.submit("hold", expected_s=SHORT_S)
    behind = {f"o{n}": bench.submit("count", job_id=f"o{n}", expected_s=SHORT_S) for n in range(9)}
    os.kill(held.wait_for("accepted"), signal.SIGKILL)
    assert held.wait_final() == ("lost", "signal 9 (SIGKILL)")
    assert all(recorder.succeeded for recorder in behind.values())
    assert bench.pool.close_and_join(WAIT_S)
    ran = collections.Counter((bench.directory / "ran").read_text().split())
    assert ran == dict.fromkeys(behind, 1)


def test_a_soft_limit_strikes_the_job_that_it_is_meant_for(
    flavour: str, start_bench: StartBench
) -> None:
    bench = start_bench(flavour, concurrency=1)
    _, pid = first_child(bench)
    assert bench.submit("echo").succeeded
    os.kill(pid, signal.SIGSTOP)
    before = [bench.submit("catch", soft_s=60, job_id=f"b{n}", expected_s=SHORT_S) for n in "12"]
    struck = bench.submit("catch", soft_s=0.05, expected_s=SHORT_S)
    after = [bench.submit("catch", soft_s=60, job_id=f"a{n}", expected_s=SHORT_S) for n in "12"]
    for name in ("b1", "b2", "a1", "a2"):
        bench.go(name)
    os.kill(pid, signal.SIGCONT)
    assert struck.result.text == "caught"
    assert [recorder.result.text for recorder in (*before, *after)] == [""] * 4
    assert struck.wait_for("soft_limit") == 0.05
    assert not any("soft_limit" in recorder.names for recorder in (*before, *after))


def test_a_hard_limit_hits_none_of_the_jobs_in_the_same_hand(
    flavour: str, start_bench: StartBench
) -> None:
    bench = start_bench(flavour, concurrency=1)
    over = bench.submit("stuck", hard_s=0.1, expected_s=SHORT_S)
    behind = [bench.submit("echo", str(n), expected_s=SHORT_S) for n in range(5)]
    assert over.wait_final() == ("hard_limit", 0.1)
    assert [recorder.result.text for recorder in behind] == [str(n) for n in range(5)]


def test_one_of_several_jobs_in_a_hand_can_be_cancelled(
    flavour: str, start_bench: StartBench
) -> None:
    bench = start_bench(flavour, concurrency=1)
    held = bench.submit("hold", expected_s=SHORT_S)
    behind = [bench.submit("echo", job_id=f"o{n}", expected_s=SHORT_S) for n in range(3)]
    held.wait_for("accepted")
    assert bench.pool.cancel("o1", signal.SIGTERM)
    assert behind[1].wait_final() == ("terminated", signal.SIGTERM)
    bench.go()
    assert held.succeeded
    assert behind[0].succeeded
    assert behind[2].succeeded
    assert behind[1].names == ["terminated"]


def test_a_child_that_leaves_takes_none_of_its_hand_with_it(
    flavour: str, start_bench: StartBench
) -> None:
    bench = start_bench(flavour, concurrency=1, max_tasks_per_child=3)
    recorders = [bench.submit("echo", expected_s=SHORT_S) for _ in range(12)]
    assert all(recorder.succeeded for recorder in recorders)
    counts = collections.Counter(recorder.wait_for("accepted") for recorder in recorders)
    assert list(counts.values()) == [3, 3, 3, 3]


def test_limits_hold_while_the_loop_stands_still(start_bench: StartBench) -> None:
    bench = start_bench("prefork-loop", concurrency=1)
    assert bench.submit("echo").succeeded
    still, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        still.set()
        go_on.wait(WAIT_S)

    assert bench.pool.options.loop is not None
    bench.pool.options.loop.post(stand_still)
    assert still.wait(WAIT_S)
    first = bench.submit("hold", job_id="first", expected_s=SHORT_S)
    over = bench.submit("stuck", hard_s=0.05, expected_s=SHORT_S)
    bench.go("first")
    pool, pid = first_child(bench)
    wait_until(lambda: pid not in pool.info()["processes"], "the child was killed for the limit")
    assert not first.calls
    go_on.set()
    assert first.succeeded
    assert over.wait_final() == ("hard_limit", 0.05)


def test_random_kills_lose_only_what_had_begun_of_what_was_in_hand(
    flavour: str, start_bench: StartBench
) -> None:
    bench = start_bench(flavour, concurrency=3)
    recorders: dict[str, Recorder] = {}
    for n in range(400):
        recorders[f"o{n}"] = bench.submit("count", job_id=f"o{n}", expected_s=SHORT_S)
    for kill in range(30):
        done = 10 * kill
        wait_until(
            lambda goal=done: sum(bool(one.finals) for one in recorders.values()) >= goal,  # type: ignore[misc]
            "progress",
        )
        for pid in bench.pool.info()["processes"][kill % 3 :][:1]:
            os.kill(pid, signal.SIGKILL)
    assert bench.pool.close_and_join(WAIT_S)
    ran = collections.Counter((bench.directory / "ran").read_text().split())
    assert max(ran.values()) == 1
    finals = [recorder.wait_final()[0] for recorder in recorders.values()]
    assert set(finals) == {"finished", "lost"}
    assert all(len(recorder.finals) == 1 for recorder in recorders.values())
    assert all(recorder.names[0] == "accepted" for recorder in recorders.values())


def test_a_cold_stop_hears_what_has_ended_already(start_bench: StartBench) -> None:
    bench = start_bench("prefork-loop", concurrency=1)
    assert bench.submit("echo").succeeded
    loop = bench.pool.options.loop
    assert loop is not None
    recorders: list[Recorder] = []
    ran, stopped = bench.directory / "ran", threading.Event()

    def stop() -> None:  # on the loop's thread, which hears nothing meanwhile
        recorders.extend(bench.submit("count", expected_s=SHORT_S) for _ in range(4))
        recorders.append(bench.submit("stuck", job_id="stuck", expected_s=SHORT_S))
        wait_until(lambda: bench.began() == 1, "the last one runs")
        bench.pool.terminate()
        stopped.set()

    loop.post(stop)
    assert stopped.wait(WAIT_S)
    assert len(ran.read_text().split()) == 4
    assert [recorder.names for recorder in recorders[:4]] == [["accepted", "finished"]] * 4
    assert not recorders[4].finals
