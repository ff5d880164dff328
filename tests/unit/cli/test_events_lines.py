"""One event as one line: what it shows, and what it lets nobody do to the terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.cells import cell_len

from umbel.cli.event_lines import UNKNOWN_TIME, Lines, call_text, local_time, software
from umbel.cli.plain import cut, number, plain, plain_json, seconds

UUID = "0f5d7f6a-6a2b-4f0c-9d6e-2f1f6a7b8c9d"
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\nfake line\u202egnp.exe\u2028\x00\x7f\ud800"


def event(kind: str, **fields: Any) -> dict[str, Any]:
    common = {"type": kind, "hostname": "w1@host", "timestamp": 1_700_000_000.25, "clock": 7}
    return {**common, "pid": 4, **({"uuid": UUID} if kind.startswith("task-") else {}), **fields}


def text(kind: str, name: str | None = None, waited_s: float | None = None, **fields: Any) -> str:
    return Lines().line(event(kind, **fields), name, waited_s).plain


def test_a_line_has_time_clock_node_type_id_and_name() -> None:
    words = text("task-received", name="shop.charge", args="(7,)", kwargs="{}").split()
    assert words[0].count(":") == 2
    assert words[0].endswith(".250")
    assert words[1:] == ["7", "w1@host", "task-received", "0f5d7f6a", "shop.charge", "(7)"]


DETAILS = {
    "task-sent": ({"args": "(7,)", "kwargs": "{'b': 1}", "queue": "q"}, "(7, {'b': 1}) queue=q"),
    "task-received": ({"args": "[]", "kwargs": "{}", "eta": "2030", "retries": 2},
                      "() eta=2030 retries=2"),
    "task-started": ({}, "waited 12.0ms"),
    "task-succeeded": ({"runtime": 0.0017, "result": "'ok'"}, "1.7ms → 'ok'"),
    "task-failed": ({"exception": "ValueError('no')", "traceback": "T"}, "ValueError('no')"),
    "task-retried": ({"exception": "OSError()"}, "OSError()"),
    "task-revoked": ({"terminated": True, "signum": 15, "expired": False},
                     "terminated with signal 15"),
    "task-rejected": ({"requeue": True}, "back to the queue"),
    "worker-heartbeat": ({"active": 1, "processed": 9, "loadavg": [0.5, 1, 2], "lost": 3},
                         "active=1 processed=9 load=0.50 lost=3"),
    "worker-online": ({"sw_ident": "py-umbel", "sw_ver": "1.0"}, "umbel 1.0"),
    "my-thing": ({"size": 3, "local_received": 1.0}, "size=3"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DETAILS)
def test_the_details_are_those_that_matter_for_the_type(kind: str) -> None:
    fields, expected = DETAILS[kind]
    assert text(kind, "n", 0.012, **fields).endswith(f"  {expected}")


NONSENSE = [None, {}, [], "x", -1, 2**70, float("inf"), True, {"a": [1]}, HOSTILE]


@pytest.mark.parametrize("kind", DETAILS)
@pytest.mark.parametrize("value", NONSENSE, ids=range(len(NONSENSE)))
def test_no_field_of_any_kind_breaks_a_line(kind: str, value: Any) -> None:
    calls = ("name", "args", "kwargs", "queue", "eta", "retries", "runtime", "result", "exception")
    ends = ("terminated", "signum", "expired", "requeue", "what")
    nodes = ("active", "processed", "loadavg", "lost", "sw_ident", "sw_ver")
    fields = dict.fromkeys((*calls, *ends, *nodes), value)
    line = text(kind, **fields)
    assert line.isprintable()


@pytest.mark.parametrize("field", ["hostname", "type", "uuid", "name", "exception", "result"])
def test_escape_sequences_reach_no_terminal(field: str) -> None:
    for kind in ("task-failed", "task-succeeded", "task-received", "strange"):
        line = Lines(200).line(event(kind, **{field: HOSTILE})).plain
        assert line.isprintable()
        assert not {"\x1b", "\x9b", "\n", "\u202e"} & set(line)
    assert "\\x1b" in plain(HOSTILE)


def test_json_of_an_event_is_one_printable_line_with_the_same_content() -> None:
    hostile = event("task-failed", exception="\x1b[2J\x9b\u202e\u2028\n😀\U000e0001é")
    line = plain_json(hostile)
    assert line.isprintable()
    assert json.loads(line) == hostile
    assert plain_json(event("x", a="\ud800")).isprintable()


def test_passwords_in_addresses_are_masked() -> None:
    line = text("task-failed", exception="OSError('redis://u:hidden@h/0')")
    assert "hidden" not in line
    assert "redis://u:**@h/0" in line


def test_a_line_fits_the_terminal_and_a_huge_text_costs_little() -> None:
    lines = Lines(80)
    for name in ("n" * 10_000_000, "語" * 500):
        line = lines.line(event("task-succeeded", name=name, result=name, runtime=1.0))
        assert cell_len(line.plain) <= 80
    assert cell_len(text("task-failed", exception="x" * 10_000)) < 320


def test_columns_grow_with_their_content_and_stay_aligned() -> None:
    lines = Lines()
    first = lines.line(event("task-started", hostname="a-much-longer-name@host")).plain
    second = lines.line(event("task-started", hostname="b@h")).plain
    assert first.index("task-started") == second.index("task-started")


@pytest.mark.parametrize("timestamp", [2**53 - 1, -(2**53) + 1, 1e300])
def test_a_time_that_is_none_is_shown_as_unknown(timestamp: float) -> None:
    assert local_time(timestamp) == UNKNOWN_TIME


def test_durations_are_short() -> None:
    shown = [seconds(value) for value in (0.0, 0.0017, 0.25, 1.5, 12.34, 245, 12_000, 400_000)]
    assert shown == ["0.0ms", "1.7ms", "250ms", "1.50s", "12.3s", "4m05s", "3h20m", "4d"]
    assert seconds(None) == seconds(-1.0) == ""


def test_small_helpers_take_anything() -> None:
    assert [number(value) for value in (1, 2.5, True, "1", float("nan"), 2**60)] == [
        1.0,
        2.5,
        None,
        None,
        None,
        None,
    ]
    assert cut("abcdef", 4) == "abc…"
    assert software("py-celery", "5.7.0") == "celery 5.7.0"
    assert call_text({}) == ""
