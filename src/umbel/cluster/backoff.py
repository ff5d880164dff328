"""Pauses between tries: each twice as long as the one before, up to a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# More would make a huge number on the way to the bound.
DOUBLINGS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Backoff:
    """How patiently something is tried again."""

    first_s: float
    longest_s: float

    def pause_s(self, failures: int, dice: float = 1.0) -> float:
        """The pause after this many failures in a row.

        `dice`, from 0 to 1, makes it up to half as long, so that many do not come back at once.
        """
        assert failures > 0
        ceiling_s = min(self.first_s * 2 ** min(failures - 1, DOUBLINGS_MAX), self.longest_s)
        return ceiling_s * (1 + dice) / 2
