"""Commands about the life of a worker: events, heartbeats, elections, its end."""

from __future__ import annotations

from typing import Any

from umbel.app.commands import NoReply, NotHere
from umbel.worker.control.commands.registry import command
from umbel.worker.control.panel import CommandState

NO_EVENTS = "event dispatcher unavailable"


@command(anywhere=True)
def enable_events(state: CommandState, **_: Any) -> dict[str, str]:
    """Tell what becomes of tasks."""
    events = state.worker.events
    if events is None:
        return {"error": NO_EVENTS}
    if not events.enable_group("task"):
        return {"ok": "task events already enabled"}
    state.worker.task_events.refresh()
    return {"ok": "task events enabled"}


@command(anywhere=True)
def disable_events(state: CommandState, **_: Any) -> dict[str, str]:
    """Tell no longer what becomes of tasks."""
    events = state.worker.events
    if events is None:
        return {"error": NO_EVENTS}
    if not events.disable_group("task"):
        return {"ok": "task events already disabled"}
    state.worker.task_events.refresh()
    return {"ok": "task events disabled"}


@command(reads=True, anywhere=True)
def heartbeat(state: CommandState, **_: Any) -> dict[str, str] | None:
    """Send a heartbeat now."""
    from umbel.worker.runtime.steps.heart import vital_signs

    worker = state.worker
    if worker.events is None:
        return {"error": NO_EVENTS}
    if worker.events.beat_interval_s is None:
        # Who beats only once is taken for lost a moment later.
        return {"error": "this node sends no heartbeats (--without-heartbeat)"}
    signs = vital_signs(worker, worker.plan.heartbeat_interval_s)
    worker.events.send("worker-heartbeat", **signs)
    return None


@command(anywhere=True)
def election(
    state: CommandState,
    id: Any = None,  # noqa: A002 - the name on the wire
    topic: Any = None,
    action: Any = None,
    **_: Any,
) -> None:
    """Choose one node that carries the action out."""
    gossip = state.worker.gossip
    if state.worker.options.without_gossip:
        raise NotHere("gossip is off here (--without-gossip): this node takes no part")
    gossip.request(id, topic, action)


@command(anywhere=True)
def shutdown(state: CommandState, msg: Any = "", **_: Any) -> None:
    """Stop warm: running tasks end first."""
    state.worker.stop()
    raise NoReply
