"""`umbel events`, `status` and `top` on real brokers, with real workers and real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.servers import RedisServer
from tests.workers import Program, WorkerProcess, program_environment, run_umbel

SHOP = """\
from umbel import Umbel
app = Umbel('shop')

@app.task
def charge(order):
    return order * 2

@app.task
def fail():
    raise ValueError('no \\x1b[2Jmoney')
"""
NOBODY = "redis://:hidden@127.0.0.1:1/0"


class Shop:
    """A directory with an application, on one broker."""

    def __init__(self, directory: Path, url: str, start: Any, worker: Any) -> None:
        self.directory, self.url = directory, url
        self._start, self._worker = start, worker

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "umbel", "-A", "shop", "-b", self.url, *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = program_environment(self.directory)
        return forks.run(self.command(*words), cwd=self.directory, env=env)

    def start(self, *words: str, **env: str) -> Program:
        program: Program = self._start(self.command(*words), env=env)
        return program

    def worker(self, name: str, *words: str) -> WorkerProcess:
        options = ["-n", name, "-P", "threads", "-c", "2", "-l", "info", *words]
        process: WorkerProcess = self._worker("shop", options, env={"UMBEL_BROKER_URL": self.url})
        return process

    def call(self, *words: str) -> str:
        """Send a task; its id."""
        ran = run_umbel(["-A", "shop", "-b", self.url, "call", *words], cwd=self.directory)
        assert ran.process.returncode == 0, ran.output
        return ran.lines[0]


MakeShop = Callable[[str], Shop]


@pytest.fixture
def make_shop(
    tmp_path: Path, start: Callable[..., Program], worker: Callable[..., WorkerProcess]
) -> MakeShop:
    (tmp_path / "shop.py").write_text(SHOP)
    return lambda url: Shop(tmp_path, url, start, worker)


@pytest.fixture
def shop(make_shop: MakeShop, broker_url: str) -> Shop:
    return make_shop(broker_url)


@pytest.fixture
def redis_shop(make_shop: MakeShop, redis_url: str) -> Shop:
    return make_shop(redis_url)


def test_the_life_of_a_task_is_shown_as_it_happens(shop: Shop) -> None:
    shop.worker("w1@here", "-E")
    events = shop.start("events")
    events.wait_for(r"w1@here +worker-heartbeat .*active=0")
    good = shop.call("shop.charge", "21")[:8]
    events.wait_for(rf"w1@here +task-received +{good}  shop\.charge +\(21\)")
    events.wait_for(rf"task-started +{good}  shop\.charge +waited ")
    events.wait_for(rf"task-succeeded +{good}  shop\.charge +[\d.]+m?s → 42")
    bad = shop.call("shop.fail")[:8]
    line = events.wait_for(rf"task-failed +{bad}  shop\.fail .*").string
    assert "ValueError('no \\x1b[2Jmoney')" in line
    events.signal(signal.SIGINT)
    assert events.wait() == 0
    assert re.fullmatch(r"umbel: \d+ events", events.lines[-1])
    assert "\x1b" not in events.output


def test_json_lines_are_whole_events(shop: Shop) -> None:
    shop.worker("w1@here", "-E")
    events = shop.start("-q", "events", "--json")
    events.wait_for("worker-heartbeat")
    uuid = shop.call("shop.charge", "7")
    events.wait_for("task-succeeded")
    events.signal(signal.SIGINT)
    assert events.wait() == 0
    found = [json.loads(line) for line in events.lines]
    assert [event["type"] for event in found if event.get("uuid") == uuid] == [
        *("task-received", "task-started", "task-succeeded")
    ]
    clocks = [event["clock"] for event in found]
    assert clocks == sorted(set(clocks))


def test_what_is_shown_is_filtered_and_limited(shop: Shop) -> None:
    shop.worker("w1@here", "-E")
    shop.worker("w2@here", "-E")
    ran = shop.run("events", "--node", "w2@*", "--type", "worker-heart*", "--limit", "2")
    assert ran.returncode == 0, ran.stderr
    assert [line.split()[2:4] for line in ran.stdout.splitlines()] == [
        ["w2@here", "worker-heartbeat"]
    ] * 2
    assert re.fullmatch(r"umbel: \d+ events(, 2 shown)?\n", ran.stderr)


def test_status_shows_every_node_and_which_of_them_send_events_of_tasks(shop: Shop) -> None:
    shop.worker("w1@here", "-E")
    shop.worker("w2@here")
    ran = shop.run("status", "--timeout", "20")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["node", "w1@here", "w2@here", "2"]
    assert "-E" in ran.stderr
    document = json.loads(shop.run("-q", "status", "--timeout", "20", "--json").stdout)
    assert document["listened_s"] < 15  # ended when all was told
    assert "hidden" not in document["broker"]
    for node in document["nodes"]:
        assert node["alive"] is True
        assert node["active"] == 0
        assert node["clock"] > 0
        assert node["sw_ident"] == "py-umbel"
        assert node["lost"] == 0


def test_nobody_is_exit_code_69(shop: Shop) -> None:
    ran = shop.run("status", "--timeout", "0.5")
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (69, "", 1)
    assert "nobody was heard within 0.5 s" in ran.stderr


def test_silence_is_exit_code_3(shop: Shop) -> None:
    ran = shop.run("events", "--timeout", "0.5")
    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.splitlines()[0] == "umbel: no event for 0.5 s"


@pytest.mark.parametrize("verb", ["events", "status"])
def test_a_broker_that_is_not_there_is_one_line(make_shop: MakeShop, verb: str) -> None:
    ran = make_shop(NOBODY).run(verb)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert ran.stderr.startswith("umbel: cannot reach redis://:**@127.0.0.1:1/0")


def test_a_reader_that_goes_away_is_no_error(redis_shop: Shop) -> None:
    redis_shop.worker("w1@here")
    with subprocess.Popen(
        redis_shop.command("events"),
        cwd=redis_shop.directory,
        env=program_environment(redis_shop.directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "worker-heartbeat" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that a test may kill."""
    directory = tmp_path / "redis"
    directory.mkdir()
    server = RedisServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.close()


def test_events_go_on_when_the_broker_comes_back(
    make_shop: MakeShop, own_redis: RedisServer
) -> None:
    shop = make_shop(own_redis.url)
    shop.worker("w1@here")
    events = shop.start("events")
    events.wait_for("worker-heartbeat")
    own_redis.kill()
    events.wait_for("umbel: the broker is gone: reconnecting")
    own_redis.start()
    events.wait_for("umbel: connected again")
    seen = len(events.lines)
    events.wait_for("worker-heartbeat", start=seen)
    events.signal(signal.SIGINT)
    assert events.wait() == 0
    assert "Traceback" not in events.output


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self._master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
        environment = program_environment(directory) | {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.output = ""

    def wait_for(self, text: str, timeout_s: float = 30.0) -> None:
        until = time.monotonic() + timeout_s
        while text not in self.output:
            left_s = until - time.monotonic()
            assert left_s > 0, f"no {text!r} in {self.output[-2000:]!r}"
            self._read(left_s)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait(self, timeout_s: float = 30.0) -> int:
        until = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < until, "it does not end"
            self._read(0.1)
        return int(self.process.returncode)

    def _read(self, timeout_s: float) -> None:
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        if ready:
            try:
                self.output += os.read(self._master, 65_536).decode(errors="replace")
            except OSError:  # its other end is closed
                self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self._master)


@pytest.mark.parametrize("leave", ["q", "\x03", ""], ids=["q", "ctrl-c", "term"])
def test_top_shows_the_cluster_on_a_terminal_and_leaves_it_in_order(
    redis_shop: Shop, leave: str
) -> None:
    redis_shop.worker("w1@here", "-E")
    terminal = Terminal(redis_shop.command("top"), redis_shop.directory)
    try:
        terminal.wait_for("w1@here")
        terminal.wait_for("1/1 alive")
        redis_shop.call("shop.charge", "7")
        terminal.wait_for("shop.charge")
        if leave:
            terminal.type(leave)
        else:
            terminal.process.terminate()
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.output
        assert "\x1b[?1049l" in terminal.output  # the screen as it was before
    finally:
        terminal.close()
