"""The stock `celery` program, run many times without loading it each time.

One process imports Celery and waits. For every command line it forks, and the child is the program:
its own process, with these arguments, that runs Celery's own entry point and exits with its code.
Loading is nearly all of what a `celery inspect` costs, and the tests run a hundred of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

APP = "tests.interop.celery_node"


class Ran(NamedTuple):
    """How one run of the program ended."""

    code: int
    output: str

    @property
    def json(self) -> Any:
        """What it wrote with `--json`."""
        assert self.code == 0, self
        return json.loads(self.output)


class CeleryShell:
    """`shell("inspect", "ping")` runs `celery -A tests.interop.celery_node inspect ping`."""

    def __init__(self, settings: dict[str, Any], cwd: Path) -> None:
        from tests import guard
        from tests.workers import program_environment

        self._guard = guard
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.interop.celery_shell"],
            cwd=cwd,
            env=program_environment(cwd) | app_environment(settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        guard.watch(self._process.pid)

    def __call__(self, *arguments: str) -> Ran:
        """Run the program to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(arguments)}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that starts Celery's programs has ended"
        return Ran(*json.loads(line))

    def close(self) -> None:
        self._guard.kill_group(self._process.pid)
        self._process.communicate()
        self._guard.unwatch(self._process.pid)


def app_environment(settings: dict[str, Any]) -> dict[str, str]:
    """What the application of Celery's programs reads; its tasks run elsewhere."""
    return {"INTEROP_SETTINGS": json.dumps(settings), "INTEROP_MARKS": "redis://127.0.0.1:1/0"}


def _serve() -> None:
    import celery.bin.celery  # noqa: F401
    import kombu.transport.pyamqp
    import kombu.transport.redis  # noqa: F401

    import tests.interop.tasks  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                _become(json.loads(line), output.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            print(json.dumps([code, output.read()]), flush=True)


def _become(arguments: list[str], output: int) -> None:
    """Be `celery arguments...`; does not return."""
    from celery.__main__ import main

    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["celery", "-A", APP, *arguments]
        main()
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
