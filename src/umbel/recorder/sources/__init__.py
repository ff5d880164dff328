"""Where a recorder takes messages from, and gives them back as done: one way for each broker.

messages    what a source is, and the messages that it gives
streams     Redis: the stream that dispatchers feed, shared by a consumer group
queues      RabbitMQ and kombu's virtual transports: one durable queue for all recorders
peers       Redis: what Celery's nodes tell by pub/sub, and put into no stream
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umbel.broker.sessions.connections import driver
from umbel.recorder.sources.messages import Message, Source

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

__all__ = ["Message", "Source", "source_for"]


def source_for(app: Umbel, name: str) -> Source:
    """The source that suits the application's broker; `name` is that of this recorder."""
    from umbel.recorder.sources.queues import QueueSource
    from umbel.recorder.sources.streams import StreamSource

    if driver(app.connection()) == "redis":
        return StreamSource(app, name)
    return QueueSource(app, name)
