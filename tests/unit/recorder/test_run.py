"""The recorder's loop: what is acknowledged when, what is in quarantine, what a full disk does."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.disks import small_disk
from tests.recording import rows_of, unique
from tests.servers import wait_until
from umbel import Umbel
from umbel.recorder import run as module
from umbel.recorder.errors import LogFull
from umbel.recorder.log import Log
from umbel.recorder.options import Options
from umbel.recorder.run import Recorder
from umbel.recorder.sources import Message
from umbel.wire.events import encode


def event(seq: int, **fields: Any) -> dict[str, Any]:
    return {
        "type": "task-x", "hostname": "a@test", "timestamp": float(seq), "clock": seq,
        "pid": 1, "inc": 5, "seq": seq, "uuid": f"u{seq}", **fields,
    }  # fmt: skip


def message(content: Any, token: Any = None, **fields: Any) -> Message:
    chosen = {
        "body": content if isinstance(content, (bytes, str)) else encode(content),
        "content_type": "application/json", "content_encoding": "utf-8",
        "headers": None, "token": token, **fields,
    }  # fmt: skip
    return Message(**chosen)


class Script:
    """A source that gives what it is told to; exceptions are raised."""

    dropped_count = 0
    is_exhausted = False

    def __init__(self) -> None:
        self.todo: list[list[Message] | Exception] = []
        self.done: list[Any] = []
        self.calls: list[str] = []
        self.refuse_opening = 0
        self.news = threading.Condition()

    def give(self, *messages: Message | Exception) -> None:
        with self.news:
            self.todo += [one if isinstance(one, Exception) else [one] for one in messages]
            self.news.notify_all()

    def open(self) -> None:
        self.calls.append("open")
        if self.refuse_opening:
            self.refuse_opening -= 1
            raise ConnectionError("away")

    def poll(self, timeout_s: float) -> list[Message]:
        with self.news:
            if not self.todo:
                self.calls.append("poll")
                self.news.wait(min(timeout_s, 0.01))
                return []
            found = self.todo.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def acknowledge(self, tokens: Iterable[Any]) -> None:
        self.done += [token for token in tokens if token is not None]

    def idle(self) -> None:
        self.calls.append("idle")

    def lag(self) -> int | None:
        return 7

    def hang_up(self) -> None:
        self.calls.append("hang_up")

    def close(self) -> None:
        self.calls.append("close")


class Stage:
    """A recorder on a thread, and its log."""

    def __init__(self, path: Path) -> None:
        self.app = Umbel("run", broker="memory://", backend="disabled://", set_as_current=False)
        self.path = path
        self.source = Script()
        self.options = Options(roll_rows=3, roll_age_s=60.0, recorder="r1")
        self.stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Recorder:
        log = Log(str(self.path)).open()
        recorder = Recorder(self.app, log, self.options, source=self.source)
        self._thread = threading.Thread(target=recorder.run, args=(self.stop,), daemon=True)
        self._thread.start()
        return recorder

    def end(self) -> None:
        self.stop.set()
        if self._thread is not None:
            self._thread.join(10)
            assert not self._thread.is_alive()

    def events(self) -> list[dict[str, Any]]:
        return rows_of(self.path)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(module, "ROOM_RETRY_S", 0.01)
    made = Stage(tmp_path / "log")
    with closing(made.app):
        yield made
        made.end()


def until(condition: Callable[[], Any], what: str = "it") -> None:
    wait_until(condition, 10, what)


def test_messages_are_acknowledged_when_their_segment_is_on_disk_and_not_before(
    stage: Stage,
) -> None:
    recorder = stage.start()
    stage.source.give(message(event(1), "t1"), message(event(2), "t2"))
    until(lambda: recorder.counts.received == 2)
    assert (stage.source.done, stage.events()) == ([], [])
    stage.source.give(message(event(3), "t3"))
    until(lambda: stage.source.done == ["t1", "t2", "t3"])
    assert [row["seq"] for row in stage.events()] == [1, 2, 3]
    assert json.loads(stage.events()[0]["raw"]) == event(1)


def test_what_was_taken_is_written_at_the_end(stage: Stage) -> None:
    recorder = stage.start()
    stage.source.give(message([event(1), event(2)], "t1"), message([], "t2"))
    until(lambda: recorder.counts.messages == 2)
    stage.end()
    assert [row["seq"] for row in stage.events()] == [1, 2]
    assert stage.source.done == ["t1", "t2"]
    assert stage.source.calls[-1] == "close"
    assert recorder.counts.recorded == 2
    assert recorder.counts.segments == 1


def test_what_has_waited_long_enough_is_written(stage: Stage) -> None:
    stage.options = Options(roll_rows=1_000, roll_age_s=0.05, recorder="r1")
    stage.start()
    stage.source.give(message(event(1), "t1"))
    until(lambda: stage.source.done == ["t1"])


def test_an_exhausted_source_has_it_written_early(stage: Stage) -> None:
    stage.start()
    stage.source.is_exhausted = True
    stage.source.give(message(event(1), "t1"))
    until(lambda: stage.source.done == ["t1"])


def test_what_comes_twice_is_written_twice_and_counted(stage: Stage) -> None:
    recorder = stage.start()
    stage.source.give(message(event(1), "t1"), message(event(1), "t2"), message(event(2), "t3"))
    until(lambda: stage.source.done)
    assert len(stage.events()) == 3
    assert [row["seq"] for row in unique(stage.events())] == [1, 2]
    assert recorder.counts.duplicates == 1


def test_what_is_no_event_goes_to_quarantine_with_its_reason(stage: Stage) -> None:
    stage.options = Options(roll_rows=10, roll_age_s=60.0, recorder="r1")
    recorder = stage.start()
    stage.source.give(
        message([event(1), {"type": 7}, "x"], "t1"),
        message(b"{", "t2"),
        message(b"\xff\xfe", "t3"),
        message(event(2), "t4", content_type="application/x-python-serialize"),
        message(event(3), "t5", content_type=None),
        message([{}] * 20_001, "t6"),
        message(event(4), "t7", headers={"compression": "no such"}),
        message(b"x" * (8 * 2**20 + 1), "t8"),
    )
    until(lambda: len(stage.source.done) == 8)
    assert [row["seq"] for row in stage.events()] == [1]
    rows = rows_of(stage.path, "quarantine")
    assert [row["reason"] for row in rows] == [
        "bad-type", "not-an-event", "undecodable", "undecodable", "content-disallowed",
        "content-unknown", "too-many", "bad-compression", "too-big",
    ]  # fmt: skip
    assert json.loads(rows[0]["raw"]) == {"type": 7}
    assert rows[2]["raw"] == "{"
    assert rows[3]["encoded"]
    assert json.loads(rows[4]["raw"])["seq"] == 2
    assert len(rows[8]["raw"]) == 2**20
    assert recorder.counts.quarantined == 9


def test_of_what_peers_tell_only_the_unnumbered_is_recorded(stage: Stage) -> None:
    stage.start()
    theirs = {k: v for k, v in event(9).items() if k not in {"inc", "seq"}}
    stage.source.give(
        message([event(1), theirs], unnumbered_only=True),
        message(event(2), unnumbered_only=True),
        message([event(3), event(4)], "t1"),
    )
    until(lambda: stage.source.done == ["t1"])
    assert [row["uuid"] for row in stage.events()] == ["u9", "u3", "u4"]


def test_a_lost_connection_is_made_anew_and_nothing_is_forgotten(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "umbel.recorder")
    stage.source.refuse_opening = 3
    recorder = stage.start()
    assert recorder.ready.wait(10)
    stage.source.give(message(event(1), "t1"), ConnectionError("gone"))
    until(lambda: recorder.counts.reconnects == 1)
    stage.source.give(message([event(2), event(3)], "t2"))
    until(lambda: stage.source.done == ["t1", "t2"])
    assert len(stage.events()) == 3
    assert stage.source.calls.count("open") == 5
    told = [record.message for record in caplog.records if "Cannot take events" in record.message]
    assert len(told) == 2, "each outage is told once"
    assert "gone" in told[1]


class FullDisk:
    """Refuses to write while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        self.tries = 0
        write = Log.write

        def write_or_not(log: Log, path: str, content: Any) -> None:
            if self.is_full:
                self.tries += 1
                raise LogFull("cannot write: no space left on device")
            write(log, path, content)

        monkeypatch.setattr(Log, "write", write_or_not)


def test_a_full_disk_stops_taking_and_acknowledging_until_there_is_room(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "umbel.recorder")
    disk = FullDisk(monkeypatch)
    recorder = stage.start()
    stage.source.give(*(message(event(n), f"t{n}") for n in range(1, 4)))
    until(lambda: disk.tries >= 3)
    stage.source.give(*(message(event(n), f"t{n}") for n in range(4, 7)))
    until(lambda: disk.tries >= 9)
    assert recorder.counts.received == 3, "nothing more is taken"
    assert stage.source.done == []
    assert "idle" in stage.source.calls
    disk.is_full = False
    until(lambda: len(stage.source.done) == 6)
    assert [row["seq"] for row in stage.events()] == [1, 2, 3, 4, 5, 6]
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "no space left" in text]) == 1
    assert len([text for text in said if text == "the log can be written again"]) == 1


def test_a_disk_without_room_is_waited_for_and_nothing_is_lost(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", mebibytes=1) as disk:
        stage.path = disk.path / "log"
        recorder = stage.start()
        stage.source.give(*(message(event(n), f"t{n}") for n in (1, 2, 3)))
        until(lambda: len(stage.source.done) == 3, "what there is room for")
        disk.fill()
        stage.source.give(*(message(event(n), f"t{n}") for n in range(4, 10)))
        until(lambda: stage.source.calls.count("idle") > 2, "several tries")
        assert "No space left on device" in caplog.text
        assert (recorder.counts.recorded, stage.source.done) == (3, ["t1", "t2", "t3"])
        disk.free()
        until(lambda: len(stage.source.done) == 9, "everything, once there is room")
        assert not list(stage.path.rglob(".*.part")), "what was half-written is gone"
        assert sorted(row["seq"] for row in stage.events()) == list(range(1, 10))
        stage.end()


def test_an_end_while_the_disk_is_full_leaves_everything_with_the_broker(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch)
    stage.start()
    stage.source.give(message([event(n) for n in range(1, 4)], "t1"))
    until(lambda: disk.tries >= 2)
    stage.end()
    assert stage.source.done == []
    assert "3 events were not written: the broker still has them" in caplog.text


def test_how_far_behind_it_is_is_told_now_and_then(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "TELL_S", 0.0)
    caplog.set_level(logging.INFO, "umbel.recorder")
    recorder = stage.start()
    until(lambda: recorder.counts.lag == 7)
    until(lambda: "lag 7" in caplog.text)
