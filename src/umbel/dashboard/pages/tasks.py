"""The tasks that are remembered: found by a search, in causal order, page by page."""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING, Any, Final

from umbel.cluster.task_states import CUSTOM, position, state_of
from umbel.dashboard.pages.page import Facts, Page, Params, whole
from umbel.dashboard.search import SearchError, parse, runtime_of, shown_error, wait_of
from umbel.dashboard.texts import shown

if TYPE_CHECKING:
    from umbel.app.events.state import Task
    from umbel.dashboard.site import Site

PAGE_ROWS: Final = 50
PAGE_ROWS_MAX: Final = 500
# `last`: by the time of the last change, the latest first. `first`: as they began, causes first.
SORTS: Final = ("last", "first", "runtime")
STATES_SHOWN: Final = ("RECEIVED", "STARTED", "SUCCESS", "FAILURE", "RETRY", "REVOKED")


def facts(site: Site, params: Params, details: bool = False) -> Facts:
    """The tasks of one page of results; a query that makes no sense is told, not raised."""
    query = params.get("q", "")
    rows_max = whole(params, "rows", PAGE_ROWS, 1, PAGE_ROWS_MAX)
    page = whole(params, "page", 1, 1, 10_000)
    sort = params.get("sort", "last")
    sort = sort if sort in SORTS else "last"
    error = ""
    found: list[Task] = []
    tasks = list(site.live.state.tasks.values())
    try:
        search = parse(query, own_states=lambda: _own_states(site, tasks), details=details)
        found = [task for task in tasks if search(task)] if search.tests else tasks
    except SearchError as exc:
        error = str(exc)
    end = page * rows_max
    chosen = _sorted(found, sort, end)[end - rows_max :]
    now = time.time()
    return {
        "query": query[:500],
        "sort": sort,
        "error": error,
        "count": len(found),
        "known": len(tasks),
        "forgotten": site.live.state.evicted_tasks,
        "page": page,
        "pages": max(1, -(-len(found) // rows_max)),
        "rows": rows_max,
        "tasks": [row(task, now, details) for task in chosen],
        "details": details,
        "condition": site.live.condition,
        "task_events": site.live.figures.task_events.total,
    }


def _sorted(found: list[Task], sort: str, limit: int) -> list[Task]:
    """The first of them; only as many are sorted as are shown."""
    if sort == "first":
        return heapq.nsmallest(limit, found, key=_first)
    if sort == "runtime":
        return heapq.nlargest(limit, found, key=lambda task: runtime_of(task) or -1.0)
    return heapq.nlargest(limit, found, key=_last)


def _own_states(site: Site, tasks: list[Task]) -> set[str]:
    """The states of the user's own that were seen: all that are kept, and those of now."""
    with site.live.lock:
        kept = set(site.live.own_states)
    last = (task.records.get(CUSTOM) for task in tasks)
    return kept | {state_of(one) for one in last if one is not None}


def _last(task: Task) -> tuple[Any, ...]:
    """By the time that is shown; the clock decides only between equal times."""
    return (task.timestamp or 0.0, () if task.last is None else position(task.last), task.uuid)


def _first(task: Task) -> tuple[Any, ...]:
    return () if task.first is None else (position(task.first), task.uuid)


def row(task: Task, now: float, details: bool) -> dict[str, Any]:
    """A task in one line."""
    return {
        "uuid": task.uuid,
        "name": task.name,
        "state": task.state,
        "worker": task.worker,
        "queue": task.queue,
        "retries": task.retries or 0,
        "runtime_s": runtime_of(task, now),
        "wait_s": wait_of(task, now),
        "timestamp": task.timestamp,
        "clock": task.clock,
        "call": call_text(task) if details else None,
        "error": shown(shown_error(task.exception, details), 300) or None,
    }


def call_text(task: Task, chars_max: int = 120) -> str:
    """What a task was called with, as its sender lets it be seen."""
    args, kwargs = task.args or "", task.kwargs or ""
    args = "" if args in ("()", "[]") else args
    kwargs = "" if kwargs == "{}" else kwargs
    return shown(" ".join(part for part in (args, kwargs) if part), chars_max)


PAGE: Final = Page("tasks", "/tasks", "Tasks", facts, ("results",), 1.0)
