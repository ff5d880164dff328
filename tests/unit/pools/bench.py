"""A bench for pools: jobs that do one thing each, and watchers that remember what they heard.

Jobs are coordinated through files in a directory, which works alike in processes, threads,
greenlets and coroutines: a job that holds makes `<id>.began` and goes on when `<id>.go` (or
`all.go`) is there.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

from umbel.exceptions import SoftTimeLimitExceeded
from umbel.worker.execution.jobs import Job, JobResult
from umbel.worker.execution.pools.base import (
    Pool,
    PoolOptions,
    Submission,
    disarm_soft_limit,
    pool_class,
)
from umbel.worker.runtime.inbox import Inbox

WAIT_S = 20.0
FINAL = {"finished", "hard_limit", "lost", "terminated", "unfit"}
Pause = Callable[[], Awaitable[None]]


class Recorder:
    """A watcher that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.changed = threading.Condition()

    def _heard(self, name: str, value: Any) -> None:
        with self.changed:
            self.calls.append((name, value))
            self.changed.notify_all()

    def accepted(self, pid: int, when: float) -> None:
        self._heard("accepted", pid)

    def soft_limit(self, limit_s: float) -> None:
        self._heard("soft_limit", limit_s)

    def finished(self, result: JobResult) -> None:
        self._heard("finished", result)

    def ran(self, pid: int, when: float, result: JobResult) -> None:
        with self.changed:  # who looks sees both or none
            self.accepted(pid, when)
            self.finished(result)

    def unfit(self, exc: Exception) -> None:
        self._heard("unfit", exc)

    def hard_limit(self, limit_s: float) -> None:
        self._heard("hard_limit", limit_s)

    def lost(self, reason: str) -> None:
        self._heard("lost", reason)

    def terminated(self, signum: int) -> None:
        self._heard("terminated", signum)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    @property
    def finals(self) -> list[tuple[str, Any]]:
        return [call for call in self.calls if call[0] in FINAL]

    def wait_for(self, name: str) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: name in self.names, WAIT_S), self.calls
            return next(value for heard, value in self.calls if heard == name)

    def wait_final(self) -> tuple[str, Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.finals), WAIT_S), self.calls
            return self.finals[0]

    @property
    def result(self) -> JobResult:
        name, value = self.wait_final()
        assert name == "finished", self.calls
        assert isinstance(value, JobResult)
        return value

    @property
    def succeeded(self) -> bool:
        return self.result.state == "SUCCESS"


async def _work(job: Job, pause: Pause) -> JobResult:  # noqa: C901 - one case per task
    directory, text = Path(job.headers["directory"]), job.body.decode()
    went = [directory / f"{job.id}.go", directory / "all.go"]

    async def hold() -> None:
        # Visible only when complete: whoever sees it may interrupt us at once.
        draft = directory / f"{job.id}.draft"
        draft.touch()
        draft.rename(directory / f"{job.id}.began")
        while not any(path.exists() for path in went):
            await pause()

    match job.task:
        case "echo":
            pass
        case "raise":
            raise ValueError(text)
        case "exit":
            raise SystemExit(3)
        case "memory":
            raise MemoryError
        case "big":
            text = "x" * int(text)
        case "hold":
            await hold()
        case "count":
            with (directory / "ran").open("a") as log:
                log.write(f"{job.id}\n")
            await pause()
        case "catch":
            try:
                await hold()
            except SoftTimeLimitExceeded:
                text = "caught"
        case "disarmed":
            disarm_soft_limit()
            await hold()
        case "stuck":
            while not any(path.exists() for path in went):
                try:
                    await hold()
                except BaseException:
                    continue
        case other:
            return TASKS[other](job)
    return JobResult("SUCCESS", 0.0, text, "")


def run(job: Job) -> JobResult:
    async def pause() -> None:
        time.sleep(0.003)

    return _driven(_work(job, pause))


async def run_async(job: Job) -> JobResult:
    return await _work(job, lambda: asyncio.sleep(0.003))


def _driven(work: Coroutine[Any, Any, JobResult]) -> JobResult:
    """Run a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        result: JobResult = end.value
        return result
    raise AssertionError("suspended")


def _die(job: Job) -> JobResult:
    os._exit(int(job.body))


def _files(job: Job) -> JobResult:
    links = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links[int(entry.name)] = str(entry.readlink())
        except OSError:
            continue
    return JobResult("SUCCESS", 0.0, repr(links), "")


def _rubbish(job: Job) -> JobResult:
    """What a stray library may do: write into the one pipe that the child speaks through."""
    ends = {
        int(one.name): one.readlink() for one in Path("/proc/self/fd").iterdir() if one.exists()
    }
    (pipe,) = (fd for fd, end in ends.items() if fd > 2 and str(end).startswith("pipe:"))
    with (Path(job.headers["directory"]) / "ran").open("a") as log:
        log.write(f"{job.id}\n")
    os.write(pipe, bytes.fromhex(job.body.decode()))
    time.sleep(0.2)
    return JobResult("SUCCESS", 0.0, "not believed", "")


def _fork_and_return(job: Job) -> JobResult:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return JobResult("SUCCESS", 0.0, "forked", "")


def _subprocess(job: Job) -> JobResult:
    import multiprocessing

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=sender.send, args=("from below",))
    process.start()
    text = receiver.recv()
    process.join()
    text += subprocess.run(["/bin/echo", "!"], capture_output=True, text=True, check=True).stdout
    return JobResult("SUCCESS", 0.0, text.strip(), "")


_kept: list[bytearray] = []


def _grow(job: Job) -> JobResult:
    _kept.append(bytearray(os.urandom(1024) * 1024 * int(job.body)))
    return JobResult("SUCCESS", 0.0, str(os.getpid()), "")


def _thread(job: Job) -> JobResult:
    thread = threading.Thread(target=lambda: None)
    main = threading.current_thread() is threading.main_thread()
    reset = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return JobResult("SUCCESS", 0.0, repr((main, thread.daemon, reset, deaf)), "")


TASKS: dict[str, Callable[[Job], JobResult]] = {
    "die": _die,
    "files": _files,
    "rubbish": _rubbish,
    "fork": _fork_and_return,
    "subprocess": _subprocess,
    "grow": _grow,
    "thread": _thread,
}


class Bench:
    """A started pool and a directory to steer its jobs."""

    def __init__(self, kind: str, directory: Path, concurrency: int, **options: Any) -> None:
        name, _, flavour = kind.partition("-")
        self.directory = directory
        options.setdefault("run", run)
        self._loop = _Loop() if flavour == "loop" else None
        if self._loop is not None:
            options["loop"] = self._loop.inbox
        self.pool: Pool = pool_class(name)(
            PoolOptions(
                concurrency=concurrency,
                run_async=run_async,
                is_async=lambda job: flavour != "plain" and job.task not in TASKS,
                **options,
            )
        )
        self._numbers = itertools.count(1)
        self._threads: list[threading.Thread] = []
        self.pool.start()

    def submit(
        self,
        task: str,
        text: str = "",
        soft_s: float | None = None,
        hard_s: float | None = None,
        job_id: str = "",
        expected_s: float | None = None,
    ) -> Recorder:
        """Submit a job; a pool that blocks its caller gets a thread to run it in."""
        recorder = Recorder()
        job = self.job(task, text, job_id)
        if self.pool.blocks_loop:
            thread = threading.Thread(
                target=self.pool.submit, args=(job, recorder, soft_s, hard_s), daemon=True
            )
            self._threads.append(thread)
            thread.start()
        else:
            expected = {} if expected_s is None else {"expected_s": expected_s}  # for prefork
            self.pool.submit(job, recorder, soft_s, hard_s, **expected)
        return recorder

    def fill(self, jobs: Iterable[Job], expected_s: float | None) -> list[Recorder]:
        """Offer these to a pool; the watchers of those that it has asked for."""
        asked: list[Recorder] = []

        def offered() -> Iterator[Submission]:
            for job in jobs:
                asked.append(Recorder())
                yield job, asked[-1], None, None, expected_s

        self.pool.fill(offered())
        return asked

    def job(self, task: str, text: str = "", job_id: str = "") -> Job:
        return Job(
            id=job_id or f"job-{next(self._numbers)}",
            task=task,
            headers={"directory": str(self.directory)},
            body=text.encode(),
            content_type="text/plain",
            content_encoding="utf-8",
        )

    def go(self, job_id: str = "all") -> None:
        (self.directory / f"{job_id}.go").touch()

    def began(self) -> int:
        return len(list(self.directory.glob("*.began")))

    def close(self) -> None:
        self.go()
        self.pool.terminate()
        if self._loop is not None:
            self._loop.stop()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


class _Loop:
    """A thread that does what is put into its inbox, as the loop of a worker does."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="bench-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            self.inbox.wait(0.05)  # what is watched may be told later than this begins
            self.inbox.run()

    def stop(self) -> None:
        self._over = True
        self.inbox.wake()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.inbox.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """For conditions that nobody can signal: look again and again, within a bound."""
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends, f"not in {WAIT_S} s: {what}"
        time.sleep(0.003)
