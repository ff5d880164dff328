"""Commands that change what a worker consumes."""

from __future__ import annotations

from typing import Any

from umbel.worker.commands.registry import command
from umbel.worker.panel import CommandState

OPTIONS = frozenset(
    {"durable", "auto_delete", "exclusive", "queue_arguments", "max_priority", "message_ttl",
     "expires", "max_length"}
)  # fmt: skip
KINDS = ("direct", "topic", "fanout", "headers")
NAME_BYTES_MAX = 255


@command
def add_consumer(
    state: CommandState,
    queue: Any = None,
    exchange: Any = None,
    exchange_type: Any = None,
    routing_key: Any = None,
    **options: Any,
) -> dict[str, str]:
    """Consume one more queue."""
    name, kind = _name(queue), exchange_type or "direct"
    if kind not in KINDS and not str(kind).startswith("x-"):
        raise ValueError(f"exchange type {kind!r:.200}: give one of {', '.join(KINDS)}")
    chosen = {key: value for key, value in options.items() if key in OPTIONS}
    state.worker.consumption.add(
        name,
        exchange=exchange or name,
        exchange_type=kind,
        routing_key=routing_key or name,
        **chosen,
    )
    return {"ok": f"add consumer {name}"}


@command
def cancel_consumer(state: CommandState, queue: Any = None, **_: Any) -> dict[str, str]:
    """Consume a queue no longer."""
    name = _name(queue)
    state.worker.consumption.drop(name)
    return {"ok": f"no longer consuming from {name}"}


@command
def pause(state: CommandState, queue: Any = None, **_: Any) -> dict[str, str]:
    """Take no more messages from a queue until `resume`; what was taken goes on."""
    name = _name(queue)
    if not state.worker.consumption.pause(name):
        return {"ok": f"{name} is not consumed here"}
    return {"ok": f"{name} paused"}


@command
def resume(state: CommandState, queue: Any = None, **_: Any) -> dict[str, str]:
    """Take messages from a paused queue again."""
    name = _name(queue)
    if not state.worker.consumption.resume(name):
        return {"ok": f"{name} was not paused here"}
    return {"ok": f"{name} resumed"}


def _name(queue: Any) -> str:
    if not isinstance(queue, str) or not 0 < len(queue.encode()) <= NAME_BYTES_MAX:
        raise ValueError(f"queue {queue!r:.300}: give the name of a queue")
    return queue
