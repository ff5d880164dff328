"""Retention on the side of the log: what goes, what stays, and who is kept from what."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.log_reading import event, rows, rows_of, segments
from tests.log_writers import eighths
from umbel.recorder import retention
from umbel.recorder.checking import check
from umbel.recorder.compaction import Compaction
from umbel.recorder.day_locks import held
from umbel.recorder.errors import LogError, LogFull
from umbel.recorder.log import Log
from umbel.recorder.options import Options
from umbel.recorder.retention import Busy, OldDay, Retention, cutoff_of, pending
from umbel.recorder.segments import Segments

DAY_S = 86_400.0
NOON = 1_794_830_400.0
DAYS = ("2026-11-16", "2026-11-17", "2026-11-18")


def written(url: str, days: int = 3) -> Log:
    """A log with two segments of eight events a day, and one in quarantine."""
    log = Log(url).open()
    for number in range(days):
        now = NOON + number * DAY_S
        writer = Segments(log, Options(recorder="r"), wall=lambda now=now: now)
        for part in range(2):
            for one in range(8):
                writer.add(event(16 * number + 8 * part + one), now)
            if part:
                writer.quarantine("x", "bad", now)
            writer.roll()
    return log


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return written(str(tmp_path / "log"))


@pytest.fixture
def place(tmp_path: Path, log: Log) -> Path:
    return tmp_path / "log"


def day(log: Log, number: int, table: pa.Table | None = None, count: int = 16) -> OldDay:
    """A day of which these rows are carried over."""
    names = [segment.name for segment in log.segments(day=DAYS[number])]
    some = [] if table is None else [table]
    return OldDay(DAYS[number], names, count, sum(map(len, some)), lambda: some)


def test_the_cutoff_is_the_first_of_the_days_that_are_kept() -> None:
    assert cutoff_of(1, NOON) == "2026-11-15"
    assert cutoff_of(30, NOON) == "2026-10-17"


def test_old_days_go_but_for_what_is_carried_over_and_empty_folders_with_them(
    log: Log, place: Path
) -> None:
    one, other = eighths(log, DAYS[2])
    outcome = Retention(log).apply(DAYS[2], [one, day(log, 1)])
    assert [row["clock"] for row in rows(place)] == [0, 8, *range(32, 48)]
    assert sorted(path.name for path in (place / "events").iterdir()) == [
        f"day={DAYS[0]}",
        f"day={DAYS[2]}",
    ]
    assert (outcome.days, outcome.segments, outcome.events, outcome.quarantined) == (2, 6, 30, 2)
    assert (outcome.carried, outcome.cutoff) == (2, DAYS[2])
    assert outcome.bytes > 0
    made = segments(place)[0]
    manifest = json.loads(pq.read_metadata(made).metadata[b"umbel"])
    assert (manifest["retained"], manifest["rows"], manifest["sequences"]) == (True, 2, [])
    assert manifest["replaces"] == sorted(one.segments)
    assert other.day == DAYS[1]


def test_what_is_freed_is_the_difference_in_size(log: Log, place: Path) -> None:
    def size() -> int:
        return sum(path.stat().st_size for path in place.rglob("*.parquet"))

    before = size()
    outcome = Retention(log).apply(DAYS[2], eighths(log, DAYS[2]))
    assert outcome.bytes == before - size()


def test_a_preview_counts_and_changes_nothing(log: Log, place: Path) -> None:
    before = sorted(place.rglob("*"))
    outcome = Retention(log).preview(DAYS[2], eighths(log, DAYS[2]))
    assert (outcome.days, outcome.segments, outcome.events, outcome.carried) == (2, 6, 28, 4)
    assert sorted(place.rglob("*")) == before


def test_numbers_that_are_carried_over_are_in_the_manifest_and_leave_no_gaps(
    log: Log, place: Path
) -> None:
    (path, *_) = segments(place)
    table = pq.read_table(path, partitioning=None).replace_schema_metadata().slice(5, 3)
    Retention(log).apply(DAYS[1], [day(log, 0, table)])
    finding = check(log)
    assert finding.incarnations[0].seen == [(5, 7), (16, 47)]
    assert finding.events.rows == 3 + 32


def test_a_segment_that_came_since_the_decision_stays(log: Log, place: Path) -> None:
    decided = [day(log, 0)]
    writer = Segments(log, Options(recorder="late"), wall=lambda: NOON + DAY_S)
    writer.add(event(99), NOON)
    writer.roll()
    Retention(log).apply(DAYS[1], decided)
    assert [row["clock"] for row in rows(place)] == [99, *range(16, 48)]


def test_a_segment_that_was_merged_since_the_decision_from_those_that_go_goes_with_them(
    log: Log, place: Path
) -> None:
    decided = [day(log, 0)]
    Compaction(log, keep_s=0, wall=lambda: NOON + 5 * DAY_S).run()
    assert len(segments(place)) == 9
    Retention(log).apply(DAYS[1], decided)
    assert {row["clock"] for row in rows(place)} == set(range(16, 48))


def test_a_log_from_which_everything_goes_keeps_a_segment_without_rows(
    log: Log, place: Path
) -> None:
    Retention(log).apply("2026-12-01", [day(log, number) for number in range(3)])
    (path,) = segments(place)
    assert (path.parent.name, rows(place)) == (f"day={DAYS[2]}", [])
    assert pending(log) is None


def test_a_day_that_somebody_works_on_is_refused_and_nothing_happens(log: Log, place: Path) -> None:
    before = [path.read_bytes() for path in segments(place)]
    with (
        held(place / f"events/day={DAYS[1]}"),
        pytest.raises(Busy, match=r"another process works on events/day=2026-11-17 .*try again"),
    ):
        Retention(log).apply(DAYS[2], eighths(log, DAYS[2]))
    assert [path.read_bytes() for path in segments(place)] == before
    assert not list(place.rglob("*.staged"))
    assert not list(place.rglob(".compacting"))


def test_a_full_disk_before_the_decision_stands_leaves_everything(
    log: Log, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = eighths(log, DAYS[2])
    real, count = log.disk.write, 0

    def write(path: str, content: object) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise LogFull("no room")
        real(path, content)

    monkeypatch.setattr(log.disk, "write", write)
    with pytest.raises(LogFull):
        Retention(log).apply(DAYS[2], decided)
    assert {row["clock"] for row in rows(place)} == set(range(48))
    assert not list(place.rglob("*.staged"))


def committed(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed when its decision stood."""

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Retention, "_carry_out", die)
        with pytest.raises(KeyboardInterrupt):
            Retention(log).apply(DAYS[2], eighths(log, DAYS[2]))
    assert pending(log) is not None


def test_a_decision_that_stands_is_carried_out_once_and_not_decided_again(
    log: Log, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(log, monkeypatch)
    with pytest.raises(Busy, match="just begun"):
        Retention(log).apply(DAYS[2], eighths(log, DAYS[2]))
    assert Retention(log).finish()
    assert not Retention(log).finish()
    assert [row["clock"] for row in rows(place)] == [0, 8, 16, 24, *range(32, 48)]


def test_compaction_finishes_it_first_or_leaves_these_days_alone(
    log: Log, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(log, monkeypatch)
    compaction = Compaction(log, keep_s=0)
    with held(place / f"events/day={DAYS[0]}"):
        outcome = compaction.run()
    assert outcome.busy == [DAYS[0], DAYS[1], DAYS[0], DAYS[1]]
    assert pending(log) is not None
    assert compaction.run().busy == []
    assert pending(log) is None
    assert [row["clock"] for row in rows(place)] == [0, 8, 16, 24, *range(32, 48)]


def test_a_retained_segment_is_never_merged(log: Log, place: Path) -> None:
    Retention(log, wall=lambda: NOON).apply(DAYS[2], eighths(log, DAYS[2]))
    writer = Segments(log, Options(recorder="late"), wall=lambda: NOON)
    for number in range(2):
        writer.add(event(90 + number), NOON)
        writer.roll()
    Compaction(log, wall=lambda: NOON + DAY_S).run()
    Compaction(log, keep_s=0, wall=lambda: NOON + 2 * DAY_S).run()
    found = {
        json.loads(pq.read_metadata(path).metadata[b"umbel"]).get("retained", False): path
        for path in segments(place)
        if path.parent.name == f"day={DAYS[0]}"
    }
    assert [row["clock"] for row in rows_of(found[True])] == [0, 8]
    assert [row["clock"] for row in rows_of(found[False])] == [90, 91]


def test_a_staged_segment_that_is_lost_keeps_the_day(
    log: Log, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(log, monkeypatch)
    for path in place.rglob(".*.staged"):
        path.unlink()
    with pytest.raises(LogError, match=r"has lost .*nothing of that day is removed"):
        Retention(log).finish()
    assert {row["clock"] for row in rows(place)} == set(range(48))


@pytest.mark.parametrize("content", [b"{", b'{"format": 9, "cutoff": ""}'])
def test_a_decision_that_can_not_be_read_is_one_line(log: Log, place: Path, content: bytes) -> None:
    (place / retention.MARKER).write_bytes(content)
    with pytest.raises(LogError, match=r"_retention\.json is (damaged|of another version)"):
        Retention(log).finish()


def test_locks_are_refreshed_while_much_is_written(
    log: Log, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "REFRESH_S", 0.0)
    lock, ages = place / f"events/day={DAYS[0]}/.compacting", []
    table = pq.read_table(segments(place)[0], partitioning=None).replace_schema_metadata()

    def batches() -> Iterator[pa.Table]:
        os.utime(lock, (0, 0))
        yield table
        yield table.slice(0, 0)

    one = day(log, 0)._replace(carried=8, batches=batches)
    real = Retention._stage

    def stage(self: Retention, *arguments: object) -> None:
        ages.append(lock.stat().st_mtime)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Retention, "_stage", stage)
    Retention(log).apply(DAYS[1], [one])
    assert ages[0] > 0


def test_it_works_in_a_store_that_has_no_renaming_and_no_locks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("fsspec")
    log = written("memory://retention/log")

    def clocks() -> list[int]:
        found: list[int] = []
        for segment in log.segments():
            with log.open_file(segment.path) as file:
                found += pq.read_table(file, partitioning=None)["clock"].to_pylist()
        return found

    names = [segment.name for segment in log.segments(day=DAYS[0])]
    with log.open_file(f"events/day={DAYS[0]}/{names[0]}") as file:
        table = pq.read_table(file, partitioning=None).replace_schema_metadata().slice(0, 1)
    old = [day(log, 0, table), day(log, 1)]

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Retention, "_carry_out", die)
        with pytest.raises(KeyboardInterrupt):
            Retention(log).apply(DAYS[2], old)
    assert len(clocks()) == 48
    assert Retention(log).finish()
    assert clocks() == [0, *range(32, 48)]
    assert log.disk.names("") == ["_umbel-log.json", "events", "quarantine"]
