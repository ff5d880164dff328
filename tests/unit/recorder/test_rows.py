"""Whatever somebody sends becomes a row or goes to quarantine; nothing is lost or raised."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.event_mutations import Mutations
from tests.log_reading import event, rows
from umbel.recorder.log import Log
from umbel.recorder.rows import SCHEMA, batch, clean
from umbel.recorder.segments import Segments
from umbel.recorder.sorting import Taken, take

NOW = 1_794_830_400.0


@pytest.fixture
def segments(tmp_path: Path) -> Segments:
    return Segments(Log(str(tmp_path)).open())


@pytest.mark.parametrize(
    ("fields", "column", "wanted"),
    [
        ({"hostname": "a\ud800"}, "hostname", "a\\ud800"),
        ({"freq": 10**300}, "freq", 1e300),
        ({"freq": 2**60 + 1}, "freq", float(2**60 + 1)),
        ({"active": 2**70}, "active", None),
        ({"sw_ident": "\udfff"}, "sw_ident", "\\udfff"),
        ({"id": "\0"}, "id", "\0"),
        ({"processed": 1.5}, "processed", None),
        ({"sync": "yes"}, "sync", None),
        ({"strange": 10**200}, "seq", 1),
    ],
)
def test_values_that_columns_can_not_hold_are_cleaned_and_raw_has_them(
    tmp_path: Path, segments: Segments, fields: dict[str, Any], column: str, wanted: Any
) -> None:
    sent = event(1, **fields)
    segments.add(sent, NOW)
    segments.add(event(2), NOW)
    segments.roll()
    odd, plain = rows(tmp_path)
    assert odd[column] == wanted
    assert json.loads(odd["raw"]) == sent
    assert plain["seq"] == 2
    assert rows(tmp_path, "quarantine") == []


def test_fields_of_a_task_that_are_no_text_for_utf8(tmp_path: Path, segments: Segments) -> None:
    sent = event(1, type="task-sent", uuid="u\ud800", eta="\ud800", name="n\ud800", x="\ud800")
    segments.add(sent, NOW)
    segments.roll()
    (row,) = rows(tmp_path)
    assert (row["uuid"], row["name"]) == ("u\\ud800", "n\\ud800")
    assert json.loads(row["eta"]) == "\\ud800"
    assert json.loads(row["raw"]) == sent


def test_a_row_without_what_must_be_there_gets_something_empty() -> None:
    made = clean({"type": 3, "received": float("nan"), "clock": 2**64, "sync": 1})
    assert made == {
        **dict.fromkeys(("type", "hostname", "recorder", "raw"), ""),
        **dict.fromkeys(("timestamp", "received"), 0.0),
    }
    assert batch([{"type": 3}], SCHEMA).num_rows == 1


def test_lists_are_taken_apart(tmp_path: Path, segments: Segments) -> None:
    body = json.dumps([event(1), 3, event(2), {"type": "x", "big": 10**40}]).encode()
    assert take(segments, body, received=NOW, token="t", source="f:1") == Taken(2, 2)
    assert take(segments, b"[]", received=NOW, token="empty") == Taken(0, 0)
    assert take(segments, b"{", received=NOW, token="broken") == Taken(0, 1)
    assert take(segments, b"", None, received=NOW, token="untyped") == Taken(0, 1)
    assert take(segments, b"[" + b"0," * 20_000 + b"0]", received=NOW, token="many") == Taken(0, 1)
    assert segments.roll() == ["t", "empty", "broken", "untyped", "many"]
    assert [row["seq"] for row in rows(tmp_path)] == [1, 2]
    refused = rows(tmp_path, "quarantine")
    assert [row["reason"] for row in refused] == [
        *("not-an-event", "bad-hostname", "undecodable", "content-unknown", "too-many")
    ]
    assert [row["source"] for row in refused] == ["f:1", "f:1", None, None, None]
    assert json.loads(refused[1]["raw"])["big"] == 10**40


def test_five_thousand_mutated_messages_are_all_somewhere(
    tmp_path: Path, segments: Segments
) -> None:
    events = refused = 0
    mutations = Mutations(random.Random(7))
    for number in range(5_000):
        message = mutations.wild_message()
        headers = message.headers if isinstance(message.headers, dict) else {}
        taken = take(
            segments,
            message.body,
            message.content_type,
            message.content_encoding,
            received=NOW,
            token=number,
            accept=frozenset({"application/json", "application/x-msgpack", "application/x-yaml"}),
            compression=headers.get("compression"),
        )
        events += taken.events
        refused += taken.refused
    assert segments.roll() == list(range(5_000))
    assert events > 500
    assert refused > 500
    found, quarantined = rows(tmp_path), rows(tmp_path, "quarantine")
    assert len(found) + len(quarantined) == events + refused
    assert not [row for row in quarantined if row["reason"].startswith("not-a-row")]
    assert all(json.loads(row["raw"])["hostname"] for row in found)
