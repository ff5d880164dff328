"""The demo that stays (`--keep`): a dashboard beside the cluster, and some work until Ctrl-C.

The dashboard is started before the first task, so that it has seen everything. Changes are
allowed there to whoever knows the password, which is made for this one run and printed once.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from rich.console import Console

from umbel.cli.demo import tasks
from umbel.files import open_file

PORT = 5577
READY_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
PAUSE_S = 0.5
APP = "umbel.cli.demo.tasks"
_PACKAGES = ("starlette", "uvicorn", "jinja2")


def missing() -> str:
    """What a dashboard needs and is not here; empty when nothing is."""
    lacking = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(lacking)} not installed: pip install 'umbel[dashboard]'" if lacking else ""


def command(tables: Path | None) -> str:
    """How to start a dashboard of what the demo has left behind."""
    shown = f" --tables {tables}" if tables is not None else ""
    return f"umbel -A {APP} dashboard{shown}"


class Dashboard:
    """A dashboard of the demo's cluster, in a process of its own."""

    def __init__(self, directory: Path, tables: Path | None, console: Console) -> None:
        self._directory, self._tables, self._console = directory, tables, console
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> bool:
        """Start it and wait until it hears the cluster; whether it does."""
        if reason := missing():
            self._say(f"there is no dashboard: {reason}")
            return False
        port, password = _free_port(), secrets.token_urlsafe(9)
        secret = self._directory / "password"
        secret.touch(0o600)  # whatever `file_umask` is
        secret.write_text(password)
        argv = [sys.executable, "-m", "umbel", "-A", APP, "dashboard", "--port", str(port),
                "--password-file", str(secret)]  # fmt: skip
        if self._tables is not None:
            argv += ["--tables", str(self._tables)]
        with open_file(self._directory / "dashboard.log", "wb") as output:
            self._process = subprocess.Popen(
                argv,
                cwd=self._directory,
                env={**os.environ, "UMBEL_EMBEDDED_DIRECTORY": str(self._directory)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        self.url = f"http://127.0.0.1:{port}/"
        if not self._hears():
            said = (self._directory / "dashboard.log").read_text(errors="replace").splitlines()
            self._say(f"the dashboard did not start: {['it said nothing', *said][-1]}")
            return False
        self._say(f"dashboard: {self.url} (to change things there, log in with {password})")
        return True

    def stop(self) -> None:
        """End it, if it runs."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def runs(self) -> bool:
        """Whether it is there."""
        return self._process is not None and self._process.poll() is None

    def _hears(self) -> bool:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while self.runs and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}healthz", timeout=2) as answer:  # noqa: S310
                    if b"connected" in answer.read():
                        return True
            except OSError:
                pass
            time.sleep(0.1)
        return False

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def stay(console: Console, dashboard: Dashboard, wish: threading.Event) -> None:
    """Give the cluster something to do until Ctrl-C, or until the event is set."""
    where = f" at {dashboard.url}" if dashboard.runs else ""
    console.print(f"the cluster goes on{where}; Ctrl-C ends it", markup=False, highlight=False)
    try:
        for number in itertools.count():
            tasks.add.delay(number, number)
            tasks.wait_for.delay(0.2 + number % 7 / 5, number)
            if number % 5 == 0:
                tasks.work_for.delay(0.3, number)
            if number % 20 == 0:
                tasks.order.delay(number)
            if number % 120 == 60:
                tasks.lead.s().election()
            if wish.wait(PAUSE_S):
                return
    except KeyboardInterrupt:
        console.print("ending", markup=False)


def _free_port() -> int:
    """The dashboard's own port, or another one where that is taken."""
    for wanted in (PORT, 0):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", wanted))
            except OSError:
                continue
            return int(sock.getsockname()[1])
    raise OSError("there is no free port on 127.0.0.1")
