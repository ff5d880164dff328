"""The timeline: one lane per worker, executions as bars, and what is known to be caused by what.

A browser asks for what changed after a version and keeps the rest. Wall times are the senders';
the logical order is that of their clocks. Arrows are given where both ends are known: from the
sending of a task to its receipt, and from a parent's execution to its child's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from umbel.dashboard.pages.page import Facts, Page, Params, whole
from umbel.dashboard.texts import shown

if TYPE_CHECKING:
    from umbel.dashboard.live.executions import Execution
    from umbel.dashboard.site import Site

BARS: Final = 5_000
BARS_MAX: Final = 20_000
NAME_CHARS_MAX: Final = 100


def facts(site: Site, params: Params, details: bool = False) -> Facts:
    """What changed after `after`, at most `bars` executions: the latest."""
    after = whole(params, "after", 0, 0, 2**53)
    limit = whole(params, "bars", BARS, 1, BARS_MAX)
    live = site.live
    with live.lock:
        version = live.executions.version
        # A version from before the dashboard was started anew.
        after = after if after <= version else 0
        bars = [_bar(site, one) for one in live.executions.since(after, limit)]
    alive = {worker.hostname for worker in live.state.alive_workers()}
    return {
        "version": version,
        "after": after,
        "now": site.wall_time(),
        "bars": bars,
        "alive": sorted(alive),
        "condition": live.condition,
    }


def _bar(site: Site, one: Execution) -> dict[str, Any]:
    task = site.live.state.tasks.get(one.uuid)
    return {
        "n": one.number,
        "id": one.uuid,
        "name": shown(one.name or (task.name if task is not None else None), NAME_CHARS_MAX),
        "worker": one.worker,
        "parent": one.parent,
        "sent": one.sent,
        "sent_clock": one.sent_clock,
        "received": one.received,
        "started": one.started,
        "ended": one.ended,
        "clocks": [one.received_clock, one.started_clock, one.ended_clock],
        "outcome": one.outcome,
    }


PAGE: Final = Page("timeline", "/timeline", "Timeline", facts)
