"""Times as people write them; UTC where they name no zone."""

from __future__ import annotations

import math
import re
import time
from datetime import UTC, datetime

LATEST = 253_402_300_799.0  # the last second of the year 9999
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_AGO = re.compile(r"(?P<count>\d{1,6}(?:\.\d+)?)(?P<unit>[smhd])(?:\s+ago)?", re.ASCII)
WAYS = "such as '2026-11-16 07:30' (UTC), 2026-11-16T07:30:00+01:00, 1794814200.5, or 15m ago"


def unix_time(text: str, now: float | None = None) -> float:
    """Unix seconds of what somebody wrote; ValueError says which ways there are."""
    text = text.strip()[:60]
    if found := _AGO.fullmatch(text):
        now = time.time() if now is None else now
        return now - float(found["count"]) * _UNIT_S[found["unit"]]
    try:
        seconds = float(text)
    except ValueError:
        seconds = _from_iso(text)
    if not math.isfinite(seconds) or not 0 <= seconds <= LATEST:
        raise ValueError(f"{text!r} is no time: write it {WAYS}")
    return seconds


def _from_iso(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no time: write it {WAYS}") from None
