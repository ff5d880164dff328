"""The parts of the page that are tables: nodes, elections, failures, revocations, clocks, gaps."""

from __future__ import annotations

from typing import Any

from umbel.pipeline.report.facts import Facts
from umbel.pipeline.report.pieces import Column, Row, Section, badge, table_of
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
        Column("node", lambda row: text(row["hostname"]), "w"),
        Column("incarnation", lambda row: text(row.get("incarnation")), "n"),
        Column("online", lambda row: facts.when(row["online"]), "m"),
        Column("last heartbeat", lambda row: facts.when(row["last_heartbeat"]), "m"),
        Column("ended", ended, "m"),
        Column("uptime", lambda row: seconds(row["uptime"]), "n"),
        Column("processed", lambda row: number(row["processed"]), "n"),
        Column("drift", lambda row: seconds(row.get("drift")), "n"),
        Column("events seen", lambda row: number(row.get("events_seen")), "n"),
        Column("missing", lambda row: number(row.get("events_missing")), "n"),
    ]
    return f"<h3>Nodes and their lives</h3>{table_of(found, columns)}"


def elections(facts: Facts) -> Section | None:
    """What was elected, and whether it was done once."""
    wanted = ("id", "topic", "requested", "candidates", "winner", "executions", "verdict")
    if not facts.has("elections", *wanted):
        return None
    found = facts.listing("elections", "verdict = 'exactly once', requested DESC")
    lead = "An election is decided by a register on the broker; each must be carried out once."
    columns = [
        Column("requested", lambda row: facts.when(row["requested"]), "m"),
        Column("election", lambda row: text(row["id"]), "id"),
        Column("topic", lambda row: text(row["topic"]), "w"),
        Column("candidates, by rank", lambda row: _candidates(row["candidates"]), "w"),
        Column("winner", lambda row: text(row["winner"]), "w"),
        Column("after", lambda row: seconds(row.get("decided_after")), "n"),
        Column("executions", lambda row: number(row["executions"]), "n"),
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
    return badge(text(verdict, 40), "good" if verdict == "exactly once" else "bad")


def failures(facts: Facts) -> Section | None:
    """Failed tasks by error, and what was tried again."""
    if not facts.has("tasks", "exception", "failed", "name", "state"):
        return None
    columns = [
        Column("error", lambda row: text(row["error"]), "w"),
        Column("tasks", lambda row: number(row["n"]), "n"),
        Column("of", lambda row: ", ".join(text(name, 60) for name in row["names"] or ()), "w"),
        Column("last", lambda row: facts.when(row["last"]), "m"),
        Column("for example", lambda row: text(row["example"]), "w"),
    ]
    content = table_of(facts.failures(), columns, "No task failed.")
    if facts.has("attempts", "outcome", "exception", "name", "uuid"):
        again = facts.retries()
        if again.rows:
            content += "<h3>Tried again</h3>" + table_of(again, [
                Column("task", lambda row: text(row["name"]), "w"),
                Column("retries", lambda row: number(row["n"]), "n"),
                Column("tasks", lambda row: number(row["tasks"]), "n"),
                Column("mostly for", lambda row: text(row["error"]), "w"),
            ])  # fmt: skip
    return Section("failures", "Failures and retries", "", content)


def revocations(facts: Facts) -> Section | None:
    """What was revoked, and what ran all the same."""
    if not facts.has("revocations", "uuid", "revoked", "seen_by", "effective", "violations"):
        return None
    found = facts.listing("revocations", "violations DESC NULLS LAST, revoked DESC")
    columns = [
        Column("revoked", lambda row: facts.when(row["revoked"]), "m"),
        Column("task", lambda row: text(row["uuid"]), "id"),
        Column("name", lambda row: text(row.get("name")), "w"),
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
        Column("node", lambda row: text(row["hostname"]), "w"),
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
        Column("node", lambda row: text(row["hostname"]), "w"),
        Column("incarnation", lambda row: text(row["incarnation"]), "n"),
        Column("from", lambda row: number(row["first"]), "n"),
        Column("to", lambda row: number(row["last"]), "n"),
        Column("missing", lambda row: number(row["missing"]), "n"),
    ]
    if facts.has("gaps", "kind"):
        columns.append(Column("kind", lambda row: text(row["kind"]), "w"))
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
        Column("root", lambda row: text(row["root_id"]), "id"),
        Column("name", lambda row: text(row.get("name")), "w"),
        Column("tasks", lambda row: number(row["size"]), "n"),
        Column("depth", lambda row: number(row["depth"]), "n"),
        Column("critical path", lambda row: seconds(row["critical_path"]), "n"),
        Column("duration", lambda row: seconds(row["duration"]), "n"),
        Column("failed", lambda row: number(row["failed"]), "n"),
    ]
    found.rows = found.rows[:15]
    return Section("lineage", "Workflows", "The largest trees of tasks.", table_of(found, columns))


def runs(facts: Facts) -> Section | None:
    """The builds behind the tables."""
    if not facts.has("runs", "run", "mode", "began", "seconds", "read", "kept", "duplicate"):
        return None
    found = facts.listing("runs", "began DESC")
    columns = [
        Column("run", lambda row: text(row["run"]), "id"),
        Column("mode", lambda row: text(row["mode"]), "m"),
        Column("began", lambda row: moment(row["began"]), "m"),
        Column("took", lambda row: seconds(row["seconds"]), "n"),
        Column("read", lambda row: number(row["read"]), "n"),
        Column("kept", lambda row: number(row["kept"]), "n"),
        Column("duplicate", lambda row: number(row["duplicate"]), "n"),
        Column("quarantined", lambda row: number(row.get("quarantined")), "n"),
        Column("tasks", lambda row: number(row.get("tasks")), "n"),
    ]
    lead = "What each build read from the log; the tables have every event once."
    return Section("runs", "Builds", lead, table_of(found, columns))
