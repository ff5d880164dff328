"""What `umbel doctor` finds out about nodes, their events and clocks, queues and revocations.

Pure, as `findings` is. The thresholds are those of the parts that they judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from umbel.cli.findings import FAIL, WARN, Finding, fail, ok, warn
from umbel.cli.plain import plain
from umbel.cli.reply_tables import NAMES_SHOWN_MAX, error_in, names
from umbel.cli.rollcall import LEFT, NO_ANSWER, NO_EVENTS, SILENT, NodeStatus, refused_text
from umbel.wire.signing import SIGNING_REASONS

# A node obeys no command that expired longer ago than this (`umbel.worker.control.panel`).
SKEW_FAIL_S = 5.0
SKEW_WARN_S = 1.0
QUEUES_SHOWN_MAX = 20
_LOG = "its log shows the first of each kind"
# The check that refused input belongs to, and what to do about it.
REFUSED_ADVICE = {
    "tasks": ("queues", "its log names each: import the missing modules, or correct the sender"),
    "control": ("nodes", f"{_LOG}: stop what publishes them, or choose another control_exchange"),
    "events": ("events", f"{_LOG}: stop what publishes them, or choose another event_exchange"),
    "replies": ("nodes", f"{_LOG}: look for a program that replies in another format"),
    "greetings": ("revocations", f"{_LOG}: use one version for all workers, set clocks by NTP"),
}
SIGNING_ADVICE = (
    "give all workers and clients the same control_signing_key, and set their clocks by NTP"
)


@dataclass(slots=True)
class Census:
    """Who was heard, and who answered."""

    rows: list[NodeStatus] = field(default_factory=list)
    took_s: dict[str, float] = field(default_factory=dict)  # of each who answered the ping
    answers: dict[str, Any] = field(default_factory=dict)
    twice: set[str] = field(default_factory=set)
    skews_s: dict[str, float] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)  # under one name at a time
    waited_s: float = 0.0


def judge_nodes(census: Census, place: str) -> Iterator[Finding]:
    """Who answers, who is heard and does not, whose names are not their own."""
    fine = sorted(node for node in census.took_s if error_in(census.answers.get(node)) is None)
    if fine:
        shown = ", ".join(
            f"{plain(node, 64)} ({census.took_s[node] * 1000:.0f} ms)"
            for node in fine[:NAMES_SHOWN_MAX]
        )
        more = len(fine) - NAMES_SHOWN_MAX
        text = f"{len(fine)} answered: {shown}" + (f" and {more} more" if more > 0 else "")
        yield ok("nodes", text, details={"answered": fine})
    elif not census.answers:
        yield fail(
            "nodes",
            f"nobody answered on {place}",
            "start a worker, or check that it uses this broker, virtual host or "
            "database, and worker_enable_remote_control",
        )
    for node in sorted(census.answers.keys() - set(fine)):
        yield warn(
            "nodes",
            f"{plain(node, 64)} answered the ping with an error "
            f"({plain(error_in(census.answers[node]))})",
            "look at its control_allow",
        )
    yield from _silent(census)
    yield from _duplicates(census)
    yield from _refused(census)


def _silent(census: Census) -> Iterator[Finding]:
    mute = [row.hostname for row in census.rows if row.state == NO_ANSWER]
    if mute:
        yield fail(
            "nodes",
            f"{names(mute)} sent heartbeats and did not answer",
            "stuck, or without remote control, or with another control_exchange, or "
            "control_signing refuses you",
            {"silent": mute},
        )
    gone = [row.hostname for row in census.rows if row.state in (SILENT, LEFT)]
    if gone:
        yield warn("nodes", f"{names(gone)} went away while this looked")


def _duplicates(census: Census) -> Iterator[Finding]:
    several = sorted(census.twice | {name for name, lives in census.lives.items() if lives > 1})
    if several:
        yield fail(
            "nodes",
            f"several nodes are called {names(several)}",
            "give every worker a name of its own (-n)",
            {"duplicates": several},
        )


def _refused(census: Census) -> Iterator[Finding]:
    for row in census.rows:
        if row.refused_queues:
            yield fail(
                "queues",
                f"the broker does not let {plain(row.hostname, 64)} consume "
                f"{names(list(row.refused_queues))}",
                "'umbel inspect stats' shows the reason",
                {"node": row.hostname, "refused_queues": list(row.refused_queues)},
            )


def judge_refused(rows: Sequence[NodeStatus]) -> Iterator[Finding]:
    """What nodes were sent that they could not read or did not believe, since they started."""
    for row in rows:
        for source, reasons in row.refused.items():
            check, advice = REFUSED_ADVICE[source]
            if not SIGNING_REASONS.isdisjoint(reasons):
                advice = f"{SIGNING_ADVICE}; otherwise {advice}"
            yield warn(
                check,
                f"{plain(row.hostname, 64)} refused {refused_text(source, reasons)}",
                advice,
                {"node": row.hostname, "source": source, "refused": dict(reasons)},
            )


def judge_events(census: Census) -> Iterator[Finding]:
    """Who sends heartbeats, and who sends events of tasks."""
    quiet = [row.hostname for row in census.rows if row.state == NO_EVENTS]
    heard = [row for row in census.rows if row.state != NO_EVENTS]
    if quiet:
        yield warn(
            "events",
            f"{names(quiet)} sent no heartbeat in {census.waited_s:g} s",
            "started with --without-heartbeat, or with another event_exchange, or beats less often",
        )
    off = [row.hostname for row in heard if row.task_events is False]
    on = [row.hostname for row in heard if row.task_events is True]
    if off and on:
        yield warn(
            "events",
            f"events of tasks come from {names(on)}, not from {names(off)}",
            "'umbel control enable_events', or start workers with -E",
            {"on": on, "off": off},
        )
    elif off:
        yield ok(
            "events",
            "heartbeats are heard; events of tasks are off",
            "to see tasks in monitors, 'umbel control enable_events', or start workers with -E",
            {"on": on, "off": off},
        )
    elif on:
        yield ok(
            "events", "heartbeats are heard, events of tasks are on", details={"on": on, "off": off}
        )
    elif heard:
        yield ok(
            "events",
            "heartbeats are heard; whether events of tasks are on, these nodes do not tell",
        )
    losing = [row.hostname for row in heard if row.lost]
    if losing:
        yield warn(
            "events",
            f"events were lost on {names(losing)}",
            "the broker was away, or event_buffer_max is too small",
        )


def judge_clocks(skews_s: Mapping[str, float]) -> Iterator[Finding]:
    """How far the wall clocks of nodes are from the one here."""
    for node, skew_s in sorted(skews_s.items()):
        size = abs(skew_s)
        if size <= SKEW_WARN_S:
            continue
        side = "ahead of" if skew_s > 0 else "behind"
        verdict = FAIL if size > SKEW_FAIL_S else WARN
        why = " (it takes commands for expired)" if verdict == FAIL and skew_s > 0 else ""
        yield Finding(
            "clocks",
            verdict,
            f"the clock of {plain(node, 64)} is {size:.1f} s {side} the one here{why}",
            "set both by NTP",
            {"node": plain(node, 64), "skew_s": skew_s},
        )
    if skews_s and all(abs(skew_s) <= SKEW_WARN_S for skew_s in skews_s.values()):
        most = max(map(abs, skews_s.values()))
        yield ok(
            "clocks", f"wall clocks agree to within {most:.2f} s", details={"skew_s": dict(skews_s)}
        )


def judge_versions(rows: Sequence[NodeStatus]) -> Iterator[Finding]:
    """What nodes run."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.sw_ident:
            name = f"{plain(row.sw_ident, 20).removeprefix('py-')} {plain(row.sw_ver, 20)}".strip()
            found.setdefault(name, []).append(row.hostname)
    if len(found) > 1:
        parts = "; ".join(f"{name} on {names(nodes)}" for name, nodes in sorted(found.items()))
        yield warn("versions", f"several versions: {parts}", "fine for a while")
    elif found:
        yield ok("versions", f"all run {next(iter(found))}")


# -- queues and revocations --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """One queue; None is unknown."""

    exists: bool | None = None
    waiting: int | None = None
    consumers: int | None = None


def judge_queues(
    queues: Mapping[str, QueueFacts], consumed_by: Mapping[str, Sequence[str]]
) -> Iterator[Finding]:
    """What waits where, and whether anybody takes it; `consumed_by` is what nodes told."""
    fine: list[str] = []
    for name, facts in sorted(queues.items()):
        taken = bool(facts.consumers or consumed_by.get(name))
        shown = f"{plain(name, 60)}: {_waiting(facts)}"
        details = {
            "queue": plain(name, 60),
            "waiting": facts.waiting,
            "nodes": list(consumed_by.get(name, ())),
        }
        if taken:
            fine.append(f"{plain(name, 60)} {'?' if facts.waiting is None else facts.waiting}")
        elif facts.exists is False:
            yield warn(
                "queues",
                f"{plain(name, 60)} is not there yet",
                "the first worker or message makes it",
                details,
            )
        else:
            yield warn(
                "queues",
                f"{shown}, and nobody consumes it",
                f"start a worker with -Q {plain(name, 60)}, or 'umbel control "
                "add_consumer' (or resume, if it was paused)",
                details,
            )
    if fine:
        more = len(fine) - QUEUES_SHOWN_MAX
        text = ", ".join(fine[:QUEUES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
        yield ok("queues", f"consumed, with what waits: {text}")


def _waiting(facts: QueueFacts) -> str:
    if facts.waiting is None:
        return "nobody knows how many messages wait"
    return f"{facts.waiting} message{'s' if facts.waiting != 1 else ''} wait"


def judge_revocations(answers: Mapping[str, Any], state_file: bool) -> Iterator[Finding]:
    """Whether nodes know the same revocations, and whether those would outlive them."""
    known = {node: set(map(str, ids)) for node, ids in answers.items() if isinstance(ids, list)}
    if not known:
        return
    everything = set().union(*known.values())
    lacking = sorted(node for node, ids in known.items() if len(ids) < len(everything))
    advice = "" if state_file else "workers without --statedb forget them at their end"
    total = f"{len(everything)} revoked task{'s' if len(everything) != 1 else ''}"
    if lacking:
        yield warn(
            "revocations",
            f"{total}, of which {names(lacking)} "
            f"{'knows' if len(lacking) == 1 else 'know'} not all",
            "nodes tell each other within seconds, but not --without-gossip: revoke them again",
        )
    elif everything:
        yield ok("revocations", f"{total}, known to all", advice)
    else:
        yield ok("revocations", "no task is revoked")
