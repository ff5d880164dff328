"""Nodes that are not there: what would be broadcast is noted, and prepared replies come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from umbel.app.control import Control

Sent = tuple[str, dict[str, Any]]


class FakeCluster:
    """Answers each command with `replies[command]`, or those of `""`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replies: dict[str, list[dict[str, Any]]] = {}
        self.sent: list[Sent] = []
        self.options: list[dict[str, Any]] = []
        cluster = self

        def broadcast(
            self: Control, command: str, arguments: Any = None, destination: Any = None, **more: Any
        ) -> Any:
            cluster.sent.append((command, dict(arguments or {})))
            cluster.options.append({"destination": destination, **more})
            found = cluster.replies.get(command, cluster.replies.get("", []))
            callback: Callable[[Any], None] | None = more.get("callback")
            for reply in found if callback is not None else ():
                callback(reply)
            return found if more.get("reply") else None

        monkeypatch.setattr(Control, "broadcast", broadcast)

    def answer(self, answer: Any, *nodes: str, command: str = "") -> None:
        """Have these nodes answer the same."""
        self.replies[command] = [{node: answer} for node in nodes or ("w1@h",)]

    @property
    def only(self) -> Sent:
        (sent,) = self.sent
        return sent
