"""What is a log, what is refused, and what a writer leaves on disk."""

from __future__ import annotations

import fcntl
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from tests.log_reading import event
from umbel.recorder.errors import LogError, LogFull
from umbel.recorder.log import Log
from umbel.recorder.segments import Segments

MARKER = "_umbel-log.json"


def test_a_new_directory_becomes_a_log_and_is_one_from_then_on(tmp_path: Path) -> None:
    Log(str(tmp_path / "deep" / "log")).open()
    assert json.loads((tmp_path / "deep" / "log" / MARKER).read_text()) == {"format": 1}
    Log(str(tmp_path / "deep" / "log")).open(create=False)
    Log(f"file://{tmp_path}/deep/log").open(create=False)


def test_several_may_open_a_new_log_at_once(tmp_path: Path) -> None:
    def open_one(number: int) -> Log:
        return Log(str(tmp_path / str(number // 8))).open()

    with ThreadPoolExecutor(8) as threads:
        assert len(list(threads.map(open_one, range(160)))) == 160
    assert {path.read_text() for path in tmp_path.rglob(MARKER)} == {'{"format":1}'}
    assert list(tmp_path.rglob("*.part")) == []


def test_an_empty_directory_with_hidden_files_becomes_a_log(tmp_path: Path) -> None:
    (tmp_path / ".keep").touch()
    (tmp_path / "lost+found").mkdir()
    Log(str(tmp_path)).open()
    assert (tmp_path / MARKER).exists()


def test_a_directory_with_other_things_in_it_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(LogError, match=r"no event log and not empty .*thesis\.txt"):
        Log(str(tmp_path)).open()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("text", ['{"format": 2}', '{"format": null}'])
def test_a_log_of_another_format_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER).write_text(text)
    with pytest.raises(LogError, match="has format"):
        Log(str(tmp_path)).open()


@pytest.mark.parametrize("text", ["", "[]", "{}", "\0" * 100, "3"])
def test_a_damaged_marker_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER).write_text(text)
    with pytest.raises(LogError, match="damaged"):
        Log(str(tmp_path)).open()


def test_a_reader_makes_no_log(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="there is no event log"):
        Log(str(tmp_path / "log")).open(create=False)
    assert not (tmp_path / "log").exists()


def test_a_file_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogError, match="Not a directory"):
        Log(str(tmp_path / "file")).open()


@pytest.mark.parametrize("url", ["", "nosuch://x/y"])
def test_a_place_that_nobody_knows_is_refused(url: str) -> None:
    with pytest.raises(LogError):
        Log(url).open()


def test_half_written_files_of_the_dead_are_removed_and_those_of_the_living_stay(
    tmp_path: Path,
) -> None:
    log = Log(str(tmp_path)).open()
    day = tmp_path / "events" / "day=2026-11-16"
    day.mkdir(parents=True)
    dead, living = day / ".1.parquet.part", day / ".2.parquet.part"
    dead.write_bytes(b"PAR1")
    living.write_bytes(b"PAR1")
    with living.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Log(str(tmp_path)).open()
        assert not dead.exists()
        assert living.exists()
    assert log.clean() == 1
    assert not living.exists()


def test_names_that_nobody_may_read_are_no_segments(tmp_path: Path) -> None:
    log = Log(str(tmp_path)).open()
    day = tmp_path / "events" / "day=2026-11-16"
    day.mkdir(parents=True)
    for name in (".a.parquet", "_b.parquet", "c.txt", "d.parquet"):
        (day / name).touch()
    (tmp_path / "events" / "day=someday").mkdir()
    assert [(one.name, one.written_ms) for one in log.segments()] == [("d.parquet", 0)]


def test_a_log_that_can_not_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text('{"format": 1}')
    (tmp_path / "events").write_text("in the way")
    with pytest.raises(LogFull, match="cannot write"):
        Log(str(tmp_path)).open()


def test_a_log_in_a_store_behind_fsspec(request: pytest.FixtureRequest) -> None:
    url = f"memory://{request.node.name}/log"
    segments = Segments(Log(url).open())
    for number in range(10):
        segments.add(event(number), 1_000.0, number)
    segments.quarantine(b"\xff", "undecodable", 1_000.0, 10)
    assert segments.roll() == list(range(11))
    again = Log(url).open(create=False)
    assert [one.day for one in again.segments()] == ["1970-01-01"]
    assert [one.day for one in again.segments("quarantine")] == ["1970-01-01"]
    store = fsspec.filesystem("memory")
    (path,) = store.glob(f"/{request.node.name}/log/events/*/*.parquet")
    import pyarrow.parquet as pq

    with store.open(path) as file:
        assert pq.read_table(file).column("seq").to_pylist() == list(range(10))


def test_a_store_that_refuses_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log("memory://refusing/log").open()
    segments = Segments(log)
    segments.add(event(1), 1_000.0, "token")

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("SlowDown")

    with monkeypatch.context() as patch:
        patch.setattr(fsspec.filesystem("memory"), "pipe_file", refuse)
        with pytest.raises(LogFull, match="SlowDown"):
            segments.roll()
    assert segments.roll() == ["token"]
