"""The page: complete, self-contained, and not to be moved by what stands in the tables."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.unit.pipeline.published import BEGAN, SCHEMAS, World, publish
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.reading import Tables
from umbel.pipeline.report.facts import BARS_MAX, Facts
from umbel.pipeline.report.page import page, write
from umbel.pipeline.report.shapes import Span, linear_ticks, log_ticks, seconds, share, step_s

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[2J\u202e\0"


class Checker(HTMLParser):
    """Counts elements, keeps the text, and holds that all of them close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def text_of(tables: Tables) -> tuple[str, Checker]:
    made = page(tables)
    return made, Checker(made)


def test_every_part_is_there_and_links_to_it_work(tables: Tables) -> None:
    made, checked = text_of(tables)
    ids = [value for _, name, value in checked.attributes if name == "id"]
    assert ids == [
        "throughput",
        "times",
        "workers",
        "elections",
        "failures",
        "revocations",
        "lineage",
        "clocks",
        "gaps",
        "runs",
    ]
    assert re.findall(r'href="#([a-z]+)"', made) == ids
    assert checked.count["svg"] > 5


def test_nothing_is_fetched_and_nothing_runs(tables: Tables) -> None:
    made, checked = text_of(tables)
    assert not checked.count.keys() & {"script", "img", "link", "iframe", "object", "form", "base"}
    for tag, name, value in checked.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in {"href", "src", "action"}:
            assert (value or "").startswith("#")
    assert "http:" not in made
    assert "https:" not in made
    assert "url(" not in made
    assert "default-src 'none'" in made


def test_numbers_on_the_page_are_those_of_the_tables(tables: Tables, world: World) -> None:
    _, checked = text_of(tables)
    shown = " ".join(checked.texts)
    failed = sum(row["state"] == "FAILURE" for row in world.rows["tasks"])
    for value, label in ((300, "tasks"), (failed, "failed"), (5, "events missing")):
        assert f"{value} {label}" in shown
    assert "4 / 6 elections exactly once" in shown
    assert "nodes, 1 lost" in shown
    for error in ("ConnectionError", "KeyError"):
        assert error in shown
    assert "went back" in shown
    assert "mostly for" in shown


def test_an_election_that_is_open_when_the_log_ends_is_no_failure(tmp_path: Path) -> None:
    rows = [
        {"id": f"e{number}", "topic": "task", "requested": BEGAN + number, "verdict": verdict}
        for number, verdict in enumerate(["exactly once", "open", "exactly once", "none"])
    ]
    for count, (told, alarm) in {3: ("2 / 2", ""), 4: ("2 / 3", " alarm")}.items():
        place = publish(tmp_path / str(count), {"elections": rows[:count]})
        with Tables(place) as tables:
            page, checked = text_of(tables)
        assert f"{told} elections exactly once, 1 still open" in " ".join(checked.texts)
        assert f'<div class="tile{alarm}"><b>{told}</b>' in page
        assert '<span class="badge none">open</span>' in page
    places = [page.index(f">{verdict}<") for verdict in ("none", "open", "exactly once")]
    assert places == sorted(places), "what went wrong comes first"


def test_throughput_has_every_end_of_a_task_once(tables: Tables, world: World) -> None:
    counts, sent = Facts(tables).throughput()
    for kind, by_column in counts.items():
        assert sum(by_column) == sum(row["type"] == kind for row in world.rows["timeline"])
    assert sum(sent) == len(world.rows["tasks"])


def test_load_adds_up_to_the_time_that_executions_took(tables: Tables, world: World) -> None:
    facts = Facts(tables)
    assert facts.span is not None
    took: dict[str, float] = {}
    for row in world.rows["attempts"]:
        if row["ended"]:
            took[row["worker"]] = took.get(row["worker"], 0.0) + row["ended"] - row["started"]
    for worker, busy in facts.load().items():
        assert sum(busy) * facts.span.step == pytest.approx(took[worker], rel=1e-6)


def test_texts_of_others_are_texts_wherever_they_come_up(tmp_path: Path) -> None:
    world = World(tasks=60, names=(f"name {HOSTILE}", f"other {HOSTILE}"))
    for name, rows in world.rows.items():
        for row in rows:
            for column, kind in SCHEMAS[name].items():
                if str(kind) == "string" and column not in {"name", "type", "state", "outcome"}:
                    row[column] = f"{row.get(column) or ''}{HOSTILE}"
            if name == "elections":
                for candidate in row["candidates"]:
                    candidate["hostname"] = HOSTILE
            if name == "revocations":
                row["seen_by"] = [HOSTILE]
    with Tables(world.publish(tmp_path)) as tables:
        made, checked = text_of(tables)
    assert not checked.count.keys() & {"script", "img"}
    assert not any(name.startswith("on") for _, name, _ in checked.attributes)
    assert not {"\x1b", "\u202e", "\0"} & set(made)
    assert made.count("&lt;script&gt;") > 20


def test_a_password_in_an_address_is_not_shown(tmp_path: Path) -> None:
    rows = [{"uuid": "a", "name": "a", "state": "FAILURE", "failed": BEGAN,
             "exception": "Unreachable('redis://user:hunter2@host/0')"}]  # fmt: skip
    with Tables(publish(tmp_path, {"tasks": rows})) as tables:
        made, _ = text_of(tables)
    assert "hunter2" not in made
    assert "Unreachable" in made


def test_empty_tables_give_a_page(tmp_path: Path) -> None:
    with Tables(publish(tmp_path, {})) as tables:
        made, checked = text_of(tables)
    assert "There are no events yet." in made
    assert "No event is missing." in " ".join(checked.texts)


def test_a_missing_table_costs_its_part_only(directory: Path, tmp_path: Path) -> None:
    index = json.loads((directory / "_tables.json").read_text())
    for name in index["tables"]:
        (tmp_path / name).symlink_to(directory / name)
    for missing in ("timeline", "tasks", "attempts", "workers"):
        left = {name: entry for name, entry in index["tables"].items() if name != missing}
        (tmp_path / "_tables.json").write_text(json.dumps({**index, "tables": left}))
        with Tables(tmp_path) as tables:
            _, checked = text_of(tables)
        assert checked.count["section"] >= 7, missing


def test_wrong_wall_clocks_do_not_stretch_the_picture(world: World, tmp_path: Path) -> None:
    strays: list[dict[str, Any]] = [
        {"position": -1, "clock": 1, "timestamp": when, "hostname": "w1@farm", "type": "task-sent",
         "uuid": "stray", "incarnation": 1}
        for when in (0.0, 5e9, -1e18, 1e300)
    ]  # fmt: skip
    rows = {**world.rows, "timeline": [*world.rows["timeline"], *strays]}
    with Tables(publish(tmp_path, rows)) as tables:
        facts = Facts(tables)
        made, _ = text_of(tables)
    assert facts.span is not None
    assert facts.span.last - facts.span.first < 600
    assert facts.outside == 4
    assert "4 events have times far outside" in made


def test_a_long_history_has_a_bounded_page(tmp_path: Path) -> None:
    with Tables(World(tasks=4_000, workers=30).publish(tmp_path / "large")) as tables:
        large, checked = text_of(tables)
    assert checked.count["rect"] < 2 * BARS_MAX + 24 * 130 + 800
    assert f"The last {BARS_MAX:,} of" in large
    assert "The busiest 24 of" in large
    assert len(large) < 1_500_000


def test_the_page_is_written_whole_or_not_at_all(tables: Tables, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("the last one")
    size = write(tables, target)
    assert target.stat().st_size == size > 50_000
    with pytest.raises(HistoryError, match="it is a directory"):
        write(tables, tmp_path)
    with pytest.raises(HistoryError, match=r"cannot write .*No such file or directory"):
        write(tables, tmp_path / "nowhere" / "report.html")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_target_that_may_not_be_written_is_told(tables: Tables, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(HistoryError, match="Permission denied"):
            write(tables, tmp_path / "report.html")
    finally:
        tmp_path.chmod(0o700)


# -- scales ------------------------------------------------------------------------------------


@pytest.mark.parametrize("span_s", [0.01, 0.3, 1, 59, 61, 3_599, 86_400, 1e6, 1e9, 1e12])
def test_a_span_has_a_bounded_number_of_columns_and_ticks(span_s: float) -> None:
    step = step_s(span_s, 120)
    span = Span(BEGAN, BEGAN + span_s, step)
    assert 1 <= span.columns <= 121
    ticks = span.ticks(8)
    assert len(ticks) <= 10
    assert all(span.first <= at <= span.last + step for at, _ in ticks)


@pytest.mark.parametrize("top", [0.0, 1e-9, 0.3, 1, 7, 99, 1e7])
def test_ticks_hold_the_greatest_value(top: float) -> None:
    ticks = linear_ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] >= top
    assert 2 <= len(ticks) <= 6


def test_powers_of_ten_hold_both_ends() -> None:
    assert log_ticks(0.002, 0.5) == pytest.approx([0.001, 0.01, 0.1, 1])
    assert log_ticks(1, 1) == [1, 10]


def test_numbers_as_people_read_them() -> None:
    told = [seconds(value) for value in (None, 0.0017, 0.25, 3.14159, 42, 245, 12_000, 183_600)]
    assert told == ["-", "1.7 ms", "250 ms", "3.14 s", "42.0 s", "4m 05s", "3h 20m", "2d 3h"]
    assert [share(1, 1), share(99_999, 100_000), share(0, 5), share(0, 0)] == [
        "100 %",
        "99.9 %",
        "0 %",
        "-",
    ]
