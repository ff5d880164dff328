"""How much the long tests do: some of it in `make test`, all of it in `make soak`."""

from __future__ import annotations

import os

FULL = os.environ.get("SOAK") == "1"


def size(usual: int, full: int) -> int:
    """The smaller number, or in `make soak` the other one."""
    return full if FULL else usual
