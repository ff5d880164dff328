"""What is missing is known from the footers alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from tests.log_reading import event, segments
from umbel.recorder.checking import Incarnation, check
from umbel.recorder.log import Log
from umbel.recorder.manifests import gaps, ranges
from umbel.recorder.segments import Segments

NOON = 1_794_830_400.0


def test_segments_rows_and_gaps_are_counted(tmp_path: Path) -> None:
    log = Log(str(tmp_path)).open()
    for start in (1, 40):  # 21 to 39 are missing
        writer = Segments(log)
        for number in range(start, start + 20):
            writer.add(event(number), NOON)
            writer.add(event(number, inc=78), NOON + 86_400)
        writer.quarantine("x", "bad", NOON)
        writer.roll()
    writer.add(event(30), NOON)
    writer.roll()
    finding = check(log)
    assert finding.days == ["2026-11-16", "2026-11-17"]
    assert (finding.events.segments, finding.events.rows) == (5, 81)
    assert (finding.quarantine.segments, finding.quarantine.rows) == (2, 2)
    assert finding.incarnations == [
        Incarnation("w1@a", 77, [(1, 20), (30, 30), (40, 59)]),
        Incarnation("w1@a", 78, [(1, 20), (40, 59)]),
    ]
    assert finding.missing == 18 + 19
    assert finding.as_json()["incarnations"][0]["gaps"] == [(21, 29), (31, 39)]


def test_an_empty_log_has_nothing_in_it(tmp_path: Path) -> None:
    finding = check(Log(str(tmp_path)).open())
    assert (finding.days, finding.events.rows, finding.missing) == ([], 0, 0)


def test_no_row_is_read(tmp_path: Path) -> None:
    writer = Segments(Log(str(tmp_path)).open())
    for number in range(1_000):
        writer.add(event(number), NOON)
    writer.roll()
    (path,) = segments(tmp_path)
    content = bytearray(path.read_bytes())
    start, end = 4, pq.read_metadata(path).row_group(0).column(0).total_compressed_size
    content[start:end] = b"\0" * (end - start)
    path.write_bytes(content)
    assert check(Log(str(tmp_path)).open()).events.rows == 1_000


def test_what_can_not_be_read_and_what_is_not_ours_is_told(tmp_path: Path) -> None:
    log = Log(str(tmp_path)).open()
    writer = Segments(log)
    writer.add(event(1), NOON)
    writer.roll()
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    for number, content in enumerate((b"", whole[:-10], b"PAR1" + b"\xff" * 100 + b"PAR1")):
        path.with_name(f"broken-{number}.parquet").write_bytes(content)
    pq.write_table(pa.table({"x": [1, 2]}), path.with_name("foreign.parquet"))
    finding = check(log)
    assert [path.rpartition("/")[2] for path in finding.unreadable] == [
        f"broken-{number}.parquet" for number in range(3)
    ]
    assert [path.rpartition("/")[2] for path in finding.foreign] == ["foreign.parquet"]
    assert finding.events.rows == 3


@given(st.lists(st.integers(0, 60), min_size=1))
def test_ranges_and_gaps_are_the_numbers_and_those_between(numbers: list[int]) -> None:
    made = ranges(numbers)
    seen = {number for first, last in made for number in range(first, last + 1)}
    missing = {number for first, last in gaps(made) for number in range(first, last + 1)}
    assert seen == set(numbers)
    assert seen | missing == set(range(min(numbers), max(numbers) + 1))
    assert not seen & missing
    assert all(first <= last for first, last in [*made, *gaps(made)])
    assert ranges(made) == made
