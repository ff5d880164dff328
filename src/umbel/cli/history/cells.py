"""Values of tables as texts for a terminal: times and durations as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from umbel.cli.history.moments import shown_time
from umbel.cli.plain import plain, seconds

# A number with a fraction is a time or a duration, by its name; the same name may be a count.
TIMES = frozenset({
    "timestamp", "sent", "received", "started", "succeeded", "failed", "retried", "revoked",
    "rejected", "finished", "ended", "online", "last_heartbeat", "offline", "lost", "requested",
    "decided", "minute", "since", "began", "other_timestamp", "last_seen", "before", "after",
    "known", "stopped",
})  # fmt: skip
DURATIONS = frozenset({
    "queue_wait", "runtime", "uptime", "drift", "decided_after", "critical_path",
    "duration", "seconds",
})  # fmt: skip
_NUMBERS = ("DOUBLE", "FLOAT", "DECIMAL", "BIGINT", "INTEGER", "SMALLINT", "TINYINT", "HUGEINT")
_EARLIEST = 86_400.0 * 365

# What is shown of a table with many columns unless the user chooses; what is missing is left out.
SHOWN: dict[str, tuple[str, ...]] = {
    "timeline": ("position", "clock", "timestamp", "type", "hostname", "uuid"),
    "tasks": ("uuid", "name", "state", "worker", "sent", "queue_wait", "runtime",
              "attempts", "exception"),
    "attempts": ("uuid", "name", "worker", "started", "outcome", "runtime", "reason", "exception"),
    "workers": ("hostname", "incarnation", "status", "online", "last_heartbeat", "uptime",
                "processed", "events_seen", "events_missing"),
    "elections": ("id", "topic", "requested", "winner", "decided_after", "executions", "verdict"),
    "revocations": ("uuid", "name", "revoked", "seen_by", "effective", "violations"),
    "rates": ("minute", "name", "worker", "started", "succeeded", "failed", "retried", "wait_p95",
              "run_p95"),
    "runs": ("run", "mode", "began", "seconds", "read", "kept", "duplicate", "quarantined",
             "tasks"),
}  # fmt: skip


def chosen(table: str, columns: Sequence[str], known: Sequence[str]) -> list[str]:
    """The columns to show: those asked for, `all`, or the ones that say most."""
    if list(columns) == ["all"]:
        return list(known)
    if columns:
        return list(columns)
    return [name for name in SHOWN.get(table, ()) if name in known] or list(known)


def is_right(kind: str, column: str) -> bool:
    """Whether a column is a number that stands on the right."""
    return kind.startswith(_NUMBERS) and not is_time(kind, column)


def is_time(kind: str, column: str) -> bool:
    """Whether a column has Unix times."""
    return kind == "DOUBLE" and column in TIMES


def cell(value: Any, kind: str, column: str, chars_max: int) -> str:
    """One value as a text that may be shown."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if is_time(kind, column) and value > _EARLIEST:
            return shown_time(value)
        if column in DURATIONS or column.startswith(("wait_p", "run_p")):
            return seconds(value) if value >= 0 else f"-{seconds(-value)}"
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return plain(", ".join(_part(part) for part in value[:20]), chars_max)
    return plain(value, chars_max)


def _part(value: Any) -> str:
    if isinstance(value, dict):
        if isinstance(value.get("hostname"), str):
            return str(value["hostname"])
        return " ".join(_part(part) for part in value.values() if part is not None)
    return value if isinstance(value, str) else f"{value}"
