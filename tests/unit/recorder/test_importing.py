"""JSON lines become rows; what is no event goes to quarantine with its place."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.log_reading import event, rows
from umbel.recorder import importing
from umbel.recorder.errors import Damaged, LogError
from umbel.recorder.importing import Importer
from umbel.recorder.log import Log
from umbel.recorder.options import Options
from umbel.recorder.segments import Segments


@pytest.fixture
def importer(tmp_path: Path) -> Importer:
    return Importer(Segments(Log(str(tmp_path / "log")).open(), Options(roll_rows=400)))


def lines(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def test_lines_are_imported_and_bad_ones_are_told_by_their_number(
    tmp_path: Path, importer: Importer
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + lines(event(1), [event(2), event(3)])
        + b"\n  \r\n{broken\n\xff\xfe\n"
        + lines({"type": "x"}, [7])
        + json.dumps(event(4)).encode()
    )
    importer.read(str(path))
    assert (importer.summary.lines, importer.summary.events) == (9, 4)
    assert importer.summary.quarantined == 4
    assert [row["seq"] for row in rows(tmp_path / "log")] == [1, 2, 3, 4]
    refused = rows(tmp_path / "log", "quarantine")
    assert [(row["source"], row["reason"]) for row in refused] == [
        (f"{path}:5", "undecodable"),
        (f"{path}:6", "undecodable"),
        (f"{path}:7", "bad-hostname"),
        (f"{path}:8", "not-an-event"),
    ]
    assert [row["encoded"] for row in refused] == [False, True, False, False]


def test_compressed_files_are_known_by_their_content(tmp_path: Path, importer: Importer) -> None:
    path = tmp_path / "events"
    path.write_bytes(gzip.compress(lines(*map(event, range(100)))))
    importer.read(str(path))
    assert importer.summary.events == 100
    assert sorted(row["seq"] for row in rows(tmp_path / "log")) == list(range(100))


def test_what_comes_before_the_damage_is_imported(tmp_path: Path, importer: Importer) -> None:
    path = tmp_path / "events.gz"
    whole = gzip.compress(lines(*({**event(n), "x": f"{n * 7919:x}"} for n in range(3_000))))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Damaged, match=r"is damaged after line \d+"):
        importer.read(str(path))
    assert importer.summary.events > 0
    assert len(rows(tmp_path / "log")) == importer.summary.events


def test_standard_input_is_read(
    tmp_path: Path, importer: Importer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = io.BufferedReader(io.BytesIO(lines(event(1))))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=given))
    importer.read("-")
    assert len(rows(tmp_path / "log")) == 1


def test_of_a_line_that_is_too_long_the_beginning_is_kept(
    tmp_path: Path, importer: Importer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SimpleNamespace(body_bytes=1_000)
    monkeypatch.setattr(importing, "EVENT_LIMITS", limits)
    monkeypatch.setattr(importing, "TOO_BIG_KEPT_BYTES", 20)
    path = tmp_path / "events.jsonl"
    path.write_bytes(lines(event(1, x="y" * 5_000), event(2)) + b"z" * 1_001)
    importer.read(str(path))
    assert importer.summary.lines == 3
    assert [row["seq"] for row in rows(tmp_path / "log")] == [2]
    refused = rows(tmp_path / "log", "quarantine")
    assert [(row["reason"], row["source"]) for row in refused] == [
        ("too-big", f"{path}:1"),
        ("too-big", f"{path}:3"),
    ]
    assert [len(row["raw"]) for row in refused] == [20, 20]


def test_a_file_that_is_not_there_is_told(tmp_path: Path, importer: Importer) -> None:
    with pytest.raises(LogError, match=r"cannot read .*: No such file"):
        importer.read(str(tmp_path / "no"))
    with pytest.raises(LogError, match="Is a directory"):
        importer.read(str(tmp_path))


def test_after_a_stop_what_was_read_is_written(tmp_path: Path) -> None:
    segments = Segments(Log(str(tmp_path / "log")).open())
    importer = Importer(segments, progress=lambda _: importer.stop())
    path = tmp_path / "events.jsonl"
    path.write_bytes(lines(*map(event, range(importing.PROGRESS_LINES + 10))))
    importer.read(str(path))
    assert importer.is_stopped
    assert len(rows(tmp_path / "log")) == importing.PROGRESS_LINES
