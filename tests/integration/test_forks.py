"""A program that is forked off a loaded process is what it would be when started."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.sizes import FULL
from tests.workers import Program, program_environment, run_umbel

pytestmark = pytest.mark.skipif(FULL, reason="there every program is started")

# What a program can tell of itself; it ends as the module is imported.
TELLER = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv[1:], "cwd": os.getcwd(), "path": sys.path[:2], "given": os.environ["GIVEN"],
    "leader": os.getsid(0) == os.getpid(), "files": len(os.listdir("/proc/self/fd")),
    "names": sorted(name for name in os.environ if not name.startswith("_")), "main": __name__,
}))
print("for the operator", file=sys.stderr)
sys.stdout.flush()
os._exit(7)
"""
WORDS = ["-A", "teller", "worker", "-l", "info"]


def told(directory: Path, *, forked: bool) -> tuple[int, dict[str, object], str]:
    env = program_environment(directory) | {"GIVEN": "ünïcode"}
    command = [*forks.UMBEL, *WORDS]
    assert forks.can_fork(command, env)
    if forked:
        ran = forks.run(command, cwd=directory, env=env)
    else:
        ran = subprocess.run(
            command, cwd=directory, env=env, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False, start_new_session=True,
        )  # fmt: skip
    return ran.returncode, json.loads(ran.stdout), ran.stderr


def test_it_has_the_words_the_place_and_the_environment_of_one_that_is_started(
    tmp_path: Path,
) -> None:
    (tmp_path / "teller.py").write_text(TELLER)
    forked = told(tmp_path, forked=True)
    assert forked == told(tmp_path, forked=False)
    assert forked[0] == 7
    assert forked[1]["given"] == "ünïcode"


def test_its_end_is_told_by_code_or_by_signal(tmp_path: Path) -> None:
    ran = run_umbel(["--version"], cwd=tmp_path)
    assert ran.process.returncode == 0
    assert "umbel" in ran.output
    (tmp_path / "shop.py").write_text("import time; print('here', flush=True); time.sleep(60)")
    with Program([*forks.UMBEL, "-A", "shop", "worker"], cwd=tmp_path) as program:
        assert isinstance(program.process, forks.Forked)
        program.wait_for("here")
        assert program.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.process.wait(0.01)
        program.signal(signal.SIGKILL)
        assert program.wait() == -signal.SIGKILL
        assert program.process.poll() == -signal.SIGKILL


def test_two_that_are_forked_roll_different_dice(tmp_path: Path) -> None:
    (tmp_path / "dice.py").write_text(
        "import os, random, uuid; print(random.random(), uuid.uuid4(), flush=True); os._exit(0)"
    )
    first, second = (run_umbel(["-A", "dice", "worker"], cwd=tmp_path).output for _ in range(2))
    assert len(first.split()) == 2
    assert set(first.split()).isdisjoint(second.split())


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["-m", "umbel", "-A", "shop", "worker", "-P", "gevent"], {}),
        (["-m", "umbel", "--version"], {"PYTHONOPTIMIZE": "1"}),
        (["-m", "celery", "worker"], {}),
        (["-c", "import umbel"], {}),
    ],
)
def test_what_would_not_be_the_same_is_started(
    words: list[str], env: dict[str, str], tmp_path: Path
) -> None:
    assert not forks.can_fork([sys.executable, *words], program_environment(tmp_path) | env)
