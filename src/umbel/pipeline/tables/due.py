"""When a task was due: when it was queued, or at the eta its caller asked for if that is later.

Moments (`eta`, `expires`) are JSON in the log: a number of Unix seconds, or a text in ISO 8601 with
a date. A text without a time zone is in UTC. Anything else is ignored.
"""

from __future__ import annotations

from typing import Final

# A text that begins with a date. No braces: those have a meaning in `SparkSession.sql`.
_DATED: Final = '"____-__-__%"'


def moment(column: str) -> str:
    """A column with a moment as Unix seconds, as SQL; null for what is none."""
    text = f"try_cast(trim(BOTH '\"' FROM {column}) AS TIMESTAMP)"
    return f"IF({column} LIKE '{_DATED}', unix_micros({text}) / 1e6D, try_cast({column} AS DOUBLE))"


def due(queued: str, eta: str) -> str:
    """When a task was due, of when it was queued and the column of its eta; as SQL."""
    return f"greatest({queued}, {moment(eta)})"


def waited(started: str, queued: str, eta: str) -> str:
    """Seconds from when a task was due to its start, as SQL.

    0 where it was started before its eta; null where it was started before it was queued, by the
    clocks of their hosts, or one of these times is not known.
    """
    return f"IF({started} >= {queued}, greatest(0D, {started} - {due(queued, eta)}), NULL)"
