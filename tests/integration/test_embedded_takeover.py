"""Data of the embedded broker outlive a change of its server: older ones, other ones, and back."""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tests import guard
from tests.embedding import STAY, USER, client, is_written, servers_of, wait_until_stopped
from tests.pages import blocks
from tests.servers import wait_until
from tests.workers import Program
from umbel import Umbel
from umbel.broker.embedded import keeper as embedded_keeper
from umbel.broker.embedded import program as embedded_program
from umbel.broker.embedded import server as embedded
from umbel.broker.sessions import connections
from umbel.exceptions import ImproperlyConfigured

Start = Callable[..., Program]

APP = "tests.probe_app"
# As if the process had been killed in the middle of a write.
HALF_A_COMMAND = b'*3\r\n$5\r\nLPUSH\r\n$6\r\ncelery\r\n$4000\r\n{"bo'
JOIN_OLD = (
    "from umbel.broker.embedded import server as embedded\n"
    "embedded.server_program = lambda named: {old!r}\n"
)


class OldServer:
    """Redis 6.2.14 in the home of an embedded broker, with the options that it had."""

    def __init__(self, program: str, home: Path) -> None:
        home.mkdir(mode=0o700, exist_ok=True)
        self.home, self.socket = home, home / "redis.sock"
        self.process = subprocess.Popen(
            [
                *(program, "--port", "0", "--unixsocket", str(self.socket)),
                *("--unixsocketperm", "600", "--dir", str(home), "--databases", "16"),
                *("--logfile", str(home / "redis.log"), "--appendonly", "yes", "--save", ""),
                *("--appendfsync", "everysec", "--maxmemory-policy", "noeviction"),
            ],
            stdin=subprocess.DEVNULL,
        )
        guard.watch(self.process.pid)
        wait_until(lambda: embedded_keeper.ping(str(self.socket)), what="the old server")
        self.client = redis.Redis(unix_socket_path=str(self.socket))

    def rewrite(self) -> None:
        """Replace what was written so far by a snapshot."""
        self.client.bgrewriteaof()
        wait_until(
            lambda: (
                not self.client.info("persistence")["aof_rewrite_in_progress"]
                and (self.home / "appendonly.aof").read_bytes().startswith(b"REDIS0009")
            ),
            what="the rewritten file",
        )

    def kill(self) -> None:
        if self.process.poll() is None:
            wait_until(lambda: is_written(self.client), what="everything to be in the file")
            self.client.close()
        self.process.kill()
        self.process.wait(10)
        guard.unwatch(self.process.pid)


@pytest.fixture
def old(old_redis: str, home: Path) -> Iterator[OldServer]:
    server = OldServer(old_redis, home / ".umbel")
    yield server
    server.kill()


@contextlib.contextmanager
def application(home: Path, **settings: str) -> Iterator[Umbel]:
    app = Umbel("client", set_as_current=False, embedded_directory=str(home), **settings)
    try:
        yield app
    finally:
        app.close()
        connections.leave_embedded()


def start_worker(start: Start, home: Path) -> Program:
    command = [sys.executable, "-m", "umbel", "-A", APP, "worker", "-P", "solo", "-l", "info"]
    worker = start(command, env={"UMBEL_EMBEDDED_DIRECTORY": str(home)})
    worker.wait_for(r"\bready\b")
    return worker


def fill(old: OldServer) -> list[str]:
    """Everything that Umbel keeps on a server, half of it in a snapshot; ids of waiting tasks."""
    url = f"redis+socket://{old.socket}?virtual_host=0"
    app = Umbel("client", broker=url, backend=url, set_as_current=False)
    one = app.send_task(f"{APP}.add", (1, 1))
    old.client.set("celery-task-meta-known", '{"status": "SUCCESS", "result": 7}', ex=86_400)
    old.client.xadd("stream", {"event": "first"}, id="1-1")
    old.client.xgroup_create("stream", "readers", "0")
    old.client.xreadgroup("readers", "me", {"stream": ">"})
    old.rewrite()
    two = app.send_task(f"{APP}.add", (2, 2))
    old.client.zadd("unacked_index", {"tag": 1.5})
    old.client.hset("unacked", "tag", "note")
    old.client.xadd("stream", {"event": "second"}, id="1-2")
    app.close()
    return [str(one.id), str(two.id)]


def test_data_of_the_old_server_are_taken_over_after_it_was_killed_in_the_middle_of_a_write(
    home: Path, old: OldServer, start: Start
) -> None:
    ids = fill(old)
    old.kill()
    with (home / ".umbel" / "appendonly.aof").open("ab") as file:
        file.write(HALF_A_COMMAND)
    with application(home) as app:
        lease = embedded.join(home)
        with client(home) as server:
            assert "valkey_version" in server.info("server")
            assert server.llen("celery") == 2
            assert server.hgetall("unacked") == {b"tag": b"note"}
            assert server.zscore("unacked_index", "tag") == 1.5
            assert 86_000 < server.ttl("celery-task-meta-known") <= 86_400
            assert server.xlen("stream") == 2
            assert server.xpending("stream", "readers")["pending"] == 1
        start_worker(start, home)
        assert [app.AsyncResult(one).get(timeout=20) for one in ids] == [2, 4]
        assert app.AsyncResult("known").result == 7
        lease.close()


def test_data_survive_a_kill_in_the_middle_of_a_write(home: Path) -> None:
    lease = embedded.join(home)
    with client(home) as server:
        assert server.config_get("append*")["appendfsync"] == "everysec"
        server.set("key", "kept")
        wait_until(lambda: is_written(server), what="everything to be in the file")
    for process in servers_of(home):
        process.kill()
    lease.close()
    wait_until_stopped(home)
    (last,) = (home / ".umbel" / "appendonlydir").glob("*.incr.aof")
    with last.open("ab") as file:
        file.write(HALF_A_COMMAND)
    lease = embedded.join(home)
    with client(home) as server:
        assert server.get("key") == b"kept"
        server.set("key", "more")
    lease.close()


def test_an_old_server_that_still_runs_serves_new_processes_and_is_replaced_when_it_ends(
    home: Path, old_redis: str, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    holder = start([sys.executable, "-c", JOIN_OLD.format(old=old_redis) + USER, str(home), STAY])
    holder.wait_for("joined")
    with application(home) as app, caplog.at_level(logging.WARNING):
        worker = start_worker(start, home)
        results = [app.send_task(f"{APP}.add", (n, n)) for n in range(20)]
        assert [one.get(timeout=20) for one in results] == [2 * n for n in range(20)]
        worker.wait_for(r"still served by Redis 6\.2\.14, which a process of an older Umbel")
        assert worker.stop() == 0
        left = app.send_task(f"{APP}.add", (3, 4))
    assert str(home / ".umbel") in caplog.text
    assert "Stop every process that uses it" in caplog.text
    holder.kill()
    wait_until_stopped(home)
    with application(home) as app:
        start_worker(start, home)
        assert app.AsyncResult(left.id).get(timeout=20) == 7
        assert app.AsyncResult(results[-1].id).get(timeout=20) == 38
        with client(home) as server:
            assert "valkey_version" in server.info("server")


def test_an_old_server_finds_nothing_of_a_new_one_and_both_sets_of_data_are_kept(
    home: Path, old_redis: str
) -> None:
    lease = embedded.join(home)
    with client(home) as server:
        server.set("written by", "new")
    lease.close()
    wait_until_stopped(home)
    old = OldServer(old_redis, home / ".umbel")
    assert old.client.dbsize() == 0
    old.client.set("written by", "old")
    old.kill()
    with pytest.raises(ImproperlyConfigured) as caught:
        embedded.join(home)
    file, directory = home / ".umbel" / "appendonly.aof", home / ".umbel" / "appendonlydir"
    assert f"two sets of data: {file}, " in str(caught.value)
    assert f" and {directory}. Move one of them" in str(caught.value)
    kept = directory.rename(home / "kept")
    for expected in (b"old", b"new"):
        lease = embedded.join(home)
        with client(home) as server:
            assert server.get("written by") == expected
        lease.close()
        wait_until_stopped(home)
        if kept.exists():
            shutil.rmtree(directory)
            kept.rename(directory)


def test_an_old_server_that_wrote_nothing_leaves_nothing_to_choose(
    home: Path, old_redis: str
) -> None:
    lease = embedded.join(home)
    with client(home) as server:
        server.set("key", "kept")
    lease.close()
    wait_until_stopped(home)
    OldServer(old_redis, home / ".umbel").kill()
    assert (home / ".umbel" / "appendonly.aof").exists()
    lease = embedded.join(home)
    with client(home) as server:
        assert server.get("key") == b"kept"
    lease.close()


def test_data_can_be_given_to_an_old_server_by_hand(home: Path, old_redis: str) -> None:
    """The commands are those of docs/operating.md."""
    lease = embedded.join(home)
    with client(home) as server:
        server.lpush("celery", *range(100))
        server.bgrewriteaof()
        wait_until(
            lambda: (
                not server.info("persistence")["aof_rewrite_in_progress"]
                and (home / ".umbel" / "appendonlydir" / "appendonly.aof.2.base.aof").exists()
            ),
            what="the rewritten file",
        )
        server.rpop("celery")
        server.xadd("stream", {"event": "first"})
    lease.close()
    wait_until_stopped(home)
    (commands,) = blocks("docs/operating.md", "sh")
    subprocess.run(commands, shell=True, check=True, cwd=home)
    old = OldServer(old_redis, home / ".umbel")
    assert (old.client.llen("celery"), old.client.xlen("stream")) == (99, 1)
    old.kill()


def test_servers_of_other_makes_read_the_data(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = shutil.which("redis-server")
    assert machine is not None, "run 'make setup'"
    monkeypatch.setattr(embedded_program, "VERSION_MIN", (7, 0))
    for number, program in enumerate((None, machine, None), 1):
        lease = embedded.join(home, program)
        with client(home) as server:
            assert ("valkey_version" in server.info("server")) == (program is None)
            assert server.incr("starts") == number
            server.bgrewriteaof()
            wait_until(lambda server=server: rewritten(server), what="the rewritten file")
        lease.close()
        wait_until_stopped(home)


def rewritten(server: redis.Redis) -> bool:
    found = server.info("persistence")
    assert found["aof_last_bgrewrite_status"] == "ok"
    return not found["aof_rewrite_in_progress"] and not found["aof_rewrite_scheduled"]
