"""`umbel inspect`: what is asked, of whom, and how the answers end up in texts and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from kombu.exceptions import OperationalError

from tests.unit.cli.conftest import SHOP, Ran
from tests.unit.cli.fake_cluster import FakeCluster
from umbel.app.control import Control
from umbel.cli.errors import CommandFailed
from umbel.cli.group import cli
from umbel.cli.inspect import InspectGroup
from umbel.cli.remote import read_pairs
from umbel.worker.control.commands import BUILTIN

OWN = """
    @app.control_command(reads=True)
    def greet(state, name="you", times=1):
        "Say hello."

    @app.control_command
    def forget(state):
        "Forget all."
"""
PONG = {"ok": "pong"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    return FakeCluster(monkeypatch)


@pytest.fixture
def inspect(umbel: Callable[..., Ran], project: Callable[..., Path]) -> Callable[..., Ran]:
    """`inspect("ping", "-d", "a@h")` on a shop with commands of its own."""
    project({"shop.py": SHOP + OWN})
    return lambda *words: umbel("-A", "shop", "inspect", *words)


ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ping": ("ping", {}),
    "clock": ("clock", {}),
    "active": ("active", {}),
    "dump_active": ("active", {}),
    "reserved": ("reserved", {}),
    "scheduled": ("scheduled", {}),
    "query_task a b": ("query_task", {"ids": ["a", "b"]}),
    "query-task a": ("query_task", {"ids": ["a"]}),
    "revoked": ("revoked", {}),
    "registered": ("registered", {"taskinfoitems": [], "builtins": False}),
    "registered rate_limit --all": (
        "registered",
        {"taskinfoitems": ["rate_limit"], "builtins": True},
    ),
    "stats": ("stats", {}),
    "conf": ("conf", {"with_defaults": False}),
    "conf --defaults": ("conf", {"with_defaults": True}),
    "active_queues": ("active_queues", {}),
    "active-queues": ("active_queues", {}),
    "queue_lengths": ("queue_lengths", {}),
    "elections": ("elections", {}),
    "report": ("report", {}),
    "memsample": ("memsample", {}),
    "memdump": ("memdump", {"samples": 10}),
    "memdump 3": ("memdump", {"samples": 3}),
    "objgraph": ("objgraph", {"type": "Request", "num": 200, "max_depth": 10}),
    "objgraph dict --num 5": ("objgraph", {"type": "dict", "num": 5, "max_depth": 10}),
    "greet": ("greet", {}),
    "greet name=bob times=2": ("greet", {"name": "bob", "times": 2}),
}


@pytest.mark.parametrize("words", ARGUMENTS)
def test_what_is_typed_becomes_what_is_asked(
    inspect: Callable[..., Ran], cluster: FakeCluster, words: str
) -> None:
    cluster.answer([])
    inspect(*words.split())
    assert cluster.only == ARGUMENTS[words]


def test_every_inspection_of_a_worker_is_offered() -> None:
    inspections = {command.name for command in BUILTIN if command.reads}
    assert set(InspectGroup.entries) == inspections - {"hello", "heartbeat"}
    aliases = {alias for entry in InspectGroup.entries.values() for alias in entry.aliases}
    assert {alias for command in BUILTIN for alias in command.aliases} <= aliases


@pytest.mark.parametrize("words", ["-d a@h,b@h -t 2 {}", "{} -d a@h -d b@h -t 2"])
def test_whom_to_ask_may_stand_before_or_after(
    inspect: Callable[..., Ran], cluster: FakeCluster, words: str
) -> None:
    cluster.answer(PONG, "a@h", "b@h")
    assert inspect(*words.format("ping").split()).code == 0
    assert cluster.options[0]["destination"] == ["a@h", "b@h"]
    assert cluster.options[0]["timeout"] == pytest.approx(2, abs=0.5)


def test_a_pattern_goes_along_and_excludes_names(
    inspect: Callable[..., Ran], cluster: FakeCluster
) -> None:
    cluster.answer(PONG)
    assert inspect("ping", "--pattern", "w*@h").code == 0
    assert (cluster.options[0]["pattern"], cluster.options[0]["destination"]) == ("w*@h", None)
    ran = inspect("--pattern", "w*", "ping", "-d", "a@h")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "exclude each other" in ran.err


def test_answers_are_a_table_or_json(inspect: Callable[..., Ran], cluster: FakeCluster) -> None:
    cluster.answer(PONG, "b@h", "a@h")
    ran = inspect("ping")
    assert (ran.code, ran.out, ran.err) == (0, "node  answer\na@h   pong\nb@h   pong\n", "")
    ran = inspect("ping", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out) == {"a@h": PONG, "b@h": PONG}


def test_that_there_is_nothing_is_said(inspect: Callable[..., Ran], cluster: FakeCluster) -> None:
    cluster.answer([], "b@h", "a@h")
    ran = inspect("active")
    assert (ran.code, ran.out, ran.err) == (0, "", "umbel: active: nothing on a@h, b@h\n")
    assert inspect("active", "--json").out == '{"b@h": [], "a@h": []}\n'


def test_an_error_of_a_node_is_told_next_to_the_answers_of_others(
    inspect: Callable[..., Ran], cluster: FakeCluster
) -> None:
    cluster.replies[""] = [{"a@h": {"error": "no \x1b[2J redis://u:hidden@h"}}, {"b@h": PONG}]
    ran = inspect("ping")
    assert ran.code == 1
    assert ran.out == "node  answer\nb@h   pong\n"
    assert ran.err == "umbel: a@h answered an error: no \\x1b[2J redis://u:**@h\n"
    ran = inspect("ping", "-j")
    assert (ran.code, ran.err) == (1, "")
    assert json.loads(ran.out)["a@h"]["error"].startswith("no \x1b")


def test_a_command_that_a_node_does_not_know_is_said_plainly(
    inspect: Callable[..., Ran], cluster: FakeCluster
) -> None:
    cluster.answer({"error": "KeyError('queue_lengths')"}, "celery@h")
    ran = inspect("queue_lengths")
    assert (ran.code, ran.err) == (1, "umbel: celery@h does not know the command queue_lengths\n")


def test_nobody_is_exit_code_69_and_points_to_the_doctor(
    inspect: Callable[..., Ran], cluster: FakeCluster
) -> None:
    ran = inspect("ping")
    assert (ran.code, ran.out, ran.err.count("\n")) == (69, "", 1)
    assert ran.err.startswith("umbel: nobody answered within 1 s on memory://")
    assert "'umbel -A shop doctor'" in ran.err
    ran = inspect("ping", "--json")
    assert (ran.code, ran.out) == (69, "{}\n")


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        (("-d", "w11@host"), "did you mean w1@host?"),
        (("-d", "x"), "who answers: w1@host, w2@host"),
        (("--pattern", "x*"), "who answers: w1@host, w2@host"),
    ],
)
def test_a_name_that_nobody_has_is_told_with_those_who_are_there(
    inspect: Callable[..., Ran], cluster: FakeCluster, asked: tuple[str, ...], hint: str
) -> None:
    cluster.answer(PONG, "w1@host", "w2@host", command="ping")
    ran = inspect("clock", *asked)
    assert (ran.code, ran.out, ran.err.count("\n")) == (69, "", 1)
    assert ran.err.startswith(f"umbel: {asked[1]}: nobody of that name answered within 1 s")
    assert ran.err.endswith(f"{hint}\n")


def test_a_named_node_that_does_not_answer_is_exit_code_69(
    inspect: Callable[..., Ran], cluster: FakeCluster
) -> None:
    cluster.answer(PONG, "a@h")
    ran = inspect("ping", "-d", "a@h,b@h")
    assert (ran.code, ran.err) == (69, "umbel: b@h did not answer within 1 s\n")
    assert "a@h" in ran.out


def test_one_name_for_several_nodes_is_told(
    inspect: Callable[..., Ran], cluster: FakeCluster
) -> None:
    cluster.answer(PONG, "a@h", "a@h")
    ran = inspect("ping")
    assert ran.code == 0
    assert "several nodes answered as a@h" in ran.err


WRONG = {
    "pign": "unknown command 'pign' of 'inspect': did you mean ping?",
    "active-queue": "unknown command 'active-queue' of 'inspect': did you mean active_queues?",
    "gret": "unknown command 'gret' of 'inspect': did you mean greet?",
    "revoke": "'revoke' is a command of 'control': use 'umbel ... control revoke'",
    "pool-grow": "'pool_grow' is a command of 'control': use 'umbel ... control pool_grow'",
    "query_task": "missing argument 'ID...': see 'umbel inspect query_task --help'",
    "ping --jsn": "unknown option --jsn of 'umbel inspect ping': did you mean --json?",
    "ping now": "got unexpected extra argument (now)",
    "ping -t 0": "invalid value for '-t' / '--timeout'",
    "ping -d a,,b": "invalid value for '-d' / '--destination': empty name",
    "greet bob": "argument 'bob': give NAME=VALUE, such as limit=5",
    "greet name=[1": "argument name='[1' begins like JSON but is none",
    "greet name=a name=b": "argument 'name' is given twice: give it once",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_said_in_one_line(
    inspect: Callable[..., Ran], cluster: FakeCluster, words: str
) -> None:
    ran = inspect(*words.split())
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
    assert ran.err.startswith(f"umbel: {WRONG[words]}")
    assert cluster.sent == []


def test_without_an_application_commands_are_told_apart_all_the_same(
    umbel: Callable[..., Ran],
) -> None:
    assert "did you mean ping?" in umbel("inspect", "pign").err
    assert "no application" in umbel("inspect", "ping").err


def test_an_application_that_can_not_be_imported_is_one_line(
    umbel: Callable[..., Ran], project: Callable[..., Path]
) -> None:
    project({"shop.py": "1/0"})
    ran = umbel("-A", "shop", "inspect", "greet")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "ZeroDivisionError" in ran.err
    assert "ping" in umbel("-A", "shop", "inspect", "--help").out


def test_a_broker_that_is_away_is_one_line_without_its_password(
    inspect: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OperationalError("no way to redis://u:hidden@h/0")

    monkeypatch.setattr(Control, "broadcast", fail)
    ran = inspect("ping")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "hidden" not in ran.err


def test_a_pattern_that_can_not_be_is_one_line(inspect: Callable[..., Ran]) -> None:
    ran = inspect("ping", "--pattern", "[" * 5_000)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith("umbel: ping: ")


def test_help_lists_all_and_says_how_to_switch_completion_on(inspect: Callable[..., Ran]) -> None:
    for words in (("--help",), ()):
        out = inspect(*words).out
        for name in (*InspectGroup.entries, "greet", "_UMBEL_COMPLETE=bash_source", "69 nobody"):
            assert name in out
        assert "forget" not in out
    assert "ID..." in inspect("query_task", "--help").out
    assert "[NAME=VALUE]..." in inspect("greet", "--help").out
    assert "Say hello." in inspect("greet", "--help").out


def completed(*words: str) -> list[str]:
    """What the shell offers for the last word."""
    shell = ShellComplete(cli, {}, "umbel", "_UMBEL_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_command_names_are_completed(project: Callable[..., Path]) -> None:
    project({"shop.py": SHOP + OWN})
    assert completed("insp") == ["inspect"]
    assert completed("inspect", "") == list(InspectGroup.entries)
    assert completed("inspect", "active") == ["active", "active_queues"]
    assert completed("inspect", "active-") == ["active-queues"]
    assert completed("inspect", "-d", "a@h", "pi") == ["ping"]
    assert completed("-A", "shop", "inspect", "gr") == ["greet"]
    assert completed("-A", "shop", "control", "fo") == ["forget"]
    assert completed("-A", "shop", "control", "rate_limit", "shop") == ["shop.charge"]
    assert completed("-A", "shop", "control", "pause", "c") == ["celery"]
    assert completed("inspect", "ping", "--de") == ["--destination"]


def test_completion_never_fails_because_of_the_application(
    project: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    project({"shop.py": "print('loud'); raise SystemExit(3)"})
    assert completed("-A", "shop", "inspect", "pi") == ["ping"]
    assert completed("-A", "nosuch", "control", "rate_limit", "s") == []
    assert completed("inspect", "nosuch", "x") == []
    assert capsys.readouterr() == ("", "")


def test_the_shell_gets_what_it_asks_for(project: Callable[..., Path]) -> None:
    where = project({"shop.py": SHOP})
    asked = {
        "COMP_WORDS": "umbel inspect pi",
        "COMP_CWORD": "2",
        "_UMBEL_COMPLETE": "bash_complete",
    }
    done = subprocess.run(
        [sys.executable, "-m", "umbel"],
        cwd=where,
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "plain,ping\n", "")


def test_values_are_json_where_they_can_be() -> None:
    assert read_pairs(["a=1", "b=true", 'c={"x": [null]}', "d=text", "e=", 'f="1"', "g=a=b"]) == {
        "a": 1,
        "b": True,
        "c": {"x": [None]},
        "d": "text",
        "e": "",
        "f": "1",
        "g": "a=b",
    }
    for wrong in ("=1", "a b=1", "1a=1", ""):
        with pytest.raises(CommandFailed):
            read_pairs([wrong])
