"""Task messages as they arrive, before anything in them is trusted.

kombu inflates a compressed body while it builds its message object, without a bound: a small
message could fill the memory. The classes here put the header aside while that happens, so that
`wire.compression` can inflate the body later, with a cap.

In transports without a server that checks, anything may be in a queue. What can not be made a
message is `Unreadable`; kombu itself would raise errors that it also uses for lost connections.
"""

from __future__ import annotations

from typing import Any


class Unreadable(ValueError):
    """What was in the queue is no message: it has no tag by which it could be settled."""


def compressed_kind(base: Any) -> Any:
    """The class of messages made from `base` whose bodies are left compressed."""

    class CompressedMessage(base):
        """A message whose body is as it was sent."""

        def __init__(self, payload: Any, channel: Any = None, **fields: Any) -> None:
            headers = _headers(payload)
            method = headers.pop("compression", None) if headers else None
            try:
                super().__init__(payload, channel=channel, **fields)
                _check_tag(self)
            except Exception as exc:
                raise Unreadable(f"{type(exc).__name__}: {exc}") from exc
            finally:
                if method is not None:  # in memory other queues share these headers
                    headers["compression"] = method
            if method is not None:
                self.headers["compression"] = method

        def serializable(self) -> Any:
            """As it goes back to a queue: the body is still compressed, so the header stays."""
            message = super().serializable()
            message["headers"] = dict(self.headers)
            return message

    return CompressedMessage


def _headers(payload: Any) -> Any:
    if isinstance(payload, dict):
        headers = payload.get("headers")
    else:
        headers = (getattr(payload, "properties", None) or {}).get("application_headers")
    return headers if isinstance(headers, dict) else None


def _check_tag(message: Any) -> None:
    tag, info = message.delivery_tag, message.delivery_info
    if isinstance(tag, bool) or not isinstance(tag, (str, int)):
        raise TypeError(f"delivery tag {tag!r:.100} is not text or a number")
    if not isinstance(info, dict) or not {"exchange", "routing_key"} <= info.keys():
        raise TypeError("exchange and routing key are missing from its delivery info")
