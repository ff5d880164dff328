"""`umbel control`: what is sent, and how a shutdown asks first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from tests.unit.cli.conftest import SHOP, Ran
from tests.unit.cli.fake_cluster import FakeCluster
from umbel.cli.control import ControlGroup
from umbel.worker.control.commands import BUILTIN

OWN = """
    @app.control_command(reads=True)
    def greet(state):
        "Say hello."

    @app.control_command
    def forget_all(state, names=(), force=False):
        "Forget all."
"""
PONG = {"ok": "pong"}
TERM = {"terminate": False, "signal": "SIGTERM"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    return FakeCluster(monkeypatch)


@pytest.fixture
def control(umbel: Callable[..., Ran], project: Callable[..., Path]) -> Callable[..., Ran]:
    """`control("pause", "celery")` on a shop with commands of its own."""
    project({"shop.py": SHOP + OWN})
    return lambda *words: umbel("-A", "shop", "control", *words)


SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "revoke a b": ("revoke", {"task_id": ["a", "b"], **TERM}),
    "revoke a --terminate --signal kill": (
        "revoke",
        {"task_id": ["a"], "terminate": True, "signal": "SIGKILL"},
    ),
    "revoke_by_stamped_headers k=v k=w": (
        "revoke_by_stamped_headers",
        {"headers": ["k=v", "k=w"], **TERM},
    ),
    "terminate KILL a b": ("terminate", {"signal": "SIGKILL", "task_id": ["a", "b"]}),
    "terminate 9 a": ("terminate", {"signal": "9", "task_id": ["a"]}),
    "rate_limit shop.charge 5/m": (
        "rate_limit",
        {"task_name": "shop.charge", "rate_limit": "5/m"},
    ),
    "rate-limit shop.charge 0": ("rate_limit", {"task_name": "shop.charge", "rate_limit": 0}),
    "rate_limit shop.charge 0.5": ("rate_limit", {"task_name": "shop.charge", "rate_limit": 0.5}),
    "rate_limit shop.charge nan": ("rate_limit", {"task_name": "shop.charge", "rate_limit": "nan"}),
    "time_limit shop.charge 5 10": (
        "time_limit",
        {"task_name": "shop.charge", "soft": 5.0, "hard": 10.0},
    ),
    "time_limit shop.charge": (
        "time_limit",
        {"task_name": "shop.charge", "soft": None, "hard": None},
    ),
    "pool_grow": ("pool_grow", {"n": 1}),
    "pool-grow 3": ("pool_grow", {"n": 3}),
    "pool-shrink 2": ("pool_shrink", {"n": 2}),
    "pool_restart": ("pool_restart", {"modules": None, "reload": False}),
    "pool_restart a b --reload": ("pool_restart", {"modules": ["a", "b"], "reload": True}),
    "autoscale 8 2": ("autoscale", {"max": 8, "min": 2}),
    "autoscale": ("autoscale", {"max": None, "min": None}),
    "add_consumer q": (
        "add_consumer",
        {"queue": "q", "exchange": None, "exchange_type": None, "routing_key": None},
    ),
    "add_consumer q x topic k.#": (
        "add_consumer",
        {"queue": "q", "exchange": "x", "exchange_type": "topic", "routing_key": "k.#"},
    ),
    "cancel_consumer q": ("cancel_consumer", {"queue": "q"}),
    "pause q": ("pause", {"queue": "q", "stamp": ANY}),
    "resume q": ("resume", {"queue": "q", "stamp": ANY}),
    "pause q -d w1@h": ("pause", {"queue": "q"}),
    "resume q --pattern w*": ("resume", {"queue": "q"}),
    "enable_events": ("enable_events", {}),
    "disable-events": ("disable_events", {}),
    "heartbeat": ("heartbeat", {}),
    'election i task {"task":"t"}': (
        "election",
        {"id": "i", "topic": "task", "action": {"task": "t"}},
    ),
    "forget_all names=[1,2] force=true": ("forget_all", {"names": [1, 2], "force": True}),
    "forget-all": ("forget_all", {}),
}


@pytest.mark.parametrize("words", SENT)
def test_what_is_typed_becomes_what_is_sent(
    control: Callable[..., Ran], cluster: FakeCluster, words: str
) -> None:
    cluster.answer({"ok": "so be it"})
    ran = control(*words.split())
    assert (ran.code, ran.out) == (0, "node  answer\nw1@h  so be it\n")
    assert cluster.only == SENT[words]


def test_every_command_of_a_worker_is_offered() -> None:
    commands = {command.name for command in BUILTIN if not command.reads}
    assert set(ControlGroup.entries) == commands | {"heartbeat"}


WRONG = {
    "revok": "unknown command 'revok' of 'control': did you mean revoke?",
    "forget-al": "unknown command 'forget-al' of 'control': did you mean forget_all?",
    "ping": "'ping' is a command of 'inspect': use 'umbel ... inspect ping'",
    "terminate KILL": "missing argument 'ID...': see 'umbel control terminate --help'",
    "terminate a b": "signal 'a': give a name such as SIGKILL, or a number",
    "revoke a --signal x": "signal 'x': give a name such as SIGKILL, or a number",
    "revoke_by_stamped_headers a": "stamp 'a': give NAME=VALUE, such as customer=7",
    "time_limit t x": "invalid value for '[SOFT]': 'x' is not a valid float",
    "pool_grow 0": "invalid value for '[N]': 0 is not in the range x>=1",
    "election i t {": "ACTION '{' is not JSON",
    "greet": "'greet' is a command of 'inspect': use 'umbel ... inspect greet'",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_said_in_one_line(
    control: Callable[..., Ran], cluster: FakeCluster, words: str
) -> None:
    ran = control(*words.split())
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
    assert ran.err.startswith(f"umbel: {WRONG[words]}")
    assert cluster.sent == []


def test_a_refused_command_is_exit_code_1(
    control: Callable[..., Ran], cluster: FakeCluster
) -> None:
    cluster.answer({"error": "unknown task"}, "a@h", "b@h")
    ran = control("rate_limit", "nosuch", "5/m")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.splitlines() == [
        "umbel: a@h answered an error: unknown task",
        "umbel: b@h answered an error: unknown task",
    ]


def test_a_command_without_an_answer_of_its_own_was_obeyed(
    control: Callable[..., Ran], cluster: FakeCluster
) -> None:
    cluster.answer(None)
    assert control("heartbeat").out == "node  answer\nw1@h  obeyed\n"
    assert control("heartbeat", "--json").out == '{"w1@h": null}\n'


# -- shutdown ----------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[str]]:
    """Pretend that somebody sits there who answers so; gives what was asked."""

    def sit(answer: bool) -> list[str]:
        asked: list[str] = []

        def confirm(text: str, **_: Any) -> bool:
            asked.append(text)
            return answer

        monkeypatch.setattr("umbel.cli.control.click.confirm", confirm)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        return asked

    return sit


def test_a_shutdown_pings_first_and_expects_no_answer(
    control: Callable[..., Ran], cluster: FakeCluster
) -> None:
    cluster.answer(PONG, "a@h", "b@h", command="ping")
    ran = control("shutdown", "-d", "a@h,b@h")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "told to end when their tasks have ended: a@h, b@h\n"
    assert [command for command, _ in cluster.sent] == ["ping", "shutdown"]
    assert not cluster.options[1].get("reply")
    assert cluster.options[1]["destination"] == ["a@h", "b@h"]


def test_on_a_terminal_a_shutdown_asks(
    control: Callable[..., Ran], cluster: FakeCluster, terminal: Callable[[bool], list[str]]
) -> None:
    cluster.answer(PONG, "a@h", "b@h", command="ping")
    asked = terminal(False)
    ran = control("shutdown")
    assert (ran.code, ran.out, ran.err) == (0, "", "umbel: nobody was told to end\n")
    assert asked == ["have 2 nodes (a@h, b@h) end?"]
    assert [command for command, _ in cluster.sent] == ["ping"]
    terminal(True)
    assert control("shutdown").code == 0
    assert cluster.sent[-1][0] == "shutdown"


def test_a_shutdown_with_yes_does_not_ask(
    control: Callable[..., Ran], cluster: FakeCluster, terminal: Callable[[bool], list[str]]
) -> None:
    cluster.answer(PONG, command="ping")
    asked = terminal(False)
    ran = control("shutdown", "--yes", "--json")
    assert (ran.code, json.loads(ran.out), asked) == (0, {"w1@h": None}, [])


def test_a_shutdown_of_nobody_is_sent_all_the_same_and_exit_code_69(
    control: Callable[..., Ran], cluster: FakeCluster, terminal: Callable[[bool], list[str]]
) -> None:
    asked = terminal(True)
    ran = control("shutdown")
    assert (ran.code, ran.out) == (69, "")
    assert asked == ["have all nodes (none of them answers) end?"]
    assert "'umbel -A shop doctor'" in ran.err
    assert cluster.sent[-1][0] == "shutdown"
