"""Where the log of several recorders ends."""

from __future__ import annotations

from umbel.pipeline.watermarks import SILENT_S, log_ends, watermarks

NOW = 1_794_000_000.0


def test_the_log_ends_where_the_slowest_of_its_recorders_is() -> None:
    assert log_ends({"a": NOW, "b": NOW - 12.5, "c": NOW - 3}) == NOW - 12.5
    assert log_ends({"a": NOW}) == NOW


def test_a_recorder_that_has_ended_does_not_hold_the_log_back() -> None:
    assert log_ends({"ended": NOW - SILENT_S - 1, "a": NOW, "b": NOW - 5}) == NOW - 5
    assert log_ends({"slow": NOW - SILENT_S, "a": NOW}) == NOW - SILENT_S
    # Each counts by the newest one, not by its neighbour.
    steps = {str(number): NOW - number * SILENT_S * 0.75 for number in range(4)}
    assert log_ends(steps) == steps["1"]


def test_without_recorders_the_log_ends_at_zero() -> None:
    assert log_ends({}) == 0.0


def test_what_was_received_late_counts_only_where_nothing_else_was() -> None:
    live, imported = ("live", NOW, NOW + 900), ("import", None, NOW + 3_600)
    assert watermarks([live, imported]) == {"live": NOW}
    assert watermarks([imported]) == {"import": NOW + 3_600}
    assert watermarks([]) == {}
