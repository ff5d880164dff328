"""What only processes promise: any child may die at any moment, and nothing else is hurt."""

from __future__ import annotations

import ast
import collections
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.unit.pools.bench import WAIT_S, Bench, wait_until
from tests.unit.pools.conftest import StartBench
from umbel.worker.execution.jobs import JobError
from umbel.worker.execution.pools.prefork import PreforkPool, frames

pytestmark = pytest.mark.timeout(60)


def pids(bench: Bench) -> list[int]:
    found: list[int] = bench.pool.info()["processes"]
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_an_idle_child_that_is_killed_is_replaced(prefork: Bench) -> None:
    assert prefork.submit("echo").succeeded
    before = pids(prefork)
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: before[0] not in pids(prefork) and len(pids(prefork)) == 2, "a new child")
    recorders = [prefork.submit("echo", str(n)) for n in range(10)]
    assert [recorder.result.text for recorder in recorders] == [str(n) for n in range(10)]


def test_a_busy_child_that_is_killed_loses_its_job_once(prefork: Bench) -> None:
    recorder = prefork.submit("hold")
    os.kill(recorder.wait_for("accepted"), signal.SIGKILL)
    assert recorder.wait_final() == ("lost", "signal 9 (SIGKILL)")
    assert prefork.submit("echo", "next").result.text == "next"
    wait_until(lambda: len(pids(prefork)) == 2, "a new child")
    assert prefork.pool.close_and_join(WAIT_S)
    assert recorder.names == ["accepted", "lost"]


def test_a_task_that_exits_the_process_is_lost_with_its_exit_code(prefork: Bench) -> None:
    assert prefork.submit("die", "3").wait_final() == ("lost", "exit code 3")


def test_random_kills_lose_only_what_had_begun(start_bench: StartBench) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    bench = start_bench("prefork", concurrency=3)
    recorders = {f"o{n}": bench.submit("count", job_id=f"o{n}") for n in range(500)}

    def ended() -> int:
        return sum(len(recorder.finals) for recorder in recorders.values())

    for kill in range(50):
        wait_until(lambda goal=kill * 9: ended() >= goal, "progress")  # type: ignore[misc]
        wait_until(lambda: any(map(alive, pids(bench))), "somebody to kill")
        for pid in chance.sample(pids(bench), 1):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
    assert bench.pool.close_and_join(WAIT_S)
    ran = collections.Counter((bench.directory / "ran").read_text().split())
    assert max(ran.values()) == 1
    assert any(recorder.finals[0][0] == "lost" for recorder in recorders.values())
    for job_id, recorder in recorders.items():
        assert len(recorder.finals) == 1, (job_id, recorder.calls)
        assert recorder.names[0] == "accepted"
        if recorder.finals[0][0] == "finished":
            assert ran[job_id] == 1
        else:
            assert recorder.finals[0] == ("lost", "signal 9 (SIGKILL)")


def test_jobs_behind_a_long_one_go_to_an_idle_child(prefork: Bench) -> None:
    first, second = prefork.submit("hold", job_id="a"), prefork.submit("hold", job_id="b")
    behind = [prefork.submit("echo", str(n)) for n in range(12)]
    first.wait_for("accepted")
    second.wait_for("accepted")
    prefork.go("a")
    assert [recorder.result.text for recorder in behind] == [str(n) for n in range(12)]
    assert not second.finals
    prefork.go("b")
    assert second.succeeded


def test_a_hard_limit_does_not_hurt_the_jobs_behind_it(start_bench: StartBench) -> None:
    bench = start_bench("prefork", concurrency=1)
    over = bench.submit("hold", hard_s=0.1)
    behind = [bench.submit("echo", str(n)) for n in range(5)]
    assert over.wait_final() == ("hard_limit", 0.1)
    assert [recorder.result.text for recorder in behind] == [str(n) for n in range(5)]
    assert all(recorder.names == ["accepted", "finished"] for recorder in behind)


def test_a_late_soft_signal_does_not_hurt_the_next_job(start_bench: StartBench) -> None:
    bench = start_bench("prefork", concurrency=1)
    pid = bench.submit("echo", soft_s=30).wait_for("accepted")
    os.kill(pid, signal.SIGUSR1)  # between jobs
    held = bench.submit("hold")
    held.wait_for("accepted")
    os.kill(pid, signal.SIGUSR1)  # meant for a job that has ended
    bench.go()
    assert held.result.state == "SUCCESS"
    assert pids(bench) == [pid]


def test_cancel_with_the_soft_signal_raises_inside_the_job(prefork: Bench) -> None:
    recorder = prefork.submit("catch", job_id="soft")
    wait_until(lambda: prefork.began() == 1, "it holds")
    assert prefork.pool.cancel("soft", signal.SIGUSR1)
    assert recorder.result.text == "caught"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGQUIT])
def test_cancel_ends_the_child_by_any_usual_signal(prefork: Bench, signum: int) -> None:
    recorder = prefork.submit("hold", job_id="it")
    recorder.wait_for("accepted")
    assert prefork.pool.cancel("it", signum)
    assert recorder.wait_final() == ("terminated", signum)


def test_a_child_leaves_after_its_number_of_jobs(start_bench: StartBench) -> None:
    bench = start_bench("prefork", concurrency=1, max_tasks_per_child=3)
    recorders = [bench.submit("echo") for _ in range(9)]
    assert all(recorder.succeeded for recorder in recorders)
    counts = collections.Counter(recorder.wait_for("accepted") for recorder in recorders)
    assert list(counts.values()) == [3, 3, 3]
    assert bench.pool.info()["max-tasks-per-child"] == 3


def test_a_child_leaves_when_it_has_grown_too_big(start_bench: StartBench) -> None:
    # A child begins with the memory of its parent, which is this test run.
    limit_kib = psutil.Process().memory_info().rss // 1024 + 128 * 1024
    bench = start_bench("prefork", concurrency=1, max_memory_per_child_kib=limit_kib)
    small = [bench.submit("echo").wait_for("accepted") for _ in range(3)]
    assert len(set(small)) == 1
    # Whatever of that the child does not share: it grows beyond the limit by itself.
    big = bench.submit("grow", str(limit_kib // 1024 + 128))
    assert big.result.text == str(small[0])
    assert bench.submit("echo").wait_for("accepted") != small[0]


def test_children_are_bound_to_cpus_in_turn_and_so_is_who_follows_one(
    start_bench: StartBench,
) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    bench = start_bench("prefork", concurrency=2 * len(cpus), cpus=cpus)
    assert bench.submit("echo").succeeded

    def bound() -> list[set[int]]:
        return sorted((os.sched_getaffinity(pid) for pid in pids(bench)), key=min)

    expected = [{cpu} for cpu in cpus for _ in range(2)]
    wait_until(lambda: bound() == expected, "all are bound")
    for victim in pids(bench)[::2]:
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda gone=victim: gone not in pids(bench), "it is gone")  # type: ignore[misc]
        wait_until(lambda: bound() == expected, "as before")
    assert os.sched_getaffinity(0) >= set(cpus)


def test_a_cpu_that_may_not_be_used_binds_nobody_and_says_so(
    start_bench: StartBench, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    handler = logging.FileHandler(log)
    logging.getLogger("umbel.pool").addHandler(handler)
    try:
        bench = start_bench("prefork", concurrency=1, cpus=[100_000])
        assert bench.submit("echo").succeeded
        assert os.sched_getaffinity(pids(bench)[0]) == os.sched_getaffinity(0)
        assert "is not bound to CPU 100000" in log.read_text()
    finally:
        logging.getLogger("umbel.pool").removeHandler(handler)
        handler.close()


def test_what_was_inherited_is_let_go(start_bench: StartBench) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        bench = start_bench("prefork", concurrency=3)
        for _ in range(6):
            links = ast.literal_eval(bench.submit("files").result.text)
            sockets = [link for link in links.values() if link.startswith("socket:")]
            pipes = [link for number, link in links.items() if number > 2 and "pipe:" in link]
            assert len(sockets) == 1
            assert len(pipes) == 1
            assert links.get(ours.fileno()) == os.devnull


def test_open_log_files_stay_open_in_children(start_bench: StartBench, tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "worker.log")
    logging.getLogger("kept").addHandler(handler)
    try:
        bench = start_bench("prefork", concurrency=1)
        links = ast.literal_eval(bench.submit("files").result.text)
        assert str(tmp_path / "worker.log") in links.values()
    finally:
        logging.getLogger("kept").removeHandler(handler)
        handler.close()


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from tests.unit.pools.bench import Bench
        bench = Bench("prefork", Path(sys.argv[1]), 3)
        recorders = [bench.submit("stuck") for _ in range(2)]
        for recorder in recorders:
            recorder.wait_for("accepted")
        print(*bench.pool.info()["processes"], flush=True)
        sys.stdin.read()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(children) == 3
        parent.kill()
        wait_until(lambda: not any(alive(pid) for pid in children), "no child left")


def test_jobs_and_results_of_any_size_pass(prefork: Bench) -> None:
    sizes = [0, frames.PACKET_PAYLOAD_BYTES_MAX, 5_000_000]
    echoes = [prefork.submit("echo", "y" * size) for size in sizes * 2]
    bigs = [prefork.submit("big", str(size)) for size in sizes]
    assert [len(recorder.result.text) for recorder in echoes] == sizes * 2
    assert [len(recorder.result.text) for recorder in bigs] == sizes


def test_a_bulky_job_survives_the_death_of_its_child(start_bench: StartBench) -> None:
    bench = start_bench("prefork", concurrency=1)
    pid = bench.submit("echo").wait_for("accepted")
    os.kill(pid, signal.SIGSTOP)  # so that it cannot accept
    bulky = bench.submit("echo", "z" * 3_000_000)
    behind = bench.submit("echo", "behind")
    os.kill(pid, signal.SIGKILL)
    assert len(bulky.result.text) == 3_000_000
    assert behind.result.text == "behind"


def test_a_child_that_dies_at_start_is_retried_ever_more_slowly(
    start_bench: StartBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    births = tmp_path / "births"

    def child_started() -> None:
        with births.open("a") as log:
            log.write("x")
        if not (tmp_path / "healthy").exists():
            os._exit(9)

    with caplog.at_level(logging.ERROR, "umbel.pool"):
        bench = start_bench("prefork", concurrency=2, child_started=child_started)
        recorder = bench.submit("echo", "at last")
        wait_until(lambda: births.exists() and births.stat().st_size >= 5, "some attempts")
        assert births.stat().st_size < 12
        (tmp_path / "healthy").touch()
        assert recorder.result.text == "at last"
    lines = [record for record in caplog.records if "die at start" in record.message]
    assert len(lines) == 1
    assert "exit code 9" in lines[0].message


def test_a_child_that_never_reports_is_killed_and_replaced(
    start_bench: StartBench, tmp_path: Path
) -> None:
    def child_started() -> None:
        if not (tmp_path / "second").exists():
            (tmp_path / "second").touch()
            signal.pause()

    bench = start_bench(
        "prefork", concurrency=1, child_started=child_started, proc_alive_timeout_s=0.3
    )
    assert bench.submit("echo", "up").result.text == "up"


def test_tasks_may_start_processes_and_forks_of_their_own(prefork: Bench) -> None:
    assert prefork.submit("subprocess").result.text == "from below!"
    recorders = [prefork.submit("fork") for _ in range(3)]
    assert [recorder.result.text for recorder in recorders] == ["forked"] * 3
    assert prefork.pool.close_and_join(WAIT_S)
    assert all(len(recorder.finals) == 1 for recorder in recorders)


def test_a_task_runs_in_the_main_thread_with_default_signals(prefork: Bench) -> None:
    text = prefork.submit("thread").result.text
    is_main, threads_are_daemons, term_is_default, int_is_ignored = ast.literal_eval(text)
    assert is_main
    assert not threads_are_daemons
    assert term_is_default
    assert int_is_ignored


def test_a_job_with_an_object_is_refused_and_nothing_is_kept(prefork: Bench) -> None:
    job = prefork.job("echo")
    job.headers["odd"] = object()
    with pytest.raises(JobError, match="job job-1 of task 'echo' cannot be handed"):
        prefork.pool.submit(job, prefork.submit("echo"), None, None)


def test_an_idle_pool_sleeps_without_a_time_out(prefork: Bench) -> None:
    pool = prefork.pool
    assert isinstance(pool, PreforkPool)
    assert prefork.submit("echo", soft_s=10, hard_s=20).succeeded

    def sleeps_for_good() -> bool:
        with pool._supervisor.lock:
            return pool._supervisor.timeout_s() is None

    wait_until(sleeps_for_good, "no deadline left once all children are up")


def test_deaths_are_noticed_where_the_kernel_has_no_pidfd(
    start_bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    bench = start_bench("prefork", concurrency=1)
    recorder = bench.submit("hold")
    os.kill(recorder.wait_for("accepted"), signal.SIGKILL)
    assert recorder.wait_final() == ("lost", "signal 9 (SIGKILL)")
    assert bench.submit("echo", "next").result.text == "next"
    assert bench.pool.close_and_join(WAIT_S)
