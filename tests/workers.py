"""Programs under test as real processes: a worker, a command, any Python program.

A program runs in a session of its own, so that no signal of the terminal reaches it and all
of its processes can be ended together. Its output is read by a thread as it comes; a test
waits for a line, never for a time. Umbel's own are forked off a process that has loaded the modules
(tests/forks.py), unless a test asks for a fresh interpreter.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests import forks, guard

ROOT = Path(__file__).resolve().parent.parent
READY = r"\bready\b"
WAIT_S = 30.0


class Program:
    """A running program and the lines it has written to standard output and error."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> None:
        self.command = list(command)
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False  # its output has
        self._watched = True
        whole = program_environment(cwd) | dict(env or {})
        self.process: subprocess.Popen[str] | forks.Forked
        if forks.can_fork(self.command, whole) and not fresh:
            self.process = forks.start(self.command, cwd, whole)
        else:
            self.process = subprocess.Popen(
                self.command,
                cwd=cwd,
                env=whole,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        guard.watch(self.process.pid)
        self._reader = threading.Thread(target=self._read, name="program-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        with self._news:
            return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout_s: float = WAIT_S, *, start: int = 0) -> re.Match[str]:
        """Wait for a line that matches, from line `start` on; fail when none can come any more."""
        expression = re.compile(pattern)
        deadline = time.monotonic() + timeout_s
        seen = start
        with self._news:
            while True:
                for line in self.lines[seen:]:
                    if match := expression.search(line):
                        return match
                seen = max(seen, len(self.lines))
                if self._ended:
                    raise AssertionError(self._report(f"ended without a line like {pattern!r}"))
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._news.wait(left_s):
                    raise AssertionError(
                        self._report(f"no line like {pattern!r} within {timeout_s:g} s")
                    )

    def signal(self, number: int) -> None:
        """Signal the program's first process only, as an operator would."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Wait for the end of the program and of its output; return the exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._report(f"did not end within {timeout_s:g} s")) from None
        self._finish()
        return code

    def stop(self, timeout_s: float = WAIT_S) -> int:
        """Ask it to end (SIGTERM), wait, and return the exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            return self.wait(timeout_s)
        except AssertionError:
            self.kill()
            raise

    def kill(self) -> None:
        """End every process of it at once, whatever state it is in."""
        guard.kill_group(self.pid)
        self.process.wait(WAIT_S)
        self._finish()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def _finish(self) -> None:
        # What it left behind in its group would keep the pipe open.
        guard.kill_group(self.pid)
        self._reader.join(WAIT_S)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()
        if self._watched:
            self._watched = False
            guard.unwatch(self.pid)

    def _report(self, what: str) -> str:
        tail = "\n".join(self.lines[-60:])
        return f"{' '.join(self.command)}: {what}; exit code {self.process.poll()}; output:\n{tail}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()


class WorkerProcess(Program):
    """`umbel -A app worker args...` in `cwd`, where the module of the app is found."""

    def __init__(
        self,
        app: str,
        args: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> None:
        command = [sys.executable, "-m", "umbel", "-A", app, "worker", *args]
        super().__init__(command, cwd=cwd, env=env, fresh=fresh)

    def wait_until_ready(self, timeout_s: float = WAIT_S) -> Self:
        self.wait_for(READY, timeout_s)
        return self


def run_umbel(
    args: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = WAIT_S,
) -> Program:
    """Run `umbel args...` to its end; `.process.returncode` and `.output` tell how it went."""
    program = Program([sys.executable, "-m", "umbel", *args], cwd=cwd, env=env)
    try:
        program.wait(timeout_s)
    except AssertionError:
        program.kill()
        raise
    return program


def shifted_clock(shift_s: float) -> dict[str, str]:
    """The environment of a fresh interpreter whose wall clock is off by `shift_s`."""
    places = (ROOT / "tests" / "shifted_clock", ROOT / "src", ROOT)
    return {"PYTHONPATH": os.pathsep.join(map(str, places)), "CLOCK_SHIFT_S": str(shift_s)}


def program_environment(cwd: Path) -> dict[str, str]:
    """The environment of a program: modules of its directory and of the repository are found."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("UMBEL_", "CELERY_"))}
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(cwd), str(ROOT / "src"), str(ROOT)]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "NO_COLOR": "1",
    }


def ready(port: int) -> tuple[int, dict[str, Any]]:
    """What the health port of a worker answers: the status, and the document."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as exc:
        return exc.code, json.load(exc)
