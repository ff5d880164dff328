"""Which queue a message came from.

AMQP names the consumer, of which there is one per queue; each gets a new name when it begins anew,
so names are remembered. Other transports only tell where the message was sent to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

# So many names and addresses are remembered; then all are forgotten.
KNOWN_MAX = 1_000


class Origins:
    """The origins of the messages of one consumer, over all of its connections."""

    def __init__(self) -> None:
        self._known: dict[Any, str] = {}

    def queue_of(self, message: Any, tasks: Any, consumed: Collection[str]) -> str | None:
        """One of the queues that are `consumed`, or None; may ask the broker."""
        if (queue := getattr(message, "queue", None)) in consumed:
            return str(queue)
        info = message.delivery_info
        tag, exchange, key = (
            info.get(name) for name in ("consumer_tag", "exchange", "routing_key")
        )
        origin = (exchange, key) if tag is None else tag
        found = self._known.get(origin)
        if found is None:
            if tag is not None:
                found = _by_consumer(tag, tasks)
            elif tasks is not None:
                found = _by_address(tasks.channel, exchange, key, consumed)
            if found is not None:
                if len(self._known) >= KNOWN_MAX:
                    self._known.clear()
                self._known[origin] = found
        return found or _guess(key, consumed)

    def told(self, message: Any, tasks: Any, consumed: Callable[[], Collection[str]]) -> str | None:
        """The same as far as the message tells it: quick, and never asks the broker."""
        queue = getattr(message, "queue", None)
        if queue is not None:
            return str(queue)
        info = message.delivery_info
        tag, key = info.get("consumer_tag"), info.get("routing_key")
        found = self._known.get((info.get("exchange"), key) if tag is None else tag)
        if found is not None:
            return found
        queues = consumed()
        return _guess(key, queues) if tag is None else self.queue_of(message, tasks, queues)


def _by_consumer(tag: str, tasks: Any) -> str | None:
    active = tasks._active_tags if tasks is not None else {}
    return next((name for name, own in active.items() if own == tag), None)


def _by_address(channel: Any, exchange: str, key: str, consumed: Collection[str]) -> str | None:
    if not exchange:
        return key if key in consumed else None
    return next((name for name in channel._lookup(exchange, key) if name in consumed), None)


def _guess(key: str, consumed: Collection[str]) -> str | None:
    """It came by a consumer of which nothing is known any more."""
    if key in consumed:
        return key
    return next(iter(consumed)) if len(consumed) == 1 else None
