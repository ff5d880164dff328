"""Tables on standard output: drawn on a terminal, plain columns in a file or a pipe.

Cells are texts that may be shown as they are: whoever fills a sheet makes them safe (`plain`). In a
pipe no line is cut or wrapped, so that every row stays one line, whatever its width.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import click
from rich.cells import cell_len

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sheet:
    """One table; the columns named in `right` hold numbers."""

    titles: Row
    rows: list[Row]
    right: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of text under a heading."""

    heading: str
    lines: list[str] = field(default_factory=list)


Part = Sheet | Block


def show(parts: Sequence[Part], *, color: bool | None) -> None:
    """Print what has any content, with an empty line between two parts."""
    filled = [part for part in parts if isinstance(part, Block) or part.rows]
    for number, part in enumerate(filled):
        if number:
            click.echo()
        if isinstance(part, Block):
            click.echo("\n".join([f"{part.heading}:", *(f"  {line}" for line in part.lines)]))
        elif sys.stdout.isatty():
            _draw(part, color)
        else:
            click.echo("\n".join(plain_lines(part)))


def plain_lines(sheet: Sheet) -> list[str]:
    """The table as aligned text, two spaces between columns."""
    everything = [sheet.titles, *sheet.rows]
    widths = [max(map(cell_len, column)) for column in zip(*everything, strict=True)]
    ends = [title in sheet.right for title in sheet.titles]
    return ["  ".join(map(_fitted, row, widths, ends)).rstrip() for row in everything]


def _fitted(text: str, width: int, right: bool) -> str:
    room = " " * (width - cell_len(text))
    return room + text if right else text + room


def _draw(sheet: Sheet, color: bool | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, no_color=True if color is False else None, highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(sheet.titles):
        table.add_column(
            title,
            justify="right" if title in sheet.right else "left",
            overflow="fold",
            style="bold" if not number else None,
        )
    for row in sheet.rows:
        table.add_row(*map(Text, row))
    console.print(table)
