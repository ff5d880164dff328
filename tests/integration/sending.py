"""Retry policies, and what has arrived; for tests of sending."""

from __future__ import annotations

from tests.unit.app.pump import messages
from umbel import Umbel

QUICK = {"max_retries": 2, "interval_start": 0, "interval_step": 0.01, "interval_max": 0.01}
PATIENT = {"max_retries": 400, "interval_start": 0.02, "interval_step": 0, "interval_max": 0.02}


def ids(app: Umbel, queue: str = "celery") -> list[str]:
    return [message.headers["id"] for message in messages(app, queue)]
