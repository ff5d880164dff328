"""Times on the wire: ISO-8601 text, with an offset when the sender is well-behaved.

A time without an offset is read in the zone that the caller names. What is returned can always
be compared with any other aware time and turned into UTC; a text that is not a time, or is one
that Python cannot represent (the year 10000), is refused.
"""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from typing import Final

from umbel.wire.limits import INVALID_TASK, Refusal
from umbel.wire.reprs import safe_repr

_CHARS_MAX: Final = 64


def parse_time(text: str, tz: tzinfo) -> datetime:
    """The aware time that `text` says, read in `tz` when it has no offset of its own."""
    try:
        if len(text) > _CHARS_MAX:
            raise ValueError  # any number of fractional digits would be read
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=tz)
        moment.astimezone(UTC)  # the edges of the calendar overflow here, not in a timer later
    except (ValueError, TypeError, OverflowError):
        raise Refusal(
            INVALID_TASK,
            f"invalid time {safe_repr(text, 80)}: send ISO-8601 between the years 1 and 9999,"
            " such as 2026-11-15T19:38:48.413148+00:00",
        ) from None
    return moment


def format_time(dt: datetime) -> str:
    """The ISO-8601 text of `dt`, with its offset if it has one."""
    return dt.isoformat()
