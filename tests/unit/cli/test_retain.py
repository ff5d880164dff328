"""`umbel history retain` on the command line: what it prints, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from umbel.cli import main
from umbel.cli.history import retain
from umbel.recorder.errors import LogError
from umbel.recorder.log import Log
from umbel.recorder.retention import Outcome

ARGV = ["history", "retain", "--log", "log", "--tables", "tables", "--days"]


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """What a run did; nothing is run."""
    made = Outcome("2026-10-19", 2, 31, 120_000, 3, 42, 5 * 2**20)
    monkeypatch.setattr(retain, "shorten", lambda *_, **__: made)
    return made


def test_what_was_done_is_one_line(outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*ARGV, "30"]) == 0
    assert capsys.readouterr().out == (
        "removed: 2 days before 2026-10-19, 31 segments, 120,000 events and 3 quarantined; "
        "42 older events carried over; 5.0 MiB freed\n"
    )
    assert main.run([*ARGV, "30", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("would be removed: 2 days before 2026-10-19")
    outcome.segments, outcome.carried = 0, 1
    assert main.run([*ARGV, "30"]) == 0
    told = "nothing to remove before 2026-10-19; 1 older event carried over\n"
    assert capsys.readouterr().out == told
    assert main.run(["-q", *ARGV, "30"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("outcome")
def test_as_json_it_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*ARGV, "30", "--json", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "cutoff": "2026-10-19",
        "days": 2,
        "segments": 31,
        "events": 120_000,
        "quarantined": 3,
        "carried": 42,
        "bytes": 5 * 2**20,
        "finished": False,
        "dry_run": True,
    }


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*ARGV, "30"], "there is no event log at log"),
        ([*ARGV, "0"], "0 is not in the range"),
        ([*ARGV, "some"], "'some' is not a valid integer"),
        (ARGV[:-1], "missing option '--days'"),
        ([*ARGV, "30", "--master", "nowhere"], "unknown master 'nowhere'"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(argv) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert said in printed.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (LogError("another process works on it"), "another process works on it"),
        (OSError(28, "No space left on device"), "cannot change the log log: No space left"),
    ],
)
def test_what_is_wrong_with_the_log_is_one_line(
    raised: Exception,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(retain, "shorten", fail)
    assert main.run([*ARGV, "30"]) == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_decides_nothing_from_a_log_that_is_half_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Log("log").open()
    (tmp_path / "log/_retention.json").write_text('{"format": 1, "cutoff": "2026-10-19"}')
    assert main.run([*ARGV, "30", "--dry-run"]) == 2
    assert "are only half removed, as a run was killed" in capsys.readouterr().err
