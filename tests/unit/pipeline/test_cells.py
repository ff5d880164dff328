"""How time is cut into cells."""

from __future__ import annotations

import random

import pytest

from umbel.pipeline import cells as module
from umbel.pipeline.cells import BEGINNING, END, Cells, tree


@pytest.fixture(autouse=True)
def small_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CELL_ROWS", 100)


def test_cells_cover_all_of_time_without_gaps() -> None:
    cells = Cells()
    cells.add(dict.fromkeys(range(1000, 1010), 40))
    assert cells.starts == [BEGINNING, 1_003, 1_006, 1_009]
    assert cells.rows == [120, 120, 120, 40]
    assert cells.cell_of(-5) == cells.cell_of(1_002) == BEGINNING
    assert cells.cell_of(1_003) == 1_003
    assert cells.cell_of(10**9) == 1_009
    assert cells.until(1_003) == 1_006
    assert cells.until(1_009) == END
    assert cells.times([1_003]) == [(60_180.0, 60_360.0)]


def test_the_last_cell_is_split_behind_its_last_event_so_that_no_event_moves() -> None:
    dice = random.Random(3)
    cells, placed = Cells(), {}
    for now in range(200):
        minute = now - dice.choice([0, 0, 0, 1, 5])
        assert cells.add({minute: 17}) == []
        for known, cell in placed.items():
            assert cells.cell_of(known) == cell
        placed[minute] = cells.cell_of(minute)
    assert len(cells.starts) > 20
    assert sum(cells.rows) == 200 * 17


def test_a_clock_in_the_next_century_does_not_make_one_cell_of_all_that_follows() -> None:
    cells, counts = Cells(), dict.fromkeys([80_000_000], 1)
    cells.add(counts)
    cuts = 0
    for minute in range(30_000_000, 30_000_200):
        counts[minute] = 10
        for large in cells.add({minute: 10}):
            cuts += len(cells.recount(large, counts)) > 1
    assert 0 < cuts < 20
    assert max(cells.rows) <= 3 * 100
    assert sum(cells.rows) == sum(counts.values())
    for minute, count in counts.items():
        assert count <= cells.rows[cells.starts.index(cells.cell_of(minute))]


def test_a_minute_cannot_be_cut() -> None:
    cells = Cells()
    (large,) = cells.add({7: 1_000})
    assert cells.recount(large, {7: 1_000}) == [BEGINNING]
    assert cells.starts == [BEGINNING]
    assert cells.rows == [1_000]


def test_cells_without_rows_are_joined_to_those_before_them() -> None:
    cells = Cells()
    cells.add(dict.fromkeys(range(30), 40))
    first, second, third, *others = cells.starts
    assert len(others) > 1
    for cell in (second, third, others[-1]):
        assert cells.recount(cell, {}) == [cell]
    before = sum(cells.rows)
    cells.drop_empty(used=[third])
    assert cells.starts == [first, third, *others[:-1]]
    assert sum(cells.rows) == before
    assert cells.cell_of(second) == first
    cells.recount(first, {})
    cells.drop_empty(used=[])
    assert cells.starts[0] == first, "time has a beginning"


def test_cells_are_known_again() -> None:
    cells = Cells()
    cells.add(dict.fromkeys(range(10), 40))
    assert Cells.of_json(cells.as_json()) == cells


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64])
def test_the_tree_finds_the_leaf_of_every_value(count: int) -> None:
    bounds = [10 * number for number in range(count)]
    text = tree("value", bounds, [str(number) for number in range(count + 1)])
    for value in range(-5, 10 * count + 5):
        assert _evaluate(text, value) == sum(bound <= value for bound in bounds)


def _evaluate(text: str, value: int) -> int:
    """The SQL as Python: IF(a < b, c, d)."""
    text = text.replace("IF(", "choose(").replace("value", str(value))
    return int(eval(text, {"choose": lambda test, yes, no: yes if test else no}))
