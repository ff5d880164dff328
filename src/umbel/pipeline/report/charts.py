"""The plots: throughput, percentiles over time, and the lanes of workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from umbel.pipeline.report.facts import OUTCOME_TYPES, Rows
from umbel.pipeline.report.shapes import (
    Span,
    drawing,
    hint,
    linear_ticks,
    log_ticks,
    moment,
    number,
    polyline,
    seconds,
    step_s,
    tag,
    text,
)

WIDE, HALF = 1_130.0, 550.0
LEFT, BOTTOM = 52.0, 24.0
TYPE_CLASS: Final = {
    "task-succeeded": "good",
    "task-failed": "bad",
    "task-retried": "again",
    "task-revoked": "gone",
    "task-rejected": "none",
}
NAMES_MAX: Final = 7  # the eighth colour is for all others
_DEEP_MAX: Final = 24
_BAR, _GAP, _LABEL = 9.0, 2.0, 190.0


def throughput(span: Span, counts: dict[str, list[int]], sent: list[int]) -> str:
    """Ends of tasks per second, in columns stacked by how they ended; what was sent as a line."""
    height, width = 230.0, WIDE - LEFT
    stacked = [sum(counts[kind][at] for kind in OUTCOME_TYPES) for at in range(span.columns)]
    top = max([*stacked, *sent, 1]) / span.step
    ticks = linear_ticks(top)
    scale = (height - BOTTOM - 8) / ticks[-1] / span.step
    ground = height - BOTTOM
    parts = _frame(span, WIDE, height, [(tick, number(tick)) for tick in ticks], ticks[-1])
    column = width / span.columns
    for at in range(span.columns):
        y = ground
        for kind in OUTCOME_TYPES:
            count = counts[kind][at]
            if not count:
                continue
            y -= count * scale
            told = (
                f"{moment(span.first + at * span.step)}: {count:,} {kind.removeprefix('task-')}, "
                f"{number(count / span.step)}/s"
            )
            parts.append(
                tag(
                    "rect",
                    hint(text(told)),
                    x=LEFT + at * column + column * 0.08,
                    y=y,
                    width=max(column * 0.84, 0.6),
                    height=max(count * scale, 0.6),
                    class_=TYPE_CLASS[kind],
                )
            )
    if any(sent):
        points = [
            (LEFT + (at + 0.5) * column, ground - count * scale) for at, count in enumerate(sent)
        ]
        parts.append(polyline(points, "line-sent"))
    return drawing(WIDE, height, parts, "tasks per second over time")


def percentiles(span: Span, found: Sequence[tuple[int, list[float]]], label: str) -> str:
    """p50, p95 and p99 over time, on a logarithmic scale."""
    height, width = 200.0, HALF - LEFT
    values = [max(value, 1e-4) for _, parts in found for value in parts]
    ticks = log_ticks(min(values), max(values))
    low, high = math.log10(ticks[0]), math.log10(ticks[-1])
    ground, room = height - BOTTOM, height - BOTTOM - 8
    parts = _frame(
        span, HALF, height, [(math.log10(tick) - low, _power(tick)) for tick in ticks], high - low
    )
    column = width / span.columns
    for number_, kind in enumerate(("line-c", "line-b", "line-a")):
        part = 2 - number_
        points = [
            (
                LEFT + (min(at, span.columns - 1) + 0.5) * column,
                ground - (math.log10(max(some[part], 1e-4)) - low) / (high - low) * room,
            )
            for at, some in found
        ]
        parts.extend(polyline(run, kind) for run in _unbroken(points, column * 6))
    for at, some in found:
        told = f"{moment(span.first + at * span.step)}: {_parts(some)}"
        parts.append(
            tag("rect", hint(text(told)), x=LEFT + at * column, y=8.0, width=column,
                height=room, fill="transparent")
        )  # fmt: skip
    return drawing(HALF, height, parts, label)


def _parts(values: Sequence[float]) -> str:
    named = zip(("p50", "p95", "p99"), values, strict=True)
    return ", ".join(f"{name} {seconds(value)}" for name, value in named)


def _unbroken(points: list[tuple[float, float]], gap: float) -> list[list[tuple[float, float]]]:
    """Where nothing was measured for a while, the line breaks."""
    runs: list[list[tuple[float, float]]] = []
    for point in points:
        if runs and point[0] - runs[-1][-1][0] <= gap:
            runs[-1].append(point)
        else:
            runs.append([(point[0] - 0.5, point[1]), point])
    return runs


def _power(value: float) -> str:
    return f"{value * 1_000:g} ms" if value < 1 else f"{value:g} s"


def _frame(
    span: Span, width: float, height: float, ticks: Sequence[tuple[float, str]], top: float
) -> list[str]:
    """Grid, axes and their labels."""
    ground, room = height - BOTTOM, height - BOTTOM - 8
    parts = []
    for value, label in ticks:
        y = ground - value / top * room
        kind = "axis" if not value else "grid"
        parts.append(tag("line", x1=LEFT, x2=width, y1=y, y2=y, class_=kind))
        parts.append(tag("text", text(label), x=LEFT - 8, y=y + 4, text_anchor="end"))
    parts.extend(_times(span, LEFT, width, ground + 16, 8 if width > HALF else 5))
    return parts


def _times(span: Span, left: float, right: float, y: float, count: int) -> list[str]:
    parts = []
    for at, label in span.ticks(count):
        x = left + span.x(at, right - left)
        anchor = "end" if x > right - 28 else "start" if x < left + 20 else "middle"
        parts.append(tag("text", text(label), x=x, y=y, text_anchor=anchor))
    return parts


def range_of(parts: Sequence[float] | None, low: float, high: float) -> str:
    """A line from p50 to p99 with a dot at p95, on a logarithmic scale that rows share."""
    if not parts:
        return ""
    width = 200.0
    span = max(math.log10(high) - math.log10(low), 1e-9)

    def x(value: float) -> float:
        return 4 + (math.log10(max(value, low)) - math.log10(low)) / span * (width - 8)

    told = _parts(parts)
    return drawing(
        width,
        12,
        [
            hint(text(told)),
            tag("line", x1=x(parts[0]), x2=x(parts[2]), y1=6, y2=6, class_="range"),
            tag("line", x1=x(parts[0]), x2=x(parts[0]), y1=2, y2=10, class_="range"),
            tag("circle", cx=x(parts[1]), cy=6, r=3.5, class_="dot"),
            tag("line", x1=x(parts[2]), x2=x(parts[2]), y1=2, y2=10, class_="range"),
        ],
        told,
    )


# -- lanes -------------------------------------------------------------------------------------


def heat(span: Span, load: dict[str, list[float]], workers: Sequence[str]) -> str:
    """One strip a worker: the more tasks ran at once, the stronger the colour."""
    top = max((max(load.get(worker, [0.0])) for worker in workers), default=0.0) or 1.0
    width, row = WIDE - _LABEL, 24.0
    column = width / span.columns
    parts = []
    for number_, worker in enumerate(workers):
        y = number_ * row
        parts.append(_name(worker, y + 15))
        parts.append(tag("rect", x=_LABEL, y=y + 3, width=width, height=row - 6, class_="lane"))
        for at, busy in enumerate(load.get(worker, ())):
            if busy > 0:
                told = f"{moment(span.first + at * span.step)}: {number(busy)} at once on {worker}"
                parts.append(
                    tag("rect", hint(text(told)), x=_LABEL + at * column, y=y + 3,
                        width=column + 0.3, height=row - 6, class_="heat",
                        fill_opacity=0.12 + 0.88 * busy / top)
                )  # fmt: skip
    height = len(workers) * row
    parts.extend(_times(span, _LABEL, WIDE, height + 14, 8))
    return drawing(WIDE, height + 20, parts, "how many tasks ran at once on each worker")


def lanes(bars: Rows, workers: Sequence[str], colours: dict[Any, str]) -> str:
    """Every execution a bar in the lane of its worker; what overlaps lies below."""
    first = min(bar["started"] for bar in bars)
    last = max(max(bar["ended"] or bar["started"], bar["started"]) for bar in bars)
    step = step_s(max(last - first, 0.01), 200)
    span = Span(first, last, step)
    width = WIDE - _LABEL
    parts: list[str] = []
    y = 0.0
    for worker in workers:
        mine = [bar for bar in bars if bar["worker"] == worker]
        rows = _pack(mine, last)
        deep = max((row for row, _ in rows), default=0) + 1
        high = deep * (_BAR + _GAP) + _GAP
        parts.append(_name(worker, y + high / 2 + 4))
        parts.append(tag("rect", x=_LABEL, y=y, width=width, height=high, class_="lane"))
        for row, bar in rows:
            parts.append(_bar(bar, span, y + _GAP + row * (_BAR + _GAP), width, colours, last))
        y += high + 6
    parts.extend(_times(span, _LABEL, WIDE, y + 10, 8))
    return drawing(WIDE, y + 16, parts, "executions of tasks on each worker")


def _pack(bars: Rows, last: float) -> list[tuple[int, dict[str, Any]]]:
    """A row for each bar so that bars of one row do not overlap, as far as rows are left."""
    free: list[float] = []
    packed = []
    for bar in bars:
        end = bar["ended"] if bar["ended"] is not None else last
        found = (row for row, since in enumerate(free) if since <= bar["started"])
        row = next(found, len(free))
        if row == _DEEP_MAX:
            row = min(range(_DEEP_MAX), key=free.__getitem__)
        elif row == len(free):
            free.append(0.0)
        free[row] = max(end, bar["started"])
        packed.append((row, bar))
    return packed


def _bar(
    bar: dict[str, Any], span: Span, y: float, width: float, colours: dict[Any, str], last: float
) -> str:
    end = bar["ended"]
    x = _LABEL + span.x(bar["started"], width)
    x_end = _LABEL + span.x(last if end is None else end, width)
    outcome = bar["outcome"]
    kind = {"FAILURE": "bad", "RETRY": "again", "REVOKED": "gone", "REJECTED": "none"}.get(
        outcome, colours.get(bar["name"], "c7")
    )
    took = "no end seen" if end is None else seconds(end - bar["started"])
    since = moment(bar["started"], fraction=True)
    told = f"{bar['name'] or '(no name)'} {bar['uuid']}: {outcome}, {took}, from {since}"
    return tag(
        "rect",
        hint(text(told, 400)),
        x=x,
        y=y,
        width=max(x_end - x, 1.0),
        height=_BAR,
        rx=1.5,
        class_="open" if end is None else kind,
    )


def _name(worker: str, y: float) -> str:
    return tag("text", text(worker, 28), x=_LABEL - 10, y=y, text_anchor="end", class_="name")
