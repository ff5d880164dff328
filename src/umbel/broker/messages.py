"""Task messages as they arrive, before anything in them is trusted.

kombu inflates a compressed body while it builds its message object, without a bound: a small
message could fill the memory. The classes here put the header aside while that happens, so that
`wire.compression` can inflate the body later, with a cap.
"""

from __future__ import annotations

from typing import Any


def leave_compressed(channel: Any) -> None:
    """Let `channel` hand out messages whose bodies are still compressed."""
    base = channel.Message

    class CompressedMessage(base):  # type: ignore[misc, valid-type]
        """A message whose body is as it was sent."""

        def __init__(self, payload: Any, channel: Any = None, **fields: Any) -> None:
            headers = _headers(payload)
            method = headers.pop("compression", None) if headers else None
            super().__init__(payload, channel=channel, **fields)
            if method is not None:
                headers["compression"] = method

    channel.Message = CompressedMessage


def _headers(payload: Any) -> Any:
    if isinstance(payload, dict):
        headers = payload.get("headers")
    else:
        headers = (getattr(payload, "properties", None) or {}).get("application_headers")
    return headers if isinstance(headers, dict) else None
