"""The log under SIGKILL and on a full disk, and the command line that fills and checks it."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.log_reading import event, identities, rows, rows_of, segments
from tests.log_writers import Killable
from tests.servers import wait_until
from tests.sizes import FULL, size
from tests.workers import Program, program_environment
from umbel.recorder.compaction import Compaction
from umbel.recorder.log import Log
from umbel.recorder.options import Options
from umbel.recorder.segments import Segments

KILLS = size(15, 300)
SEED = int(os.environ.get("RECORD_SEED", "1"))
KILLED = -signal.SIGKILL
NOON = 1_794_830_400.0


@pytest.fixture(scope="module")
def killable() -> Iterator[Killable]:
    with Killable() as one:
        yield one


def acknowledged(notes: Path) -> set[int]:
    """What a writer has said that it is on disk; the last line may be half a one."""
    whole = notes.read_text().rpartition("\n")[0] if notes.exists() else ""
    return {number for line in whole.splitlines() for number in json.loads(line)} - {0}


def hidden(log: Path) -> list[Path]:
    return [path for path in log.rglob("*") if path.name.startswith(".")]


def test_a_writer_killed_anywhere_leaves_whole_segments_and_all_it_acknowledged(
    tmp_path: Path, killable: Killable
) -> None:
    log, dice = tmp_path / "log", random.Random(SEED)
    known: set[Path] = set()
    acknowledged_count = 0
    for life in range(KILLS):
        notes = tmp_path / f"notes-{life}"
        pause_s = dice.choice((0.01, 0.1, 0.5)) * dice.random()
        code = killable.run(
            "write",
            log=str(log),
            notes=str(notes),
            life=life,
            seed=life,
            kill_after_s=pause_s,
            # A busy machine may get no further than to the beginning before it is killed.
            kill_once=notes if life % 3 == 0 else None,
        )
        assert code == KILLED, f"seed {SEED}, life {life}"
        new = [path for path in segments(log) if path not in known]
        known.update(new)
        found = {row["seq"] for path in new for row in rows_of(path)}  # fails on what is not whole
        assert acknowledged(notes) <= found, f"seed {SEED}, life {life}"
        acknowledged_count += len(acknowledged(notes))
    assert acknowledged_count
    assert rows(log, "quarantine")
    Log(str(log)).open()
    assert hidden(log) == []


def test_a_writer_killed_at_each_step_leaves_a_log(tmp_path: Path, killable: Killable) -> None:
    for step in range(size(12, 60)):
        log, notes = tmp_path / f"log-{step}", tmp_path / f"notes-{step}"
        code = killable.run("write", log=str(log), notes=str(notes), life=1, seed=step, die=step)
        assert code == KILLED, step
        Log(str(log)).open()  # another one can go on
        assert acknowledged(notes) <= {row["seq"] for row in rows(log)}, step
        assert hidden(log) == [], step


def test_compaction_killed_at_each_step_keeps_the_same_events(
    tmp_path: Path, killable: Killable
) -> None:
    origin = tmp_path / "origin"
    writer = Segments(Log(str(origin)).open(), Options(recorder="r"), wall=lambda: NOON)
    for part in range(4):
        for number in range(40):
            writer.add(event(number + 30 * part), NOON)  # some are there twice
        writer.quarantine(f"{part}", "bad", NOON)
        writer.roll()
    before, step, code = identities(origin), 0, KILLED
    now = NOON + 1_000
    while code == KILLED:
        log = tmp_path / f"log-{step}"
        shutil.copytree(origin, log)
        code = killable.run("compact", log=str(log), now=now, die=step)
        assert identities(log) == before, step
        again = Compaction(Log(str(log)).open(), keep_s=0, wall=lambda: now + 1_000)
        again.run()
        again.run()
        assert identities(log) == before, step
        assert len(rows(log)) == len(before) == 130, step
        assert len(segments(log)) == 1, step
        assert sorted(row["raw"] for row in rows(log, "quarantine")) == list("0123"), step
        assert hidden(log) == [], step
        shutil.rmtree(log)
        step += 1 if FULL or step < 8 else 4
    assert code == 0
    assert step > 20


def test_retention_killed_at_each_step_has_not_happened_or_is_finished_by_the_next_one(
    tmp_path: Path, killable: Killable
) -> None:
    origin, day_s = tmp_path / "origin", 86_400.0
    for day in range(3):
        now = NOON + day * day_s
        wall = itertools.repeat(now).__next__
        writer = Segments(Log(str(origin)).open(), Options(recorder="r"), wall=wall)
        for part in range(2):
            for number in range(20):
                writer.add(event(20 * (2 * day + part) + number), now)
            writer.quarantine(f"{day}", "bad", now)
            writer.roll()
    before = {row["clock"] for row in rows(origin)}
    days = sorted(path.name.removeprefix("day=") for path in (origin / "events").iterdir())
    after = {number for number in before if number >= 80 or number % 8 == 0}
    step, code, undone = 0, KILLED, 0
    while code == KILLED:
        log = tmp_path / f"log-{step}"
        shutil.copytree(origin, log)
        job = {"log": str(log), "cutoff": days[2], "now": NOON + 3 * day_s}
        code = killable.run("retain", **job, die=step)
        is_committed = code == 0 or (log / "_retention.json").exists() or left(log) == after
        if is_committed:
            assert after <= left(log) <= before, step
        else:
            assert left(log) == before, step
            assert len(rows(log, "quarantine")) == 6, step
            undone += 1
        if step % 2 and is_committed:  # a compaction finishes it as well
            Compaction(Log(str(log)).open(create=False), wall=lambda: NOON + 3 * day_s).run()
            assert left(log) == after, step
        assert killable.run("retain", **job) == 0, step
        assert left(log) == after, step
        assert {row["raw"] for row in rows(log, "quarantine")} == {"2"}, step
        assert not (log / "_retention.json").exists(), step
        # A lock of the dead is taken over by whoever works on that day next.
        assert {path.name for path in hidden(log)} <= {".compacting"}, step
        assert sorted(path.name for path in (log / "quarantine").iterdir()) == [f"day={days[2]}"]
        shutil.rmtree(log)
        step += 1 if FULL or step < 8 else 3
    assert code == 0
    assert undone > 5
    assert step > 30


def left(log: Path) -> set[int]:
    """The events that readers see: those that a segment stands for are not read beside it."""
    found, replaced = {}, set()
    for path in segments(log):
        found[path] = {row["clock"] for row in rows_of(path)}
        manifest = json.loads(pq.read_metadata(path).metadata[b"umbel"])
        replaced |= {path.with_name(name) for name in manifest.get("replaces", ())}
    return {number for path, some in found.items() if path not in replaced for number in some}


def test_on_a_full_disk_nothing_is_acknowledged_and_all_is_written_when_there_is_room(
    tmp_path: Path, killable: Killable
) -> None:
    log, notes = tmp_path / "log", tmp_path / "notes"
    assert killable.run("fill", log=str(log), notes=str(notes), limit_bytes=4_000) == 0
    told = json.loads(notes.read_text())
    assert told["added"] == 400  # four times what makes a segment: the bound
    assert len(told["failures"]) == 7
    assert "File too large" in told["failures"][0]
    assert told["left"] == 0
    assert told["tokens"] == list(range(400))
    assert sorted(row["seq"] for row in rows(log)) == list(range(400))


# -- the command line


def umbel(*words: str, cwd: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "umbel", *words],
        cwd=cwd,
        env=program_environment(cwd),
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def test_a_file_is_imported_and_the_log_is_checked_and_compacted(tmp_path: Path) -> None:
    events = [event(number) for number in (*range(1, 50), *range(60, 101))]
    (tmp_path / "a.jsonl").write_bytes(lines(*events[:30]) + b"{broken\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(*events[30:60])))
    done = umbel(
        *("record", "--log", "log", "--import", "a.jsonl", "--import", "b.jsonl.gz"),
        *("--import", "-", "--roll-rows", "20", "--json"),
        cwd=tmp_path,
        stdin=lines(*events[60:]),
    )
    assert (done.returncode, done.stderr) == (0, b"")
    told = json.loads(done.stdout)
    assert (told["lines"], told["events"], told["quarantined"]) == (91, 90, 1)
    assert [json.loads(row["raw"]) for row in rows(tmp_path / "log")] == events
    assert rows(tmp_path / "log", "quarantine")[0]["source"] == "a.jsonl:31"

    shown = umbel("record", "--log", "log", "--check", cwd=tmp_path)
    assert shown.returncode == 0
    first, *_, last = shown.stdout.decode().splitlines()
    assert first.startswith("log: 90 events in ")
    assert first.endswith("; 1 incarnations, 10 events missing")
    assert last.split() == ["w1@a", "77", "1-100", "10", "50-59"]
    as_json = json.loads(umbel("record", "--log", "log", "--check", "--json", cwd=tmp_path).stdout)
    assert (as_json["rows"], as_json["missing"], as_json["quarantine_rows"]) == (90, 10, 1)

    compacted = umbel("record", "--log", "log", "--compact", cwd=tmp_path)
    assert compacted.returncode == 0
    assert compacted.stderr == b"umbel: nothing to merge\n"  # all is too new


def test_what_is_damaged_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(event(1)))
    assert umbel("record", "--log", "log", "--import", "a.jsonl", cwd=tmp_path).returncode == 0
    (path,) = segments(tmp_path / "log")
    path.write_bytes(path.read_bytes()[:-20])
    shown = umbel("record", "--log", "log", "--check", cwd=tmp_path)
    assert shown.returncode == 1
    assert f"{path.name} cannot be read" in shown.stdout.decode()
    assert shown.stderr == b""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--log", "nolog", "--check"], "there is no event log at nolog"),
        (["--log", "nolog", "--compact"], "there is no event log at nolog"),
        (["--log", "other", "--import", "a.jsonl"], "other is no event log and not empty"),
        (["--log", "nolog", "--import", "missing"], "cannot read missing: No such file"),
        (["--log", "a.jsonl", "--import", "a.jsonl"], "cannot open the log a.jsonl: Not a dir"),
        (["--log", "nosuch://x", "--check"], "cannot use nosuch://x: Protocol not known"),
        (["--log", "nolog"], "nothing to record: name a broker with -b"),
        (["--log", "nolog", "--check", "--compact"], "choose one of --import, --check"),
        (["--log", "nolog", "--roll-age", "nan"], "nan is not a number of seconds"),
        ([], "missing option '--log'"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from umbel.cli import main

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    (tmp_path / "a.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UMBEL_BROKER_URL", raising=False)
    assert main.run(["record", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert said in printed.err
    assert not (tmp_path / "nolog").exists()


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None; from umbel.cli.main import run; "
        "sys.exit(run(['record', '--log', 'log', '--check']))"
    )
    Log(str(tmp_path / "log")).open()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=program_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "umbel: 'umbel record' needs the package pyarrow: pip install 'umbel[record]'\n"
    )


def test_an_import_that_waits_for_its_input_ends_on_a_signal_with_all_it_read(
    tmp_path: Path,
) -> None:
    words = ["record", "--log", "log", "--import", "-", "--roll-rows", "2000"]
    with subprocess.Popen(
        [sys.executable, "-m", "umbel", *words],
        cwd=tmp_path,
        env=program_environment(tmp_path),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        # The first segment is written while it reads: then the rest is in memory.
        process.stdin.write(lines(*map(event, range(2_001))))
        process.stdin.flush()
        wait_until(lambda: segments(tmp_path / "log"), 60)
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert process.stderr is not None
        said = process.stderr.read().decode()
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert len(rows(tmp_path / "log")) >= 2_000


def test_recording_ends_in_order_on_a_signal(
    tmp_path: Path, broker_url: str, start: Callable[..., Program]
) -> None:
    from umbel import Umbel

    command = [sys.executable, "-m", "umbel", "-b", broker_url, "record", "--log", "log"]
    recorder = start([*command, "--roll-age", "600", "--json"])
    recorder.wait_for("takes events from the broker")
    app = Umbel("sender", broker=broker_url, set_as_current=False)
    try:
        with app.events.default_dispatcher() as dispatcher:
            for number in range(200):
                dispatcher.send("task-told", uuid=f"u{number}")
    finally:
        app.close()
    # What is not taken yet when it ends stays with the broker: another one takes it.
    found: set[str] = set()
    for _ in range(20):
        recorder.process.send_signal(signal.SIGTERM)
        assert recorder.wait(30) == 0, recorder.output
        found = {row["uuid"] for row in rows(tmp_path / "log") if row["type"] == "task-told"}
        if len(found) == 200:
            break
        recorder = start([*command, "--roll-age", "600", "--json"])
        recorder.wait_for("takes events from the broker")
    assert len(found) == 200
    assert json.loads(recorder.lines[-1])["segments"] >= 0
