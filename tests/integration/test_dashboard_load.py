"""What a busy cluster costs the dashboard: processor, memory, and that nothing is lost."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import psutil

from tests.servers import free_port, wait_until
from tests.sizes import size
from tests.workers import Program
from umbel import Umbel
from umbel.app.events.outlet import Outlet

WORKERS = 100
EVENTS_PER_S = 1_000
LASTING_S = size(10, 300)
MEMORY_MAX = 300 * 2**20
PROCESSOR_MAX = 0.5
# Each task is four events, of which the last tells most.
PER_BEAT = EVENTS_PER_S // 10


def test_a_thousand_events_a_second_of_a_hundred_workers_are_held(
    redis_url: str, start: Callable[..., Program]
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "umbel", "-A", "tests.probe_app", "-b", redis_url]
    program = start([*command, "dashboard", "--port", str(port)], env={"PROBE_URL": redis_url})
    wait_until(lambda: b"connected" in fetched(f"{url}/healthz"), 60, "the dashboard")
    stop = threading.Event()
    # Two browsers look on.
    watchers = [
        threading.Thread(target=watch, args=(f"{url}/live/{page}", stop), daemon=True)
        for page in ("cluster", "tasks")
    ]
    for watcher in watchers:
        watcher.start()
    process = psutil.Process(program.pid)
    before = process.cpu_times()
    began = time.monotonic()
    sent = publish(redis_url, LASTING_S)
    lasted_s = time.monotonic() - began
    after = process.cpu_times()
    wait_until(
        lambda: json.loads(fetched(f"{url}/api/v1/cluster"))["totals"]["events"] >= sent,
        30,
        "all events to be heard",
    )
    stop.set()
    facts = json.loads(fetched(f"{url}/api/v1/cluster"))
    used_s = after.user + after.system - before.user - before.system
    memory = process.memory_info().rss
    print(
        f"{sent / lasted_s:.0f} events/s for {lasted_s:.0f} s: {used_s / lasted_s:.0%} of a core, "
        f"{memory / 2**20:.0f} MB"
    )
    assert facts["totals"]["nodes_alive"] == WORKERS
    assert facts["totals"]["missing"] == 0
    # By event, as a busy machine may not let the test itself send so many.
    assert used_s / sent * EVENTS_PER_S < PROCESSOR_MAX
    assert memory < MEMORY_MAX


def publish(url: str, lasting_s: float) -> int:
    """Events at the given rate, in batches as workers send them; how many."""
    app = Umbel("load", broker=url, set_as_current=False)
    outlet = Outlet(app)
    outlet.open()
    clock, sent, number = 0, 0, 0
    seqs = [0] * WORKERS
    began = time.monotonic()
    try:
        beat = 0
        while time.monotonic() - began < lasting_s:
            batches: dict[int, list[dict[str, Any]]] = {}
            if beat % 20 == 0:  # heartbeats of all, every two seconds
                for worker in range(WORKERS):
                    batches.setdefault(worker, []).append({
                        "type": "worker-heartbeat", "freq": 2.0, "active": 2,
                        "sw_ident": "py-umbel", "processed": number // WORKERS,
                        "loadavg": [1.0, 1.0, 1.0],
                    })  # fmt: skip
            for _ in range(PER_BEAT // 3):
                number += 1
                # Ten workers tell in each tenth of a second, several tasks at a time.
                worker = (beat * 10 + number % 10) % WORKERS
                batches.setdefault(worker, []).extend(life(number))
            for worker, events in batches.items():
                for event in events:
                    clock += 1
                    event.update(
                        hostname=f"w{worker}@load", pid=worker + 1, inc=1, seq=seqs[worker] + 1,
                        clock=clock, timestamp=time.time(), utcoffset=0,
                    )  # fmt: skip
                    seqs[worker] += 1
                    sent += 1
                for event in [one for one in events if one["type"].startswith("worker")]:
                    outlet.publish([event])
                outlet_events = [one for one in events if one["type"].startswith("task")]
                if outlet_events:
                    outlet.publish(outlet_events)
            beat += 1
            time.sleep(max(0.0, began + beat * 0.1 - time.monotonic()))  # the rate is the test
    finally:
        outlet.close()
        app.close()
    return sent


def life(number: int) -> list[dict[str, Any]]:
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


def watch(url: str, stop: threading.Event) -> None:
    with urllib.request.urlopen(url, timeout=60) as stream:
        while not stop.is_set() and stream.readline():
            pass


def fetched(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            body: bytes = answer.read()
            return body
    except OSError:
        return b""
