"""One task: what is known of it, its attempts, the events behind them, and its family."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from umbel.cluster.task_states import READY_STATES, place, state_of
from umbel.dashboard.live.executions import Execution
from umbel.dashboard.pages.page import Facts, NotFound, Page, Params
from umbel.dashboard.pages.tasks import row
from umbel.dashboard.search import WAITING, shown_error
from umbel.dashboard.texts import shown

if TYPE_CHECKING:
    from umbel.app.events.state import Task
    from umbel.dashboard.site import Site

TREE_MAX: Final = 200
TREE_DEPTH_MAX: Final = 20
UUID_CHARS_MAX: Final = 1_000


def facts(site: Site, params: Params, details: bool = False) -> Facts:
    """Everything that is known; `NotFound` for a task that is not, or not any more."""
    uuid = params.get("uuid", "")[:UUID_CHARS_MAX]
    state = site.live.state
    task = state.tasks.get(uuid)
    if task is None:
        raise NotFound(
            f"no task {shown(uuid, 80)!r} is remembered: it is unknown, or so old that it was "
            f"forgotten ({state.evicted_tasks:,} were)"
        )
    now = time.time()
    with site.live.lock:
        attempts = [attempt(one, details) for one in site.live.executions.of_task(uuid)]
    # A state of the user's own outlasts a revocation.
    terminated = task.revoked is not None and not task.running and task.state not in WAITING
    ended = task.state in READY_STATES or terminated
    return {
        "task": {
            **row(task, now, details),
            "args": task.args if details else None,
            "kwargs": task.kwargs if details else None,
            "result": task.result if details else None,
            "exception": shown_error(task.exception, details),
            "traceback": task.traceback if details else None,
            "client": task.client,
            "exchange": task.exchange,
            "routing_key": task.routing_key,
            "eta": task.eta,
            "expires": task.expires,
            "root_id": task.root_id,
            "parent_id": task.parent_id,
            "sent": task.sent,
            "received": task.received,
            "started": task.started,
            "ended": task.succeeded or task.failed or task.revoked if ended else None,
            "terminated": task.terminated,
            "signum": task.signum,
            "expired": task.expired,
            "extra": task.extra if details else None,
            "is_ended": ended,
            "is_running": task.running,
        },
        "attempts": attempts,
        "details": details,
        "events": _events(task),
        "tree": _tree(site, task, now, details),
        "condition": site.live.condition,
    }


def attempt(one: Execution, details: bool) -> dict[str, Any]:
    """One execution."""
    return {
        "number": one.number,
        "worker": one.worker,
        "received": one.received,
        "started": one.started,
        "ended": one.ended,
        "clocks": [one.received_clock, one.started_clock, one.ended_clock],
        "outcome": one.outcome or ("STARTED" if one.started is not None else "RECEIVED"),
        "runtime_s": one.runtime_s,
        "error": shown_error(one.exception, details),
    }


def _events(task: Task) -> list[dict[str, Any]]:
    """The last event of each kind, causes before effects."""
    return [
        {
            "type": one.type,
            "state": state_of(one),
            "clock": one.clock,
            "timestamp": one.timestamp,
            "hostname": one.hostname,
        }
        for one in sorted(task.records.values(), key=place)
    ]


def _tree(site: Site, task: Task, now: float, details: bool) -> list[dict[str, Any]]:
    """The family of a task from its first known ancestor on, as rows with a depth."""
    state = site.live.state
    root, seen = task, {task.uuid}
    while root.parent_id is not None and root.parent_id not in seen:
        above = state.tasks.get(root.parent_id)
        if above is None:
            break
        seen.add(above.uuid)
        root = above
    rows: list[dict[str, Any]] = []
    todo = [(root, 0)]
    listed: set[str] = set()
    while todo and len(rows) < TREE_MAX:
        one, depth = todo.pop()
        if one.uuid in listed:
            continue
        listed.add(one.uuid)
        rows.append({**row(one, now, details), "depth": depth, "is_this": one.uuid == task.uuid})
        if depth < TREE_DEPTH_MAX:
            todo.extend((child, depth + 1) for child in reversed(state.children(one.uuid)))
    return rows if len(rows) > 1 else []


PAGE: Final = Page("task", "/tasks/{uuid:path}", "Task", facts, ("detail",), 0.5)
