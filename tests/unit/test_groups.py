"""How tests are dealt out to several processes (tests/groups.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.groups import LONG, group_of, rank

ROOT = Path(__file__).parents[2]
CONFTEST = """
import sys
import pytest

sys.path.insert(0, {root!r})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.groups import Groups

    return Groups(config, log)
"""
TESTS = """
import os
import pytest


@pytest.mark.parametrize("number", range(5))
def test_number(number):
    if number == 2 and {dies}:
        os._exit(1)
"""


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/a/test_x.py::test_y", "tests/a/test_x.py"),
        ("tests/a/test_x.py::test_y[redis-1]", "tests/a/test_x.py redis"),
        ("tests/a/test_x.py::test_y[1-amqp]", "tests/a/test_x.py amqp"),
        ("tests/a/test_x.py::test_y[rediss]", "tests/a/test_x.py"),
        ("tests/pipeline/test_x.py::test_y[redis]", "tests/pipeline"),
        ("tests/pipeline/test_build.py::test_y", "tests/pipeline builds"),
        (
            "tests/i/test_x.py::test_y[umbel-to-celery-json-on-redis-2]",
            "umbel-to-celery-json-on-redis",
        ),
    ],
)
def test_the_group_of_a_test(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group


def test_the_long_ones_come_first() -> None:
    assert rank("tests/pipeline") < rank(f"tests/{LONG[0]} redis")
    assert rank(f"tests/{LONG[0]} redis") < rank(f"tests/{LONG[-1]}") < rank("tests/test_other.py")
    assert rank("tests/pipeline") < rank("tests/unit/test_other.py") < rank(f"tests/{LONG[0]}")


def test_every_long_file_exists() -> None:
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(LONG) <= there


def test_tests_that_kill_their_process_fail_once_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    for number in range(6):
        dies = number in {1, 5}
        (tmp_path / f"test_file{number}.py").write_text(TESTS.format(dies=dies))
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "2",
            "--dist",
            "loadgroup",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:schemathesis",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "2 failed, 28 passed" in run.stdout, run.stdout + run.stderr
