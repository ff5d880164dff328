"""Names for new things, in the shape of UUIDs.

`fresh_id` says the same as `str(uuid.uuid4())` for a fraction of its price: the randomness is
drawn in portions. `fresh_tag` is for what has to differ from all others and need not be hard to
guess: the first part is drawn once per process, the last one counts. A forked child draws anew.
"""

from __future__ import annotations

import os
from itertools import count
from os import urandom


def fresh_id() -> str:
    """A random UUID of version 4."""
    try:
        text = _drawn.pop()  # one step, so no two threads get the same
    except IndexError:
        text, *more = _draw()
        _drawn.extend(more)
    variant = _VARIANTS[text[16]]
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-{variant}{text[17:20]}-{text[20:]}"


def fresh_tag() -> str:
    """A name that nobody else has or will have, in any process."""
    return f"{_first}{next(_last):012x}"


def _draw() -> list[str]:
    digits = urandom(16 * PORTION).hex()
    return [digits[at : at + 32] for at in range(0, 32 * PORTION, 32)]


def _begin() -> None:
    global _first, _last
    _drawn.clear()
    _first, _last = fresh_id()[:24], count()


PORTION = 64
_VARIANTS = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
_drawn: list[str] = []
_first, _last = fresh_id()[:24], count()
os.register_at_fork(after_in_child=_begin)
