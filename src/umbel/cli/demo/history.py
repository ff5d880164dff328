"""The history of the demo: a recorder beside the workers, then tables and a page about it all.

What is not installed is told and left out; nothing of it can make the demo fail but a recorder, a
build or a page that goes wrong. The log, the tables and the page stay for the user to look at.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from umbel.files import open_file

READY_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
BUILD_TIMEOUT_S = 400.0  # a busy machine may take its time
# A Java process with so little to do does not earn back what optimised code costs.
_QUICK_JAVA = "-XX:TieredStopAtLevel=1"
_PACKAGES = ("pyarrow", "fsspec", "duckdb", "pandas", "pyspark")


def missing() -> str:
    """What a history needs and is not here; empty when nothing is."""
    lacking = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed: pip install 'umbel[history]'"
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        return "Spark needs Java 17 or newer, and there is none here"
    return ""


class History:
    """Records from `start` on; `finish` makes the tables and the page."""

    def __init__(self, directory: Path, console: Console) -> None:
        self._embedded = directory
        self._console = console
        self.place: Path | None = None
        self._recorder: subprocess.Popen[str] | None = None
        self._is_told = False
        self.built: Path | None = None  # the tables, once they are there

    @property
    def tables(self) -> Path | None:
        """Where tables will be; None where none can be made."""
        return None if self.place is None else self.place / "tables"

    @property
    def report(self) -> Path | None:
        """Where the page will be."""
        return None if self.place is None else self.place / "report.html"

    def start(self) -> None:
        """Start the recorder and wait until it listens, so that nothing is missed."""
        if reason := missing():
            self._say(f"no history is kept: {reason}")
            return
        self.place = Path(tempfile.mkdtemp(prefix="umbel-demo-history-"))
        with open_file(self.place / "recorder.log", "w") as output:
            self._recorder = subprocess.Popen(
                self._command("-A", "umbel.cli.demo.tasks", "record", "--log", "log"),
                cwd=self.place,
                env={**os.environ, "UMBEL_EMBEDDED_DIRECTORY": str(self._embedded)},
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._is_listening() and time.monotonic() < deadline:
            if self._recorder.poll() is not None:
                break
            time.sleep(0.05)

    def _is_listening(self) -> bool:
        return any("takes events from the broker" in line for line in self._words())

    def finish(self) -> bool:
        """Make the tables and the page; whether that went well, or there was nothing to do."""
        if self.place is None or self._recorder is None:
            return True
        if not self._stop():
            self._say(f"the recorder failed: {self._last_words()}", wrong=True)
            return False
        began = time.monotonic()
        steps = (
            ("build", "--log", "log", "--tables", "tables"),
            ("report", "--tables", "tables", "-o", "report.html", "--title", "What the demo did"),
        )
        with self._console.status("Spark makes tables of everything that happened"):
            for step in steps:
                done = self._run(*step)
                if done.returncode:
                    self._is_told = True
                    self._say(f"history {step[0]} failed: {done.stderr.strip()}", wrong=True)
                    self._say(f"  the log: {self.place / 'log'}")
                    return False
                if step[0] == "build":
                    told = done.stdout.strip()
        self._is_told = True
        self._say(f"history: {told}; {time.monotonic() - began:.0f} s in all")
        self.built = self.tables
        return True

    def abandon(self) -> None:
        """End the recorder, whatever happened; what nobody can look at is removed."""
        if self._recorder is not None and self._recorder.poll() is None:
            self._recorder.kill()
            self._recorder.wait()
        if self.place is not None and not self._is_told:
            shutil.rmtree(self.place, ignore_errors=True)

    def _stop(self) -> bool:
        assert self._recorder is not None
        if self._recorder.poll() is None:
            self._recorder.send_signal(signal.SIGTERM)
        try:
            return self._recorder.wait(STOP_TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            return False

    def _run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        command = self._command("history", *argv)
        given = os.environ.get("JDK_JAVA_OPTIONS", "")
        environ = {**os.environ, "JDK_JAVA_OPTIONS": f"{given} {_QUICK_JAVA}".strip()}
        try:
            return subprocess.run(
                command, cwd=self.place, env=environ, capture_output=True, text=True,
                timeout=BUILD_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            told = f"it took more than {BUILD_TIMEOUT_S:.0f} s"
            return subprocess.CompletedProcess(command, 1, "", told)

    @staticmethod
    def _command(*argv: str) -> list[str]:
        return [sys.executable, "-m", "umbel", *argv]

    def _words(self) -> list[str]:
        assert self.place is not None
        return (self.place / "recorder.log").read_text(errors="replace").splitlines()

    def _last_words(self) -> str:
        return ["it said nothing", *self._words()][-1]

    def _say(self, line: str, *, wrong: bool = False) -> None:
        style = "red" if wrong else None
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
