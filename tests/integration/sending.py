"""Retry policies, and what has arrived; for tests of sending."""

from __future__ import annotations

from typing import Any

from umbel import Umbel

QUICK = {"max_retries": 2, "interval_start": 0, "interval_step": 0.01, "interval_max": 0.01}
PATIENT = {"max_retries": 400, "interval_start": 0.02, "interval_step": 0, "interval_max": 0.02}


def taken(app: Umbel, queue: str = "celery") -> list[Any]:
    """Every message of a queue, in order."""
    found = []
    with app.connection() as connection:
        channel = connection.channel()
        while (message := channel.basic_get(queue, no_ack=True)) is not None:
            found.append(message)
    return found


def ids(app: Umbel, queue: str = "celery") -> list[str]:
    return [message.headers["id"] for message in taken(app, queue)]
