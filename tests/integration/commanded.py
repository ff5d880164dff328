"""A worker in this process that is commanded: its tasks, and what it answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tests.inside import Inside
from umbel import Umbel

NAME = "inside@test"

Start = Callable[..., Inside]


class Tasks:
    """What the tasks of a worker in this process did."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.hold = threading.Event()
        self.holding = threading.Event()
        self.commands: list[Any] = []

    def register(self, app: Umbel) -> None:
        @app.task(name="note")
        def note(value: Any = None) -> None:
            self.ran.append(value)

        @app.task(name="hold")
        def hold() -> None:
            self.holding.set()
            self.hold.wait(30)

        @app.task(name="burn")
        def burn() -> None:
            self.holding.set()
            while not self.hold.is_set():
                sum(range(1_000))

        @app.task(name="spin")
        def spin(seconds: float) -> str:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                time.sleep(0.005)
            return "to the end"

        @app.control_command
        def count(state: Any, **arguments: Any) -> dict[str, int]:
            self.commands.append(arguments)
            return {"ok": len(self.commands)}

        @app.control_command
        def stall(state: Any) -> str:
            self.holding.set()
            self.hold.wait(30)
            return "late"


def tell(inside: Inside, command: str, **arguments: Any) -> Any:
    """What the worker answers; None when it does not."""
    replies = inside.client.control.broadcast(command, arguments, reply=True, timeout=5, limit=1)
    return replies[0][NAME] if replies else None


def silent(inside: Inside, command: str, **arguments: Any) -> bool:
    """Whether nothing is answered, while the worker answers others."""
    control = inside.client.control
    return control.broadcast(command, arguments, reply=True, timeout=0.3, limit=1) == []
