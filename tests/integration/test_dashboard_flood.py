"""A dashboard whose port is attacked by whoever can reach it: it goes on answering."""

from __future__ import annotations

import contextlib
import http.client
import re
import resource
import socket
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers import free_port, wait_until
from tests.workers import Program

PASSWORD = "correct horse battery"
HALF_OPEN = 1_060
HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
TOKEN = re.compile(r'name="csrf" value="([0-9a-f]+)"')
LIMITED = 'ulimit -n "$1"; shift; exec "$@"'


@dataclass
class Dashboard:
    port: int
    program: Program

    def get(self, path: str, source: str = "127.0.0.1", **headers: str) -> tuple[int, str]:
        """Ask from an address of the loopback network."""
        return self.ask("GET", path, source, headers=headers)[:2]

    def ask(
        self,
        method: str,
        path: str,
        source: str,
        body: str = "",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, str, str]:
        asked = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=20, source_address=(source, 0)
        )
        try:
            asked.request(method, path, body.encode(), headers or {})
            answer = asked.getresponse()
            return answer.status, answer.read().decode(), answer.headers.get("set-cookie", "")
        finally:
            asked.close()

    def log_in(self, password: str, source: str, **headers: str) -> int:
        """Try a password; the code of the answer."""
        _, page, cookie = self.ask("GET", "/login", source, headers=dict(headers))
        found = TOKEN.search(page)
        assert found is not None
        form = urllib.parse.urlencode({"csrf": found[1], "password": password})
        sent = {
            "cookie": cookie.partition(";")[0],
            "origin": f"http://127.0.0.1:{self.port}",
            "content-type": "application/x-www-form-urlencoded",
            **headers,
        }
        return self.ask("POST", "/login", source, form, sent)[0]


@pytest.fixture
def dashboard(start: Callable[..., Program], tmp_path: Path) -> Callable[..., Dashboard]:
    def make(files_max: int, *words: str) -> Dashboard:
        secret = tmp_path / "secret"
        secret.write_text(PASSWORD)
        secret.chmod(0o600)
        port = free_port()
        command = ["/bin/sh", "-c", LIMITED, "sh", str(files_max), sys.executable, "-m", "umbel",
                   "-A", "tests.probe_app", "-b", "memory://", "dashboard", "--port", str(port),
                   "--password-file", str(secret), *words]  # fmt: skip
        made = Dashboard(port, start(command, env={"PROBE_URL": "memory://"}))
        wait_until(lambda: is_healthy(made), 60, "the dashboard to answer")
        return made

    return make


def is_healthy(dashboard: Dashboard) -> bool:
    try:
        return dashboard.get("/healthz")[0] == 200
    except OSError:
        return False


@contextlib.contextmanager
def half_open(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections of which none gets as far as a request; half of them begin one."""
    with contextlib.ExitStack() as stack:
        made: list[socket.socket] = []
        for number in range(count):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(20)
            with contextlib.suppress(ConnectionError):  # dropped already
                sock.connect(("127.0.0.1", port))
                if number % 2:
                    sock.send(HEAD)
            made.append(sock)
        yield made


def test_a_thousand_half_open_connections_keep_nobody_out(
    dashboard: Callable[..., Dashboard],
) -> None:
    found = dashboard(1024)
    with half_open(found.port, HALF_OPEN):
        for _ in range(5):
            began = time.monotonic()
            assert found.get("/healthz")[0] == 200
            assert time.monotonic() - began < 5
        assert found.log_in(PASSWORD, "127.0.0.1") == 303
        assert found.get("/tasks")[0] == 200
    assert len(found.program.output) < 2_000


def test_a_dashboard_without_files_left_says_so_once_and_recovers(
    dashboard: Callable[..., Dashboard],
) -> None:
    found = dashboard(1024)
    pid = found.program.pid
    open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files + 20, 1024))
    with half_open(found.port, 100):
        assert found.get("/healthz")[0] == 200
        found.program.wait_for("too many open files")
    assert found.get("/healthz")[0] == 200
    assert found.program.output.count("too many open files") == 1
    assert len(found.program.output) < 2_000


def test_wrong_passwords_from_everywhere_lock_nobody_out(
    dashboard: Callable[..., Dashboard],
) -> None:
    found = dashboard(1024)
    for number in range(60):
        assert found.log_in("wrong", f"127.0.1.{number + 1}") == 403
    began = time.monotonic()
    assert found.log_in(PASSWORD, "127.0.0.1") == 303
    assert time.monotonic() - began < 5
    for _ in range(5):
        assert found.log_in("wrong", "127.0.2.1") == 403
    assert found.log_in(PASSWORD, "127.0.2.1") == 429
    assert found.log_in(PASSWORD, "127.0.2.2") == 303
    # A header names no other address unless a proxy was named.
    assert found.log_in(PASSWORD, "127.0.2.1", **{"x-forwarded-for": "192.0.2.7"}) == 429
