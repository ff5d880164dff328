"""Where contestants perform: private servers, fresh processes, and the log of what they did.

Servers are those of the tests, on free ports. Redis keeps nothing on disk; RabbitMQ gets a new
virtual host for each run. Every run finds both empty. Umbel runs in the environment of this
process, its peers in `.venv-bench`, where arq has a Redis client of its own that is old enough.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.work import COUNTER, RECORD
from tests import guard
from tests.servers import RabbitMQServer, RedisServer

ROOT = Path(__file__).resolve().parent.parent
PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
OWN_LIBRARIES = ROOT / ".venv-bench" / "own"  # OWN_LIBRARIES/NAME comes first for NAME
STALL_S = 20.0  # without any task done, a run has failed
ANSWER_S = 300.0  # a million tasks are queued in much less
COUNTER_DB = 15


class Failed(Exception):
    """A contestant did not do what it should; the run goes on without the figure."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """What is known of one contestant; see `benchmarks.peers`."""

    name: str
    label: str
    version: str
    brokers: tuple[str, ...]
    acks: str
    rough_per_s: float
    variants: dict[str, dict[str, list[list[str]]]]
    events: list[str] | None
    batch: bool


class MemoryRedis(RedisServer):
    """A Redis without files: the disk is not what is measured."""

    def command(self) -> list[str]:
        """The tests' command, less the log of changes."""
        return [*super().command(), "--appendonly", "no"]


class Stage:
    """The servers, and the run that is on."""

    def __init__(self, directory: Path, log: Path, brokers: tuple[str, ...]) -> None:
        self.directory = directory
        self.log = log
        self.brokers = brokers
        self._redis = MemoryRedis(_made(directory / "redis"))
        self._amqp = RabbitMQServer(_made(directory / "rabbitmq")) if "amqp" in brokers else None
        self._runs = 0
        self._vhost = ""
        self._touched = True  # a run on RabbitMQ leaves something behind

    def start(self) -> None:
        """Start the servers."""
        self._redis.start()
        if self._amqp is not None:
            self._amqp.start()

    def close(self) -> None:
        """End the servers."""
        self._redis.close()
        if self._amqp is not None:
            self._amqp.close()

    # -- the servers -----------------------------------------------------------------------

    def clear(self) -> None:
        """Empty brokers and an empty log."""
        self._redis.client().flushall()
        self.log.write_bytes(b"")
        if self._amqp is not None and self._touched:
            if self._vhost:
                self._amqp.delete_vhost(self._vhost)
            self._runs += 1
            self._vhost = f"bench{self._runs}"
            self._amqp.add_vhost(self._vhost)
            self._touched = False

    def url(self, broker: str, db: int = 0) -> str:
        """Where the broker is."""
        if broker == "redis":
            return self._redis.url_of(db)
        assert self._amqp is not None
        self._touched = True
        return self._amqp.url_of(self._vhost)

    def redis(self, db: int = 0) -> Any:
        """A client of the Redis server."""
        return self._redis.client(db)

    def counted(self) -> int:
        """What the INCR tasks have counted to."""
        return int(self.redis(COUNTER_DB).get(COUNTER) or 0)

    def redis_cpu_s(self) -> float:
        """Processor time that the Redis server has used."""
        info = self.redis().info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def versions(self) -> dict[str, str]:
        """Of the servers."""
        found = {"redis": str(self.redis().info("server")["redis_version"])}
        if self._amqp is not None:
            with self._amqp.connection() as connection:
                found["rabbitmq"] = str(connection.server_properties["version"])
        return found

    # -- contestants -----------------------------------------------------------------------

    def environment(self, name: str, url: str) -> dict[str, str]:
        """Of a contestant's processes."""
        found = {key: value for key, value in os.environ.items() if not key.startswith("BENCH_")}
        path = [str(ROOT)]
        if name == "umbel":
            path += [found["PYTHONPATH"]] if found.get("PYTHONPATH") else []
        else:
            path.insert(0, str(OWN_LIBRARIES / name))
        own = {"BENCH_BROKER": url, "BENCH_LOG": str(self.log)}
        own["BENCH_REDIS"] = self._redis.url_of(COUNTER_DB)
        own["PYTHONPATH"] = os.pathsep.join(path)
        return found | own

    def ask(self, name: str, broker: str, role: str, *arguments: object, db: int = 0) -> Any:
        """Run `benchmarks.contestant` and return its answer."""
        command = [python_of(name), "-m", "benchmarks.contestant", name, role]
        try:
            done = subprocess.run(
                [*command, *map(str, arguments)],
                cwd=ROOT,
                env=self.environment(name, self.url(broker, db)),
                capture_output=True,
                text=True,
                timeout=ANSWER_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{name} {role}: no end within {ANSWER_S:g} s") from None
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise Failed(f"{name} {role}: {(done.stderr or done.stdout)[-1500:]}")
        return json.loads(lines[-1])

    def describe(self, name: str) -> Contestant:
        """Ask a contestant what it is."""
        told = self.ask(name, "redis", "describe")
        return Contestant(name=name, brokers=tuple(told.pop("brokers")), **told)

    @contextlib.contextmanager
    def working(
        self, name: str, broker: str, commands: list[list[str]], db: int = 0
    ) -> Iterator[Crew]:
        """A worker at work, killed in the end: how it says good-bye is not measured."""
        environment = self.environment(name, self.url(broker, db))
        output = self.directory / "worker.log"
        with output.open("wb") as out:
            programs = [
                subprocess.Popen(
                    [python_of(name), *command],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command in commands
            ]
        for program in programs:
            guard.watch(program.pid)
        crew = Crew(self, programs, output)
        try:
            yield crew
        finally:
            crew.kill()


class Crew:
    """The processes of one worker, and what they have done so far."""

    def __init__(self, stage: Stage, programs: list[subprocess.Popen[bytes]], output: Path) -> None:
        self.stage = stage
        self._programs = programs
        self._output = output

    def done_count(self) -> int:
        """Tasks that have ended."""
        return self.stage.log.stat().st_size // RECORD.size

    def wait(self, count: int, at: Callable[[], None] | None = None, at_count: int = 0) -> None:
        """Until so many tasks are done; `at` is called when `at_count` are."""
        last, moved_at = -1, time.monotonic()
        while True:
            done = self.done_count()
            if at is not None and done >= at_count:
                at()
                at = None
            if done >= count:
                return
            if done != last:
                last, moved_at = done, time.monotonic()
            elif time.monotonic() - moved_at > STALL_S or self._ended():
                told = self._output.read_text(errors="replace")[-1500:]
                raise Failed(f"{done} of {count} tasks are done, and no more; it said:\n{told}")
            time.sleep(0.005)

    def records(self) -> list[tuple[int, int, int]]:
        """What the tasks have written."""
        written = self.stage.log.read_bytes()
        whole = len(written) // RECORD.size * RECORD.size
        return list(RECORD.iter_unpack(written[:whole]))

    def cpu_s(self) -> float:
        """Processor time of all processes, those that have ended included."""
        spent = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                spent += sum(process.cpu_times()[:4])
        return spent

    def awake_s(self) -> float:
        """Processor time of all threads that live, to the nanosecond where the kernel tells it.

        The usual account is in steps of 10 ms, which is much for a worker that sleeps.
        """
        told: list[int] = []
        for process in self._processes():
            for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # it has ended just now
                    told.append(int(path.read_text().split()[0]))
        return sum(told) / 1e9 if told else self.cpu_s()

    def held_mib(self) -> tuple[float, float]:
        """Memory of all processes: with what they share counted for each, and counted once."""
        rss = pss = 0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                held = process.memory_full_info()
                rss, pss = rss + held.rss, pss + held.pss
        return rss / 2**20, pss / 2**20

    def kill(self) -> None:
        """End every process."""
        processes = self._processes()
        for program in self._programs:
            guard.kill_group(program.pid, signal.SIGSTOP)  # nobody may start another one
        processes |= self._processes()
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for program in self._programs:
            guard.kill_group(program.pid)
            program.wait(10)
            guard.unwatch(program.pid)

    def _ended(self) -> bool:
        return any(program.poll() is not None for program in self._programs)

    def _processes(self) -> set[psutil.Process]:
        found: set[psutil.Process] = set()
        for program in self._programs:
            with contextlib.suppress(psutil.Error):
                first = psutil.Process(program.pid)
                found |= {first, *first.children(recursive=True)}
        return found


def python_of(name: str) -> str:
    """The interpreter of a contestant."""
    return sys.executable if name == "umbel" else str(PEERS_PYTHON)


def missing() -> list[str]:
    """What has to be there before anything can be measured, and is not."""
    found = []
    if not PEERS_PYTHON.exists():
        found.append("the peers' environment .venv-bench: run scripts/bench-setup")
    return found


@contextlib.contextmanager
def open_stage(brokers: tuple[str, ...]) -> Iterator[Stage]:
    """Servers that are up; gone in the end, with their files, also when asked to stop."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # The log is in memory where that can be: appending to it is as cheap as can be.
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="umbel-bench-") as directory,
        tempfile.NamedTemporaryFile(prefix="umbel-bench-", dir=place) as log,
    ):
        stage = Stage(Path(directory), Path(log.name), brokers)
        try:
            stage.start()
            stage.clear()
            yield stage
        finally:
            stage.close()


def machine() -> dict[str, Any]:
    """What it was measured on."""
    known = Path("/proc/cpuinfo")
    names = re.findall(
        r"^model name\s*:\s*(.+)$", known.read_text() if known.exists() else "", re.MULTILINE
    )
    return {
        "cpu": names[0] if names else os.uname().machine,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": sys.version.split()[0],
    }


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory
