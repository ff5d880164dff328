"""Commands that change what a worker consumes."""

from __future__ import annotations

from typing import Any

from umbel.cluster.pauses import is_queue
from umbel.worker.control.commands.registry import command
from umbel.worker.control.panel import CommandState

OPTIONS = frozenset(
    {"durable", "auto_delete", "exclusive", "queue_arguments", "max_priority", "message_ttl",
     "expires", "max_length"}
)  # fmt: skip
KINDS = ("direct", "topic", "fanout", "headers")
LATER = "{0} was {1} by a command with a later time: is the clock of your host behind?"


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
    paused = ", which is paused" if name in state.worker.consumption.paused else ""
    return {"ok": f"add consumer {name}{paused}"}


@command
def cancel_consumer(state: CommandState, queue: Any = None, **_: Any) -> dict[str, str]:
    """Consume a queue no longer."""
    name = _name(queue)
    state.worker.consumption.drop(name)
    return {"ok": f"no longer consuming from {name}"}


@command(stamped=True)
def pause(state: CommandState, queue: Any = None, stamp: Any = None, **_: Any) -> dict[str, str]:
    """Take no more messages from a queue until `resume`; what was taken goes on.

    With the time at which it was told, `stamp`, for the whole cluster, later joiners included.
    """
    name, consumption = _name(queue), state.worker.consumption
    if stamp is not None and not consumption.say(name, stamp, paused=True):
        return {"error": LATER.format(name, "resumed")}
    if not consumption.pause(name):
        return {"ok": f"{name} is not consumed here"}
    return {"ok": f"{name} paused"}


@command(stamped=True)
def resume(state: CommandState, queue: Any = None, stamp: Any = None, **_: Any) -> dict[str, str]:
    """Take messages from a paused queue again; with a `stamp` in the whole cluster."""
    name, consumption = _name(queue), state.worker.consumption
    if stamp is not None and not consumption.say(name, stamp, paused=False):
        return {"error": LATER.format(name, "paused")}
    if not consumption.resume(name):
        return {"ok": f"{name} was not paused here"}
    return {"ok": f"{name} resumed"}


def _name(queue: Any) -> str:
    if not is_queue(queue):
        raise ValueError(f"queue {queue!r:.300}: give the name of a queue")
    return str(queue)
