"""Run what is in the queues, here and now: a worker without a worker.

Takes messages off the default queue of an application and executes them in this thread, one
after the other, until the queue is empty. No broker process, no pool, no time.
"""

from __future__ import annotations

from typing import Any

from umbel.app.umbel import Umbel
from umbel.worker.execution.jobs import Job, JobResult
from umbel.worker.execution.runner import Runner


def messages(app: Umbel, queue: str = "celery") -> list[Any]:
    """Take every message that is in the queue now."""
    found = []
    with app.connection() as connection:
        channel = connection.channel()
        while (message := channel.basic_get(queue, no_ack=True)) is not None:
            found.append(message)
    return found


def run(app: Umbel, message: Any) -> JobResult:
    """Execute one message as a worker would."""
    raw = message.body
    return Runner(app, "pump@here")(
        Job(
            id=message.headers["id"],
            task=message.headers["task"],
            headers=message.headers,
            body=raw.encode() if isinstance(raw, str) else bytes(raw),
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            exchange=message.delivery_info["exchange"],
            routing_key=message.delivery_info["routing_key"],
            priority=message.properties.get("priority"),
            reply_to=message.properties.get("reply_to"),
            correlation_id=message.properties.get("correlation_id"),
        )
    )


def pump(app: Umbel, queue: str = "celery") -> list[tuple[str, str]]:
    """Execute until nothing is left; gives (task, state) in order of execution."""
    done = []
    while batch := messages(app, queue):
        for message in batch:
            result = run(app, message)
            done.append((message.headers["task"], result.state))
    return done
