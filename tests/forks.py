"""Umbel's programs, forked off a process that has loaded the modules already.

To load them is nearly all of what starting a worker costs, and the tests start hundreds. One
process (`Nursery`) imports what a worker needs and waits. For every command line it forks, and the
child becomes the program: a session of its own, its directory, environment and output, `sys.argv`,
and `python -m umbel` from the beginning.

Left to a fresh interpreter: what must be the first to import (gevent), everything that is not
`python -m umbel`, and in `make soak` every program.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.sizes import FULL

UMBEL = [sys.executable, "-m", "umbel"]
MODULES = (
    "amqp",
    "billiard.pool",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
    "rich.console",
    "rich.table",
    "tzlocal",
    "umbel.app.builtins",
    "umbel.app.events.receiver",
    "umbel.app.events.state",
    "umbel.app.results.redis",
    "umbel.app.results.rpc",
    "umbel.app.umbel",
    "umbel.broker.amqp",
    "umbel.broker.tasks.origins",
    "umbel.broker.redis",
    "umbel.cli.control",
    "umbel.cli.events",
    "umbel.cli.inspect",
    "umbel.cli.main",
    "umbel.cli.status",
    "umbel.cli.worker",
    "umbel.worker.runtime.banner",
    "umbel.worker.runtime.consumer",
    "umbel.worker.observe.endpoint",
    "umbel.worker.logs",
    "umbel.worker.execution.pools.asyncio",
    "umbel.worker.execution.pools.prefork",
    "umbel.worker.execution.pools.solo",
    "umbel.worker.execution.pools.threads",
    "umbel.worker.runtime.returns",
    "umbel.worker.runtime.signals",
    "umbel.worker.runtime.watchdog",
    "umbel.worker.runtime.worker",
)
# What the interpreter reads as it starts; whoever wants it otherwise has one started.
AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "TZ")


def can_fork(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a program may be forked and be what it would be when started in this environment."""
    from tests.workers import ROOT, program_environment

    if FULL or list(command[:3]) != UMBEL or "gevent" in " ".join(command):
        return False
    return _read_at_start(env) == _read_at_start(program_environment(ROOT))


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(AT_START) and k != "PYTHONPATH"}


def run(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run`: the program to its end, with what it wrote."""
    if not can_fork(command, env):
        return subprocess.run(
            list(command), cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip
    from tests import guard

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = nursery().fork(command, cwd, env, out.fileno(), err.fileno())
        try:
            code = child.wait(timeout)
        finally:
            guard.kill_group(child.pid)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(command), code, out.read(), err.read())


class Forked:
    """A running child, with what is used of `subprocess.Popen`."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = None
        self._status = status  # the code comes through this pipe when the child has ended
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, once there is one."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; negative for a signal, as in `Popen`."""
        with self._lock:
            if self.returncode is None:
                ready, _, _ = select.select([self._status], [], [], timeout)
                if not ready:
                    raise subprocess.TimeoutExpired("umbel", timeout or 0)
                told = os.read(self._status, 16)
                os.close(self._status)
                self.returncode = int(told) if told else -signal.SIGKILL
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks; this process has one, from the first program on."""

    def __init__(self, env: Mapping[str, str]) -> None:
        from tests import guard

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control, self._lock = ours, threading.Lock()
        command = [sys.executable, "-m", "tests.forks", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        self._process.returncode = 0  # it ends when this process does: nobody waits for it
        theirs.close()
        guard.watch(self._process.pid)

    def fork(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], out: int, err: int
    ) -> Forked:
        """A child that is `command`, and writes to these two."""
        status, write_status = os.pipe()
        told = json.dumps({"arguments": list(command[3:]), "cwd": str(cwd), "env": dict(env)})
        with self._lock:
            socket.send_fds(self._control, [told.encode()], [out, err, write_status])
            answer = self._control.recv(32)
        os.close(write_status)
        assert answer, "the process that forks programs has ended"
        return Forked(int(answer), status)


_nursery: Nursery | None = None
_starting = threading.Lock()


def nursery() -> Nursery:
    """The one of this process."""
    global _nursery
    from tests.workers import ROOT, program_environment

    with _starting:
        if _nursery is None:
            _nursery = Nursery(program_environment(ROOT))
    return _nursery


def start(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Forked:
    """A program that `can_fork`; what it writes comes through `stdout`."""
    output, write_output = os.pipe()
    child = nursery().fork(command, cwd, env, write_output, write_output)
    os.close(write_output)
    child.stdout = os.fdopen(output, errors="replace")
    return child


# -- in the other process ----------------------------------------------------------------------


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each message; returns in a child, with what it is to be, or when all is over."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_ends(statuses)
        if control not in ready:
            continue
        told, fds, _, _ = socket.recv_fds(control, 2**20, 3)
        if not told:
            return None
        out, err, status = fds
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.dup2(out, 1)
            os.dup2(err, 2)
            control.detach()
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            return dict(json.loads(told))
        os.close(out)
        os.close(err)
        statuses[pid] = status
        control.send(str(pid).encode())


def _tell_ends(statuses: dict[int, int]) -> None:
    for pid in list(statuses):
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            fd = statuses.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(fd, str(os.waitstatus_to_exitcode(code)).encode())
            os.close(fd)


def _become(arguments: list[str], cwd: str, env: dict[str, str]) -> None:
    """Be `python -m umbel arguments...`."""
    os.chdir(cwd)
    # A stream remembers what kind of file it was made for.
    for number, name in enumerate(("stdout", "stderr"), start=1):
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw, "utf-8", "strict" if number == 1 else "backslashreplace", write_through=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    sys.path[0] = cwd
    here = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1 : 1 + _PATHS] = here
    importlib.invalidate_caches()
    sys.argv = ["umbel", *arguments]
    runpy.run_module("umbel", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _PATHS = len(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    for name in MODULES:
        importlib.import_module(name)
    assert threading.active_count() == 1, "threads do not survive a fork"
    with socket.socket(fileno=int(sys.argv[1])) as end:
        wanted = _serve(end)
    if wanted is not None:
        _become(**wanted)
