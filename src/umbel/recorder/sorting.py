"""From the body of a message, or a line of a file, to rows; what is no event goes to quarantine.

A body has one event or a list of them. What can not be read goes to quarantine as it came; of a
list only what is no event does. Nothing that a sender can write raises here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from umbel.cluster.event_rows import raw_json
from umbel.recorder.segments import Segments
from umbel.wire.events import (
    BATCH_MAX,
    CONTENT_ENCODING,
    CONTENT_TYPE,
    TOO_MANY,
    Event,
    check,
    open_body,
)
from umbel.wire.limits import CONTENT_UNKNOWN, Refusal

JSON_ONLY: Final = frozenset({CONTENT_TYPE})


class Taken(NamedTuple):
    """How many were events, and how many were not."""

    events: int
    refused: int


def take(
    segments: Segments,
    body: Any,
    content_type: Any = CONTENT_TYPE,
    content_encoding: Any = CONTENT_ENCODING,
    *,
    received: float,
    token: Any = None,
    accept: frozenset[str] = JSON_ONLY,
    compression: Any = None,
    source: str | None = None,
    wants: Callable[[Event], bool] | None = None,
) -> Taken:
    """Put what is in one body into the segments; a body with nothing in it leaves its token.

    Events that `wants` is false of are left out: somebody else records them.
    """
    try:
        content = _read(body, content_type, content_encoding, accept, compression)
    except Refusal as refusal:
        return _refuse(segments, body, refusal.reason, received, token, source)
    found = content if type(content) is list else [content]
    if len(found) > BATCH_MAX:
        return _refuse(segments, body, TOO_MANY, received, token, source)
    events = refused = 0
    for one in found:
        if reason := check(one):
            segments.quarantine(raw_json(one), reason, received, token, source)
            refused += 1
        elif wants is None or wants(one):
            segments.add(one, received, token)
            events += 1
    if not (events or refused):
        segments.hold(token)
    return Taken(events, refused)


def _refuse(
    segments: Segments, body: Any, reason: str, received: float, token: Any, source: str | None
) -> Taken:
    raw = body if isinstance(body, str | bytes) else repr(body)
    segments.quarantine(raw, reason, received, token, source)
    return Taken(0, 1)


def _read(
    body: Any, content_type: Any, content_encoding: Any, accept: frozenset[str], compression: Any
) -> Any:
    if not isinstance(content_type, str):
        raise Refusal(CONTENT_UNKNOWN, "no content type")
    return open_body(body, content_type, content_encoding, accept=accept, compression=compression)
