"""The parts of the page that are tables: nodes, elections, failures, revocations, clocks, gaps."""

from __future__ import annotations

from typing import Any

from umbel.pipeline.report.facts import Facts
from umbel.pipeline.report.pieces import Column, Row, Section, badge, of, table_of
from umbel.pipeline.report.shapes import moment, number, seconds, text


def lives(facts: Facts) -> str:
    """Every incarnation of every node."""
    wanted = ("hostname", "online", "last_heartbeat", "offline", "lost", "uptime", "processed")
    if not facts.has("workers", *wanted):
        return ""
    found = facts.listing("workers", "hostname, online")

    def ended(row: Row) -> str:
        if row["offline"] is not None:
            return f"offline {facts.when(row['offline'])}"
        if row["lost"] is not None:
            return f"{badge('lost', 'bad')} {facts.when(row['lost'])}"
        return ""

    columns = [
        of("hostname", text, "w", "node"),
        of("incarnation", text, "n"),
        Column("online", lambda row: facts.when(row["online"]), "m"),
        Column("last heartbeat", lambda row: facts.when(row["last_heartbeat"]), "m"),
        Column("ended", ended, "m"),
        of("uptime", seconds, "n"),
        of("processed", number, "n"),
        of("drift", seconds, "n"),
        of("events_seen", number, "n", "events seen"),
        of("events_missing", number, "n", "missing"),
    ]
    return f"<h3>Nodes and their lives</h3>{table_of(found, columns)}"


def elections(facts: Facts) -> Section | None:
    """What was elected, and whether it was done once."""
    wanted = ("id", "topic", "requested", "candidates", "winner", "executions", "verdict")
    if not facts.has("elections", *wanted):
        return None
    # What went wrong comes first, then what is not over.
    order = "verdict = 'exactly once', verdict = 'open', requested DESC"
    found = facts.listing("elections", order)
    lead = "An election is decided by a register on the broker; each must be carried out once."
    columns = [
        Column("requested", lambda row: facts.when(row["requested"]), "m"),
        of("id", text, "id", "election"),
        of("topic", text, "w"),
        Column("candidates, by rank", lambda row: _candidates(row["candidates"]), "w"),
        of("winner", text, "w"),
        of("decided_after", seconds, "n", "after"),
        of("executions", number, "n"),
        Column("verdict", lambda row: _verdict(row["verdict"]), "m"),
    ]
    return Section("elections", "Elections", lead, table_of(found, columns, "There were none."))


def _candidates(found: Any) -> str:
    if not isinstance(found, list):
        return text(found)
    names = [one.get("hostname") if isinstance(one, dict) else one for one in found]
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(text(name, 60) for name in names[:6]) + more


def _verdict(verdict: Any) -> str:
    kinds = {"exactly once": "good", "open": "none"}
    return badge(text(verdict, 40), kinds.get(verdict, "bad"))


def failures(facts: Facts) -> Section | None:
    """Failed tasks by error, and what was tried again."""
    if not facts.has("tasks", "exception", "failed", "name", "state"):
        return None
    columns = [
        of("error", text, "w"),
        of("n", number, "n", "tasks"),
        Column("of", lambda row: ", ".join(text(name, 60) for name in row["names"] or ()), "w"),
        Column("last", lambda row: facts.when(row["last"]), "m"),
        *([of("example", text, "w", "for example")] if facts.details else []),
    ]
    content = table_of(facts.failures(), columns, "No task failed.")
    if facts.has("attempts", "outcome", "exception", "name", "uuid"):
        again = facts.retries()
        if again.rows:
            content += "<h3>Tried again</h3>" + table_of(again, [
                of("name", text, "w", "task"),
                of("n", number, "n", "retries"),
                of("tasks", number, "n"),
                of("error", text, "w", "mostly for"),
            ])  # fmt: skip
    return Section("failures", "Failures and retries", "", content)


def revocations(facts: Facts) -> Section | None:
    """What was revoked, and what ran all the same."""
    if not facts.has("revocations", "uuid", "revoked", "seen_by", "effective", "violations"):
        return None
    found = facts.listing("revocations", "violations DESC NULLS LAST, revoked DESC")
    columns = [
        Column("revoked", lambda row: facts.when(row["revoked"]), "m"),
        of("uuid", text, "id", "task"),
        of("name", text, "w"),
        Column("known to", lambda row: _candidates(row["seen_by"]), "w"),
        Column("effective", lambda row: "yes" if row["effective"] else "no"),
        Column("ran all the same", lambda row: _violations(row["violations"]), "n"),
    ]
    return Section(
        "revocations",
        "Revocations",
        "A task that ran on a node which knew that it was revoked is a violation.",
        table_of(found, columns, "Nothing was revoked."),
    )


def _violations(count: int | None) -> str:
    return badge(number(count), "bad") if count else "0"


def clocks(facts: Facts) -> Section | None:
    """What the audit of the clocks found."""
    if not facts.has("clock_audit", "hostname", "kind"):
        return None
    found = facts.listing("clock_audit", "kind, hostname")
    known = [
        of("hostname", text, "w", "node"),
        Column("finding", lambda row: badge(text(row["kind"], 40), "again"), "m"),
        Column("event", lambda row: _event(row, ""), "w"),
        Column("and", lambda row: _event(row, "other_"), "w"),
    ]
    return Section(
        "clocks",
        "Clocks",
        "Where the order of cause and effect was in doubt.",
        table_of(found, known, "Every clock went forward, and no effect came before its cause."),
    )


def _event(row: Row, prefix: str) -> str:
    said = []
    shown = {"type": text, "hostname": text, "clock": number, "timestamp": moment}
    for name, show in shown.items():
        value = row.get(f"{prefix}{name}")
        if value is not None and (prefix or name != "hostname"):
            label = "clock " if name == "clock" else ""
            said.append(f"{label}{show(value)}")
    return ", ".join(said)


def gaps(facts: Facts) -> Section | None:
    """Events that never came."""
    if not facts.has("gaps", "hostname", "incarnation", "first", "last", "missing"):
        return None
    found = facts.listing("gaps", "missing DESC, hostname, first")
    columns = [
        of("hostname", text, "w", "node"),
        of("incarnation", text, "n"),
        of("first", number, "n", "from"),
        of("last", number, "n", "to"),
        of("missing", number, "n"),
    ]
    if facts.has("gaps", "kind"):
        columns.append(of("kind", text, "w"))
    return Section(
        "gaps",
        "Gaps",
        "Every node numbers its events; numbers that never came are events that were lost.",
        table_of(found, columns, "No event is missing."),
    )


def lineage(facts: Facts) -> Section | None:
    """The largest trees of tasks."""
    if not facts.has("lineage", "root_id", "size", "depth", "critical_path", "duration", "failed"):
        return None
    found = facts.listing("lineage", "size DESC, duration DESC NULLS LAST, root_id", "size > 1")
    if not found.rows:
        return None
    columns = [
        of("root_id", text, "id", "root"),
        of("name", text, "w"),
        of("size", number, "n", "tasks"),
        of("depth", number, "n"),
        of("critical_path", seconds, "n", "critical path"),
        of("duration", seconds, "n"),
        of("failed", number, "n"),
    ]
    found.rows = found.rows[:15]
    return Section("lineage", "Workflows", "The largest trees of tasks.", table_of(found, columns))


def runs(facts: Facts) -> Section | None:
    """The builds behind the tables."""
    if not facts.has("runs", "run", "mode", "began", "seconds", "read", "kept", "duplicate"):
        return None
    found = facts.listing("runs", "began DESC")
    columns = [
        of("run", text, "id"),
        of("mode", text, "m"),
        of("began", moment, "m"),
        of("seconds", seconds, "n", "took"),
        of("read", number, "n"),
        of("kept", number, "n"),
        of("duplicate", number, "n"),
        of("quarantined", number, "n"),
        of("tasks", number, "n"),
    ]
    lead = "What each build read from the log; the tables have every event once."
    return Section("runs", "Builds", lead, table_of(found, columns))
