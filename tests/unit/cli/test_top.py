"""`umbel top` where it can not run: one line each, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.cluster_script import Script
from umbel.cli.top.figures import Figures
from umbel.cli.top.tables import NODES, TABLES, TYPES, rate

Umbel = Callable[..., Any]


def test_a_missing_library_is_one_line_with_the_way_out(
    umbel: Umbel, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "textual" or name == "umbel.cli.top.screen":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    ran = umbel("-A", "shop", "top")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "umbel: 'umbel top' needs the package textual: pip install 'umbel[top]'\n"


def test_without_a_terminal_other_verbs_are_named(umbel: Umbel, shop: Path) -> None:
    ran = umbel("-A", "shop", "top")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "top needs a terminal" in ran.err
    assert "umbel events" in ran.err


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.id)
def test_every_table_can_be_ordered_by_every_column(table: Any) -> None:
    script, figures = Script(), Figures()
    for node in ("b@h", "a@h"):
        figures.event(script.heartbeat(node, active=None), 1.0)
        figures.event(script.heartbeat(f"{node}2"), 1.0)
        for event in script.life(f"id-{node}", f"name-{node}")[:2]:
            figures.event(event, 1.0)
        for event in script.life(f"done-{node}", f"done-{node}"):
            figures.event(event, 1.0)
    for order, column in enumerate(table.columns):
        view = table.view(figures, 2.0, order, "")
        ranks = [column.rank(row) for row in table.rows(figures, 2.0)]
        assert len(view.cells) == view.count == len(ranks) > 1
        shown = [cells[order].plain for cells in view.cells]
        expected = sorted(table.rows(figures, 2.0), key=column.rank)
        assert shown == [column.text(row) for row in expected]


def test_rows_without_a_value_come_last_whatever_the_order() -> None:
    script, figures = Script(), Figures()
    figures.event(script.event("worker-heartbeat", "short@h", freq=5), 1.0)
    figures.event(script.heartbeat("a@h", active=0), 1.0)
    figures.event(script.heartbeat("b@h", active=3), 1.0)
    order = [column.title for column in NODES.columns].index("active")
    view = NODES.view(figures, 2.0, order, "")
    assert [cells[0].plain for cells in view.cells] == ["b@h", "a@h", "short@h"]


def test_numbers_stand_to_the_right_and_rates_are_short() -> None:
    assert [rate(value) for value in (0.0, 0.25, 9.96, 120.4)] == ["0", "0.2", "10.0", "120"]
    script, figures = Script(), Figures()
    for event in script.life("a"):
        figures.event(event, 1.0)
    (cells,) = TYPES.view(figures, 2.0, 0, "").cells
    assert [cells[0].justify, cells[1].justify] == ["left", "right"]
