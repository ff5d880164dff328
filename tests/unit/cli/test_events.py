"""`umbel events`: what is shown, when it ends, what it tells at the end."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.cluster_script import Event, Script
from umbel.cli import events as verb
from umbel.cli.errors import FINE, TIMED_OUT
from umbel.cli.events import Filter, Follower, json_writer, line_writer
from umbel.cli.feed import GONE, Feed

Umbel = Callable[..., Any]


class HandSource:
    """Gives what a test puts in; after that, time passes and nothing comes."""

    def __init__(self, *events: Event | type[BaseException]) -> None:
        self.events = list(events)
        self.now_s = 0.0
        self.condition = ""
        self.dropped = self.missing = 0
        self.refused: dict[str, int] = {}
        self.missing_by_node: dict[str, int] = {}

    def take(self, timeout_s: float) -> Event | None:
        if not self.events:
            self.now_s += timeout_s
            return None
        first = self.events.pop(0)
        if isinstance(first, type):
            raise first
        self.now_s += 0.01
        return first


class Followed:
    """A follower that keeps what it would write."""

    def __init__(self, source: HandSource, **patterns: tuple[str, ...]) -> None:
        self.source = source
        self.written: list[tuple[str, Any, float | None]] = []
        self.follower = Follower(
            lambda event, name, waited_s: self.written.append((event["type"], name, waited_s)),
            Filter(**patterns),
            clock=lambda: source.now_s,
        )

    def run(self, limit: int | None = None, timeout_s: float | None = 5.0) -> int:
        return self.follower.run(self.source, limit, timeout_s)


@pytest.fixture
def script() -> Script:
    return Script()


def busy(script: Script) -> list[Event]:
    return [
        script.heartbeat(),
        *script.life("aaaa-1", "shop.charge"),
        script.task("sent", "bbbb-2", "gen7@host", name="mail.send"),
        *script.life("bbbb-2", "mail.send", end="failed"),
        script.heartbeat("w2@other"),
    ]


FILTERS: dict[str, tuple[dict[str, tuple[str, ...]], int]] = {
    "everything": ({}, 9),
    "type": ({"types": ("task-*",)}, 7),
    "types": ({"types": ("task-failed", "worker-*")}, 3),
    "task": ({"tasks": ("shop.*",)}, 3),
    "node": ({"nodes": ("*@other",)}, 1),
    "id": ({"ids": ("bbbb-2",)}, 4),
    "beginning of an id": ({"ids": ("aa",)}, 3),
    "all of them": ({"types": ("*ed",), "tasks": ("mail.*",), "nodes": ("w1@*",)}, 3),
    "nothing": ({"tasks": ("nowhere",)}, 0),
}


@pytest.mark.parametrize("case", FILTERS)
def test_a_filter_shows_what_matches_one_pattern_of_each_kind(case: str, script: Script) -> None:
    patterns, count = FILTERS[case]
    followed = Followed(HandSource(*busy(script)), **patterns)
    assert followed.run() == TIMED_OUT
    assert len(followed.written) == followed.follower.shown == count
    assert followed.follower.seen == 9


def test_later_events_of_a_task_show_its_name_and_how_long_it_waited(script: Script) -> None:
    followed = Followed(HandSource(*script.life("a")))
    followed.run()
    assert [name for _, name, _ in followed.written] == ["shop.charge"] * 3
    assert [waited_s for *_, waited_s in followed.written] == [None, 0.5, 0.5]


def test_the_limit_counts_what_is_shown(script: Script) -> None:
    followed = Followed(HandSource(*busy(script)), types=("worker-heartbeat",))
    assert followed.run(limit=2) == FINE
    assert (followed.follower.shown, followed.follower.seen) == (2, 9)


def test_the_time_out_counts_from_the_last_event_that_was_shown(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    beats = [script.heartbeat() for _ in range(1_000)]  # ten seconds of them
    followed = Followed(HandSource(*beats), types=("task-*",))
    assert followed.run(timeout_s=2.0) == TIMED_OUT
    assert followed.follower.seen < 300
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        "umbel: no such event for 2 s, heartbeats only: workers send events of tasks with -E"
    )


def test_an_interrupt_ends_in_order_with_a_summary(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    source = HandSource(*busy(script), KeyboardInterrupt)
    source.refused = {"bad-clock": 2, "bad-uuid": 1}
    source.missing, source.missing_by_node = 5, {"w1@host": 4, "\x1b[2Jw2": 1}
    source.dropped = 7
    assert Followed(source, types=("task-*",)).run() == FINE
    assert capsys.readouterr().err == (
        "umbel: 9 events, 7 shown; 3 refused (bad-clock 2, bad-uuid 1); "
        "5 missing by their numbers (w1@host 4, \\x1b[2Jw2 1); "
        "7 dropped here, as they came faster than they were written\n"
    )


def test_a_broker_that_goes_and_comes_back_is_told_once_each(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    source = HandSource(*[script.heartbeat() for _ in range(6)])
    states = iter(["", "", GONE, GONE, "", ""])
    take = source.take

    def taken(timeout_s: float) -> Event | None:
        source.condition = next(states, "")
        return take(timeout_s)

    source.take = taken  # type: ignore[method-assign]
    Followed(source).run(limit=6)
    assert capsys.readouterr().err.splitlines()[:2] == [
        f"umbel: {GONE}",
        "umbel: connected again",
    ]


def test_json_is_one_object_per_line(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    sent = busy(script)
    Follower(json_writer(), Filter(), quiet=True).run(HandSource(*sent), limit=len(sent))
    shown = capsys.readouterr()
    assert [json.loads(line) for line in shown.out.splitlines()] == sent
    assert shown.err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("color", "coloured"), [(None, True), (False, False)])
def test_colours_are_for_terminals_that_want_them(
    color: bool | None, coloured: bool, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    write = line_writer(color)
    for event in busy(script):
        write({**event, "exception": "x" * 300}, "n", None)
    said = terminal.getvalue()
    assert ("\x1b[" in said) == coloured
    assert said.count("\n") == 9
    if not coloured:
        assert max(len(line) for line in said.splitlines()) == 60


def test_a_file_gets_plain_lines(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr("sys.stdout", file)
    write = line_writer(None)
    for event in busy(script):
        write(event, None, None)
    assert file.getvalue().count("\n") == 9
    assert file.getvalue().replace("\n", "").isprintable()


def test_a_feed_that_is_full_drops_the_oldest_and_counts_it(script: Script) -> None:
    from umbel import Umbel

    with Umbel("shop", broker="memory://", set_as_current=False) as app:
        feed = Feed(app, buffer_max=10)
        for number in range(25):
            feed._put(script.heartbeat(processed=number))
        assert feed.dropped == 15
        assert [event["processed"] for event in feed.drain(100)] == list(range(15, 25))
        assert feed.take(0) is None


def test_what_ends_the_receiver_is_told_where_events_are_taken() -> None:
    from umbel import Umbel
    from umbel.exceptions import ImproperlyConfigured

    with Umbel("shop", broker="memory://", set_as_current=False) as app:
        app.conf.update(event_queue_durable=True, event_queue_exclusive=True)
        feed = Feed(app)
        with pytest.raises(ImproperlyConfigured, match="exclude each other"), feed:
            feed.take(5)
        assert feed.condition.startswith("stopped: ImproperlyConfigured: ")
        assert feed.drain(10) == []


def test_silence_is_exit_code_3(umbel: Umbel, shop: Path) -> None:
    ran = umbel("-A", "shop", "events", "--timeout", "0.2")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.splitlines() == ["umbel: no event for 0.2 s", "umbel: 0 events"]


@pytest.mark.parametrize("option", ["--limit=0", "--limit=x", "--timeout=0", "--timeout=-1"])
def test_a_wrong_number_is_one_line(umbel: Umbel, shop: Path, option: str) -> None:
    ran = umbel("-A", "shop", "events", option)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert option.partition("=")[0] in ran.err


def test_the_module_bounds_what_it_remembers(script: Script) -> None:
    followed = Followed(HandSource(*(script.task("started", f"u{n}") for n in range(10_050))))
    followed.run()
    assert len(followed.follower._state.tasks) == verb.TASKS_REMEMBERED_MAX
