"""The message of a queue that is next in turn, looked at without taking it; on Redis only.

A message of a task has no time of its own; when it was sent is known where its `task-sent` event
was heard, or where the sender has put a timestamp into its properties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

MESSAGE_BYTES_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Oldest:
    """The message that was sent first of those that wait."""

    uuid: str | None
    task: str | None
    timestamp: float | None


def oldest_of(channel: Any, queue: str) -> Oldest | None:
    """The oldest message of a queue; None where there is none, or nobody can tell."""
    if not hasattr(channel, "_q_for_pri") or not hasattr(channel, "conn_or_acquire"):
        return None
    with channel.conn_or_acquire() as client:
        for step in channel.priority_steps:
            raw = client.lindex(channel._q_for_pri(queue, step), -1)
            if raw is not None:
                return read(raw)
    return None


def read(raw: Any) -> Oldest | None:
    """What the envelope of a message tells; never raises."""
    data = raw.encode("utf-8", "replace") if isinstance(raw, str) else raw
    if not isinstance(data, bytes) or len(data) > MESSAGE_BYTES_MAX:
        return None
    try:
        envelope = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(envelope, dict):
        return None
    headers, properties = envelope.get("headers"), envelope.get("properties")
    headers = headers if isinstance(headers, dict) else {}
    properties = properties if isinstance(properties, dict) else {}
    uuid = headers.get("id") or properties.get("correlation_id")
    task, at = headers.get("task"), properties.get("timestamp")
    return Oldest(
        uuid if isinstance(uuid, str) else None,
        task if isinstance(task, str) else None,
        float(at) if isinstance(at, (int, float)) and 0 < at < 2**53 else None,
    )
