"""Revoking tasks: a broadcast to every worker.

The message is the control command `revoke` on the pidbox exchange. Workers remember the ids and
skip them; with `terminate` a running task is ended. No reply is asked for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kombu import Exchange

if TYPE_CHECKING:
    from umbel.app.publish import Link
    from umbel.app.umbel import Umbel

# How long an undelivered command keeps its meaning.
COMMAND_LIFE_S = 300.0


def revoke(
    app: Umbel, task_ids: list[str], *, terminate: bool = False, signal: str | int | None = None
) -> Any:
    """Ask every worker to revoke these tasks."""
    control = getattr(app, "control", None)
    if control is not None:
        return control.revoke(task_ids, terminate=terminate, signal=signal)
    arguments = {
        "task_id": task_ids,
        "terminate": terminate,
        "signal": signal if signal is not None else "SIGTERM",
    }
    return broadcast(app, "revoke", arguments)


def broadcast(app: Umbel, method: str, arguments: dict[str, Any]) -> None:
    """Publish a control command to all workers, without asking for replies."""
    name = f"{app.conf.control_exchange}.pidbox"
    exchange = Exchange(name, type="fanout", durable=False, delivery_mode="persistent")
    message = {
        "method": method,
        "arguments": arguments,
        "destination": None,
        "pattern": None,
        "matcher": None,
    }

    def publish(link: Link) -> None:
        link.producer.publish(
            message,
            exchange=exchange,
            routing_key="",
            declare=[exchange],
            headers={"clock": 1, "expires": time.time() + COMMAND_LIFE_S},
            serializer="json",
            delivery_mode=2,
        )

    app.publisher.run(publish)
