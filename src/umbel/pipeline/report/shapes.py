"""Scales, ticks and pieces of SVG.

Names of tasks, nodes and errors come from whoever can reach the broker. `text` is the only way by
which they get into the page: what is not plainly printable is shown escaped, passwords in addresses
are masked, long texts are cut, and marks of HTML mean themselves.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from umbel.wire.secret_texts import mask_addresses

CHARS_MAX: Final = 200
NOTHING: Final = "-"
_STEPS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200),
    *(86_400 * days for days in (1, 2, 7, 14, 28, 91, 182, 364)),
)
_LATEST_S: Final = 253_402_300_799.0


def text(value: Any, chars_max: int = CHARS_MAX) -> str:
    """A text of others, as it may stand in the page."""
    if value is None:
        return ""
    shown = str(value)[: 4 * chars_max]
    if "://" in shown:
        shown = mask_addresses(shown)
    if not shown.isprintable():
        shown = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
            for char in shown
        )
    if len(shown) > chars_max:
        shown = f"{shown[: chars_max - 1]}…"
    return html.escape(shown)


# -- numbers and times as people read them -----------------------------------------------------


def seconds(value: float | None) -> str:
    """A duration: `1.7 ms`, `12.3 s`, `4m 05s`, `3h 20m`, `2d 4h`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    sign, value = ("-" if value < 0 else ""), abs(value)
    if value < 0.9995:
        return f"{sign}{value * 1_000:.{0 if value >= 0.0995 else 1}f} ms"
    if value < 99.95:
        return f"{sign}{value:.{2 if value < 9.995 else 1}f} s"
    whole = round(value)
    if whole < 3_600:
        return f"{sign}{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{sign}{whole // 3_600}h {whole % 3_600 // 60:02}m"
    return f"{sign}{whole // 86_400:,}d {whole % 86_400 // 3_600}h"


def moment(value: float | None, *, fraction: bool = False) -> str:
    """A time in UTC."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if not 0 <= value <= _LATEST_S:
        return f"{value:g}"
    spec = "milliseconds" if fraction else "seconds"
    return datetime.fromtimestamp(value, UTC).isoformat(sep=" ", timespec=spec).split("+")[0]


def number(value: float | None) -> str:
    """A count or a rate, with at most three digits after a point."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(part: float, whole: float) -> str:
    """A part of a whole in percent; never 100 % when something is missing."""
    if not whole:
        return NOTHING
    percent = 100 * part / whole
    if part < whole:
        percent = min(percent, 99.9)
    return f"{percent:.1f} %" if 0 < percent < 100 else f"{percent:.0f} %"


# -- scales ------------------------------------------------------------------------------------


def step_s(span_s: float, parts_max: int) -> float:
    """The smallest round step with which a span has at most so many parts."""
    for step in _STEPS_S:
        if span_s <= step * parts_max:
            return float(step)
    years = math.ceil(span_s / parts_max / (86_400 * 364))
    return 86_400.0 * 364 * years


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time that charts share, and the width of one column of it."""

    first: float
    last: float
    step: float

    @property
    def columns(self) -> int:
        """How many columns there are."""
        return max(1, math.ceil((self.last - self.first) / self.step))

    def x(self, when: float, width: float) -> float:
        """Where a time is, from 0 to `width`; what is outside stays at the edge."""
        part = (when - self.first) / (self.columns * self.step)
        return min(1.0, max(0.0, part)) * width

    def ticks(self, count_max: int = 8) -> list[tuple[float, str]]:
        """Round times, and how to call them."""
        end = self.first + self.columns * self.step
        step = step_s(end - self.first, count_max)
        at = math.ceil(self.first / step) * step
        found: list[tuple[float, str]] = []
        while at <= end and len(found) < 4 * count_max:
            found.append((at, _tick(at, step)))
            at += step
        return found


def _tick(at: float, step: float) -> str:
    if not 0 <= at <= _LATEST_S:
        return f"{at:g}"
    when = datetime.fromtimestamp(round(at, 3), UTC)
    if step >= 86_400:
        return when.strftime("%-d %b")
    if step >= 60:
        return when.strftime("%-d %b") if not at % 86_400 else when.strftime("%H:%M")
    if step >= 1:
        return when.strftime("%H:%M:%S")
    return when.strftime("%H:%M:%S.%f")[:-3]


def linear_ticks(top: float, count: int = 4) -> list[float]:
    """Round values from 0 to at least `top`."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * part for part in (1, 2, 2.5, 5, 10) if power * part >= raw * 0.999_999)
    return [step * part for part in range(math.ceil(top / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that hold both."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


# -- pieces ------------------------------------------------------------------------------------


def tag(name: str, content: str = "", **attributes: Any) -> str:
    """An element; `class_` and `stroke_width` give `class` and `stroke-width`."""
    listed = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{listed}>{content}</{name}>" if content else f"<{name}{listed}/>"


def _attribute(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return html.escape(str(value))


def hint(lines: str) -> str:
    """What a browser shows when the pointer rests; the text is safe already."""
    return f"<title>{lines}</title>"


def polyline(points: Iterable[tuple[float, float]], class_: str) -> str:
    """A line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return tag("polyline", points=path, class_=class_)


def drawing(width: float, height: float, parts: Sequence[str], label: str) -> str:
    """A picture that takes the width it gets."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """What the colours mean: pairs of a class and a safe text."""
    items = "".join(f'<li><i class="key {kind}"></i>{name}</li>' for kind, name in entries)
    return f'<ul class="legend">{items}</ul>'
