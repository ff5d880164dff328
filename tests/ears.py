"""A receiver of events on a thread of its own, for tests that look at what was told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

from tests.servers import wait_until
from umbel import Umbel
from umbel.app.events.receiver import Receiver

Event = dict[str, Any]
WAIT_S = 20.0


class Ears:
    """Hears everything from the moment in which it is made."""

    def __init__(self, url: str, **options: Any) -> None:
        self.app = Umbel("ears", broker=url, backend="disabled://", set_as_current=False)
        self.events: list[Event] = []
        self.succeeded: set[str] = set()  # ids of tasks
        self.receiver = Receiver(self.app, handlers={"*": self._hear}, wakeup=False, **options)
        self._thread = threading.Thread(target=self.receiver.capture, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self.receiver.wait_ready(WAIT_S), "the receiver does not hear"
        return self

    def __exit__(self, *_: object) -> None:
        self.receiver.stop()
        self._thread.join(WAIT_S)
        self.receiver.close()
        self.app.close()

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        if event["type"] == "task-succeeded":
            self.succeeded.add(event["uuid"])

    def of(self, kind: str, **fields: Any) -> list[Event]:
        """The events of one type, with these fields."""
        return [
            event
            for event in list(self.events)
            if event["type"] == kind
            and all(event.get(name) == value for name, value in fields.items())
        ]

    def wait(self, wanted: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> None:
        """Wait until it was heard."""
        wait_until(wanted, timeout_s=timeout_s, what=what)

    def wait_for(self, kind: str, count: int = 1, **fields: Any) -> list[Event]:
        """Wait for so many events of a type, and give them."""
        self.wait(lambda: len(self.of(kind, **fields)) >= count, f"{count} {kind} {fields or ''}")
        return self.of(kind, **fields)
