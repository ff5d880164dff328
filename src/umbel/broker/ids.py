"""Names for new things, in the shape of UUIDs.

`fresh_id` says the same as `str(uuid.uuid4())` for a third of its price. `fresh_tag` is for what
has to differ from all others and need not be hard to guess: the first part is drawn once per
process, the last one counts.
"""

from __future__ import annotations

import os
from itertools import count
from os import urandom


def fresh_id() -> str:
    """A random UUID of version 4."""
    text = urandom(16).hex()
    variant = _VARIANTS[text[16]]
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-{variant}{text[17:20]}-{text[20:]}"


def fresh_tag() -> str:
    """A name that nobody else has or will have, in any process."""
    return f"{_drawn}{next(_counted):012x}"


def _draw() -> None:
    # A forked child draws again: it has got the parent's count.
    global _drawn, _counted
    _drawn, _counted = fresh_id()[:24], count()


_VARIANTS = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
_drawn, _counted = fresh_id()[:24], count()
os.register_at_fork(after_in_child=_draw)
