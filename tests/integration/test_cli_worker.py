"""A worker as an operator meets it: banner, log, health, signals; on the embedded broker."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import wait_until
from tests.workers import WorkerProcess, run_umbel

SHOP = """\
import logging
import time
from pathlib import Path

from umbel import Umbel

app = Umbel('shop')

@app.task
def charge(order):
    logging.getLogger('shop').warning('charging %s', order)
    print('printed', order)
    return order * 2

@app.task
def fail():
    raise ValueError('no money')

@app.task(acks_late=True)
def wait_for(path):
    print('begun')
    while not Path(path).exists():
        time.sleep(0.01)
    return 'done'
"""

Start = Callable[..., WorkerProcess]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def call(directory: Path, *words: str) -> tuple[int, list[str]]:
    ran = run_umbel(["-A", "shop", "call", *words], cwd=directory)
    return int(ran.process.returncode), ran.lines


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "asyncio", "solo"])
def test_a_task_goes_in_and_a_result_comes_out(
    directory: Path, start_worker: Start, pool: str
) -> None:
    words = ["-n", "w1@%h", "-P", pool, "-c", "2", "-l", "info"]
    process = start_worker("shop", words, fresh=True)
    code, (task_id, result) = call(directory, "shop.charge", "7", "--wait", "--timeout", "20")
    assert (code, result) == (0, "14")
    prefix = re.escape(f"shop.charge[{task_id}]: ")
    process.wait_for(prefix + "charging 7")
    process.wait_for(prefix + "printed 7")
    assert process.stop() == 0
    assert "Traceback" not in process.output


def test_the_banner_tells_who_what_and_where(directory: Path, start_worker: Start) -> None:
    process = start_worker("shop", ["-n", "w1@host", "-P", "solo", "-Q", "celery,money"])
    banner = process.output
    for fact in ("w1@host", "embedded", "solo, 1 at a time", "money  exchange=money(direct)"):
        assert fact in banner
    assert "shop.charge" in banner
    assert process.stop() == 0


def test_a_failed_task_is_told_plainly(directory: Path, start_worker: Start) -> None:
    start_worker("shop", ["-P", "solo"])
    code, lines = call(directory, "shop.fail", "--wait", "--timeout", "20")
    assert code == 1
    assert lines[1].endswith("ended as FAILURE: ValueError: no money")
    ran = run_umbel(["-A", "shop", "result", lines[0], "--traceback"], cwd=directory)
    assert ran.process.returncode == 1
    assert "in fail" in ran.output


def test_every_line_of_a_json_log_is_json(directory: Path, start_worker: Start) -> None:
    process = start_worker("shop", ["-P", "prefork", "-c", "1", "--json-logs", "-l", "info"])
    _, lines = call(directory, "shop.charge", "7", "--wait", "--timeout", "20")
    assert process.stop() == 0
    records = [json.loads(line) for line in process.lines]
    inside = {r["message"]: r for r in records if r["task_id"] == lines[0]}
    assert {"charging 7", "printed 7"} <= inside.keys()
    assert inside["charging 7"]["task_name"] == "shop.charge"
    assert inside["charging 7"]["process"] != process.pid


def test_a_log_file_gets_the_lines_of_pool_processes(directory: Path, start_worker: Start) -> None:
    start_worker(
        "shop", ["-n", "w1@h", "-P", "prefork", "-c", "1", "-f", "%n.log", "-q"], wait=False
    )
    log = directory / "w1.log"
    wait_until(lambda: log.exists() and "ready" in log.read_text(), what="the worker to be ready")
    assert call(directory, "shop.charge", "7", "--wait", "--timeout", "20")[0] == 0
    wait_until(lambda: "printed 7" in log.read_text(), what="the line of the task")


def test_health_follows_the_life_of_the_worker(directory: Path, start_worker: Start) -> None:
    arguments = ["-P", "threads", "-l", "info", "--health-file", "health", "--health-port", "0"]
    process = start_worker("shop", arguments)
    port = process.wait_for(r"health checks at http://127.0.0.1:(\d+)")[1]
    for question in ("live", "ready"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{question}", timeout=5) as answer:
            assert json.load(answer) == {question: True}
    file = directory / "health"
    wait_until(file.exists, what="the health file")
    assert json.loads(file.read_text())["pid"] == process.pid
    assert process.stop() == 0
    assert not file.exists()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_warm_shutdown_lets_the_task_end(directory: Path, start_worker: Start, pool: str) -> None:
    process = start_worker("shop", ["-P", pool, "-c", "1", "-l", "info"])
    _, (task_id,) = call(directory, "shop.wait_for", "go")
    process.wait_for("begun")
    process.signal(signal.SIGINT)
    process.wait_for(r"press Ctrl-C again")
    assert process.process.poll() is None
    (directory / "go").touch()
    assert process.wait() == 0
    ran = run_umbel(["-A", "shop", "result", task_id], cwd=directory)
    assert ran.lines == ["done"]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize("signals", [[signal.SIGQUIT], [signal.SIGINT, signal.SIGINT]])
def test_a_cold_shutdown_stops_the_task_and_gives_its_message_back(
    directory: Path, start_worker: Start, pool: str, signals: list[int]
) -> None:
    process = start_worker("shop", ["-P", pool, "-c", "1", "-l", "info"])
    _, (task_id,) = call(directory, "shop.wait_for", "go")
    process.wait_for("begun")
    for number in signals:
        process.signal(number)
        process.wait_for("shutdown")
    assert process.wait() == 1
    assert "cold shutdown" in process.output
    (directory / "go").touch()
    start_worker("shop", ["-P", "solo"])
    ran = run_umbel(["-A", "shop", "result", task_id, "--wait", "--timeout", "20"], cwd=directory)
    assert ran.lines == ["done"]


def test_usr1_shows_the_stacks_and_the_worker_works_on(
    directory: Path, start_worker: Start
) -> None:
    process = start_worker("shop", ["-P", "threads"])
    os.kill(process.pid, signal.SIGUSR1)
    process.wait_for("thread MainThread")
    assert call(directory, "shop.charge", "7", "--wait", "--timeout", "20")[0] == 0


def test_a_worker_that_purges_begins_with_empty_queues(
    directory: Path, start_worker: Start
) -> None:
    for _ in range(3):
        assert call(directory, "shop.charge", "7")[0] == 0
    process = start_worker("shop", ["-P", "solo", "--purge"])
    process.wait_for("purged 3 messages from celery")
    assert "charging" not in process.output
