"""Times: aware, representable, or refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from umbel.wire.limits import Refusal
from umbel.wire.times import format_time, parse_time


def test_a_time_with_an_offset_keeps_it():
    moment = parse_time("2026-11-15T19:38:48.413148+02:00", UTC)
    assert moment == datetime(2026, 11, 15, 17, 38, 48, 413148, tzinfo=UTC)
    assert parse_time("2026-11-15T19:38:48Z", UTC).utcoffset() == timedelta(0)


def test_a_time_without_an_offset_is_read_in_the_given_zone():
    moment = parse_time("2026-07-01T12:00:00", ZoneInfo("Europe/Paris"))
    assert moment.utcoffset() == timedelta(hours=2)


def test_a_time_survives_being_written_and_read():
    moment = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone(timedelta(hours=-5, minutes=-30)))
    assert parse_time(format_time(moment), UTC) == moment


@pytest.mark.parametrize(
    "text",
    [
        "10000-01-01T00:00:00+00:00",
        "0001-01-01T00:00:00+10:00",
        "9999-12-31T23:59:59-10:00",
        "soon",
        "",
        "2026-02-30",
        "2026-11-15T25:00:00",
        "\ud800",
        "1" * 10_000,
        None,
        5,
        [],
    ],
)
def test_what_is_not_a_time_is_refused_as_an_invalid_task(text):
    with pytest.raises(Refusal, match="invalid time") as caught:
        parse_time(text, UTC)
    assert caught.value.reason == "invalid-task"
    assert len(caught.value.text) < 300
