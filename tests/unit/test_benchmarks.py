"""What `make bench` writes: tables and a chart from a run's figures, and the pages that show them.

The run itself is no test: it takes minutes and wants the machine for itself.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks import bars, chart, measures, peers, report, runner
from benchmarks.figures import TIMES, Results
from benchmarks.stage import Failed

ROOT = Path(__file__).resolve().parent.parent.parent
SVG = "{http://www.w3.org/2000/svg}"


def results(**figures: dict[str, dict[str, list[float]]]) -> Results:
    """A run with these figures, names with `_` for `-`."""
    known = {"version": "1.0", "acks": "told"}
    return Results(
        {
            "date": "2026-01-02",
            "machine": {"cpu": "A <CPU>", "cores": 2, "memory_gib": 8, "python": "3.11.7"},
            "servers": {"redis": "7.0", "rabbitmq": "3.10"},
            "rounds": 3,
            "contestants": {
                "umbel": known | {"label": "Umbel"},
                "celery": known | {"label": "Celery"},
                "dramatiq": known | {"label": "dramatiq"},
            },
            "variants": {"umbel": {"redis": "defaults", "amqp": "defaults"}},
            "figures": {name.replace("_", "-"): found for name, found in figures.items()},
        }
    )


@pytest.fixture
def found() -> Results:
    return results(
        incr_2={
            "redis": {"celery": [700, 600, 900], "umbel": [8000, 7000, 9000], "dramatiq": [2000]},
            "amqp": {"celery": [1500], "umbel": [6000]},
        },
        send_one={"redis": {"celery": [1600], "umbel": [4000]}},
        send_batch={"redis": {"umbel": [40_000]}},
        latency_p50_ms={"redis": {"umbel": [1.25]}},
        idle_cpu_percent={"redis": {"umbel": [1.5]}},
    )


# -- the figures -----------------------------------------------------------------------------


def test_the_median_of_the_rounds_counts(found: Results) -> None:
    assert found.median("incr-2", "redis", "umbel") == 8000
    assert found.ratio("incr-2", "redis", "celery") == 8000 / 700
    assert found.median("incr-2", "redis", "nobody") is None
    assert found.ratio("incr-2", "amqp", "dramatiq") is None


def test_the_fastest_peer_is_never_umbel(found: Results) -> None:
    assert found.fastest_peer("incr-2", "redis") == "dramatiq"
    assert found.fastest_peer("incr-2", "amqp") == "celery"
    assert found.fastest_peer("send-batch", "redis") is None


def test_what_was_written_is_read_again(found: Results, tmp_path: Path) -> None:
    found.add("wake-p50-ms", "redis", "umbel", 1.23456)
    found.write(tmp_path / "made" / "run.json")
    read = Results.read(tmp_path / "made" / "run.json")
    assert read.median("wake-p50-ms", "redis", "umbel") == 1.235
    assert read.median("incr-2", "redis", "umbel") == 8000


def test_a_rate_leaves_the_start_out() -> None:
    slow_start = [0, 5 * 10**9]
    times = slow_start + [6 * 10**9 + number * 10**6 for number in range(98)]
    assert measures.rate(times) == pytest.approx(1000)


def test_tasks_that_end_at_one_time_have_no_rate() -> None:
    with pytest.raises(Failed, match="too few"):
        measures.rate([7, 7, 7])


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert measures.percentile(values, 50) == 50
    assert measures.percentile(values, 99) == 99
    assert measures.percentile([3.0], 99) == 3


# -- the bars --------------------------------------------------------------------------------


def test_bars_are_met_or_missed_by_name(found: Results) -> None:
    checked = {bar["name"]: (bar["met"], bar["got"]) for bar in bars.check(found)}
    assert checked["Redis, INCR, 2 processes: over Celery"] == (True, 8000 / 700)
    assert checked["Redis, INCR, 2 processes: over the fastest peer"] == (True, 4)
    assert checked["RabbitMQ, INCR, 2 processes: over the fastest peer"] == (True, 4)
    assert checked["`send_many` over Celery's `apply_async`, Redis"] == (True, 25)
    assert checked["send to start at 100 tasks/s, p50, Redis"] == (True, 1.25)
    assert checked["idle worker of 2 processes, CPU, Redis"] == (False, 1.5)


def test_what_was_not_measured_is_no_bar(found: Results) -> None:
    names = {bar["name"] for bar in bars.check(found)}
    assert not any("10⁶" in name or "p99" in name for name in names)
    found.data["growth"] = {"umbel": {"waiting": {"1000": 5000, "1000000": 4000}}}
    (growth,) = (bar for bar in bars.check(found) if "10⁶" in bar["name"])
    assert (growth["met"], growth["got"]) == (False, 0.8)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pages and results of another tree."""
    (tmp_path / "docs").mkdir()
    for page in report.PAGES:
        text = "text\n<!-- figures: none -->\nuntil then\n<!-- end of figures -->\n"
        (tmp_path / page).write_text(text)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    return tmp_path


def conclusion(found: Results, *, whole: bool, failures: tuple[str, ...] = ()) -> int:
    found.data["bars"] = bars.check(found)
    run = runner.Run.__new__(runner.Run)  # one that has ended
    run.results, run.failures, run.quick = found, list(failures), False
    return runner.conclude(run, whole, [])


def test_a_run_that_missed_a_bar_names_it_and_exits_with_1(
    found: Results, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conclusion(found, whole=False) == 1
    told = capsys.readouterr()
    assert told.err == "missed: idle worker of 2 processes, CPU, Redis\n"
    assert "MISSED idle worker of 2 processes, CPU, Redis: 1.50 % (<= 1)" in told.out
    found.data["figures"]["idle-cpu-percent"]["redis"]["umbel"] = [0.5]
    assert conclusion(found, whole=False) == 0


def test_a_whole_run_misses_what_it_did_not_measure(
    found: Results, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conclusion(found, whole=True) == 1
    unmeasured = len(bars.BARS) - len(bars.check(found))
    assert f"missed: {unmeasured} bars were not measured" in capsys.readouterr().err


def test_pages_show_whole_runs_without_a_failure_only(found: Results, elsewhere: Path) -> None:
    before = (elsewhere / "README.md").read_text()
    conclusion(found, whole=False)
    conclusion(found, whole=True, failures=("incr of celery on Redis",))
    assert (elsewhere / "README.md").read_text() == before
    conclusion(found, whole=True)
    assert "8,000" in (elsewhere / "README.md").read_text()


# -- the report ------------------------------------------------------------------------------


def test_the_report_has_a_table_per_broker_the_fastest_first(found: Results) -> None:
    found.data["bars"] = bars.check(found)
    page = report.full(found)
    redis, rabbitmq = page.split("### RabbitMQ")[0], page.split("### RabbitMQ")[1]
    rows = [line for line in redis.splitlines() if line.startswith("| ")]
    names = [line.split("|")[1].strip() for line in rows]
    assert names == ["", "---", "Umbel", "dramatiq", "Celery"]
    assert f"| Celery | 700 | 11.4{TIMES} |" in redis
    assert f"| Celery | 1,500 | 4.0{TIMES} |" in rabbitmq
    assert "2026-01-02, 2 cores" in page
    assert "| idle worker of 2 processes, CPU, Redis | at most 1 % | 1.50 % | **no** |" in page


def test_every_table_has_as_many_cells_in_each_row(found: Results) -> None:
    found.data["bars"] = bars.check(found)
    found.data["growth"] = {"umbel": {"waiting": {"10": 5000.0}, "queues": {"1": 5000.0}}}
    for section in (report.full(found), report.short(found)):
        for table in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE):
            assert len({line.count("|") for line in table.splitlines()}) == 1, table


def test_a_section_replaces_what_is_between_the_markers() -> None:
    page = "before\n<!-- figures: old.json -->\nold\n<!-- end of figures -->\nafter\n"
    made = report.with_section(page, "new.json", r"new \1")
    assert made == "before\n<!-- figures: new.json -->\nnew \\1\n<!-- end of figures -->\nafter\n"
    with pytest.raises(AssertionError, match="one section"):
        report.with_section("nothing here", "new.json", "new")


def test_publishing_writes_both_pages_and_the_chart(found: Results, elsewhere: Path) -> None:
    source = elsewhere / "benchmarks" / "results" / "2026-01-02.json"
    found.write(source)
    report.publish(source)
    for page in report.PAGES:
        text = (elsewhere / page).read_text()
        assert text.startswith("text\n<!-- figures: benchmarks/results/2026-01-02.json -->\n")
        assert "8,000" in text
        assert "until then" not in text
    assert (elsewhere / report.CHART).read_text() == chart.draw(found)


# -- the chart -------------------------------------------------------------------------------


def test_the_chart_is_a_picture_with_a_bar_for_each_contestant(found: Results) -> None:
    picture = ET.fromstring(chart.draw(found))
    bars_drawn = picture.findall(f"{SVG}rect")
    assert len(bars_drawn) == 5
    longest = max(float(bar.get("width", 0)) for bar in bars_drawn)
    shortest = min(float(bar.get("width", 0)) for bar in bars_drawn)
    assert longest / shortest == pytest.approx(8000 / 700, rel=0.01)
    texts = [text.text or "" for text in picture.findall(f"{SVG}text")]
    assert any("8,000" in text for text in texts)
    assert "prefers-color-scheme: dark" in (picture.findtext(f"{SVG}style") or "")
    assert "Umbel 8,000, dramatiq 2,000, Celery 700" in (picture.findtext(f"{SVG}title") or "")


def test_no_text_of_the_chart_leaves_the_picture(found: Results) -> None:
    picture = ET.fromstring(chart.draw(found))
    width, height = (float(picture.get(name, 0)) for name in ("width", "height"))
    for text in picture.findall(f"{SVG}text"):
        at = float(text.get("x", 0))
        room = at if text.get("text-anchor") == "end" else width - at
        assert len(text.text or "") * 7 <= room, text.text
        assert float(text.get("y", 0)) <= height


# -- what is in the repository ---------------------------------------------------------------


def shown(page: str) -> Path:
    found = report.SECTION.search((ROOT / page).read_text())
    assert found is not None, f"{page} has no section of figures"
    if found[1] == "none":
        pytest.skip("no run is shown yet")
    return ROOT / found[1]


@pytest.mark.parametrize("page", list(report.PAGES))
def test_a_page_shows_the_figures_of_the_file_it_names(page: str) -> None:
    source = shown(page)
    text = (ROOT / page).read_text()
    name = source.relative_to(ROOT).as_posix()
    section = report.PAGES[page](Results.read(source))
    assert report.with_section(text, name, section) == text, "run python -m benchmarks.report"


def test_both_pages_and_the_chart_show_the_same_run() -> None:
    (source,) = {shown(page) for page in report.PAGES}
    assert (ROOT / report.CHART).read_text() == chart.draw(Results.read(source))


def test_the_run_that_is_shown_was_a_whole_one() -> None:
    data: dict[str, Any] = json.loads(shown("README.md").read_text())
    assert set(data["contestants"]) == set(peers.NAMES)
    assert not data["quick"]
    assert not data["failures"]
    assert len(data["bars"]) == len(bars.BARS)


@pytest.mark.parametrize("name", peers.NAMES)
def test_each_contestant_has_the_whole_interface(name: str) -> None:
    # Read, not imported: its library is in another environment.
    module = ast.parse((ROOT / "benchmarks" / "peers" / f"{name}.py").read_text())
    assigned = {
        target.id
        for statement in module.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    functions = {
        statement.name: [argument.arg for argument in statement.args.args]
        for statement in module.body
        if isinstance(statement, ast.FunctionDef)
    }
    assert assigned >= set(peers.CONSTANTS)
    assert functions.items() >= peers.FUNCTIONS.items()
    for optional, parameters in peers.OPTIONAL_FUNCTIONS.items():
        assert optional in assigned or functions[optional] == parameters


def test_the_peers_packages_are_pinned_and_no_host_is_named() -> None:
    lists = sorted((ROOT / "benchmarks").glob("requirements*.txt"))
    lines = [line for path in lists for line in path.read_text().splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins)
    named = {pin.partition("==")[0] for pin in pins}
    assert named >= {"celery", "dramatiq", "taskiq", "taskiq-redis", "huey", "rq", "arq"}
    assert "://" not in "".join(lines) + (ROOT / "scripts" / "bench-setup").read_text()
