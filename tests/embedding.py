"""Embedded brokers under test: joined by other processes, looked at from outside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import redis

from tests.servers import wait_until
from tests.workers import Program
from umbel.broker.embedded import server as embedded

USER = """
import sys
from pathlib import Path
from umbel.broker.embedded import server as embedded
lease = embedded.join(Path(sys.argv[1]))
print("joined", lease.socket_path, flush=True)
sys.stdin.read() if len(sys.argv) < 3 else exec(sys.argv[2])
"""
STAY = "import threading; threading.Event().wait()"


def client(directory: Path) -> redis.Redis:
    path = embedded._known_socket_path(directory.resolve() / ".umbel")
    assert path is not None
    return redis.Redis(unix_socket_path=str(path))


def server_pid(directory: Path) -> int:
    with client(directory) as connection:
        return int(connection.info("server")["process_id"])


def servers_of(directory: Path) -> list[psutil.Process]:
    """Every server and keeper process that works in the directory."""
    wanted = str(directory.resolve() / ".umbel")
    found = []
    for process in psutil.process_iter(["name", "cmdline", "status"]):
        line = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and (
            "embedded/keeper.py" in (text := " ".join(line)[:300])
            or "embedded.keeper" in text
            or process.info["name"] in ("valkey-server", "redis-server")
        ):
            try:
                if process.cwd() == wanted:
                    found.append(process)
            except psutil.Error:
                pass
    return found


def wait_until_stopped(directory: Path) -> None:
    wait_until(lambda: not servers_of(directory), what=f"the server of {directory} to end")


def user(start: Callable[..., Program], directory: Path, then: str = STAY) -> Program:
    program = start([sys.executable, "-c", USER, str(directory), then])
    program.wait_for("joined")
    return program


def is_written(server: redis.Redis) -> bool:
    """Whether everything is in the file: while that is synced, a server keeps what comes."""
    return bool(server.info("persistence")["aof_buffer_length"] == 0)
