"""What a worker is sent and cannot read: logged once per kind, counted, and shown to who looks."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers import wait_until
from tests.strangers import Stranger
from tests.workers import Program, WorkerProcess, run_umbel

APP = """
import os
from umbel import Umbel

app = Umbel("shop", broker=os.environ["BROKER"], backend="disabled://")
app.conf.update(worker_heartbeat_interval=0.5)
"""
FORGED = "odd@test\nERROR all is lost"


class Shop:
    """An application in a file, its worker, and commands about it."""

    def __init__(self, directory: Path, url: str, start: Callable[..., WorkerProcess]) -> None:
        (directory / "shop.py").write_text(APP)
        self.directory, self.env = directory, {"BROKER": url}
        args = ["-P", "threads", "-c", "1", "-n", "w@test", "--metrics-port", "0", "-l", "info"]
        self.worker = start("shop", args, cwd=directory, env=self.env, wait=True)

    def run(self, *args: str) -> Program:
        return run_umbel(["-A", "shop", *args], cwd=self.directory, env=self.env)

    def refused(self) -> dict[str, dict[str, int]]:
        own = json.loads(self.run("inspect", "stats", "--json").output)["w@test"]["umbel"]
        return {key: own[key] for key in ("refused", "gossip_refused", "control_refused")}

    def metrics(self) -> str:
        address = self.worker.wait_for(r"metrics at (http://[\d.]+:\d+/metrics)")[1]
        with urllib.request.urlopen(address, timeout=10) as answer:
            return str(answer.read().decode())

    def lines(self, text: str) -> list[str]:
        return [line for line in self.worker.lines if text in line]


@pytest.fixture
def shop(tmp_path: Path, broker_url: str, start_worker: Callable[..., WorkerProcess]) -> Shop:
    return Shop(tmp_path, broker_url, start_worker)


def heartbeat(**fields: Any) -> bytes:
    event = {"type": "worker-heartbeat", "hostname": "forged@test", "timestamp": 1.0, **fields}
    return json.dumps(event).encode()


def test_a_malformed_event_is_logged_once_per_kind_and_shown_by_everything_that_looks(
    shop: Shop, broker_url: str
) -> None:
    quiet = shop.run("status")
    assert "refused" not in quiet.output
    with Stranger(broker_url) as stranger:
        for _ in range(3):
            stranger.send_event(heartbeat(clock="x", password="hunter2"), "worker-heartbeat", {})
        for body in (b"7", b"\xff{", b"[]]"):
            stranger.send_event(body, "worker-heartbeat", {"hostname": FORGED})
        stranger.event("worker-elect", "odd@test", id=7, topic="task", action={}, cver=2)
        stranger.send(b"{")
        stranger.app.send_task("no.such.task")
    expected = {
        "gossip_refused": {"bad-clock": 3, "not-an-event": 1, "undecodable": 2, "bad-id": 1},
        "control_refused": {"undecodable": 1},
        "refused": {"unregistered": 1},
    }

    def counted() -> bool:
        found = shop.refused()
        found["gossip_refused"].pop("not-for-election", None)
        return found == expected

    wait_until(counted, 40, f"{expected}, not {shop.refused()}")
    (line,) = shop.lines("(bad-clock)")
    assert "WARNING" in line
    assert "forged@test" in line
    assert "'clock': 'x'" in line
    assert "hunter2" not in shop.worker.output
    for reason in ("not-an-event", "undecodable", "bad-id"):
        (line,) = [one for one in shop.lines(f"({reason})") if "event was refused" in one]
        assert "odd@test" in line
    assert not [one for one in shop.worker.lines if one.startswith("ERROR all is lost")]
    page = shop.metrics()
    assert re.search(r'^umbel_events_refused_total\{kind="bad-clock"\} 3\.0$', page, re.MULTILINE)
    assert 'umbel_control_refused_total{kind="undecodable"} 1.0' in page
    assert 'umbel_messages_refused_total{kind="unregistered"} 1.0' in page
    status = shop.run("status").output
    assert "w@test refused 1 task messages (unregistered 1), 1 control messages" in status
    assert "7 events (bad-clock 3, bad-id 1, not-an-event 1, undecodable 2)" in status
    rows = json.loads(shop.run("--quiet", "status", "--json").output)["nodes"]
    assert rows[0]["refused"]["events"] == expected["gossip_refused"]
    doctor = shop.run("doctor")
    assert doctor.process.returncode == 0, doctor.output
    (line,) = [one for one in doctor.output.splitlines() if "bad-clock 3" in one]
    assert line.startswith("warn  events")
    assert "event_exchange" in line
    assert "undecodable 1" in doctor.output
    table = shop.run("inspect", "stats").output
    assert re.search(r"events\s+bad-clock\s+3", table), table
