"""A worker that does not run, and messages that remember what was done with them."""

from __future__ import annotations

import uuid
from typing import Any

from tests.messages import written
from umbel import Umbel
from umbel.worker.runtime.options import WorkerOptions
from umbel.worker.runtime.worker import Worker


class Message:
    """A message as kombu hands it out; `fate` is what became of it."""

    def __init__(self, channel: Any = None, **changes: Any) -> None:
        self.fate: list[str] = []
        self.error: Exception | None = None
        self.channel = channel
        self.delivery_tag = uuid.uuid4().hex
        self.delivery_info = {"exchange": "", "routing_key": "celery"}
        self.properties: Any = {"reply_to": None, "correlation_id": None}
        self.headers: Any = {}
        self.body: Any = b""
        self.content_type: Any = "application/json"
        self.content_encoding: Any = "utf-8"
        for name, value in changes.items():
            setattr(self, name, value)

    def ack(self) -> None:
        self._settle("ack")

    def reject(self, requeue: bool = False) -> None:
        self._settle("requeue" if requeue else "reject")

    def _settle(self, fate: str) -> None:
        if self.error is not None:
            raise self.error
        self.fate.append(fate)


def task_message(name: str, *args: Any, channel: Any = None, **fields: Any) -> Message:
    """A message that asks for a task."""
    sent = written(name, uuid.uuid4().hex, args, **fields)
    return Message(
        channel,
        headers=sent.headers,
        body=sent.body,
        content_type=sent.content_type,
        content_encoding=sent.content_encoding,
    )


def idle_worker(app: Umbel, **options: Any) -> Worker:
    """A worker that was made and not started."""
    return Worker(app, WorkerOptions(**{"pool": "solo", "hostname": "unit@test", **options}))


def finish_asides(worker: Worker) -> None:
    """Wait for what is done away from the loop, then let the loop take note."""
    worker._aside.submit(int).result(10)
    worker.inbox.run()
