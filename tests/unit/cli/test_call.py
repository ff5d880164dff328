"""`umbel call` and `umbel result` on brokers inside this process."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from umbel.app.current import current_app
from umbel.app.umbel import Umbel as Application

Umbel = Callable[..., Any]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any, dict[str, Any]]]:
    calls: list[tuple[str, Any, Any, dict[str, Any]]] = []

    def send_task(self: Any, name: str, args: Any, kwargs: Any, **options: Any) -> Any:
        calls.append((name, args, kwargs, options))
        return self.AsyncResult("the-id")

    monkeypatch.setattr(Application, "send_task", send_task)
    return calls


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-7", -7),
        ("-7.5e3", -7500.0),
        ("hello", "hello"),
        ('"7"', "7"),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ("NaN", "NaN"),
        ("07", "07"),
        ("2030-01-01", "2030-01-01"),
        ("", ""),
    ],
)
def test_an_argument_is_json_or_a_plain_word(
    umbel: Umbel, shop: Path, sent: list[Any], text: str, value: Any
) -> None:
    ran = umbel("-A", "shop", "call", "shop.charge", text)
    assert (ran.code, ran.out) == (0, "the-id\n")
    assert sent == [("shop.charge", [value], {}, {})]


def test_options_reach_the_message(umbel: Umbel, shop: Path, sent: list[Any]) -> None:
    line = "call shop.charge --queue money --priority 3 --countdown -5 --serializer json 7"
    assert umbel("-A", "shop", *line.split()).code == 0
    assert sent[0][3] == {"queue": "money", "priority": 3, "countdown": -5.0, "serializer": "json"}


def test_times_are_read_in_the_zone_of_the_application(
    umbel: Umbel, shop: Path, sent: list[Any]
) -> None:
    line = "call shop.charge 7 --eta 2030-01-31T08:00:00 --expires 2030-01-31T09:00:00+01:00"
    assert umbel("-A", "shop", *line.split()).code == 0
    assert sent[0][3]["eta"].isoformat() == "2030-01-31T08:00:00+00:00"
    assert sent[0][3]["expires"].isoformat() == "2030-01-31T09:00:00+01:00"
    assert umbel("-A", "shop", "call", "shop.charge", "7", "--expires", "60").code == 0
    assert sent[1][3]["expires"] == 60.0


def test_lists_and_objects_come_from_options(umbel: Umbel, shop: Path, sent: list[Any]) -> None:
    ran = umbel("-A", "shop", "call", "shop.charge", "-a", "[7]", "-k", '{"currency": "CHF"}')
    assert ran.code == 0
    assert sent[0][1:3] == ([7], {"currency": "CHF"})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["[1"], "argument 1 '[1' begins like JSON but is none"),
        (["-a", "7"], "--args '7' must be a JSON list"),
        (["-a", "[7"], "--args '[7' is not JSON"),
        (["-k", "[]"], "--kwargs '[]' must be a JSON object"),
        (["7", "-a", "[7]"], "arguments are given twice"),
        (["7", "--eta", "noon"], "--eta 'noon' is not a time: give ISO 8601"),
        (["7", "--expires", "soon"], "--expires 'soon' is not a time"),
        (["7", "--timeout", "3"], "add --wait"),
        (["7", "8", "9"], "too many positional arguments"),
        (["7", "--serializer", "pickle"], "pickle"),
        (["7", "--priority", "x"], "--priority"),
        (["7", "--prioritty", "1"], "did you mean --priority?"),
    ],
)
def test_what_can_not_be_sent_is_one_line(
    umbel: Umbel, shop: Path, words: list[str], said: str
) -> None:
    ran = umbel("-A", "shop", "call", "shop.charge", *words)
    assert ran.code == 2
    assert said in ran.err
    assert (ran.err.count("\n"), ran.out) == (1, "")


def test_an_unknown_task_is_sent_with_a_remark(umbel: Umbel, shop: Path, sent: list[Any]) -> None:
    ran = umbel("-A", "shop", "call", "shop.chrage", "7")
    assert ran.code == 0
    assert "did you mean 'shop.charge'?" in ran.err
    assert umbel("-q", "-A", "shop", "call", "elsewhere.task").err == ""


def test_a_result_that_nobody_knows_is_pending_or_unknown(umbel: Umbel, shop: Path) -> None:
    ran = umbel("-A", "shop", "result", "abc")
    assert (ran.code, ran.out) == (0, "PENDING: pending, or unknown to this result backend\n")


@pytest.fixture
def task_id() -> str:
    return str(uuid.uuid4())


def store(umbel: Umbel, task_id: str, result: Any, state: str, **more: Any) -> None:
    umbel("-A", "shop", "report")  # makes the application
    current_app().backend.store(task_id, result, state, **more)


def test_a_result_is_shown_plainly_or_as_json(umbel: Umbel, shop: Path, task_id: str) -> None:
    store(umbel, task_id, {"paid": True}, "SUCCESS")
    assert umbel("-A", "shop", "result", task_id).out == '{"paid": true}\n'
    shown = json.loads(umbel("-A", "shop", "result", task_id, "--json").out)
    assert (shown["state"], shown["result"]) == ("SUCCESS", {"paid": True})


def test_a_failed_task_is_exit_code_1_with_its_error_and_traceback(
    umbel: Umbel, shop: Path, task_id: str
) -> None:
    store(umbel, task_id, ValueError("no money"), "FAILURE", traceback="Traceback: line 3\n")
    ran = umbel("-A", "shop", "result", task_id)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"umbel: task {task_id} ended as FAILURE: ValueError: no money\n"
    assert "line 3" in umbel("-A", "shop", "result", task_id, "--traceback").err
    shown = json.loads(umbel("-A", "shop", "result", task_id, "--json").out)
    assert shown["error"] == {"type": "ValueError", "message": "no money"}


def test_waiting_in_vain_is_exit_code_3(umbel: Umbel, shop: Path, task_id: str) -> None:
    ran = umbel("-A", "shop", "result", task_id, "--wait", "--timeout", "0.01")
    assert ran.code == 3
    assert f"task {task_id} has not ended within 0.01 s" in ran.err


def test_results_that_are_not_kept_can_not_be_asked_for(umbel: Umbel, shop: Path) -> None:
    for verb in (["result", "abc"], ["call", "shop.charge", "7", "--wait"]):
        ran = umbel("-A", "shop", "--result-backend", "disabled://", *verb)
        assert ran.code == 2
        assert "--result-backend" in ran.err


@pytest.fixture
def queue() -> str:
    return f"money-{uuid.uuid4()}"


def test_purge_removes_what_waits_and_says_from_where(umbel: Umbel, shop: Path, queue: str) -> None:
    for name in (queue, queue, f"{queue}-2"):
        assert umbel("-A", "shop", "call", "shop.charge", "7", "-Q", name).code == 0
    ran = umbel("-A", "shop", "purge", "-f", "-Q", f"{queue},{queue}-2,nowhere")
    assert ran.code == 0
    assert ran.out == f"removed 3 messages ({queue}: 2, {queue}-2: 1, nowhere: 0)\n"
    ran = umbel("-A", "shop", "purge", "-f", "-Q", queue)
    assert ran.out == f"nothing to remove: no message waits in {queue}\n"


def test_purge_asks_first(
    umbel: Umbel, shop: Path, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert umbel("-A", "shop", "call", "shop.charge", "7", "-Q", queue).code == 0
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.confirm", lambda text: False)
    assert umbel("-A", "shop", "purge", "-Q", queue).out == "nothing was removed\n"
    monkeypatch.setattr("click.confirm", lambda text: f"1 messages ({queue}: 1)" in text)
    assert umbel("-A", "shop", "purge", "-Q", queue).out == f"removed 1 messages ({queue}: 1)\n"


def test_purge_refuses_without_a_terminal(
    umbel: Umbel, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    ran = umbel("-A", "shop", "purge")
    assert (ran.code, ran.err) == (
        2,
        "umbel: purge asks first and there is no terminal to ask on: use -f\n",
    )
