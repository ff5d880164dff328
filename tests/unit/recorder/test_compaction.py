"""Compaction: fewer segments, the same events; nothing goes before its time."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.log_reading import event, identities, rows, segments
from umbel.cluster.event_rows import ADDED
from umbel.recorder import compaction, day_locks
from umbel.recorder.checking import check
from umbel.recorder.compaction import Compaction, Keeper
from umbel.recorder.log import Log
from umbel.recorder.options import Options
from umbel.recorder.segments import Segments

NOON = 1_794_830_400.0


class Wall:
    now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(str(tmp_path)).open()


def fill(log: Log, wall: Wall, counts: list[int], start: int = 0) -> int:
    """Segments with so many events each, one a second; the number of the next event."""
    writer = Segments(log, Options(recorder="r1"), wall=wall)
    number = start
    for count in counts:
        for _ in range(count):
            writer.add(event(number), wall.now)
            number += 1
        writer.roll()
        wall.now += 1
    return number


def manifest(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(pq.read_metadata(path).metadata[b"umbel"])
    return told


def test_small_closed_segments_become_one_and_go_after_the_grace(
    tmp_path: Path, log: Log, wall: Wall
) -> None:
    fill(log, wall, [10, 20, 30])
    before, names = identities(tmp_path), [path.name for path in segments(tmp_path)]
    one = Compaction(log, wall=wall)
    assert one.run().made == 0  # written just now
    wall.now += 600
    outcome = one.run()
    assert (outcome.merged, outcome.made, outcome.rows, outcome.removed) == (3, 1, 60, 0)
    (new,) = [path for path in segments(tmp_path) if path.name not in names]
    assert manifest(new)["replaces"] == names
    assert manifest(new)["sequences"] == [["w1@a", 77, [[0, 59]]]]
    assert pq.read_schema(new).equals(pq.read_schema(tmp_path / "events/day=2026-11-16" / names[0]))
    wall.now += 3_000
    assert one.run().made == one.run().removed == 0
    wall.now += 601
    assert one.run().removed == 3
    assert segments(tmp_path) == [new]
    assert identities(tmp_path) == before
    assert len(rows(tmp_path)) == 60


def test_an_event_that_came_twice_is_kept_as_it_came_first(
    tmp_path: Path, log: Log, wall: Wall
) -> None:
    for _ in range(3):
        fill(log, wall, [50])
    fill(log, wall, [1], start=1_000)
    wall.now += 600
    outcome = Compaction(log, keep_s=0, wall=wall).run()
    assert (outcome.rows, outcome.duplicates) == (51, 100)
    Compaction(log, keep_s=0, wall=wall).run()
    found = rows(tmp_path)
    assert [row["seq"] for row in found] == [*range(50), 1_000]
    assert {row["received"] for row in found} == {NOON, NOON + 3}


def test_events_without_numbers_are_told_apart_by_the_rest(
    tmp_path: Path, log: Log, wall: Wall
) -> None:
    common = {"hostname": "c@a", "timestamp": 1.0}
    sent = [
        {"type": "task-sent", "uuid": "a", **common},
        {"type": "task-sent", "uuid": "b", **common},
        {"type": "task-received", "uuid": "a", **common},
        {"type": "worker-online", **common},
        {"type": "worker-online", "clock": 0, **common},
    ]
    for _ in range(2):
        writer = Segments(log, wall=wall)
        for one in sent:
            writer.add(dict(one), wall.now)
        writer.roll()
    wall.now += 600
    assert Compaction(log, keep_s=0, wall=wall).run().rows == len(sent)


def test_compacted_segments_are_compacted_again_and_name_all_that_is_still_there(
    tmp_path: Path, log: Log, wall: Wall
) -> None:
    one = Compaction(log, wall=wall)
    number = fill(log, wall, [10, 10])
    wall.now += 600
    one.run()
    fill(log, wall, [10, 10], start=number)
    wall.now += 600
    assert one.run().merged == 3
    assert len(segments(tmp_path)) == 6
    finding = check(log)
    assert (finding.events.segments, finding.events.rows) == (1, 40)
    assert (finding.replaced.segments, finding.missing) == (5, 0)
    wall.now += 3_600
    assert one.run().removed == 5
    assert len(rows(tmp_path)) == 40


def test_big_segments_strangers_and_other_days_are_left_alone(
    tmp_path: Path, log: Log, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "SMALL_ROWS", 30)
    fill(log, wall, [10, 31, 10])
    day = tmp_path / "events" / "day=2026-11-16"
    stranger = day / "mine.parquet"
    stranger.write_bytes(segments(tmp_path)[0].read_bytes())
    broken = day / "1794830400000-x-1.parquet"
    broken.write_bytes(b"PAR1 and so on")
    wall.now += 86_400
    fill(log, wall, [10])
    wall.now += 600
    outcome = Compaction(log, keep_s=0, wall=wall).run()
    assert (outcome.merged, outcome.made) == (2, 1)
    assert outcome.unreadable == ["events/day=2026-11-16/1794830400000-x-1.parquet"]
    Compaction(log, keep_s=0, wall=wall).run()
    assert stranger.exists()
    assert broken.exists()
    assert len(segments(tmp_path)) == 5


def test_a_segment_that_can_not_be_merged_does_not_keep_others_from_it(
    tmp_path: Path, log: Log, wall: Wall
) -> None:
    fill(log, wall, [10, 10, 10])
    older, *_ = segments(tmp_path)
    metadata = pq.read_metadata(older).metadata
    table = pq.read_table(older, partitioning=None).drop_columns(["winner"])
    pq.write_table(table.replace_schema_metadata({b"umbel": metadata[b"umbel"]}), older)
    wall.now += 600
    outcome = Compaction(log, keep_s=0, wall=wall).run()
    assert (outcome.merged, len(outcome.unreadable)) == (2, 1)
    Compaction(log, keep_s=0, wall=wall).run()
    assert len(segments(tmp_path)) == 2
    assert older.exists()
    assert len(rows(tmp_path)) == 30


def test_segments_of_a_recorder_that_knew_fewer_columns_are_merged_with_newer_ones(
    tmp_path: Path, log: Log, wall: Wall
) -> None:
    fill(log, wall, [10])
    (older,) = segments(tmp_path)
    metadata = pq.read_metadata(older).metadata
    table = pq.read_table(older, partitioning=None).drop_columns(sorted(ADDED))
    pq.write_table(table.replace_schema_metadata({b"umbel": metadata[b"umbel"]}), older)
    writer = Segments(log, Options(recorder="r1"), wall=wall)
    for number in (1, 2, 4):
        writer.add(event(number, umbel_series=5, timestamp=NOON + number), wall.now)
    writer.roll()
    wall.now += 600
    outcome = Compaction(log, keep_s=0, wall=wall).run()
    assert (outcome.merged, outcome.made, outcome.rows, outcome.unreadable) == (2, 1, 13, [])
    Compaction(log, keep_s=0, wall=wall).run()
    assert sorted(row["series"] or 0 for row in rows(tmp_path)) == [0] * 10 + [5] * 3
    missing = {(one.hostname, one.inc): one.gaps for one in check(log).incarnations}
    assert missing == {("w1@a", 77): [], ("w1@a", 5): [(3, 3)]}


def test_while_some_write_and_others_compact_every_event_stays(tmp_path: Path, log: Log) -> None:
    done = threading.Event()

    def compact() -> None:
        one = Compaction(Log(str(tmp_path)), closed_s=0, keep_s=0)
        while not done.is_set():
            one.run()

    threads = [threading.Thread(target=compact) for _ in range(2)]
    for thread in threads:
        thread.start()
    writer = Segments(log)
    for number in range(200):
        writer.add(event(number), NOON)
        if number % 5 == 0:
            writer.roll()
    writer.roll()
    done.set()
    for thread in threads:
        thread.join()
    last = Compaction(log, closed_s=-1, keep_s=-1)
    last.run()
    last.run()
    assert sorted(row["seq"] for row in rows(tmp_path)) == list(range(200))
    assert len(segments(tmp_path)) == 1


def test_a_group_is_bounded(
    tmp_path: Path, log: Log, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "MERGED_ROWS_MAX", 25)
    fill(log, wall, [10] * 5)
    wall.now += 600
    outcome = Compaction(log, wall=wall).run()
    assert (outcome.merged, outcome.made) == (4, 2)  # the fifth has nobody to go with


def test_quarantine_is_compacted_too(tmp_path: Path, log: Log, wall: Wall) -> None:
    writer = Segments(log, wall=wall)
    for number in range(3):
        writer.quarantine(f"{number}", "bad", wall.now)
        writer.roll()
    wall.now += 600
    for _ in range(2):
        Compaction(log, keep_s=0, wall=wall).run()
    assert len(segments(tmp_path, "quarantine")) == 1
    assert [row["raw"] for row in rows(tmp_path, "quarantine")] == ["0", "1", "2"]


def test_a_day_that_somebody_works_on_is_left_to_him(tmp_path: Path, log: Log, wall: Wall) -> None:
    fill(log, wall, [10, 10])
    wall.now = time.time()  # of files, as the system sees it
    one = Compaction(log, closed_s=-1e9, wall=wall)
    with day_locks.held(tmp_path / "events/day=2026-11-16") as mine:
        assert mine
        outcome = one.run()
        assert (outcome.busy, outcome.made) == (["2026-11-16"], 0)
    assert one.run().made == 1
    assert list(tmp_path.rglob(".compacting*")) == []


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    owner = {"host": socket.gethostname(), "pid": gone.pid, "token": "x"}
    (tmp_path / day_locks.NAME).write_text(json.dumps(owner))
    with day_locks.held(tmp_path) as mine:
        assert mine
        with day_locks.held(tmp_path) as other:
            assert not other
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_another_host_is_taken_over_when_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / day_locks.NAME
    path.write_text('{"host": "elsewhere", "pid": 1, "token": "x"}')
    with day_locks.held(tmp_path) as mine:
        assert not mine
    assert path.exists()
    with day_locks.held(tmp_path, lambda: time.time() + day_locks.STALE_S + 1) as mine:
        assert mine
    assert not path.exists()


def test_a_store_is_compacted_by_whoever_is_asked_to(wall: Wall) -> None:
    log = Log("memory://compacted/log").open()
    fill(log, wall, [10, 10])
    wall.now += 600
    one = Compaction(log, keep_s=0, wall=wall)
    assert one.run().made == 1
    assert one.run().removed == 2
    assert check(log).events.rows == 20


def test_a_keeper_compacts_in_the_background_until_it_is_closed(
    tmp_path: Path, log: Log, wall: Wall
) -> None:
    fill(log, wall, [10, 10])
    wall.now += 600
    with Keeper(Compaction(log, keep_s=0, wall=wall), every_s=0.01):
        deadline = time.monotonic() + 20
        while len(segments(tmp_path)) != 1 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(segments(tmp_path)) == 1
    assert len(rows(tmp_path)) == 20
