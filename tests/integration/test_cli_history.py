"""`umbel record --import`, `history build`, `show`, `at` and `report`, one after the other.

One real build on Spark, of a short story whose every number is known.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.modes import check, modes_of
from tests.pipeline.stories import Story

HOSTILE = "<script>alert(1)</script>\x1b[2J"
BUILD_TIMEOUT_S = 360

pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S + 30)  # Spark starts slowly among many tests


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def umbel(*argv: str, cwd: Path) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "umbel", *argv],
        cwd=cwd,
        env={**os.environ, "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"},  # short-lived
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def lines_of(ran: Ran) -> list[dict[str, Any]]:
    assert ran.code == 0, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


def told() -> Story:
    """Two workers, six tasks, an election, a gap; one event comes twice, one is none."""
    story = Story()
    one, two = story.node("w1@farm", inc=1), story.node("w2@farm", inc=2)
    for node in (one, two):
        node.tell("worker-online", freq=2.0)
        node.beat(processed=0, active=0)
    for number in range(3):
        one.run(f"good-{number}", runtime=0.25, result="7")
    two.run("bad", "task-failed", exception="KeyError('order')", traceback="Traceback ...")
    two.tell("task-received", "evil", name=HOSTILE, root_id="evil")
    two.tell("task-started", "evil")
    for node in (one, two):
        node.tell("worker-elect", id="e1", topic="task", action=None)
    one.tell("worker-elected", id="e1", winner="w1@farm")
    one.run("e1", runtime=0.5, result="8")
    two.skip(4)
    two.beat(processed=1, active=1)
    one.beat(processed=4, active=0)
    story.events.append(story.events[-1])
    return story


@pytest.fixture(scope="module")
def story() -> Story:
    return told()


@pytest.fixture(scope="module")
def place(story: Story, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the log, the tables, and what the build said."""
    path = tmp_path_factory.mktemp("history")
    lines = [json.dumps(event) for event in story.events]
    (path / "events.jsonl").write_text("\n".join([*lines, '{"type": 7}', ""]))
    imported = umbel("record", "--log", "log", "--import", "events.jsonl", cwd=path)
    assert imported.code == 0, imported.err
    built = umbel(
        "history", "build", "--log", "log", "--tables", "tables", "--master", "local[2]", "--json",
        cwd=path,
    )  # fmt: skip
    assert built.code == 0, built.err
    (path / "built.json").write_text(built.out)
    return path


def test_the_build_counts_what_it_read_and_what_it_left_out(place: Path, story: Story) -> None:
    built = json.loads((place / "built.json").read_text())
    counts = {key: built[key] for key in ("read", "kept", "duplicate", "quarantined", "tasks")}
    events = len(story.events)
    assert counts == {
        "read": events,
        "kept": events - 1,
        "duplicate": 1,
        "quarantined": 1,
        "tasks": 6,
    }
    (run,) = lines_of(umbel("history", "show", "runs", "--tables", "tables", "--json", cwd=place))
    assert {key: run[key] for key in counts} == counts


def test_every_table_is_there_and_says_what_happened(place: Path) -> None:
    def rows(table: str, *argv: str) -> list[dict[str, Any]]:
        return lines_of(
            umbel("history", "show", table, "--tables", "tables", "--json", *argv, cwd=place)
        )

    listed = {row["table"]: row["rows"] for row in lines_of(
        umbel("history", "show", "--tables", "tables", "--json", cwd=place)
    )}  # fmt: skip
    assert listed.keys() == {
        *("timeline", "tasks", "attempts", "workers", "elections", "revocations"),
        *("clock_audit", "rates", "rates_hourly", "rates_daily", "queues", "lineage", "gaps"),
        "runs",
    }
    failed = rows("tasks", "--where", "state = 'FAILURE'")
    assert [(row["uuid"], row["exception"]) for row in failed] == [("bad", "KeyError('order')")]
    (election,) = rows("elections")
    assert (election["winner"], election["verdict"]) == ("w1@farm", "exactly once")
    (gap,) = rows("gaps", "--where", "kind = 'hole'")
    assert (gap["hostname"], gap["missing"]) == ("w2@farm", 4)
    assert {row["hostname"] for row in rows("workers")} == {"w1@farm", "w2@farm"}


def test_the_cluster_as_it_was_at_the_end(place: Path, story: Story) -> None:
    clock = max(event["clock"] for event in story.events)
    ran = umbel("history", "at", "--tables", "tables", "--clock", str(clock), "--json", cwd=place)
    (picture,) = lines_of(ran)
    assert [(node["hostname"], node["alive"]) for node in picture["nodes"]] == [
        ("w1@farm", True),
        ("w2@farm", True),
    ]
    (task,) = picture["running"]
    assert (task["uuid"], task["name"], task["worker"]) == ("evil", HOSTILE, "w2@farm")
    (leader,) = picture["leaders"]
    assert (leader["id"], leader["winner"]) == ("e1", "w1@farm")


def test_the_report_has_all_its_parts(place: Path) -> None:
    ran = umbel("history", "report", "--tables", "tables", "-o", "report.html", cwd=place)
    assert ran.code == 0, ran.err
    page = (place / "report.html").read_text()
    assert re.findall(r'<section id="([a-z]+)"', page) == [
        *("throughput", "times", "workers", "elections", "failures", "revocations", "clocks"),
        *("gaps", "runs"),
    ]
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_the_log_the_tables_and_the_report_are_for_their_owner_alone(place: Path) -> None:
    report = umbel("history", "report", "--tables", "tables", "-o", "out/page.html", cwd=place)
    assert report.code == 2  # no folder is made for a page
    (place / "out").mkdir(mode=0o755)
    report = umbel("history", "report", "--tables", "tables", "-o", "out/page.html", cwd=place)
    assert report.code == 0, report.err
    for name in ("log", "tables", "out"):
        check(place / name)
    names = set(modes_of(place / "tables"))
    assert any(name.startswith("_work/facts/") for name in names)
    assert not any("_work/events-" in name for name in names), "what a build worked on is removed"
    assert modes_of(place)["log"] == modes_of(place)["tables"] == 0o700
    assert modes_of(place)["out"] == 0o755


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--log", "nowhere"], "there is no event log at nowhere"),
        (["--log", "log", "--master", "sparc://x"], "unknown master 'sparc://x'"),
        (["--log", "log", "--master", "spark://127.0.0.1:9"], "cannot reach the Spark master"),
        (["--log", "log", "--since", "soon"], "'soon' is no time"),
        (["--log", "log", "--follow", "--full"], "leave out --full"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_build_that_can_not_be_is_one_line_and_leaves_nothing(
    place: Path, argv: list[str], why: str
) -> None:
    ran = umbel("history", "build", "--tables", "others", *argv, cwd=place)
    assert ran.code == 2, ran.err
    assert why in ran.err
    assert ran.err.count("\n") == 1
    assert not (place / "others" / "_tables.json").exists()


def test_a_target_that_is_a_file_is_told(place: Path) -> None:
    (place / "taken").write_text("")
    ran = umbel("history", "build", "--log", "log", "--tables", "taken", cwd=place)
    assert ran.code == 2, ran.err
    assert ran.err.count("\n") == 1
    assert "taken" in ran.err
