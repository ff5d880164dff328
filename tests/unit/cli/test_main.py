"""The entry: patching, the barrier, the group."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from umbel.cli.errors import print_line
from umbel.cli.group import VERBS, cli
from umbel.cli.main import wants_gevent

Umbel = Callable[..., Any]


@pytest.mark.parametrize(
    "line",
    [
        "-A shop worker -P gevent",
        "-A shop worker -Pgevent -c 4",
        "-A shop worker --pool gevent",
        "-A shop worker --pool=gevent",
        "-A shop worker -EP gevent",
        "-A shop worker -P prefork -P gevent",
    ],
)
def test_a_gevent_worker_is_recognised_before_anything_is_imported(line: str) -> None:
    assert wants_gevent(line.split(), {})


@pytest.mark.parametrize(
    "line", ["", "worker", "-A shop worker -P", "-A shop worker -P threads", "call -P gevent"]
)
def test_other_commands_are_left_unpatched(line: str) -> None:
    assert not wants_gevent(line.split(), {})


def test_the_environment_may_name_the_pool_and_the_option_overrides_it() -> None:
    environ = {"UMBEL_WORKER_POOL": "gevent"}
    assert wants_gevent(["worker"], environ)
    assert not wants_gevent(["worker", "-P", "solo"], environ)


def test_the_entry_imports_next_to_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import umbel.cli.main;"
        "print([m for m in ('click', 'kombu', 'logging', 'socket', 'threading') "
        "if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_verb_has_help() -> None:
    runner = CliRunner()
    for verb in VERBS:
        done = runner.invoke(cli, [verb, "--help"])
        assert done.exit_code == 0, done.output
        assert "Usage:" in done.output


def test_the_help_documents_the_exit_codes() -> None:
    done = CliRunner().invoke(cli, ["--help"])
    for code in ("0 ", "1 ", "2 ", "3 ", "69 ", "130 "):
        assert f"\n    {code}" in done.output


def test_an_error_of_any_shape_is_one_line_without_secrets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_line("first\nsecond redis://user:hidden@host/0")
    said = capsys.readouterr().err
    assert said == "umbel: first second redis://user:**@host/0\n"


def test_the_whole_traceback_is_shown_when_asked_for(umbel: Umbel, project: Any) -> None:
    project({"shop.py": "1/0"})
    assert "Traceback" not in umbel("-A", "shop", "report").err
    ran = umbel("--traceback", "-A", "shop", "report")
    assert ran.code == 2
    assert "Traceback" in ran.err


def test_an_interrupt_ends_with_130_and_without_a_traceback(umbel: Umbel, project: Any) -> None:
    project({"shop.py": "raise KeyboardInterrupt"})
    ran = umbel("-A", "shop", "report")
    assert ran.code == 130
    assert ran.err.strip() == ""


def test_a_bug_of_ours_is_one_line_too(
    umbel: Umbel, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr("umbel.app.reporting.installed", broken)
    ran = umbel("report")
    assert ran.code == 1
    assert ran.err.startswith("umbel: unexpected RuntimeError: oops (")
    assert ran.err.count("\n") == 1


def test_a_missing_directory_is_named(umbel: Umbel) -> None:
    ran = umbel("--workdir", "/no/such/place", "report")
    assert (ran.code, ran.err) == (
        2,
        "umbel: --workdir '/no/such/place': No such file or directory\n",
    )


def test_a_config_module_of_the_directory_is_read(umbel: Umbel, project: Any) -> None:
    project({"settings.py": "task_default_queue = 'jobs'\n"})
    ran = umbel("--config", "settings", "report")
    assert ran.code == 0
    assert "task_default_queue: jobs" in ran.out


def test_report_masks_secrets(umbel: Umbel, project: Any) -> None:
    project(
        {"shop.py": "from umbel import Umbel\napp = Umbel('shop', broker='redis://u:hidden@h/0')"}
    )
    for options in ((), ("--json",), ("--all",)):
        ran = umbel("-A", "shop", "report", *options)
        assert ran.code == 0
        assert "redis://u:**@h/0" in ran.out
        assert "hidden" not in ran.out
