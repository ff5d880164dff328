"""What is collected is written whole, and only what is written may be acknowledged."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.log_reading import event, rows, segments
from umbel.cluster.event_rows import COLUMNS
from umbel.recorder import disks
from umbel.recorder.errors import LogFull
from umbel.recorder.log import Log
from umbel.recorder.options import Options
from umbel.recorder.segments import Segments

NOON = 1_794_830_400.0  # 2026-11-16 12:00 UTC


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def writer(path: Path, clock: Any = None, **options: Any) -> Segments:
    return Segments(Log(str(path)).open(), Options(**options), clock=clock or Clock())


def test_events_come_back_as_rows_and_their_tokens_once(tmp_path: Path) -> None:
    one = writer(tmp_path, recorder="r1")
    for number in range(5):
        one.add(event(number), NOON, token=number // 2)
    assert one.rows == 5
    assert one.roll() == [0, 1, 2]
    assert one.rows == 0
    assert one.roll() == []
    found = rows(tmp_path)
    assert [row["seq"] for row in found] == list(range(5))
    assert {row["recorder"] for row in found} == {"r1"}
    assert {row["received"] for row in found} == {NOON}
    assert [json.loads(row["raw"]) for row in found] == [event(number) for number in range(5)]


def test_a_segment_has_the_columns_of_the_log_and_a_manifest(tmp_path: Path) -> None:
    one = writer(tmp_path, recorder="r1")
    for number in (1, 2, 3, 7, 9, 8, 2):
        one.add(event(number), NOON)
    one.add(event(5, hostname="w2@a"), NOON)
    one.add({"type": "x", "hostname": "celery@a", "timestamp": 1}, NOON)
    one.roll()
    (path,) = segments(tmp_path)
    assert path.parent.name == "day=2026-11-16"
    schema = pq.read_schema(path)
    assert schema.names == list(COLUMNS)
    assert {field.name for field in schema if not field.nullable} == {
        *("type", "hostname", "timestamp", "received", "recorder", "raw")
    }
    metadata = pq.read_metadata(path)
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    assert json.loads(metadata.metadata[b"umbel"]) == {
        "format": 1,
        "recorder": "r1",
        "rows": 9,
        "sequences": [["w1@a", 77, [[1, 3], [7, 9]]], ["w2@a", 77, [[5, 5]]]],
    }


def test_each_day_of_receipt_has_a_segment_of_its_own(tmp_path: Path) -> None:
    one = writer(tmp_path)
    for day in (0, 1, 0):
        one.add(event(day), NOON + day * 86_400, day)
    assert one.roll() == [0, 1, 0]
    found = [(path.parent.name, pq.read_metadata(path).num_rows) for path in segments(tmp_path)]
    assert found == [("day=2026-11-16", 2), ("day=2026-11-17", 1)]


def test_it_is_due_by_rows_by_age_and_by_size(tmp_path: Path) -> None:
    clock = Clock()
    one = writer(tmp_path, clock, roll_rows=3, roll_age_s=10, roll_bytes=100_000)
    assert not one.due()
    clock.now += 1_000
    assert not one.due()  # nothing waits
    one.add(event(1), NOON)
    assert not one.due()
    clock.now += 10
    assert one.due()
    one.roll()
    for number in range(3):
        assert not one.due()
        one.add(event(number), NOON)
    assert one.due()
    one.roll()
    one.add(event(1, note="x" * 200_000), NOON)
    assert one.due()


def test_a_token_without_events_comes_back_in_its_turn(tmp_path: Path) -> None:
    clock = Clock()
    one = writer(tmp_path, clock)
    one.hold("empty")
    one.add(event(1), NOON, "one")
    assert one.roll() == ["empty", "one"]
    one.hold("empty again")
    clock.now += 100
    assert one.due()
    assert one.roll() == ["empty again"]
    assert len(segments(tmp_path)) == 1


def test_while_nothing_can_be_written_all_is_kept_and_it_fills_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = writer(tmp_path, roll_rows=10)

    def refuse(fd: int, content: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disks, "_write_all", refuse)
        for number in range(40):
            assert not one.is_full
            one.add(event(number), NOON, number)
            if one.due():
                with pytest.raises(LogFull, match="No space left"):
                    one.roll()
        assert one.is_full
        assert segments(tmp_path) == []
        assert list(tmp_path.rglob(".*")) == []
    assert one.roll() == list(range(40))
    assert not one.is_full
    assert sorted(row["seq"] for row in rows(tmp_path)) == list(range(40))


def test_it_is_full_by_size_too(tmp_path: Path) -> None:
    one = writer(tmp_path, roll_bytes=1_000)
    one.add(event(1, note="x" * 4_000), NOON)
    assert one.is_full


def test_a_roll_that_failed_in_the_middle_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = writer(tmp_path)
    for day in range(3):
        one.add(event(day), NOON + day * 86_400, day)
    one.quarantine("x", "bad", NOON, "q")
    write, calls = one.log.write, []

    def sometimes(path: str, content: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise LogFull("no room")
        write(path, content)

    monkeypatch.setattr(one.log, "write", sometimes)
    with pytest.raises(LogFull):
        one.roll()
    assert one.roll() == [0, 1, 2, "q"]
    assert sorted(row["seq"] for row in rows(tmp_path)) == [0, 1, 2]
    assert len(rows(tmp_path, "quarantine")) == 1


def test_what_is_no_event_is_kept_with_the_reason(tmp_path: Path) -> None:
    one = writer(tmp_path, recorder="r1")
    one.quarantine('{"a": 1}', "bad-type", NOON, "t1")
    one.quarantine(b"\xff\x00", "undecodable", NOON, "t2", "file:3")
    one.quarantine("half \ud800", "bad-uuid", NOON)
    assert one.roll() == ["t1", "t2"]
    common = {"received": NOON, "recorder": "r1"}
    assert rows(tmp_path, "quarantine") == [
        {"reason": "bad-type", "raw": '{"a": 1}', "encoded": False, "source": None, **common},
        {
            "reason": "undecodable",
            "raw": base64.b64encode(b"\xff\x00").decode(),
            "encoded": True,
            "source": "file:3",
            **common,
        },
        {"reason": "bad-uuid", "raw": "half \\ud800", "encoded": False, "source": None, **common},
    ]
    assert segments(tmp_path) == []


def test_an_event_that_makes_no_row_is_in_quarantine_and_its_message_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("umbel.recorder.segments.row", fail)
    one = writer(tmp_path)
    one.add(event(1), NOON, "token")
    assert one.roll() == ["token"]
    (kept,) = rows(tmp_path, "quarantine")
    assert kept["reason"] == "not-a-row: ZeroDivisionError"
    assert json.loads(kept["raw"]) == event(1)


def test_a_log_that_has_gone_is_not_made_again(tmp_path: Path) -> None:
    one = writer(tmp_path / "log")
    one.add(event(1), NOON, "token")
    (tmp_path / "log").rename(tmp_path / "elsewhere")
    with pytest.raises(LogFull, match="has gone"):
        one.roll()
    assert not (tmp_path / "log").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "log")
    assert one.roll() == ["token"]
