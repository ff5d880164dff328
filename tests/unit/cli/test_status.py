"""`umbel status`: who is found by listening, when it ends, what it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.cluster_script import Event, Script
from umbel.cli import status as verb
from umbel.cli.rollcall import NodeStatus, RollCall
from umbel.cli.status import Asking, cells, document, listen, remarks, show, summary

Umbel = Callable[..., Any]


@pytest.fixture
def script() -> Script:
    return Script()


def called(*events: Event, now_s: float = 0.5) -> RollCall:
    roll = RollCall(0.0)
    for event in events:
        roll.event(event, now_s)
    return roll


def only(rows: Sequence[NodeStatus]) -> NodeStatus:
    (row,) = rows
    return row


def test_a_heartbeat_tells_all_about_a_node(script: Script) -> None:
    row = only(called(script.heartbeat(active=2, processed=9, lost=3)).rows(1.0))
    assert row == NodeStatus(
        hostname="w1@host",
        state="alive",
        alive=True,
        answered=None,
        pid=100,
        clock=1,
        active=2,
        processed=9,
        load=0.5,
        sw_ident="py-umbel",
        sw_ver="1.2.3",
        task_events=None,
        lost=3,
    )


def test_a_node_that_says_goodbye_or_falls_silent_is_not_alive(script: Script) -> None:
    left = called(script.heartbeat(), script.event("worker-offline", freq=2.0))
    assert (only(left.rows(1.0)).state, only(left.rows(1.0)).alive) == ("left", False)
    silent = only(called(script.heartbeat()).rows(10.0))
    assert (silent.state, silent.alive) == ("silent", False)


def test_listening_ends_when_every_node_had_time_to_beat(script: Script) -> None:
    roll = called(script.heartbeat(), script.heartbeat("w2@host", freq=5.0))
    assert not roll.complete(2.5)
    assert not roll.complete(5.2)
    assert roll.complete(5.3)


def test_a_node_that_has_not_told_its_figures_is_waited_for(script: Script) -> None:
    # Celery's answer to a call for heartbeats.
    short = script.event("worker-heartbeat", "c@host", freq=5)
    roll = called(script.heartbeat(), short)
    assert not roll.complete(100.0)
    roll.event(script.heartbeat("c@host"), 2.0)
    assert roll.complete(2.3)


def test_nobody_is_waited_for_until_the_end() -> None:
    assert not called().complete(1e9)


class Hand:
    """Events at given times; time passes while one waits."""

    def __init__(self, *events: tuple[float, Event]) -> None:
        self.events = list(events)
        self.now_s = 0.0

    def take(self, timeout_s: float) -> Event | None:
        if self.events and self.events[0][0] <= self.now_s + timeout_s:
            self.now_s, event = self.events.pop(0)
            return event
        self.now_s += timeout_s
        return None


@pytest.mark.parametrize(("beats_at_s", "ends_at_s"), [((), 3.0), ((0.5, 1.9), 2.3)])
def test_listening_lasts_as_long_as_it_must(
    script: Script, beats_at_s: tuple[float, ...], ends_at_s: float
) -> None:
    source = Hand(*((at_s, script.heartbeat(f"w{at_s}@h")) for at_s in beats_at_s))
    roll = RollCall(0.0)
    listen(source, roll, 3.0, lambda: source.now_s)
    assert source.now_s == pytest.approx(ends_at_s, abs=0.11)
    assert len(roll.rows(source.now_s)) == len(beats_at_s)


def test_events_of_tasks_are_on_when_one_was_heard(script: Script) -> None:
    roll = called(script.heartbeat(), script.task("started", "a"))
    assert only(roll.rows(1.0)).task_events is True
    assert roll.task_event_count == 1


def test_events_of_tasks_are_off_when_tasks_ran_unheard(script: Script) -> None:
    roll = called(script.heartbeat(processed=3), script.heartbeat(processed=8))
    assert only(roll.rows(1.0)).task_events is False
    (remark,) = remarks(roll.rows(1.0), "redis://h", 2.0, 0)
    assert remark == "events of tasks are off on w1@host: start workers with -E to see tasks"


@pytest.mark.parametrize("told", [True, False])
def test_a_node_may_say_itself_whether_it_sends_events_of_tasks(script: Script, told: bool) -> None:
    assert only(called(script.heartbeat(task_events=told)).rows(1.0)).task_events is told


def test_what_clients_send_makes_no_node(script: Script) -> None:
    assert called(script.task("sent", "a", "gen1@host", name="n")).rows(1.0) == []


def test_events_that_a_task_sends_do_not_tell_whether_the_worker_has_task_events_on(
    script: Script,
) -> None:
    beats = script.heartbeat(processed=3), script.heartbeat(processed=8)
    own = script.task("progress", "a", pid=200), script.task("approved", "a", "gen1@host")
    roll = called(*own, beats[0], *own, beats[1], *own)
    row = only(roll.rows(1.0))
    assert (row.pid, row.processed, row.task_events) == (100, 8, False)
    assert roll.complete(3.0), "nobody else is waited for"


def test_heartbeats_only_are_told(script: Script) -> None:
    (remark,) = remarks(called(script.heartbeat()).rows(1.0), "redis://h", 2.0, 0)
    assert remark.startswith("heartbeats only")
    assert "-E" in remark


def test_lost_events_are_told(script: Script) -> None:
    rows = called(script.heartbeat(lost=7), script.task("started", "a")).rows(1.0)
    assert list(remarks(rows, "redis://h", 2.0, 1)) == [
        "events were lost on w1@host: monitors have not seen all that happened"
    ]


def test_what_a_node_refused_is_told_with_its_reasons(script: Script) -> None:
    counts = {"events": {"bad-clock": 2, "not-an-event": 1}, "tasks": {"unregistered": 4}}
    rows = called(script.heartbeat(refused=counts), script.task("started", "a")).rows(1.0)
    assert only(rows).refused == counts
    (remark,) = remarks(rows, "redis://h", 2.0, 1)
    assert remark == (
        "w1@host refused 4 task messages (unregistered 4), 3 events (bad-clock 2, not-an-event 1) "
        "since it started: 'umbel doctor' shows what to do"
    )
    rows = called(script.heartbeat(refused=counts), script.heartbeat()).rows(1.0)
    assert only(rows).refused == {}


@pytest.mark.parametrize(
    "told",
    [7, [], {"events": 7}, {"events": {"a": "b"}}, {"other": {"a": 1}}, {"events": {"a": -1}}],
)
def test_refused_input_that_makes_no_sense_is_not_shown(script: Script, told: Any) -> None:
    assert only(called(script.heartbeat(refused=told)).rows(1.0)).refused == {}


def test_who_was_heard_but_did_not_answer_is_told_from_who_answered(script: Script) -> None:
    roll = called(script.heartbeat("a@h"), script.heartbeat("b@h"))
    rows = {row.hostname: row for row in roll.rows(1.0, {"a@h", "c@h"})}
    assert [(name, row.state, row.answered) for name, row in rows.items()] == [
        ("a@h", "alive", True),
        ("b@h", "did not answer", False),
        ("c@h", "answers, sends no events", True),
    ]
    said = list(remarks(list(rows.values()), "redis://h", 2.0, 1))
    assert said == ["b@h sent heartbeats but did not answer: stuck, or remote control is off"]
    assert summary(list(rows.values())) == (
        "3 nodes: 1 alive, 1 answers, sends no events, 1 did not answer"
    )


class Control:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def ping(self, timeout: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class App:
    def __init__(self, *control: Any) -> None:
        if control:
            self.control = Control(*control)


ANSWERS: dict[str, tuple[App, set[str] | None]] = {
    "no way to ask": (App(), None),
    "nobody": (App([]), set()),
    "two": (App([{"a@h": {"ok": "pong"}}, {"b@h": {"ok": "pong"}}]), {"a@h", "b@h"}),
    "a failure": (App(OSError("gone")), None),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_nodes_are_asked_where_the_application_can(case: str) -> None:
    app, expected = ANSWERS[case]
    asking = Asking(app, 1.0)  # type: ignore[arg-type]
    asking.start()
    assert asking.answers(5.0) == expected


def test_the_table_and_the_json_show_the_same_safe_texts(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = called(
        script.heartbeat(active=2, processed=9, lost=3),
        script.heartbeat("\x1b[2Jw2@h", sw_ver="\x9b31m"),
    ).rows(1.0)
    show(rows, color=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *("node", "state", "clock", "active", "processed", "load", "lost", "events", "version")
    ]
    assert "\\x1b[2Jw2@h" in lines[1]
    assert lines[2].split() == [
        "w1@host",
        "alive",
        "1",
        "2",
        "9",
        "0.50",
        "3",
        "?",
        "umbel",
        "1.2.3",
    ]
    assert lines[3] == "2 nodes: 2 alive"
    assert all(line.isprintable() for line in lines)
    told = json.dumps(document(rows, "redis://h", 2.0, 0), ensure_ascii=False)
    assert told.isprintable()
    assert json.loads(told)["nodes"][1]["hostname"] == "w1@host"
    assert all(text.isprintable() for row in rows for text, _ in cells(row))


@pytest.mark.parametrize("value", [None, "x", {}, [], -1, True, 2**60, float("inf")])
def test_no_field_of_any_kind_breaks_the_answer(script: Script, value: object) -> None:
    names = ("freq", "active", "processed", "loadavg", "lost", "sw_ident", "sw_ver", "task_events")
    fields = dict.fromkeys(names, value)
    rows = called(
        *(script.event(f"worker-{kind}", **fields) for kind in ("online", "heartbeat", "other"))
    ).rows(1.0)
    assert cells(only(rows))[0][0] == "w1@host"
    assert all(remark.isprintable() for remark in remarks(rows, "p", 1.0, 0))


def test_nobody_is_exit_code_69_and_told_why(umbel: Umbel, shop: Path) -> None:
    ran = umbel("-A", "shop", "status", "--timeout", "0.2")
    assert (ran.code, ran.out) == (verb.NOBODY, "") == (69, "")
    for reason in ("nobody was heard within 0.", "--without-heartbeat", "another broker"):
        assert reason in ran.err
    assert ran.err.count("\n") == 1
    ran = umbel("-q", "-A", "shop", "status", "--timeout", "0.2", "--json")
    assert (ran.code, ran.err) == (69, "")
    assert json.loads(ran.out)["nodes"] == []
