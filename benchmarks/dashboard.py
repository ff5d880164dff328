"""What a busy cluster costs the dashboard: its share of a core and its memory, with restarts.

Events as a hundred workers would send them go through a private Redis at a steady rate, while two
browsers' worth of live updates are read. Now and then the broker is killed and started again; the
dashboard must go on hearing. Processor time is told as a share of one core, also for the rate that
was asked for, as a busy machine may not let the load itself keep up; memory is the greatest seen.

    python benchmarks/dashboard.py [--seconds 300] [--rate 1000] [--workers 100] [--restarts 3]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from tests.servers import RedisServer, free_port, wait_until  # noqa: E402

CORES_MAX = 0.5
MEMORY_MB_MAX = 300
BEAT_S = 0.1
TASK_EVENTS = 3
HEARTBEATS_EVERY = 20  # beats
# How the dashboard reports that the broker went away.
LOSS_REPORTS = ("Cannot receive events",)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a run."""

    seconds: float
    events: int
    events_per_s: float
    cores: float
    cores_at_rate: float
    memory_mb_max: float
    nodes_alive: int
    missing: int
    restarts: int
    reconnects: int
    heard_after_all: bool
    complaints: list[str]

    @property
    def holds(self) -> bool:
        """Whether it is what was promised."""
        return (
            self.cores_at_rate <= CORES_MAX
            and self.memory_mb_max <= MEMORY_MB_MAX
            and self.heard_after_all
            and not self.complaints
        )


def measure(
    server: RedisServer, url: str, directory: Path, *,
    seconds: float, rate: int = 1_000, workers: int = 100, restarts: int = 0,
) -> Measured:  # fmt: skip
    """Run it once on a server that is there."""
    with Dashboard(url, directory) as dashboard, dashboard.watched():
        load = Load(url, rate, workers)
        process = psutil.Process(dashboard.process.pid)
        before, memory = process.cpu_times(), process.memory_info().rss
        began = time.monotonic()
        load.start()
        pauses = [began + seconds * (n + 1) / (restarts + 1) for n in range(restarts)]
        while time.monotonic() - began < seconds:
            time.sleep(min(1.0, max(0.0, began + seconds - time.monotonic())))
            memory = max(memory, process.memory_info().rss)
            if pauses and time.monotonic() >= pauses[0]:
                pauses.pop(0)
                server.restart()
        after, lasted_s = process.cpu_times(), time.monotonic() - began
        heard = dashboard.hears_more()
        load.stop()
        wait_until(lambda: dashboard.totals() is not None, 20, "an answer")
        time.sleep(1.0)  # what is on its way
        totals = dashboard.totals() or {}
        memory = max(memory, process.memory_info().rss)
    used_s = after.user + after.system - before.user - before.system
    return Measured(
        seconds=round(lasted_s, 1),
        events=load.sent,
        events_per_s=round(load.sent / lasted_s),
        cores=round(used_s / lasted_s, 3),
        cores_at_rate=round(used_s / load.sent * rate, 3),
        memory_mb_max=round(memory / 2**20, 1),
        nodes_alive=totals.get("nodes_alive", 0),
        missing=totals.get("missing", -1),
        restarts=restarts,
        reconnects=totals.get("reconnects", 0),
        heard_after_all=heard,
        complaints=_complaints(dashboard.output(), restarts),
    )


def _complaints(lines: list[str], restarts: int) -> list[str]:
    """Lines that report a failure; that the broker went away is no failure where it did."""
    expected = LOSS_REPORTS if restarts else ()
    return [
        line
        for line in lines
        if "Traceback" in line or ("Error" in line and not any(text in line for text in expected))
    ]


class Dashboard:
    """The program under test."""

    def __init__(self, url: str, directory: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = directory / "dashboard.log"
        command = [sys.executable, "-m", "umbel", "-A", "umbel.cli.demo.tasks", "-b", url,
                   "dashboard", "--port", str(self.port)]  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=directory, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> Self:
        wait_until(lambda: b"connected" in _fetched(f"{self.url}/healthz"), 60, "the dashboard")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def totals(self) -> dict[str, Any] | None:
        """What it has heard, in numbers."""
        content = _fetched(f"{self.url}/api/v1/cluster")
        return json.loads(content)["totals"] if content else None

    def hears_more(self, timeout_s: float = 30.0) -> bool:
        """Whether it hears events that are sent now."""
        first = (self.totals() or {}).get("events", 0)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (self.totals() or {}).get("events", 0) > first:
                return True
            time.sleep(0.2)
        return False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Two browsers look on meanwhile."""
        stop = threading.Event()
        for page in ("cluster", "tasks"):
            threading.Thread(
                target=_watch, args=(f"{self.url}/live/{page}", stop), daemon=True
            ).start()
        try:
            yield
        finally:
            stop.set()

    def output(self) -> list[str]:
        """What it has printed."""
        return self._log.read_text(errors="replace").splitlines()


class Load(threading.Thread):
    """Sends events at a rate, in batches as workers do; waits for a broker that is away."""

    def __init__(self, url: str, rate: int, workers: int) -> None:
        super().__init__(name="load", daemon=True)
        self._url, self._workers = url, workers
        beats_per_s = 1 / BEAT_S
        heartbeats_per_s = workers * beats_per_s / HEARTBEATS_EVERY
        self._tasks_per_beat = (rate - heartbeats_per_s) / beats_per_s / TASK_EVENTS
        self._seqs = [0] * workers
        self._clock = self._number = 0
        self._stopping = threading.Event()
        self.sent = 0

    def stop(self) -> None:
        """Send no more."""
        self._stopping.set()
        self.join(20)

    def run(self) -> None:
        from umbel import Umbel
        from umbel.app.events.publisher import Publisher

        app = Umbel("load", broker=self._url, set_as_current=False)
        began, beat = time.monotonic(), 0
        publisher = None
        while not self._stopping.is_set():
            batches = self._batches(beat)
            try:
                if publisher is None:
                    publisher = Publisher(app)
                    publisher.open()
                for batch in batches:
                    publisher.publish(batch)
                    self.sent += len(batch)
            except Exception:  # noqa: BLE001 - the broker is away, which is a part of the play
                if publisher is not None:
                    with contextlib.suppress(Exception):
                        publisher.close()
                publisher = None
            beat += 1
            late_s = time.monotonic() - (began + beat * BEAT_S)
            if late_s > 1.0:  # what could not be sent is not made up for
                began += late_s
            self._stopping.wait(max(0.0, -late_s))
        if publisher is not None:
            publisher.close()
        app.close()

    def _batches(self, beat: int) -> list[list[dict[str, Any]]]:
        batches: list[list[dict[str, Any]]] = []
        if beat % HEARTBEATS_EVERY == 0:
            for worker in range(self._workers):
                told = {
                    "type": "worker-heartbeat", "freq": 2.0, "active": 2, "sw_ident": "py-umbel",
                    "processed": self._number // self._workers, "loadavg": [1.0, 1.0, 1.0],
                }  # fmt: skip
                batches.append([self._stamped(worker, told)])
        by_worker: dict[int, list[dict[str, Any]]] = {}
        wanted = int((beat + 1) * self._tasks_per_beat) - int(beat * self._tasks_per_beat)
        for _ in range(wanted):
            self._number += 1
            # Ten workers tell in each beat, several tasks at a time.
            worker = (beat * 10 + self._number % 10) % self._workers
            told_by = by_worker.setdefault(worker, [])
            told_by.extend(self._stamped(worker, event) for event in _life(self._number))
        return [*batches, *by_worker.values()]

    def _stamped(self, worker: int, event: dict[str, Any]) -> dict[str, Any]:
        self._clock += 1
        self._seqs[worker] += 1
        return {
            **event, "hostname": f"w{worker}@load", "pid": worker + 1, "inc": 1,
            "seq": self._seqs[worker], "clock": self._clock, "timestamp": time.time(),
            "utcoffset": 0,
        }  # fmt: skip


def _life(number: int) -> list[dict[str, Any]]:
    uuid = f"{os.getpid()}-{number}"
    call = {"name": f"shop.task{number % 20}", "args": f"({number}, 'x' * 40)", "kwargs": "{}"}
    end: dict[str, Any] = {"type": "task-succeeded", "result": "'ok'", "runtime": 0.05}
    if number % 50 == 0:
        end = {"type": "task-failed", "exception": "E()", "traceback": "line\n" * 100}
    return [
        {"type": "task-received", "uuid": uuid, **call, "retries": 0},
        {"type": "task-started", "uuid": uuid},
        {**end, "uuid": uuid},
    ]


def _watch(url: str, stop: threading.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60) as stream:
            while not stop.is_set() and stream.readline():
                pass
        stop.wait(0.5)


def _fetched(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            body: bytes = answer.read()
            return body
    except OSError:
        return b""


def main() -> int:
    """Measure, tell, and fail where a promise is not held."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=int, default=1_000, help="events a second")
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--restarts", type=int, default=3, help="of the broker")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="umbel-dashboard-") as place:
        server = RedisServer(Path(place))
        server.start()
        try:
            found = measure(
                server, server.url_of(0), Path(place), seconds=chosen.seconds, rate=chosen.rate,
                workers=chosen.workers, restarts=chosen.restarts,
            )  # fmt: skip
        finally:
            server.stop()
    print(json.dumps(asdict(found), indent=2))
    verdict = "holds" if found.holds else "does NOT hold"
    print(f"{CORES_MAX:.0%} of a core and {MEMORY_MB_MAX} MB: {verdict}")
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
