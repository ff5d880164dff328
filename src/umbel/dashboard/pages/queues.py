"""Queues: how long they are, how they grow, who takes from them, what is paused."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from umbel.dashboard.pages.page import Facts, Page, Params

if TYPE_CHECKING:
    from umbel.dashboard.live.polling import NodeAnswer, QueueFacts
    from umbel.dashboard.site import Site

CONSUMERS_SHOWN_MAX: Final = 20


def facts(site: Site, params: Params, details: bool = False) -> Facts:
    """Every queue that somebody consumes from, sends to, or the application names."""
    site.polling.want()
    answers = site.polling.nodes()
    with site.live.lock:
        heard = set(site.live.figures.queues)
    rows = [
        _row(site, one, answers, name in heard)
        for name, one in sorted(site.polling.queues().items())
    ]
    return {
        "condition": site.live.condition,
        "trouble": site.polling.trouble,
        "queues": rows,
        "waiting": sum(row["length"] or 0 for row in rows),
        "nodes": len(answers),
    }


def _row(
    site: Site, one: QueueFacts, answers: dict[str, NodeAnswer], is_heard: bool
) -> dict[str, Any]:
    consumers = sorted(name for name, answer in answers.items() if one.name in answer.queues)
    paused = sorted(name for name, answer in answers.items() if one.name in answer.paused)
    lengths = [sample.length for sample in list(one.samples)]
    growth, sent = one.rates()
    # Without events of senders nobody can tell growth from what was sent and taken.
    sent = sent if is_heard else None
    taken = None if growth is None or sent is None else max(0.0, sent - growth)
    oldest = _oldest(site, one)
    return {
        "name": one.name,
        "length": one.length,
        "growth_per_s": growth,
        "sent_per_s": sent,
        "taken_per_s": taken,
        "lengths": lengths,
        "oldest": oldest,
        "consumers": consumers[:CONSUMERS_SHOWN_MAX],
        "consumers_count": len(consumers),
        "paused": bool(paused),
        "paused_on": paused[:CONSUMERS_SHOWN_MAX],
        "paused_everywhere": bool(paused) and set(consumers) <= set(paused),
        "stuck": bool(one.length) and not consumers and not paused,
    }


def _oldest(site: Site, one: QueueFacts) -> dict[str, Any] | None:
    found = one.oldest
    if found is None:
        return None
    task = site.live.state.tasks.get(found.uuid) if found.uuid else None
    at = found.timestamp if task is None or task.sent is None else task.sent
    age_s = None if at is None else max(0.0, time.time() - at)
    return {"uuid": found.uuid, "task": found.task, "age_s": age_s, "known": task is not None}


PAGE: Final = Page("queues", "/queues", "Queues", facts, ("queues",))
