"""What the documentation shows is done as it is printed, against a worker in its own directory.

Of a line such as `add.delay(2, 3).get(timeout=10)  # 5` the value is compared with the remark,
where the remark is a value.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import Command, blocks, commands
from tests.workers import WorkerProcess, program_environment

PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
RUN = """
import ast, sys
source = sys.stdin.read()
names = dict(page_somebody=print, alert=print, read_sensor=lambda: 21)
exec(open("given.py").read(), names)
for node in ast.parse(source).body:
    text = ast.get_source_segment(source, node)
    if isinstance(node, ast.Expr):
        value = eval(compile(ast.Expression(node.value), "docs", "eval"), names)
        line = source.splitlines()[node.end_lineno - 1]
        _, mark, remark = line.partition("  # ")
        try:
            told = ast.literal_eval(remark) if mark else value
        except (SyntaxError, ValueError):
            told = value
        if value != told:
            sys.exit(f"{text} gives {value!r}, the page says {told!r}")
    else:
        exec(compile(ast.Module([node], []), "docs", "exec"), names)
print("all of it")
"""


class Desk:
    """A directory with the module of the quickstart, and a worker that runs it."""

    def __init__(self, directory: Path, shop: str, args: list[str]) -> None:
        self.directory = directory
        (directory / "shop.py").write_text(shop)
        (directory / "given.py").write_text("")
        self.worker = WorkerProcess("shop", args, cwd=directory).wait_until_ready()

    def type(self, command: Command) -> str:
        """Run a command as it is printed; what it says."""
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command.line)], cwd=self.directory, timeout=60,
            env=program_environment(self.directory), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (command.line, done.stderr)
        return done.stdout

    def run(self, block: str, given: str = "") -> None:
        """Run a block of Python, with the names that `given` defines before."""
        (self.directory / "given.py").write_text(given)
        done = subprocess.run(
            [sys.executable, "-c", RUN], cwd=self.directory, timeout=60, input=block,
            env=program_environment(self.directory), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (block, done.stderr)
        assert done.stdout.endswith("all of it\n")

    def close(self) -> None:
        self.worker.kill()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    shop = blocks("docs/quickstart.md", "python")[0]
    made = Desk(tmp_path_factory.mktemp("shop"), shop, ["-c", "4", "-E"])
    yield made
    made.close()


def test_the_readme_works_as_printed(tmp_path: Path) -> None:
    worker, call = commands("README.md")[:2]
    assert worker.line.startswith("umbel -A shop worker ")
    desk = Desk(tmp_path, blocks("README.md", "python")[0], shlex.split(worker.line)[4:])
    try:
        assert desk.type(call).splitlines() == call.printed != []
    finally:
        desk.close()


def test_the_commands_of_the_quickstart_work_as_printed(desk: Desk) -> None:
    (block,) = [one for one in blocks("docs/quickstart.md", "console") if " call " in one]
    typed = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    done = subprocess.run(
        ["bash", "-ec", "\n".join(typed)], cwd=desk.directory, timeout=110,
        env=program_environment(desk.directory) | {"PATH": PATH}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, task_id, *shown = done.stdout.splitlines()
    assert first == "5"
    assert uuid.UUID(task_id)
    assert "'tries': 3" in "".join(shown).replace('"', "'")


def test_the_code_of_the_quickstart_works_as_printed(desk: Desk) -> None:
    _, calls, many, brokers = blocks("docs/quickstart.md", "python")
    desk.run(calls)
    desk.run(many, given="from shop import add")
    desk.run(brokers, given="from umbel import Umbel")


def test_a_wrong_value_on_a_page_would_be_found(desk: Desk) -> None:
    with pytest.raises(AssertionError, match="the page says 6"):
        desk.run("from shop import add\nadd.delay(2, 3).get(timeout=10)  # 6\n")


SHOP = "from shop import *\nfrom umbel.worker.blueprint import Step\n"


@pytest.mark.parametrize(
    ("page", "given"),
    [
        ("docs/agreement.md", SHOP),
        ("docs/control.md", SHOP + "result = add.delay(1, 2)\n"),
        ("docs/events.md", SHOP + "task_id = add.delay(1, 2).id\n"),
        ("docs/migrating.md", ""),
    ],
)
def test_the_code_of_other_pages_runs(desk: Desk, page: str, given: str) -> None:
    for block in blocks(page, "python"):
        desk.run(block, given=given)
