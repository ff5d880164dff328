"""The cluster: every node, what it does and how it is; the whole in some numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from umbel.dashboard.live.figures import OUTCOMES, NodeFigures
from umbel.dashboard.pages.page import Facts, Page, Params
from umbel.dashboard.texts import shown

if TYPE_CHECKING:
    from umbel.app.events.state import Worker
    from umbel.dashboard.live.polling import NodeAnswer
    from umbel.dashboard.site import Site

# A node that is lost or has left is shown for so long, fading.
GONE_S: Final = 600.0
FADE_S: Final = 60.0
STEP_S: Final = 5
NODES_SHOWN_MAX: Final = 500
TYPES_SHOWN_MAX: Final = 50
QUIET_S: Final = 5.0
SKEW_MAX_S: Final = 1.0


def facts(site: Site, params: Params, details: bool = False) -> Facts:
    """Everything that the page tells."""
    site.polling.want()
    live = site.live
    with live.lock:
        now_s = live.now_s()
        series = live.figures.series.columns(now_s, STEP_S)
        types = _types(site, now_s)
        nodes = _nodes(site, now_s)
        totals = _totals(site, nodes, now_s)
    listed = nodes[:NODES_SHOWN_MAX]
    return {
        "condition": live.condition,
        "totals": totals,
        "series": {"step_s": STEP_S, "kinds": [*OUTCOMES, "sent"], "per_s": series},
        "nodes": listed,
        "nodes_more": len(nodes) - len(listed),
        "types": types,
        "remarks": _remarks(site, nodes, now_s),
    }


def _totals(site: Site, nodes: list[dict[str, Any]], now_s: float) -> dict[str, Any]:
    live, figures = site.live, site.live.figures
    alive = [node for node in nodes if node["state"] == "online"]
    sizes = [node["pool_size"] for node in alive if node["pool_size"] is not None]
    active = [node["active"] for node in alive if node["active"] is not None]
    return {
        "nodes_alive": len(alive),
        "nodes": len(nodes),
        "running": sum(active),
        "slots": sum(sizes) if sizes else None,
        "ended_per_s": figures.ended.per_s(now_s),
        "failed_per_s": figures.failed.per_s(now_s),
        "failed": figures.failed.total,
        "sent_per_s": figures.sent.per_s(now_s),
        "events_per_s": figures.events.per_s(now_s),
        "events": live.state.event_count,
        "tasks_known": len(live.state.tasks),
        "tasks_forgotten": live.state.evicted_tasks,
        "missing": live.missing_count,
        "refused": live.refused_count,
        "reconnects": live.reconnect_count,
        "disagreements": live.elections.disagreements,
        "clock": live.app.clock.value,
    }


def _types(site: Site, now_s: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, one in site.live.figures.types.items():
        run, run95 = one.runtimes.percentiles(0.5, 0.95)
        wait, wait95 = one.waits.percentiles(0.5, 0.95)
        rows.append({
            "name": name, "per_s": one.ended.per_s(now_s), "ended": one.ended.total,
            "succeeded": one.counts.get("SUCCESS", 0), "failed": one.counts.get("FAILURE", 0),
            "retried": one.counts.get("RETRY", 0), "revoked": one.counts.get("REVOKED", 0),
            "runtime_p50_s": run, "runtime_p95_s": run95,
            "wait_p50_s": wait, "wait_p95_s": wait95,
        })  # fmt: skip
    # A quiet order: it does not change while one reads.
    rows.sort(key=lambda row: (-row["ended"], row["name"]))
    return sorted(rows[:TYPES_SHOWN_MAX], key=lambda row: row["name"])


def _nodes(site: Site, now_s: float) -> list[dict[str, Any]]:
    live, answers = site.live, site.polling.nodes()
    won: dict[str, list[str]] = {}
    for topic, election in live.elections.leaders().items():
        won.setdefault(election.winners[0], []).append(topic)
    rows = []
    known = live.state.workers
    for name, worker in known.items():
        row = _row(worker, live.figures.nodes.get(name), answers.get(name), now_s)
        if row is not None:
            row["leads"] = sorted(won.get(name, ()))[:3]
            rows.append(row)
    rows += [_silent(name, answers[name]) for name in answers.keys() - set(known)]
    rows.sort(key=lambda row: (row["state"] not in ("online", "silent"), row["name"]))
    return rows


def _row(
    worker: Worker, figures: NodeFigures | None, answer: NodeAnswer | None, now_s: float
) -> dict[str, Any] | None:
    heard_ago_s = None if worker.heard_at is None else max(0.0, now_s - worker.heard_at)
    left = figures is not None and figures.left
    state = "online" if worker.alive else ("left" if left else "lost")
    if state != "online" and (heard_ago_s is None or heard_ago_s > GONE_S):
        return None
    size = None if answer is None else answer.pool_size
    active = worker.active if state == "online" else None
    return {
        "name": worker.hostname,
        "state": state,
        "fading": state != "online" and (heard_ago_s or 0) > FADE_S,
        "leads": [],
        "clock": worker.clock,
        "skew_s": worker.skew_s,
        "skewed": worker.skew_s is not None and abs(worker.skew_s) > SKEW_MAX_S,
        "heard_ago_s": heard_ago_s,
        "freq_s": worker.freq,
        "active": active,
        "pool_size": size,
        "saturation": None if not size or active is None else min(1.0, active / size),
        "prefetch": None if answer is None else answer.prefetch,
        "uptime_s": None if answer is None else answer.uptime_s,
        "queues": [] if answer is None else list(answer.queues[:20]),
        "per_s": 0.0 if figures is None else figures.ended.per_s(now_s),
        "failed_per_s": 0.0 if figures is None else figures.failed.per_s(now_s),
        "processed": worker.processed,
        "load": worker.loadavg[0] if worker.loadavg else None,
        "lost_events": worker.lost,
        "software": f"{(worker.sw_ident or '').removeprefix('py-')} {worker.sw_ver or ''}".strip(),
        "pid": worker.pid,
        "task_events": figures is None or not figures.is_silent_on_tasks,
    }


def _silent(name: str, answer: NodeAnswer) -> dict[str, Any]:
    """A node that answers questions and sends no events at all."""
    return {
        "name": name, "state": "silent", "fading": False, "leads": [], "clock": answer.clock,
        "skew_s": None, "skewed": False, "heard_ago_s": None, "freq_s": None, "active": None,
        "pool_size": answer.pool_size, "saturation": None, "prefetch": answer.prefetch,
        "uptime_s": answer.uptime_s, "queues": list(answer.queues[:20]), "per_s": 0.0,
        "failed_per_s": 0.0, "processed": None, "load": None, "lost_events": None,
        "software": "", "pid": None, "task_events": False,
    }  # fmt: skip


def _remarks(site: Site, nodes: list[dict[str, Any]], now_s: float) -> list[dict[str, str]]:
    """What one should know before one believes an empty table."""
    live, found = site.live, []

    def say(kind: str, text: str, action: str = "") -> None:
        found.append({"kind": kind, "text": text, "action": action})

    if live.elections.disagreements:
        say("bad", "Nodes have named different winners of one election: see Elections.")
    if not nodes and live.is_connected and now_s - live.began_s > QUIET_S:
        say("warn", "No node was heard of yet. A worker is heard within seconds of its start; "
            "one that runs without heartbeats and events shows only when it answers.")  # fmt: skip
    silent = [node["name"] for node in nodes if node["state"] == "silent"]
    if silent:
        told = "answers, but sends" if len(silent) == 1 else "answer, but send"
        say("warn", f"{_names(silent)} {told} no events: started without heartbeats.")
    mute = [n["name"] for n in nodes if n["state"] == "online" and not n["task_events"]]
    if mute:
        say("warn", f"{_names(mute)} run{'s' if len(mute) == 1 else ''} tasks without telling: "
            "start workers with -E, or switch task events on.", "enable-events")  # fmt: skip
    skewed = [node["name"] for node in nodes if node["skewed"] and node["state"] == "online"]
    if skewed:
        say("warn", f"The wall clock of {_names(skewed)} is off by more than a second.")
    missing = live.missing_count
    if missing:
        say("info", f"{missing:,} event{'s' if missing != 1 else ''} never came, by the numbers.")
    return found


def _names(names: list[str]) -> str:
    told = ", ".join(shown(name, 60) for name in names[:3])
    return told if len(names) <= 3 else f"{told} and {len(names) - 3} more"


PAGE: Final = Page("cluster", "/", "Cluster", facts, ("summary", "nodes", "types"))
