"""The demo without what a history needs: it says so, and goes on."""

from __future__ import annotations

import importlib.util
import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from umbel.cli.demo import history


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("package", ["pyspark", "pyarrow", "duckdb"])
def test_without_a_package_the_demo_keeps_no_history(
    package: str, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    kept = history.History(tmp_path, console)
    kept.start()
    assert said(console) == (
        f"no history is kept: {package} not installed: pip install 'umbel[history]'\n"
    )
    assert kept.finish() is True
    kept.abandon()
    assert kept.place is None


def test_without_java_the_demo_keeps_no_history(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    kept = history.History(tmp_path, console)
    kept.start()
    assert "Spark needs Java 17 or newer, and there is none here" in said(console)
    assert kept.finish() is True


def test_a_recorder_that_ends_by_itself_is_told_with_its_last_words(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "missing", lambda: "")
    monkeypatch.setattr(
        history.History, "_command", staticmethod(lambda *_: ["sh", "-c", "echo no space; exit 2"])
    )
    kept = history.History(tmp_path, console)
    kept.start()
    assert kept.finish() is False
    assert "the recorder failed: no space" in said(console)
    kept.abandon()
    assert kept.place is not None
    assert not kept.place.exists()
