"""What nodes answered, as tables: every shape of the wire, and what does not fit."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from umbel.cli import inspect as verb
from umbel.cli.reply_tables import as_json, error_in, names, parts_for, without_secrets
from umbel.cli.sheets import Block, Part, Sheet, plain_lines, show

NOW = 1_700_000_010.0
ESCAPE = "\x1b[2J"


def lines(command: str, **answers: Any) -> list[list[str]]:
    """The cells of everything that is shown, titles first."""
    found: list[list[str]] = []
    for part in parts_for(command, answers, NOW):
        if isinstance(part, Block):
            found += [[part.heading], *([line] for line in part.lines)]
        else:
            found += [list(part.titles), *(list(row) for row in part.rows)]
    return found


def request(**fields: Any) -> dict[str, Any]:
    return {
        "id": "run-1",
        "name": "shop.charge",
        "args": [12],
        "kwargs": {"a": None},
        "type": "shop.charge",
        "hostname": "w1@h",
        "time_start": NOW - 3,
        "acknowledged": True,
        "delivery_info": {"exchange": "", "routing_key": "celery"},
        "worker_pid": 137,
        **fields,
    }


def test_a_ping_is_one_line_per_node_by_name() -> None:
    assert lines("ping", b={"ok": "pong"}, a={"ok": "pong"}) == [
        ["node", "answer"],
        ["a", "pong"],
        ["b", "pong"],
    ]


def test_clocks() -> None:
    assert lines("clock", a={"clock": 12}) == [["node", "clock"], ["a", "12"]]


def test_running_tasks_tell_since_when() -> None:
    assert lines("active", a=[request()], b=[request(time_start=None, worker_pid=None)], c=[]) == [
        ["node", "id", "task", "args", "kwargs", "running", "pid"],
        ["a", "run-1", "shop.charge", "[12]", '{"a": null}', "3.00s", "137"],
        ["b", "run-1", "shop.charge", "[12]", '{"a": null}', "", ""],
    ]


def test_arguments_that_come_as_texts_are_shown_as_they_are() -> None:
    (_, row) = lines("reserved", a=[request(args="('x',)", kwargs="{}")])
    assert row == ["a", "run-1", "shop.charge", "('x',)", "{}"]


def test_tasks_that_wait_for_their_time_show_it() -> None:
    entry = {"eta": "2026-11-15T19:38:48+00:00", "priority": 6, "request": request()}
    assert lines("scheduled", a=[entry])[1][:3] == ["a", "2026-11-15T19:38:48+00:00", "run-1"]


def test_where_tasks_are() -> None:
    answer = {"run-1": ["active", request()], "run-2": ["reserved", request(id="run-2")]}
    rows = lines("query_task", a=answer, b={})
    assert [row[:4] for row in rows] == [
        ["node", "id", "state", "task"],
        ["a", "run-1", "active", "shop.charge"],
        ["a", "run-2", "reserved", "shop.charge"],
    ]


def test_what_nodes_have_in_common_is_shown_once() -> None:
    assert lines("revoked", a=["x", "y"], b=["y"], c=["y"]) == [
        ["id", "nodes"],
        ["x", "a"],
        ["y", "all"],
    ]
    assert lines("revoked", a=["x"]) == [["id", "nodes"], ["x", "a"]]


def test_registered_tasks_show_attributes_only_where_there_are_any() -> None:
    assert lines("registered", a=["t.a", "t.b"]) == [["task", "nodes"], ["t.a", "a"], ["t.b", "a"]]
    assert lines("registered", a=["t.a [rate_limit=10/m]", "t.b"], b=["t.b"]) == [
        ["task", "attributes", "nodes"],
        ["t.a", "rate_limit=10/m", "a"],
        ["t.b", "", "all"],
    ]


def test_settings_are_masked_whatever_a_node_answered() -> None:
    answer = {
        "result_backend": "redis://u:hidden@h/0",
        "redis_password": "hidden",
        "imports": ["t"],
    }
    shown = lines("conf", a=answer)
    assert ["imports", '["t"]', "a"] in shown
    assert ["redis_password", "**", "a"] in shown
    assert "hidden" not in str(shown)
    assert "hidden" not in as_json(without_secrets("conf", {"a": answer, "b": {"error": "x"}}))


def test_what_is_masked_already_stays_as_it_is() -> None:
    answers = {
        "a": {"broker_url": "amqp://u:**@h//", "security_key": "**", "n": 3, "l": ["a", None]}
    }
    assert without_secrets("conf", answers) == answers


def test_stats_are_a_line_per_node_and_a_line_per_task() -> None:
    answer = {
        "total": {"shop.charge": 3, "shop.refund": 1},
        "pid": 7,
        "clock": "49",
        "uptime": 3700,
        "pool": {"implementation": "celery.concurrency.prefork:TaskPool", "max-concurrency": 4},
        "broker": {"transport": "redis", "hostname": "h", "port": 6379, "virtual_host": "/1"},
        "prefetch_count": 16,
        "rusage": {"maxrss": 51200},
        "umbel": {"gossip_refused": {"bad-clock": 2}, "refused": {}},
    }
    assert lines("stats", a=answer) == [
        [
            "node",
            "pid",
            "uptime",
            "clock",
            "pool",
            "slots",
            "prefetch",
            "tasks",
            "memory",
            "broker",
        ],
        ["a", "7", "1h01m", "49", "prefork:TaskPool", "4", "16", "4", "50 MiB", "redis://h:6379/1"],
        ["node", "task", "count"],
        ["a", "shop.charge", "3"],
        ["a", "shop.refund", "1"],
        ["node", "refused", "reason", "count"],
        ["a", "events", "bad-clock", "2"],
    ]


def test_queues_and_what_waits_in_them() -> None:
    queue = {
        "name": "q",
        "exchange": {"name": "x", "type": "topic"},
        "routing_key": "k.#",
        "durable": True,
        "exclusive": False,
        "auto_delete": True,
    }
    assert lines("active_queues", a=[queue])[1] == [
        "a",
        "q",
        "x",
        "topic",
        "k.#",
        "durable auto-delete",
    ]
    assert lines("queue_lengths", a={"q": 3, "p": None})[1:] == [["a", "p", "?"], ["a", "q", "3"]]


def test_elections_show_candidates_or_the_winner() -> None:
    answer = {
        "open": {"e1": {"topic": "task", "age": 0.5, "candidates": ["a", "b"], "claimed": False}},
        "decided": {"e0": {"winner": "b", "age": 61.0}, "e9": {"winner": None, "age": 1}},
        "counts": {},
    }
    assert lines("elections", a=answer, b={}) == [
        ["node", "id", "state", "topic", "age", "winner or candidates"],
        ["a", "e1", "open", "task", "500ms", "a, b"],
        ["a", "e0", "decided", "", "61.0s", "b"],
        ["a", "e9", "decided", "", "1.00s", ""],
    ]


def test_texts_are_shown_line_by_line_under_their_node() -> None:
    assert lines("report", a={"ok": f"umbel: 1\n  x{ESCAPE}"}) == [
        ["a"],
        ["umbel: 1"],
        ["  x\\x1b[2J"],
    ]
    assert lines("memdump", a="- 1MB\n= 2MB") == [["a"], ["- 1MB"], ["= 2MB"]]
    assert lines("memsample", a="71.5MB") == [["node", "answer"], ["a", "71.5MB"]]
    assert lines("objgraph", a={"filename": "/tmp/x.png"}) == [
        ["node", "file"],
        ["a", "/tmp/x.png"],
    ]


def test_commands_of_the_application_are_shown_as_json() -> None:
    assert lines("greet", a={"hello": [1]}, b=None) == [
        ["node", "answer"],
        ["a", '{"hello": [1]}'],
        ["b", "obeyed"],
    ]


def test_errors_are_left_to_others() -> None:
    assert lines("active", a={"error": "no"}) == []
    assert error_in({"error": "no"}) == "no"
    for fine in ({"ok": "x"}, {"error": 3}, None, "error", ["error"], {"ok": "x", "error": "y"}):
        assert error_in(fine) is None


SHAPES: list[Any] = [
    *(None, True, 3, 1.5, "text", [], {}, [None], [[]], [{}], ["x"], {"x": None}, {"x": []}),
    *({"total": None}, {"total": {"a": "b"}}, {"clock": {}}, [{"name": 3, "exchange": "x"}]),
    *({"x": ["active", {}]}, [{"eta": 3, "request": 4}], [{"id": {}}], {"filename": None}),
]


@pytest.mark.parametrize("command", [*verb.InspectGroup.entries, "of_the_application"])
def test_no_answer_of_any_shape_is_lost_or_breaks_the_others(command: str) -> None:
    fine = {"ok": "pong"} if command == "ping" else []
    for shape in SHAPES:
        parts = parts_for(command, {"odd@h": shape, "fine@h": fine}, NOW)
        for part in parts:
            if isinstance(part, Sheet):
                assert all(len(row) == len(part.titles) for row in part.rows)
                assert all(isinstance(cell, str) for row in part.rows for cell in row)
        if not isinstance(shape, (list, dict)):
            assert "odd@h" in repr(parts), (command, shape)


@pytest.mark.parametrize("command", verb.InspectGroup.entries)
def test_no_text_of_a_node_reaches_the_terminal_raw(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = f"a{ESCAPE}\u202e\n"
    everywhere = request(id=evil, name=evil, args=[evil], kwargs={evil: evil}, worker_pid=evil)
    answers: list[Any] = [
        *([everywhere], [evil], {evil: evil}, {"ok": evil}, evil, {"clock": evil}),
        *([{"eta": evil, "request": everywhere}], {evil: [evil, everywhere]}, {"filename": evil}),
        *([{"name": evil, "exchange": {"name": evil, "type": evil}, "routing_key": evil}],),
        {"total": {evil: evil}, "pid": evil, "pool": {"implementation": evil}, "clock": evil,
         "broker": {"hostname": evil, "transport": evil, "port": evil}},
    ]  # fmt: skip
    for answer in answers:
        show(parts_for(command, {evil: answer}, NOW), color=False)
        shown = capsys.readouterr().out
        assert all(line.isprintable() for line in shown.split("\n")), shown


def test_json_is_exact_and_safe() -> None:
    answers = {"a@h": {"ok": f"ü{ESCAPE}\u2028\U000e0001\ud800 \\"}, "b": [1.5, None, True]}
    text = as_json(answers)
    assert text.isprintable()
    assert "ü" in text
    assert json.loads(text) == answers


def test_many_names_are_counted() -> None:
    assert names(["a", "b"]) == "a, b"
    assert names([f"w{i}" for i in range(8)]) == "w0, w1, w2, w3, w4 and 3 more"


def test_plain_tables_are_aligned_and_never_cut() -> None:
    wide = "x" * 500
    sheet = Sheet(
        ("node", "count", "text"), [("a", "1", wide), ("字@h", "100", "")], frozenset({"count"})
    )
    assert plain_lines(sheet) == [
        "node  count  text",
        f"a         1  {wide}",
        "字@h    100",
    ]


def test_parts_are_apart_and_empty_ones_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    parts: list[Part] = [Sheet(("a",), [("1",)]), Sheet(("b",), []), Block("c", ["2", "3"])]
    show(parts, color=None)
    assert capsys.readouterr().out == "a\n1\n\nc:\n  2\n  3\n"
    show([], color=None)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_drawn_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    show([Sheet(("node", "text"), [("a@h", "x" * 60)])], color=False)
    shown = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert "─" in shown or "━" in shown
    assert shown.count("x") == 60 + 1  # folded, not cut; and the title
    assert max(map(len, shown.splitlines())) <= 40
