"""Numbers, times and other people's texts, as they stand in pages.

Templates escape HTML; `shown` does the rest for what comes from outside: bounded, one line, no
invisible marks, no passwords of addresses. `block` is for tracebacks, which keep their lines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from umbel.pipeline.report.shapes import seconds
from umbel.wire.reprs import safe_repr
from umbel.wire.secret_texts import mask_addresses

CHARS_MAX: Final = 200
BLOCK_CHARS_MAX: Final = 20_000
NOTHING: Final = "\N{EN DASH}"

STATE_KINDS: Final = {
    "PENDING": "none",
    "RECEIVED": "wait",
    "STARTED": "run",
    "SUCCESS": "good",
    "FAILURE": "bad",
    "RETRY": "again",
    "REVOKED": "gone",
    "REJECTED": "gone",
    "CANCELLED": "gone",
}


def shown(value: Any, chars_max: int = CHARS_MAX) -> str:
    """A text of others as one line; empty for None."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else safe_repr(value, chars_max + 1)
    text = _clean(text[: 4 * chars_max + 4])
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"


def block(value: Any) -> str:
    """A text of others with its lines."""
    if value is None:
        return ""
    lines = str(value)[:BLOCK_CHARS_MAX].splitlines()
    return "\n".join(_clean(line.expandtabs(4)) for line in lines)


def _clean(text: str) -> str:
    if "://" in text:
        text = mask_addresses(text)
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def ago(at: float | None, now: float | None = None) -> str:
    """How long ago a wall-clock time was."""
    if at is None:
        return NOTHING
    past = (time.time() if now is None else now) - at
    return f"{duration(past)} ago" if past >= 0 else f"in {duration(-past)}"


def duration(value: float | None) -> str:
    """As the report shows it: `1.7 ms`, `12.3 s`, `4m 05s`."""
    return NOTHING if value is None or not math.isfinite(value) else seconds(value)


def count(value: float | None) -> str:
    """A whole number with commas, or a number with three digits."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{int(value):,}" if value == int(value) else f"{value:.3g}"


def rate(value: float | None) -> str:
    """So many a second, with one digit after the point where that says something."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def clock_time(at: float | None) -> str:
    """Hours to milliseconds of a wall-clock time, UTC."""
    if at is None:
        return NOTHING
    try:
        then = datetime.fromtimestamp(at, UTC)
    except (OverflowError, OSError, ValueError):
        return f"{at:g}"
    return f"{then:%H:%M:%S}.{then.microsecond // 1000:03}"


def moment(at: float | None) -> str:
    """Day and time to seconds, UTC."""
    if at is None:
        return NOTHING
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, OSError, ValueError):
        return f"{at:g}"


def kind(state: Any) -> str:
    """The colour of a state."""
    return STATE_KINDS.get(str(state), "none")


def sparkline(values: Sequence[float], width: int = 96, height: int = 22) -> str:
    """The points of a small line, for the `points` of an SVG polyline."""
    if len(values) < 2:
        return ""
    top = max(*values, 1e-9)
    step = width / (len(values) - 1)
    return " ".join(
        f"{at * step:.1f},{height - 2 - value / top * (height - 4):.1f}"
        for at, value in enumerate(values)
    )


FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "shown": shown,
    "block": block,
    "ago": ago,
    "duration": duration,
    "count": count,
    "rate": rate,
    "moment": moment,
    "clock_time": clock_time,
    "kind": kind,
    "sparkline": sparkline,
}
