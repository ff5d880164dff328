"""Texts of others, safe to show on a terminal.

Whoever can reach the broker chooses what stands in an event: an escape sequence in the name of a
task would move the cursor, change colours or rename the window of whoever looks on. Everything
that is not plainly printable, including marks that reverse the direction of a line, is shown in
its escaped form. Passwords in addresses are masked. The work is bounded before it begins.
"""

from __future__ import annotations

import math
from typing import Any

from umbel.wire.events import encode
from umbel.wire.reprs import safe_repr

CHARS_MAX = 200
ELLIPSIS = "…"


def plain(value: Any, chars_max: int = CHARS_MAX) -> str:
    """`value` as one line of at most `chars_max` printable characters; nothing for None."""
    from umbel.wire.secret_texts import mask_addresses

    if value is None:
        return ""
    text = value if isinstance(value, str) else safe_repr(value, chars_max + 1)
    # What is masked or escaped may only grow shorter or longer within this piece.
    text = text[: 4 * chars_max + 4]
    if "://" in text:
        text = mask_addresses(text)
    if not text.isprintable():
        text = "".join(char if char.isprintable() else _escaped(char) for char in text)
    return cut(text, chars_max)


def cut(text: str, chars_max: int) -> str:
    """The text, or its beginning with a sign that there was more."""
    return text if len(text) <= chars_max else text[: max(0, chars_max - 1)] + ELLIPSIS


def plain_json(value: Any) -> str:
    """An event, or any other value, as one line of JSON that a terminal cannot misunderstand."""
    text = encode(value).decode()
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _json_escaped(char) for char in text)


def number(value: Any) -> float | None:
    """A finite number that came from outside, or None for whatever else did."""
    if type(value) is int:
        return float(value) if abs(value) < 2**53 else None
    if type(value) is float and math.isfinite(value):
        return value
    return None


def count(value: Any) -> int | None:
    """A whole number from zero on that came from outside, or None."""
    return value if type(value) is int and 0 <= value < 2**53 else None


def seconds(value: float | None) -> str:
    """A duration in at most six characters: `1.7ms`, `12.3s`, `4m05s`, `3h20m`."""
    if value is None or value < 0:
        return ""
    if value < 0.9995:
        milliseconds = value * 1_000
        return f"{milliseconds:.1f}ms" if milliseconds < 99.95 else f"{milliseconds:.0f}ms"
    if value < 99.95:
        return f"{value:.1f}s" if value >= 9.995 else f"{value:.2f}s"
    whole = round(value)
    if whole < 3_600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 360_000:
        return f"{whole // 3_600}h{whole % 3_600 // 60:02}m"
    return f"{min(whole // 86_400, 99_999)}d"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _json_escaped(char: str) -> str:
    code = ord(char)
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
