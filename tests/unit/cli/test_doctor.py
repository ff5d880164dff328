"""`umbel doctor`: the verb, on a broker inside this process, and what it says when things fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.cluster_script import Script
from tests.unit.cli.conftest import Ran
from umbel.cli import probing
from umbel.cli.doctor import document, line, summary
from umbel.cli.findings import Finding, exit_code, fail, ok, warn
from umbel.cli.probing import Watch, reason, within

SHORT = ("doctor", "--timeout", "0.2")


def verdicts(ran: Ran) -> list[list[str]]:
    return [text.split()[:2] for text in ran.out.splitlines()[:-1]]


def test_nobody_is_exit_code_69_and_the_rest_is_fine(umbel: Callable[..., Ran], shop: Path) -> None:
    ran = umbel("-A", "shop", *SHORT)
    assert ran.code == 69, ran
    assert ran.err == ""
    assert verdicts(ran) == [
        ["ok", "settings"],
        ["ok", "broker"],
        ["ok", "broker"],
        ["ok", "results"],
        ["fail", "nodes"],
        ["warn", "queues"],
    ]
    assert ran.out.splitlines()[-1] == "1 failed, 1 warning, 4 fine"


def test_the_same_as_json(umbel: Callable[..., Ran], shop: Path) -> None:
    ran = umbel("-A", "shop", *SHORT, "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["exit_code"], ran.err) == (69, 69, "")
    assert [one["verdict"] for one in found["findings"]].count("fail") == 1
    assert all({"check", "verdict", "text", "advice"} <= one.keys() for one in found["findings"])


def test_quiet_shows_what_is_wrong_only(umbel: Callable[..., Ran], shop: Path) -> None:
    ran = umbel("-q", "-A", "shop", *SHORT)
    assert [text.split()[0] for text in ran.out.splitlines()] == ["fail", "warn"]


def test_no_application_is_a_wrong_command(umbel: Callable[..., Ran]) -> None:
    ran = umbel(*SHORT)
    assert (ran.code, ran.out) == (2, "")
    assert "no application" in ran.err


MADE = "from umbel import Umbel\napp = Umbel('shop', broker='memory://', {})"
FAULTY = {
    "an import that fails": ("1/0", "ZeroDivisionError"),
    "an unknown setting": (
        MADE.format("task_serialiser='json'"),
        "did you mean 'task_serializer'?",
    ),
    "an unknown broker": (
        "from umbel import Umbel\napp = Umbel('shop', broker='rdis://u:hidden@h')",
        "unknown transport 'rdis'",
    ),
    "a key that is too short": (
        MADE.format("control_signing='required', control_signing_key='hidden'"),
        "control_signing_key has 6 bytes",
    ),
    "a missing module": (
        MADE.format("include=['nosuch_tasks']"),
        "nosuch_tasks",
    ),
}


@pytest.mark.parametrize("case", FAULTY)
def test_settings_that_do_not_load_are_a_failure(
    umbel: Callable[..., Ran], project: Callable[..., Path], case: str
) -> None:
    text, expected = FAULTY[case]
    project({"shop.py": text})
    ran = umbel("-A", "shop", *SHORT)
    assert (ran.code, ran.err) == (1, ""), ran
    assert "fail  settings" in ran.out
    assert expected in ran.out
    assert "hidden" not in ran.out


def test_doubtful_settings_are_warned_of(
    umbel: Callable[..., Ran], project: Callable[..., Path]
) -> None:
    project(
        {
            "shop.py": """
                from umbel import Umbel
                app = Umbel("shop", broker="memory://", worker_enable_remote_control=False,
                            control_allow=["revoke"], result_cache_max=7)
            """
        }
    )
    ran = umbel("-A", "shop", *SHORT)
    assert ran.code == 69
    for text in ("worker_enable_remote_control is off", "control_allow leaves out ping"):
        assert f"warn  settings    {text}" in ran.out


def test_a_broker_that_is_not_there_ends_in_one_line_and_exit_code_1(
    umbel: Callable[..., Ran], shop: Path
) -> None:
    ran = umbel(
        *("-A", "shop", "-b", "redis://u:hidden@127.0.0.1:1/0;redis://127.0.0.1:2/0"),
        *("--result-backend", "redis://:hidden@127.0.0.1:1/1", "doctor"),
    )
    assert (ran.code, ran.err) == (1, "")
    assert verdicts(ran) == [
        ["ok", "settings"],
        ["fail", "broker"],
        ["fail", "broker"],
        ["fail", "results"],
    ]
    assert "redis://u:**@127.0.0.1:1/0 can not be reached" in ran.out
    assert "hidden" not in ran.out


def test_a_look_that_raises_is_a_finding_and_the_others_follow(
    umbel: Callable[..., Ran], shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("oops \x1b[2J redis://u:hidden@h")

    monkeypatch.setattr(probing, "census", broken)
    monkeypatch.setattr(probing, "backend_took_s", broken)
    ran = umbel("-A", "shop", *SHORT)
    assert (ran.code, ran.err) == (1, "")
    assert "could not be looked at (RuntimeError: oops \\x1b[2J redis://u:**@h)" in ran.out


def test_a_look_that_takes_too_long_is_left_alone() -> None:
    release = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, lambda: release.wait(20))
    assert time.monotonic() - began < 10
    release.set()
    assert within(10, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(10, lambda: {}["x"])


def test_a_hanging_broker_is_told_within_the_bound(
    umbel: Callable[..., Ran], shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(probing, "reach", lambda *_: release.wait(60))
    monkeypatch.setattr(probing, "patience_s", lambda *_: 0.1)
    ran = umbel("-A", "shop", *SHORT)
    release.set()
    assert ran.code == 1
    assert "memory:// can not be reached (no answer within 0.1 s)" in ran.out


def test_exit_codes() -> None:
    nodes, broker = fail("nodes", "x"), fail("broker", "x")
    assert exit_code([ok("a", "x"), warn("b", "x")], answered=True) == 0
    assert exit_code([nodes], answered=True) == 1
    assert exit_code([nodes], answered=False) == 69
    assert exit_code([nodes, broker], answered=False) == 1
    assert exit_code([], answered=False) == 69


def test_lines_and_the_last_one() -> None:
    found = [ok("broker", "x"), warn("nodes", "y", "do z", {"a": 1})]
    assert line(found[1]).endswith("  nodes       y: do z")
    assert summary(found) == "0 failed, 1 warning, 1 fine"
    assert summary([ok("a", "b")]) == "all is well"
    assert document(found, 0)["findings"][1] == {
        "check": "nodes",
        "verdict": "warn",
        "text": "y",
        "advice": "do z",
        "details": {"a": 1},
    }
    assert Finding("a", "ok", "b").line == "b"


def test_reasons_are_one_safe_line() -> None:
    assert reason(TimeoutError("no answer within 3 s")) == "no answer within 3 s"
    assert reason(OSError("a\n b")) == "OSError: a b"
    assert reason(KeyError()) == "KeyError"


# -- what is noted while one listens -------------------------------------------------------------


def test_the_least_skew_of_a_node_counts() -> None:
    script, watch = Script(), Watch(0.0)
    for held_up_s, ahead_s in ((3.0, 0.0), (0.1, 0.0), (2.0, 0.0)):
        event = script.heartbeat(
            timestamp=script.now + ahead_s, local_received=script.now + held_up_s
        )
        watch.event(event, 0.5)
    watch.event(script.heartbeat("b@h", timestamp=script.now + 60), 0.5)
    watch.event(script.task("sent", "a", "gen1@h", timestamp=script.now + 99), 0.5)
    assert watch.skews_s == {"w1@host": pytest.approx(-0.1), "b@h": pytest.approx(60)}


def test_a_name_that_two_nodes_have_is_told_from_a_restart() -> None:
    script = Script()
    restarted, shared = Watch(0.0), Watch(0.0)
    for pid in (1, 1, 2, 2):
        restarted.event(script.heartbeat(pid=pid, inc=pid), 0.5)
    for pid in (1, 2, 1):
        shared.event(script.heartbeat(pid=pid, inc=pid), 0.5)
    assert restarted.lives == {"w1@host": 1}
    assert shared.lives == {"w1@host": 2}
