"""The tables of `umbel top`: what stands in which column, and in which order rows come.

Pure: rows of `figures` go in, cells come out. A number column puts the greatest first, a text
column the first of the alphabet; rows that are equal in it are ordered by their name, so that
nothing jumps about. Filtering looks for a word in the texts of a row, in any case of letters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from umbel.cli.plain import seconds
from umbel.cli.top.figures import Figures, NodeRow, RunningRow, TypeRow

ROWS_SHOWN_MAX = 200


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `value` orders, `text` is shown."""

    title: str
    value: Callable[[Any], Any]
    text: Callable[[Any], str]
    style: Callable[[Any], str] = lambda row: ""
    is_text: bool = False

    def cell(self, row: Any) -> Text:
        """What is shown; never read as markup."""
        cell = Text(self.text(row), style=self.style(row), no_wrap=True)
        cell.justify = "left" if self.is_text else "right"
        return cell

    def rank(self, row: Any) -> tuple[bool, Any]:
        """Where a row comes when this column orders; one that has no value comes last."""
        value = self.value(row)
        if value is None:
            return (True, "" if self.is_text else 0)
        return (False, value.lower() if self.is_text else -value)


@dataclass(frozen=True, slots=True)
class Table:
    """One table: its rows, what they are called, and the column that orders them at first."""

    id: str
    title: str
    empty: str
    columns: tuple[Column, ...]
    rows: Callable[[Figures, float], Sequence[Any]]
    first_order: int
    words: Callable[[Any], str]

    def view(self, figures: Figures, now_s: float, order: int, word: str) -> View:
        """The rows to show, ordered and filtered."""
        found = [
            row
            for row in self.rows(figures, now_s)
            if not word or word.lower() in self.words(row).lower()
        ]
        column = self.columns[order]
        found.sort(key=lambda row: (column.rank(row), self.words(row)))
        cells = [[column.cell(row) for column in self.columns] for row in found[:ROWS_SHOWN_MAX]]
        return View(cells, len(found))


@dataclass(frozen=True, slots=True)
class View:
    """The cells to show, and how many rows there are in all."""

    cells: list[list[Text]]
    count: int


def _text(title: str, name: str, style: Callable[[Any], str] = lambda row: "") -> Column:
    return Column(
        title, lambda row: getattr(row, name), lambda row: getattr(row, name), style, True
    )


def _number(
    title: str,
    name: str,
    show: Callable[[Any], str] = str,
    style: Callable[[Any], str] = lambda row: "",
) -> Column:
    def text(row: Any) -> str:
        value = getattr(row, name)
        return "" if value is None else show(value)

    return Column(title, lambda row: getattr(row, name), text, style)


def rate(value: float) -> str:
    """Per second: one place after the point where that says anything."""
    if value == 0:
        return "0"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _load(value: float) -> str:
    return f"{value:.2f}"


def _node_style(row: NodeRow) -> str:
    return "green" if row.alive else "bold red"


def _runs_on_style(row: RunningRow) -> str:
    return "" if row.node_alive else "bold red"


def _failed_style(row: TypeRow) -> str:
    return "red" if row.failed else ""


def _lost_style(row: NodeRow) -> str:
    return "yellow" if row.lost else ""


NODES = Table(
    "nodes",
    "workers",
    "no worker was heard yet",
    (
        _text("node", "node"),
        _text("state", "status", _node_style),
        _number("active", "active"),
        _number("processed", "processed"),
        _number("tasks/s", "per_s", rate),
        _number("load", "load", _load),
        _number("clock", "clock"),
        _number("lost", "lost", style=_lost_style),
        _number("heard", "heard_s", lambda value: f"{value:.0f}s ago"),
        _text("version", "software"),
    ),
    Figures.nodes,
    0,
    lambda row: f"{row.node} {row.status} {row.software}",
)

TYPES = Table(
    "types",
    "task types",
    "no event of a task was heard yet",
    (
        _text("task", "name"),
        _number("tasks/s", "per_s", rate),
        _number("waiting", "waiting"),
        _number("running", "running"),
        _number("succeeded", "succeeded"),
        _number("failed", "failed", style=_failed_style),
        _number("retried", "retried"),
        _number("run p50", "runtime_p50_s", seconds),
        _number("run p95", "runtime_p95_s", seconds),
        _number("wait p50", "wait_p50_s", seconds),
        _number("wait p95", "wait_p95_s", seconds),
    ),
    Figures.types,
    1,
    lambda row: row.name,
)

RUNNING = Table(
    "running",
    "running tasks",
    "nothing runs, as far as was heard",
    (
        _text("id", "uuid"),
        _text("task", "name"),
        _text("node", "node", _runs_on_style),
        _number("running for", "running_s", seconds),
        _text("called with", "call"),
    ),
    Figures.running,
    3,
    lambda row: f"{row.name} {row.node} {row.uuid}",
)

TABLES = (NODES, TYPES, RUNNING)
