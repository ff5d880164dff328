"""The workers of the demo: three processes with different pools on one embedded broker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

POOLS = (("prefork", 2), ("threads", 4), ("asyncio", 20))
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0


class DemoWorker:
    """One worker process; its last lines are kept for when something goes wrong."""

    def __init__(self, pool: str, concurrency: int, directory: Path) -> None:
        self.name = f"{pool}@demo"
        self.ready = threading.Event()
        self.lines: deque[str] = deque(maxlen=50)
        command = [
            sys.executable, "-m", "umbel", "-A", "umbel.cli.demo.tasks", "worker",
            "-n", self.name, "-P", pool, "-c", str(concurrency), "-l", "info", "--no-color", "-E",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, "UMBEL_EMBEDDED_DIRECTORY": str(directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if f"{self.name} ready" in line:
                self.ready.set()

    def stop(self) -> None:
        """Ask for a warm stop."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def join(self, deadline: float) -> None:
        """Wait for the end, and make it the end."""
        try:
            self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Cluster:
    """All workers of the demo."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.workers: list[DemoWorker] = []
        self._killed: set[str] = set()

    def start(self) -> None:
        """Start the workers and wait until all take messages."""
        self.workers = [DemoWorker(pool, size, self.directory) for pool, size in POOLS]
        self._wait()

    def replace_killed(self) -> None:
        """Start anew what was killed, as a supervisor would."""
        sizes = dict(POOLS)
        for number, worker in enumerate(self.workers):
            if worker.name in self._killed:
                pool = worker.name.partition("@")[0]
                self.workers[number] = DemoWorker(pool, sizes[pool], self.directory)
        self._killed.clear()
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        for worker in self.workers:
            if not worker.ready.wait(max(0.0, deadline - time.monotonic())):
                shown = "\n  ".join(worker.lines) or "(it printed nothing)"
                raise RuntimeError(f"worker {worker.name} did not start:\n  {shown}")

    def stop(self) -> None:
        """Stop them all."""
        for worker in self.workers:
            worker.stop()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for worker in self.workers:
            worker.join(deadline)

    def kill(self, name: str) -> None:
        """End a worker without a warning."""
        for worker in self.workers:
            if worker.name == name:
                self._killed.add(name)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)

    def alive(self) -> list[str]:
        """The names of workers that run."""
        return [worker.name for worker in self.workers if worker.process.poll() is None]

    def dead(self) -> list[str]:
        """The names of workers that ended by themselves."""
        alive = {*self.alive(), *self._killed}
        return [worker.name for worker in self.workers if worker.name not in alive]
