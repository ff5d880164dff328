"""A blueprint as text, as DOT and as SVG.

The drawing shows every step in the order in which it starts, what it requires, and whether it
takes part. It is made from the classes, so it can be drawn without a broker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from umbel.worker.blueprint import Step, required, sort_steps
from umbel.worker.runtime.steps import CONSUMER_STEPS, WORKER_STEPS

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.runtime.options import WorkerOptions

BOX_W, BOX_H, GAP_X, GAP_Y, MARGIN = 150, 34, 50, 16, 20


@dataclass(slots=True, frozen=True)
class Node:
    """One step of a drawing."""

    label: str
    requires: tuple[str, ...]
    on: bool
    note: str = ""


@dataclass(slots=True, frozen=True)
class Drawing:
    """One blueprint, ready to be drawn."""

    title: str
    nodes: tuple[Node, ...]


def drawings_of(app: Umbel, options: WorkerOptions) -> list[Drawing]:
    """The two blueprints of a worker, steps of users included."""
    return [
        _drawing("worker", [*WORKER_STEPS, *app.steps["worker"]], app, options),
        _drawing("consumer", [*CONSUMER_STEPS, *app.steps["consumer"]], app, options),
    ]


def _drawing(
    title: str, kinds: Sequence[type[Step]], app: Umbel, options: WorkerOptions
) -> Drawing:
    ordered = sort_steps(title, list(kinds))
    nodes = []
    for kind in ordered:
        why_off = kind.why_off(app, options)
        needs = tuple(found.label() for found in required(title, kind, ordered))
        nodes.append(Node(kind.label(), needs, not why_off, why_off))
    return Drawing(title, tuple(nodes))


def as_text(drawings: Sequence[Drawing]) -> str:
    """One line a step, in starting order."""
    lines: list[str] = []
    for drawing in drawings:
        lines.append(f"{drawing.title}:")
        width = max(len(node.label) for node in drawing.nodes)
        for number, node in enumerate(drawing.nodes, 1):
            needs = f"requires {', '.join(node.requires)}" if node.requires else ""
            note = "" if node.on else f"off: {node.note}" if node.note else "off"
            rest = "; ".join(part for part in (needs, note) if part)
            lines.append(f"  {number:2}. {node.label:{width}}  {rest}".rstrip())
        lines.append("")
    return "\n".join(lines).rstrip()


def as_dot(drawings: Sequence[Drawing]) -> str:
    """Input for Graphviz: an edge goes from a step to what it requires."""
    lines = ["digraph blueprint {", "  rankdir=RL; node [shape=box, style=rounded];"]
    for drawing in drawings:
        lines.append(f"  subgraph {_quoted('cluster_' + drawing.title)} {{")
        lines.append(f"    label={_quoted(drawing.title)};")
        for node in drawing.nodes:
            style = "" if node.on else ' [style="rounded,dashed", fontcolor=gray]'
            lines.append(f"    {_id(drawing, node.label)}{style};")
            lines.append(f"    {_id(drawing, node.label)} [label={_quoted(node.label)}];")
        lines.append("  }")
        for node in drawing.nodes:
            lines.extend(
                f"  {_id(drawing, node.label)} -> {_id(drawing, needed)};"
                for needed in node.requires
            )
    lines.append("}")
    return "\n".join(lines)


def as_svg(drawings: Sequence[Drawing]) -> str:
    """A picture: one column a blueprint, requirements as arcs on its right side."""
    arc_room = 90
    column = BOX_W + arc_room + GAP_X
    height = MARGIN * 2 + 24 + max(len(d.nodes) for d in drawings) * (BOX_H + GAP_Y)
    width = MARGIN * 2 + column * len(drawings)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text{font:13px sans-serif}</style>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"',
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#3d6b35"/></marker></defs>',
    ]
    for index, drawing in enumerate(drawings):
        parts += _column(drawing, MARGIN + index * column)
    parts.append("</svg>")
    return "\n".join(parts)


def _column(drawing: Drawing, x: int) -> list[str]:
    parts = [f'<text x="{x}" y="{MARGIN + 10}" font-weight="bold">{escape(drawing.title)}</text>']
    middle = {}
    for row, node in enumerate(drawing.nodes):
        y = MARGIN + 24 + row * (BOX_H + GAP_Y)
        middle[node.label] = y + BOX_H // 2
        dash = "" if node.on else ' stroke-dasharray="4 3"'
        fill, ink = ("#dcebd8", "#222") if node.on else ("#f4f4f4", "#888")
        why = f"<title>off: {escape(node.note)}</title>" if node.note else ""
        parts.append(
            f'<rect x="{x}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="6" fill="{fill}" '
            f'stroke="#55503f"{dash}>{why}</rect>'
        )
        text = escape(node.label)
        parts.append(f'<text x="{x + 12}" y="{y + 22}" fill="{ink}">{text}</text>')
    right = x + BOX_W
    for node in drawing.nodes:
        for needed in node.requires:
            start, end = middle[node.label], middle[needed]
            bulge = right + 20 + abs(start - end) // 6
            parts.append(
                f'<path d="M{right} {start} C{bulge} {start} {bulge} {end} {right} {end}" '
                'fill="none" stroke="#3d6b35" stroke-width="1.5" marker-end="url(#a)"/>'
            )
    return parts


FORMATS: dict[str, Callable[[Sequence[Drawing]], str]] = {
    "text": as_text,
    "dot": as_dot,
    "svg": as_svg,
}


def _id(drawing: Drawing, label: str) -> str:
    return _quoted(f"{drawing.title}.{label}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
