"""A project directory to run commands in, and a way to run them in this process."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from umbel.app import current
from umbel.cli import errors, main


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """`project(**{"shop.py": text})` writes files into the working directory."""
    for name in list(os.environ):
        if name.startswith(("UMBEL_", "CELERY_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(errors, "_show_tracebacks", False)
    monkeypatch.setattr(current, "_current", None)
    before = set(sys.modules)

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return tmp_path

    yield write
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def umbel(
    project: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ran]]:
    """`umbel("-A", "shop", "report")` runs a command line and tells how it went."""
    root = logging.getLogger()
    before = root.level, list(root.handlers)

    def run(*argv: str) -> Ran:
        code = main.run(argv)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    yield run
    root.setLevel(before[0])
    root.handlers[:] = before[1]


SHOP = """
    from umbel import Umbel

    app = Umbel("shop", broker="memory://", backend="cache+memory://")

    @app.task
    def charge(order, currency="EUR"):
        return order
"""


@pytest.fixture
def shop(project: Callable[..., Path]) -> Path:
    """A project with one application and one task, on brokers inside this process."""
    return project({"shop.py": SHOP})
