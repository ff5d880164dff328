"""The cluster as it was, at a value of the logical clock or at a time.

What is told is what the events up to then say: which nodes were there, which tasks ran on them,
which were known to wait, and who had won elections. `--clock` cuts along the order of cause and
effect: nothing that is shown is an effect of something that is not. `--time` cuts by the senders'
wall clocks, as far as these agree. Clients send tasks without a clock of their own; a cut by clock
takes those that were sent until the time of the last event before the cut.

A node is there from its first sign of life until it goes offline, or counts as lost. A task that
was started runs until it ends or its node does; tasks of a node that has gone are told apart.

`timeline.incarnation` is what an event itself names: of workers without `inc` the process id, which
several lives may share. The life of such an event is the last one of that process that began before
it (`umbel.pipeline.tables.workers`).
"""

# ruff: noqa: S608 - what is put into SQL: numbers and names of ours
from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from umbel.pipeline.errors import HistoryError
from umbel.pipeline.reading import Tables

# What the last event of a task says about it; whatever is in neither runs.
_WAITS: Final = ("task-sent", "task-received", "task-retried", "task-cancelled")
_ENDED: Final = ("task-succeeded", "task-failed", "task-revoked", "task-rejected")
# Lives that are named by when they began: `_LIFE` is the life of an event of such a process.
_BORN: Final = """
    born AS (
        SELECT hostname AS born_host, pid, online AS born, incarnation AS born_life FROM workers
        WHERE incarnation = TRY_CAST(round(online * 1000000) AS BIGINT)
    )
"""
_JOIN_BORN: Final = """
    ASOF LEFT JOIN born ON said.hostname = born_host AND said.incarnation = pid
        AND said.timestamp >= born
"""
_LIFE: Final = "coalesce(born_life, said.incarnation)"


@dataclass(frozen=True, slots=True)
class Node:
    """One life of one node, and what was known of it."""

    hostname: str
    incarnation: int | None
    alive: bool
    since: float | None
    last_heartbeat: float | None
    ended: float | None = None
    how: str = ""  # offline or lost
    running: int = 0


@dataclass(frozen=True, slots=True)
class TaskThen:
    """A task that ran or waited."""

    uuid: str
    name: str | None
    worker: str | None  # null when nobody had taken it
    since: float
    state: str


@dataclass(frozen=True, slots=True)
class Leader:
    """Who won an election that was decided by then."""

    id: str
    topic: str | None
    winner: str
    decided: float | None
    alive: bool


@dataclass(slots=True)
class Picture:
    """The cluster at one moment; the lists may be cut, the counts are complete."""

    clock: int
    time: float
    events: int
    nodes: list[Node] = field(default_factory=list)
    running: list[TaskThen] = field(default_factory=list)
    orphaned: list[TaskThen] = field(default_factory=list)
    waiting: list[TaskThen] = field(default_factory=list)
    leaders: list[Leader] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def at(
    tables: Tables, *, clock: int | None = None, time: float | None = None, limit: int = 0
) -> Picture:
    """The cluster at a clock or a time; each list has at most `limit` entries, 0 is all."""
    assert (clock is None) != (time is None), "either a clock or a time"
    for name in ("timeline", "workers"):
        tables.table(name)
    cut = _Cut.find(tables, clock, time)
    picture = Picture(cut.clock, cut.time, cut.events)
    nodes = _nodes(tables, cut)
    lives = {(node.hostname, node.incarnation) for node in nodes if node.alive}
    known = {(node.hostname, node.incarnation) for node in nodes}
    latest = {node.hostname: (node.hostname, node.incarnation) for node in nodes}
    started: dict[tuple[str, int | None], int] = {}
    lists: dict[str, list[TaskThen]] = {"running": [], "orphaned": [], "waiting": []}
    counts = dict.fromkeys(lists, 0)
    for row in _tasks(tables, cut):
        life = row["hostname"], row["incarnation"]
        if life not in known:  # a pool process that names itself, as Celery's do
            life = latest.get(row["hostname"], life)
        if row["type"] in _WAITS:
            kind = "waiting"
        elif life in lives or life not in known:  # senders of a name of their own
            kind = "running"
            started[life] = started.get(life, 0) + 1
        else:
            kind = "orphaned"
        counts[kind] += 1
        if not limit or len(lists[kind]) < limit:
            lists[kind].append(_task(row))
    picture.running, picture.orphaned = lists["running"], lists["orphaned"]
    picture.waiting = lists["waiting"]
    picture.nodes = [
        Node(**{**asdict(node), "running": started.get((node.hostname, node.incarnation), 0)})
        for node in nodes
    ]
    names = {hostname for hostname, _ in lives}
    leaders = _leaders(tables, cut, names)
    counts["nodes"] = len(lives)
    counts["leaders"] = len(leaders)
    picture.leaders = leaders[:limit] if limit else leaders
    picture.counts = counts
    return picture


@dataclass(frozen=True, slots=True)
class _Cut:
    """Which events are before it, as SQL over a table with the columns clock and timestamp."""

    clock: int
    time: float
    events: int
    by_clock: bool

    @classmethod
    def find(cls, tables: Tables, clock: int | None, time: float | None) -> _Cut:
        span = tables.ask(
            "SELECT count(*) AS events, min(clock) FILTER (clock > 0) AS first_clock, "
            "max(clock) AS last_clock, min(timestamp) AS first, max(timestamp) AS last "
            "FROM timeline"
        )[0]
        if not span["events"]:
            raise HistoryError(f"the history in {tables.directory} has no events")
        if clock is not None:
            if clock < (span["first_clock"] or 0):
                raise HistoryError(
                    f"clock {clock} is before the history: "
                    f"it goes from {span['first_clock']} to {span['last_clock']}"
                )
            time = tables.ask(
                "SELECT arg_max(timestamp, position) AS time FROM timeline "
                "WHERE clock <= ? AND clock > 0",
                clock,
            )[0]["time"]
        assert time is not None
        if time < span["first"]:
            raise HistoryError(
                f"time {time:.3f} is before the history: "
                f"it goes from {span['first']:.3f} to {span['last']:.3f}"
            )
        cut = cls(clock or 0, time, 0, clock is not None)
        found = tables.ask(
            f"SELECT count(*) AS events, max(clock) AS clock FROM timeline WHERE {cut.sql}"
        )[0]
        last_clock = found["clock"] or 0
        return cls(clock if clock is not None else last_clock, time, found["events"], cut.by_clock)

    @property
    def sql(self) -> str:
        """The events before the cut; only numbers of ours are put into the text."""
        if not self.by_clock:
            return f"(timestamp <= {self.time!r})"
        return (
            f"((clock <= {self.clock:d} AND clock > 0) "
            f"OR (coalesce(clock, 0) = 0 AND timestamp <= {self.time!r}))"
        )


def _nodes(tables: Tables, cut: _Cut) -> list[Node]:
    """Every incarnation that had been seen; how it ended only if it had by then."""
    rows = tables.ask(
        f"""
        WITH {_BORN}, signs AS (
            SELECT hostname, {_LIFE} AS incarnation, min(timestamp) AS first,
                max(timestamp) FILTER (type IN ('worker-heartbeat', 'worker-online')) AS beat,
                max(timestamp) FILTER (type = 'worker-offline') AS offline
            FROM (
                SELECT * FROM timeline
                WHERE type IN ('worker-heartbeat', 'worker-online', 'worker-offline') AND {cut.sql}
            ) AS said {_JOIN_BORN}
            GROUP BY ALL
        )
        SELECT workers.hostname, workers.incarnation, coalesce(first, online) AS since, beat,
            signs.offline, workers.lost
        FROM workers LEFT JOIN signs
            ON workers.hostname = signs.hostname
            AND workers.incarnation IS NOT DISTINCT FROM signs.incarnation
        WHERE first IS NOT NULL OR online <= {cut.time!r}
        ORDER BY workers.hostname, since
        """
    )
    return [_node(row, cut) for row in rows]


def _node(row: dict[str, Any], cut: _Cut) -> Node:
    ended, how = None, ""
    if row["offline"] is not None and row["offline"] >= (row["beat"] or 0.0):
        ended, how = row["offline"], "offline"
    elif row["lost"] is not None and row["lost"] <= cut.time:
        ended, how = row["lost"], "lost"
    return Node(
        row["hostname"], row["incarnation"], ended is None, row["since"], row["beat"], ended, how
    )


def _tasks(tables: Tables, cut: _Cut) -> list[dict[str, Any]]:
    """The last event of every task that had not ended.

    Most had, and the table of tasks knows it: events of the others alone are looked at.
    """
    ended = ", ".join(f"'{kind}'" for kind in _ENDED)
    maybe, name, join = "", "NULL", ""
    if tables.has("tasks", "uuid", "name", "finished", "clock"):
        after = f"finished > {cut.time!r}" + (f" OR clock > {cut.clock:d}" if cut.by_clock else "")
        maybe = f"AND uuid IN (SELECT uuid FROM tasks WHERE finished IS NULL OR {after})"
        name, join = "tasks.name", "LEFT JOIN tasks USING (uuid)"
    return tables.ask(
        f"""
        WITH {_BORN}, last AS (
            SELECT uuid, arg_max({{'type': type, 'hostname': hostname, 'incarnation': incarnation,
                'timestamp': timestamp}}, position) AS said
            FROM timeline WHERE uuid IS NOT NULL AND {cut.sql} {maybe} GROUP BY uuid
        ), open AS (SELECT uuid, unnest(said) FROM last WHERE said.type NOT IN ({ended}))
        SELECT uuid, {name} AS name, said.type, said.hostname, {_LIFE} AS incarnation,
            said.timestamp AS since
        FROM open AS said {_JOIN_BORN} {join} ORDER BY said.timestamp, uuid
        """
    )


def _task(row: dict[str, Any]) -> TaskThen:
    kind = row["type"].removeprefix("task-")
    state = {"sent": "PENDING", "retried": "RETRY"}.get(kind, kind.upper())
    worker = None if kind == "sent" else row["hostname"]
    return TaskThen(row["uuid"], row["name"], worker, row["since"], state)


def _leaders(tables: Tables, cut: _Cut, alive: set[str]) -> list[Leader]:
    """Winners of elections decided before the cut, the last first."""
    if not tables.has("elections", "id", "topic", "winner", "requested"):
        return []
    columns = tables.table("elections").columns
    decided = "decided" if "decided" in columns else "requested + coalesce(decided_after, 0)"
    before = f"{decided} <= {cut.time!r}"
    if cut.by_clock and "decided_clock" in columns:
        before = f"coalesce(decided_clock <= {cut.clock:d}, {before})"
    rows = tables.ask(
        f"SELECT id, topic, winner, {decided} AS decided FROM elections "
        f"WHERE winner IS NOT NULL AND {before} ORDER BY decided DESC, id"
    )
    return [Leader(**row, alive=row["winner"] in alive) for row in rows]
