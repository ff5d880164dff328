"""The command line as a user meets it: real processes, their output and exit codes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workers import Program, program_environment, run_umbel

SHOP = """\
from umbel import Umbel
app = Umbel('shop')

@app.task
def charge(order):
    return order
"""
BROKEN = "import os\n\nraise RuntimeError('nothing works: redis://u:hidden@h/0')\n"
NOBODY = "redis://:hidden@127.0.0.1:1/0"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "green.py").write_text(SHOP.replace("'shop'", "'shop', worker_pool='gevent'"))
    return tmp_path


def umbel(line: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "umbel", *line.split()],
        cwd=cwd,
        env=program_environment(cwd) | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


WRONG = {
    "-A shp worker": "no module named 'shp'",
    "-A shop:ap worker": "did you mean shop:app?",
    "-A shop.py worker": "is a file name",
    "-A broken worker": "cannot import broken: RuntimeError: nothing works",
    "worker": "no application: name its module with -A",
    "worker -A shop": "option -A goes before the verb",
    "wroker": "unknown command 'wroker': did you mean worker?",
    "--verzion": "did you mean --version?",
    "-A shop -b nonsense worker": "broker_url",
    "-A shop -b rediss//x worker": "broker_url",
    "-A shop -b foo://host worker": "unknown transport 'foo'",
    "-A shop -b redis://u:hidden@h:port/0 worker": "redis://u:**@h:port/0",
    "-A shop --result-backend foo://h worker": "result_backend 'foo://h'",
    "-A shop worker -P prefrok": (
        "unknown pool 'prefrok': choose one of prefork, threads, gevent, asyncio, solo"
    ),
    "-A green worker": "give -P gevent on the command line",
    "-A shop worker --concurency 3": "did you mean --concurrency?",
    "-A shop worker -c none": "'-c' / '--concurrency': 'none' is not a valid integer range",
    "-A shop worker -c 0": "0 is not in the range x>=1",
    "-A shop worker -l inof": "unknown log level 'inof': did you mean info?",
    "-A shop worker -Q a,,b": "empty name",
    "-A shop worker -I nowhere": "No module named 'nowhere'",
    "-A shop worker --time-limit 1 --soft-time-limit 2": "is not below the hard time limit",
    "-A shop worker -f no/such/place": "log file 'no/such/place' can not be written",
    "-A shop worker --health-file no/such/place": "health file 'no/such/place' can not be written",
    "-A shop worker --health-port 99999": "99999 is not in the range 0<=x<=65535",
    "--config nowhere report": "config module 'nowhere' was not found",
    "--workdir /no/such/place report": "--workdir '/no/such/place'",
    "-A shop purge": "there is no terminal to ask on: use -f",
    "-A shop call": "missing argument 'NAME'",
    f"-A shop -b {NOBODY} call shop.charge 7": "redis://:**@127.0.0.1:1/0",
    f"-A shop -b {NOBODY} purge -f": "cannot reach redis://:**@127.0.0.1:1/0",
    f"-A shop --result-backend {NOBODY} result abc": "redis://:**@127.0.0.1:1/0",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_is_one_clear_line_and_exit_code_2(line: str, directory: Path) -> None:
    ran = umbel(line, directory)
    assert ran.returncode == 2, ran.stderr
    assert WRONG[line] in ran.stderr
    assert ran.stderr.startswith("umbel: ")
    assert (ran.stderr.count("\n"), ran.stdout) == (1, "")
    assert "hidden" not in ran.stderr


def test_a_wrong_setting_in_the_environment_is_one_line(directory: Path) -> None:
    ran = umbel("-A shop worker", directory, UMBEL_BROKER_URK="redis://h")
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "UMBEL_BROKER_URL" in ran.stderr


def test_the_place_of_an_error_in_the_users_module_is_told(directory: Path) -> None:
    ran = umbel("-A broken worker", directory)
    assert "(broken.py:3)" in ran.stderr
    assert "Traceback" in umbel("-A broken worker", directory, UMBEL_TRACEBACK="1").stderr


def test_a_taken_health_port_is_one_line(directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = umbel(f"-A shop worker --health-port {port}", directory)
    assert (ran.returncode, ran.stderr) == (
        2,
        f"umbel: health port {port} can not be opened: Address already in use; choose another\n",
    )


def test_nothing_is_needed_for_version_help_and_report(directory: Path) -> None:
    assert umbel("--version", directory).stdout.startswith("umbel ")
    assert "Exit codes:" in umbel("--help", directory).stdout
    ran = umbel("report", directory)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "kombu: " in ran.stdout


def test_a_reader_that_goes_away_is_no_error(directory: Path) -> None:
    environment = program_environment(directory)
    with subprocess.Popen(
        [sys.executable, "-m", "umbel", "report", "--all"],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert said == b""


@pytest.fixture
def interrupted(directory: Path) -> Iterator[Callable[[str, str], Program]]:
    """Runs a command, interrupts it when a line appears, and waits for its end."""
    programs: list[Program] = []

    def run(line: str, when: str) -> Program:
        command = [sys.executable, "-m", "umbel", *line.split()]
        program = Program(command, cwd=directory)
        programs.append(program)
        program.wait_for(when)
        program.signal(signal.SIGINT)
        program.wait()
        return program

    yield run
    for program in programs:
        program.kill()


def test_an_interrupted_wait_is_exit_code_130(interrupted: Callable[..., Program]) -> None:
    program = interrupted("-A shop call shop.charge 7 --wait", r"^[0-9a-f-]{36}$")
    assert program.process.returncode == 130
    assert len([line for line in program.lines if line]) == 1


def test_an_interrupt_while_a_broker_is_sought_ends_the_worker(
    interrupted: Callable[..., Program],
) -> None:
    program = interrupted(f"-A shop -b {NOBODY} worker", "Retrying")
    assert program.process.returncode == 0
    assert "Cannot connect to redis://:**@127.0.0.1:1/0" in program.output
    assert "Traceback" not in program.output


def test_a_worker_that_may_not_retry_fails_with_1(directory: Path) -> None:
    ran = umbel(
        f"-A shop -b {NOBODY} worker -q -P solo",
        directory,
        UMBEL_BROKER_CONNECTION_RETRY_ON_STARTUP="false",
    )
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert "cannot connect to redis://:**@127.0.0.1:1/0" in ran.stderr


def test_messages_are_sent_counted_and_purged_on_the_embedded_broker(directory: Path) -> None:
    env = {"UMBEL_EMBEDDED_DIRECTORY": str(directory)}
    for queue in ("celery", "money", "money"):
        sent = run_umbel(
            ["-A", "shop", "call", "shop.charge", "7", "-Q", queue], cwd=directory, env=env
        )
        assert sent.process.returncode == 0, sent.output
    ran = umbel("-A shop purge -f -Q money,celery,nowhere", directory, **env)
    assert ran.stdout == "removed 3 messages (money: 2, celery: 1, nowhere: 0)\n"


def test_a_real_broker_that_knows_no_such_queue_has_nothing_to_remove(
    directory: Path, broker_url: str
) -> None:
    for _ in range(2):
        assert umbel(f"-A shop -b {broker_url} call shop.charge 7", directory).returncode == 0
    ran = umbel(f"-A shop -b {broker_url} purge -f -Q nowhere,celery", directory)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "removed 2 messages (nowhere: 0, celery: 2)\n"
