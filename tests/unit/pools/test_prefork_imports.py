"""A child is forked while a thread of its parent imports something."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.servers import wait_until
from umbel.worker.execution.pools.prefork import child_loop


@pytest.fixture
def slow_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that a thread of this process is importing until the test ends."""
    begun, end, parent = threading.Event(), threading.Event(), os.getpid()

    def wait() -> None:
        if os.getpid() == parent:
            begun.set()
            end.wait(30)

    gate = ModuleType("slow_gate")
    gate.wait = wait  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slow_gate", gate)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_module.py").write_text("import slow_gate\nslow_gate.wait()\nANSWER = 42\n")
    thread = threading.Thread(target=importlib.import_module, args=("slow_module",))
    thread.start()
    assert begun.wait(10)
    yield "slow_module"
    end.set()
    thread.join()
    sys.modules.pop("slow_module", None)


def test_a_child_can_import_what_a_thread_of_its_parent_had_begun_to(slow_import: str) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child_loop._forget_begun_imports()
            code = 0 if importlib.import_module(slow_import).ANSWER == 42 else 2
        finally:
            os._exit(code)
    ended: list[int] = []

    def has_ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended.append(os.waitstatus_to_exitcode(status))
        return bool(found)

    try:
        wait_until(has_ended, 10, "the child to import")
    finally:
        if not ended:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    assert ended == [0]
