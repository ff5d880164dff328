"""What the parts of the page are made of: headings, tables and marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from umbel.pipeline.report.facts import Listing

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page; its content is HTML that is safe."""

    key: str
    title: str
    lead: str
    content: str

    def html(self) -> str:
        """The part, ready."""
        lead = f'<p class="lead">{self.lead}</p>' if self.lead else ""
        return f'<section id="{self.key}"><h2>{self.title}</h2>{lead}{self.content}</section>'


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its heading, how a row fills it, and how it stands."""

    title: str
    fill: Callable[[Row], str]
    kind: str = ""


def of(name: str, show: Callable[[Any], str], kind: str, title: str = "") -> Column:
    """A column of the page that shows one of the table; under its name, unless told another."""
    return Column(title or name, lambda row: show(row.get(name)), kind)


def badge(label: str, kind: str) -> str:
    """A word on a colour; the label is safe already."""
    return f'<span class="badge {kind}">{label}</span>'


def table_of(found: Listing, columns: Sequence[Column], empty: str = "") -> str:
    """A table, or a sentence when there is nothing to show."""
    if not found.rows:
        return f'<p class="fine">{empty}</p>' if empty else ""
    classes = [f' class="{column.kind}"' if column.kind else "" for column in columns]
    heads = "".join(
        f"<th{kind if column.kind == 'n' else ''}>{column.title}</th>"
        for column, kind in zip(columns, classes, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{kind}>{column.fill(row)}</td>"
            for column, kind in zip(columns, classes, strict=True)
        )
        + "</tr>"
        for row in found.rows
    )
    more = found.count - len(found.rows)
    rest = f'<p class="soft">and {more:,} more</p>' if more > 0 else ""
    head = f"<thead><tr>{heads}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>{rest}'
