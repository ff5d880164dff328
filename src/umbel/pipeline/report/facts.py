"""What the page tells, asked of the tables. Every answer has a bound.

Senders' wall clocks may be wrong by years: the stretch of time that the charts share is where
nearly all events are, and what lies far outside is counted, not drawn.
"""

# ruff: noqa: S608 - what is put into SQL: numbers and names of ours
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from umbel.pipeline.reading import Tables
from umbel.pipeline.report.shapes import Span, moment, step_s

COLUMNS_MAX: Final = 120
ROWS_MAX: Final = 40
BARS_MAX: Final = 1_500
WORKERS_MAX: Final = 24
OUTCOME_TYPES: Final = (
    "task-succeeded",
    "task-failed",
    "task-retried",
    "task-revoked",
    "task-rejected",
)

_NAME: Final = "^([A-Za-z_][A-Za-z0-9_.]*)"

Rows = list[dict[str, Any]]


@dataclass(slots=True)
class Listing:
    """The first rows of something, and how many there are."""

    rows: Rows = field(default_factory=list)
    count: int = 0


class Facts:
    """Questions to the tables of one build; each is asked when it is needed.

    Without `details`, of errors only their class is asked for.
    """

    def __init__(self, tables: Tables, *, details: bool = True) -> None:
        self._tables = tables
        self.details = details
        # Who sees no details sees no words of a text that is not the repr of an exception.
        self._class = _NAME if details else f"{_NAME}\\("
        self.run = tables.run
        self.directory = tables.directory
        self.span, self.outside = self._find_span()

    def has(self, table: str, *columns: str) -> bool:
        """Whether there is such a table, with such columns."""
        return self._tables.has(table, *columns)

    def listing(self, table: str, order: str, where: str = "true", what: str = "*") -> Listing:
        """The first rows of a table, and how many there are in all."""
        ask = self._tables.ask
        rows = ask(f"SELECT {what} FROM {table} WHERE {where} ORDER BY {order} LIMIT {ROWS_MAX}")
        count = ask(f"SELECT count(*) AS n FROM {table} WHERE {where}")[0]["n"]
        return Listing(rows, count)

    def when(self, moment_s: float | None) -> str:
        """A time, without the day where all of the history is on one."""
        told = moment(moment_s)
        days = (
            {moment(edge)[:10] for edge in (self.span.first, self.span.last)} if self.span else ()
        )
        return told[11:] if len(days) == 1 and told[:10] in days else told

    # -- the stretch of time -------------------------------------------------------------------

    def _find_span(self) -> tuple[Span | None, int]:
        if not self.has("timeline", "timestamp"):
            return None, 0
        found = self._tables.ask(
            "SELECT min(timestamp) AS first, max(timestamp) AS last, count(*) AS n, "
            "quantile_cont(timestamp, [0.01, 0.99]) AS most FROM timeline"
        )[0]
        if not found["n"]:
            return None, 0
        low, high = found["most"]
        room = max(1.0, high - low)
        first, last = max(found["first"], low - room), min(found["last"], high + room)
        step = step_s(max(last - first, 0.05), COLUMNS_MAX)
        span = Span(first // step * step, max(last, first + step), step)
        outside = self._tables.ask(
            "SELECT count(*) AS n FROM timeline WHERE timestamp NOT BETWEEN ? AND ?", first, last
        )[0]["n"]
        return span, outside

    def _column(self, name: str) -> str:
        """The number of the column of the charts that a time is in, as SQL."""
        assert self.span is not None
        return f"floor(({name} - {self.span.first!r}) / {self.span.step!r})::BIGINT"

    def _within(self, name: str) -> str:
        assert self.span is not None
        return f"({name} BETWEEN {self.span.first!r} AND {self.span.last!r})"

    # -- figures -------------------------------------------------------------------------------

    def totals(self) -> dict[str, Any]:
        """One number for each of the tiles; what can not be told is not there."""
        ask, found = self._tables.ask, {}
        if self.has("timeline", "timestamp"):
            found["events"] = ask("SELECT count(*) AS n FROM timeline")[0]["n"]
        if self.has("tasks", "state"):
            found.update(self._task_totals())
        if self.has("attempts", "outcome"):
            found["executions"] = ask("SELECT count(*) AS n FROM attempts")[0]["n"]
        if self.has("workers", "hostname", "lost"):
            found.update(
                ask(
                    "SELECT count(DISTINCT hostname) AS nodes, count(*) AS lives, "
                    "count(lost) AS lost FROM workers"
                )[0]
            )
        if self.has("elections", "verdict"):
            found.update(
                ask(
                    "SELECT count(*) AS elections, "
                    "count(*) FILTER (verdict = 'exactly once') AS once, "
                    "count(*) FILTER (verdict = 'open') AS open FROM elections"
                )[0]
            )
        if self.has("gaps", "missing"):
            # Not what was sent before anybody recorded.
            where = "kind = 'hole'" if self.has("gaps", "kind") else "true"
            total = f"coalesce(sum(missing) FILTER ({where}), 0)::BIGINT"
            found.update(ask(f"SELECT {total} AS missing FROM gaps")[0])
        if self.has("revocations", "violations"):
            found.update(
                ask("SELECT coalesce(sum(violations), 0)::BIGINT AS violations FROM revocations")[0]
            )
        return found

    def _task_totals(self) -> dict[str, Any]:
        wait, run = self._wait, self._run
        times = "".join(
            f", quantile_cont({name}, 0.95) AS {label}_p95"
            for name, label in ((wait, "wait"), (run, "run"))
            if name
        )
        return self._tables.ask(
            "SELECT count(*) AS tasks, count(*) FILTER (state = 'SUCCESS') AS succeeded, "
            "count(*) FILTER (state = 'FAILURE') AS failed, "
            "count(*) FILTER (state IN ('SUCCESS', 'FAILURE', 'REVOKED')) AS ended, "
            f"count(*) FILTER (state = 'REVOKED') AS revoked{times} FROM tasks"
        )[0]

    @property
    def _wait(self) -> str:
        return "queue_wait" if self.has("tasks", "queue_wait") else ""

    @property
    def _run(self) -> str:
        """What a worker measured; else, by its wall clock, from start to end."""
        if not self.has("tasks", "runtime", "started", "finished"):
            return ""
        return "coalesce(runtime, CASE WHEN finished >= started THEN finished - started END)"

    def throughput(self) -> tuple[dict[str, list[int]], list[int]]:
        """Ends of tasks by type for each column, and how many were sent in it."""
        assert self.span is not None
        counts = {kind: [0] * self.span.columns for kind in OUTCOME_TYPES}
        sent = [0] * self.span.columns
        rows = self._tables.ask(
            f"SELECT {self._column('timestamp')} AS slot, type, count(*) AS n FROM timeline "
            f"WHERE {self._within('timestamp')} AND type LIKE 'task-%' GROUP BY ALL"
        )
        for row in rows:
            at = min(max(row["slot"], 0), self.span.columns - 1)
            if row["type"] in counts:
                counts[row["type"]][at] += row["n"]
            elif row["type"] == "task-sent":
                sent[at] += row["n"]
        return counts, sent

    def percentiles(self, what: str) -> list[tuple[int, list[float]]]:
        """p50, p95 and p99 of waits or runs, for each column that has any."""
        value, when = (self._wait, "started") if what == "wait" else (self._run, "finished")
        if not value or self.span is None or not self.has("tasks", when):
            return []
        rows = self._tables.ask(
            f"SELECT {self._column(when)} AS slot, "
            f"quantile_cont({value}, [0.5, 0.95, 0.99]) AS parts FROM tasks "
            f"WHERE {self._within(when)} AND {value} IS NOT NULL AND isfinite({value}) "
            "GROUP BY slot ORDER BY slot"
        )
        return [(row["slot"], row["parts"]) for row in rows]

    def kinds(self) -> Listing:
        """Tasks by name, those with most first."""
        if not self.has("tasks", "name", "state"):
            return Listing()
        times = "".join(
            f", quantile_cont({value}, [0.5, 0.95, 0.99]) "
            f"FILTER ({value} IS NOT NULL AND isfinite({value})) AS {label}"
            for value, label in ((self._wait, "wait"), (self._run, "run"))
            if value
        )
        again = "sum(greatest(attempts - 1, 0))" if self.has("tasks", "attempts") else "NULL"
        rows = self._tables.ask(
            "SELECT name, count(*) AS n, count(*) FILTER (state = 'SUCCESS') AS succeeded, "
            "count(*) FILTER (state = 'FAILURE') AS failed, "
            f"{again}::BIGINT AS again{times} "
            f"FROM tasks GROUP BY name ORDER BY n DESC, name LIMIT {ROWS_MAX}"
        )
        count = self._tables.ask("SELECT count(DISTINCT name) AS n FROM tasks")[0]["n"]
        return Listing(rows, max(count, len(rows)))

    def failures(self) -> Listing:
        """Failed tasks by the kind of error."""
        example = "arg_max(exception, failed) AS example, " if self.details else ""
        grouped = (
            f"SELECT coalesce(nullif(regexp_extract(exception, '{self._class}', 1), ''), "
            f"'(unknown)') AS error, count(*) AS n, max(failed) AS last, {example}"
            "list_sort(list_distinct(list(name)))[:4] AS names FROM tasks "
            "WHERE state = 'FAILURE' GROUP BY error"
        )
        rows = self._tables.ask(f"{grouped} ORDER BY n DESC, error LIMIT {ROWS_MAX}")
        count = self._tables.ask(f"SELECT count(*) AS n FROM ({grouped})")[0]["n"]
        return Listing(rows, count)

    def retries(self) -> Listing:
        """Which tasks were tried again, and for what."""
        grouped = (
            "SELECT name, count(*) AS n, count(DISTINCT uuid) AS tasks, "
            f"mode(regexp_extract(exception, '{self._class}', 1)) AS error "
            "FROM attempts WHERE outcome = 'RETRY' GROUP BY name"
        )
        rows = self._tables.ask(f"{grouped} ORDER BY n DESC, name LIMIT {ROWS_MAX}")
        count = self._tables.ask(f"SELECT count(*) AS n FROM ({grouped})")[0]["n"]
        return Listing(rows, count)

    # -- lanes ---------------------------------------------------------------------------------

    def busiest(self) -> Listing:
        """The workers that get a lane: those with most executions, by name."""
        rows = self._tables.ask(
            "SELECT worker, count(*) AS n FROM attempts WHERE worker IS NOT NULL GROUP BY worker "
            f"ORDER BY n DESC, worker LIMIT {WORKERS_MAX}"
        )
        count = self._tables.ask("SELECT count(DISTINCT worker) AS n FROM attempts")[0]["n"]
        return Listing(sorted(rows, key=lambda row: row["worker"]), count)

    def bars(self) -> Listing:
        """The last executions, in the order in which they began."""
        if self.span is None:
            return Listing()
        within = f"worker IS NOT NULL AND {self._within('started')}"
        rows = self._tables.ask(
            "SELECT uuid, name, worker, started, ended, outcome FROM attempts "
            f"WHERE {within} ORDER BY started DESC, uuid LIMIT {BARS_MAX}"
        )
        count = self._tables.ask(f"SELECT count(*) AS n FROM attempts WHERE {within}")[0]["n"]
        return Listing(rows[::-1], count)

    def load(self) -> dict[str, list[float]]:
        """How many tasks ran at once on each worker, on average over each column.

        An execution is spread over the columns that it touches: whole ones count its whole width.
        """
        assert self.span is not None
        first, step, columns = self.span.first, self.span.step, self.span.columns
        end = first + columns * step
        rows = self._tables.ask(
            f"""
            WITH runs AS (
                SELECT worker, greatest(started, {first!r}) AS a, least(ended, {end!r}) AS z
                FROM attempts WHERE ended > {first!r} AND started < {end!r} AND ended >= started
            ), touched AS (
                SELECT worker, a, z, unnest(range(
                    floor((a - {first!r}) / {step!r})::BIGINT,
                    least(floor((z - {first!r}) / {step!r})::BIGINT + 1, {columns})
                )) AS slot FROM runs
            )
            SELECT worker, slot, sum(least(z, {first!r} + (slot + 1) * {step!r})
                - greatest(a, {first!r} + slot * {step!r})) / {step!r} AS busy
            FROM touched GROUP BY worker, slot
            """
        )
        load: dict[str, list[float]] = {}
        for row in rows:
            if row["worker"] is not None:
                load.setdefault(row["worker"], [0.0] * columns)[row["slot"]] = row["busy"]
        return load
