"""One batch of new segments, carried through to every table that it changes.

What new events change is found by *keys*, and only that is computed again, from all of its events:

1. **Cells** (`umbel.pipeline.cells`) of the new events.
2. **Families**: the tasks that new events are about, and all tasks of the same roots. Published
   tables have the cells of each task (`_cells`), so that its older events are found.
3. **Elections and revocations** that new events are about, by their ids.
4. **Blocks** of the numbers that senders gave new events (`tables.sequences`).

All events of the cells that these reach to are read from the log, each once. From them follow, by
the same pure functions as of a whole log, the rows of these keys; all other rows stay. What depends
on where the log ends (`lost`, RUNNING, `open`) is judged again for everything that is not settled.
The cells of segments that were removed from the log are computed again too, with all that had
events in them: what has none any more is left out.

So a build costs what its new events touch. The rows are those of one build of everything: with no
tables before it, all events are new, and the very same steps make the tables.

Facts of workers are kept by cell and merged, numbers by block, the order of events by range
(`tables.timeline`): what those tables say follows from these small tables as a whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr

from umbel.pipeline import log as logs
from umbel.pipeline import task_fold
from umbel.pipeline.cells import BEGINNING, END, MINUTE, MINUTE_S, Cells
from umbel.pipeline.events import once, prepare, unique
from umbel.pipeline.log import Coverage
from umbel.pipeline.places import Place
from umbel.pipeline.queries import query
from umbel.pipeline.storage import Publication
from umbel.pipeline.tables import (
    attempts,
    clock_audit,
    elections,
    gaps,
    lineage,
    queues,
    rates,
    revocations,
    sequences,
    stored,
    timeline,
    workers,
)
from umbel.pipeline.tables.tasks import tasks as tasks_table
from umbel.pipeline.tables.timeline import Ranges
from umbel.pipeline.watermarks import RECEIPTS, SILENT_S, log_ends, watermarks

STATE_FORMAT: Final = 2
DAY_MINUTES: Final = 1_440
SMALL_ROWS_MAX: Final = 100_000
THREADS: Final = 11  # one for each step: those that wait for others take no time
_ELECTION: Final = "type LIKE 'worker-elect%' AND id IS NOT NULL"
_TASK_ID: Final = "get_json_object(raw, '$.action.options.task_id')"


class Rebuild(Exception):
    """The tables cannot be brought up to date from what is new; the reason is for the user."""


@dataclass(slots=True)
class State:
    """What a build leaves for the next one, beside the tables."""

    coverage: Coverage = field(default_factory=Coverage)
    cells: Cells = field(default_factory=Cells)
    ranges: Ranges = field(default_factory=Ranges)
    receipts: dict[str, list[float | None]] = field(default_factory=dict)  # see `watermarks`

    @classmethod
    def of_json(cls, told: dict[str, Any]) -> Self:
        """What `as_json` gave."""
        return cls(
            Coverage(**told["coverage"]),
            Cells.of_json(told["cells"]),
            Ranges.of_json(told["ranges"]),
            told["receipts"],
        )

    def as_json(self, log: str) -> dict[str, Any]:
        """For the state file of tables that are made from this log."""
        covered = self.coverage
        return {
            "format": STATE_FORMAT,
            "log": log,
            "coverage": {
                "read": covered.read,
                "replaced": covered.replaced,
                "skipped": covered.skipped,
                "spans": covered.spans,
            },
            "cells": self.cells.as_json(),
            "ranges": self.ranges.as_json(),
            "receipts": self.receipts,
        }

    @property
    def rows(self) -> int:
        """How many rows of the log the tables are made of."""
        return sum(self.cells.rows)

    @property
    def kept(self) -> int:
        """How many events those are, each once."""
        return self.ranges.total

    def known_receipts(self) -> Iterator[tuple[str, float | None, float]]:
        """The receipts, for `watermarks`."""
        for name, (prompt, newest) in self.receipts.items():
            yield name, prompt, newest or 0.0

    def log_ends(self) -> float:
        """Where the log ends, Unix seconds."""
        return log_ends(watermarks(self.known_receipts()))


@dataclass(slots=True)
class Keys:
    """What new events touch; `None` for everything, when there are no tables yet."""

    cells: set[int]
    named: DataFrame | None = None  # (uuid): tasks, elections and revocations
    members: DataFrame | None = None  # (uuid): those, and all tasks of their families
    roots: DataFrame | None = None  # (uuid): the roots of those families
    blocks: DataFrame | None = None  # the keys of blocks
    # The parts of published tables that have rows of these keys.
    parts: dict[str, set[int]] = field(default_factory=dict)


class Increment:
    """The steps, in order; each writes tables, or leaves something for those after it."""

    def __init__(
        self,
        publication: Publication,
        log: Place,
        state: State,
        fresh: list[str],
        *,
        gone: Collection[tuple[float, float]] = (),
        since: float | None = None,
        is_small: bool = False,
        step: Callable[[str, float], None] = lambda *_: None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.publication, self.log, self.state = publication, log, state
        self.since, self._each = since, unique if is_small else once
        self._fresh_paths, self._gone = fresh, gone
        self._step, self._progress = step, progress
        self.is_whole = not publication.before
        self.read = 0  # rows of the log that were new
        self._log_ended, self._last_cell = state.log_ends(), state.cells.starts[-1]

    @property
    def spark(self) -> SparkSession:
        """The session of the publication."""
        return self.publication.spark

    def run(self) -> None:
        """Bring all tables up to date; raises `Rebuild` if that takes more than what is new.

        A table is begun as soon as those are done that it is made of: much of the time of a small
        step is planning, which keeps one core busy.
        """
        fresh = self._timed("new events", self._count)
        keys = self._timed("keys", lambda: self._keys(fresh))
        events = self._timed("events", lambda: self._events(keys))
        own = self._of(events, keys.members).where("class IS NOT NULL")
        if keys.members is not None:
            own = self._staged(own, "own")
        told = "type LIKE 'worker-elect%' OR type = 'worker-revocation'"
        about = own.unionByName(events.where(f"class IS NULL AND ({told})"))
        self._log_ends = self.state.log_ends()
        with ThreadPoolExecutor(THREADS, thread_name_prefix="history") as pool:

            def begin(name: str, make: Callable[..., Any], *needed: Future[Any]) -> Future[Any]:
                """A step, once those are done that it needs; it fails if one of them does."""

                def step() -> Any:
                    made = [one.result() for one in needed]
                    return self._timed(name, lambda: make(*made))

                return pool.submit(step)

            statuses = begin("lives", lambda: self._lives(events, keys))
            tasks = begin("tasks", lambda: self._tasks(own, keys))
            executed = begin(
                "attempts",
                lambda made, judged: self._attempts(own, made, keys, judged),
                tasks,
                statuses,
            )
            findings = begin("workers", lambda _: self._workers(events, keys), statuses)
            steps = (
                begin("timeline", lambda: self._timeline(fresh, events)),
                begin("elections", lambda: self._elections(about, keys)),
                begin("lineage", lambda made: self._lineage(made, own, keys), tasks),
                begin("revocations", lambda made: self._revocations(about, made, keys), tasks),
                begin(
                    "clock_audit",
                    lambda made, found: self._clock_audit(own, made, found, keys),
                    tasks,
                    findings,
                ),
                begin("rates", lambda _: self._rates(events, keys), executed),
                begin("queues", lambda made, _: self._queues(made, keys), tasks, executed),
            )
            for one in (statuses, tasks, executed, findings, *steps):
                one.result()
        self.state.cells.drop_empty(self.publication.rows_by_part("queues"))
        self.state.ranges.drop_empty()

    def _timed(self, name: str, make: Callable[[], Any]) -> Any:
        self._progress(name)
        began = time.monotonic()
        made = make()
        self._step(name, began)
        return made

    # -- what is new ---------------------------------------------------------------------------

    def _count(self) -> DataFrame:
        """The new rows, prepared, with their cells; those are split where they are full."""
        rows = self._read(self._fresh_paths)
        minutes: dict[int, int] = {}
        if self._gone:
            self._recount_receipts()
        counted = rows.groupBy("recorder", expr(MINUTE).alias("minute")).agg(
            expr("count(1)").alias("count"),
            expr("bool_or(type LIKE 'worker-elect%')").alias("elections"),
            expr("bool_or(type IN ('worker-revocation', 'task-revoked'))").alias("revocations"),
            *map(expr, RECEIPTS),
        )
        receipts = self.state.receipts
        self._has_elections = self._has_revocations = False
        for one in counted.collect():
            self._has_elections |= one["elections"]
            self._has_revocations |= one["revocations"]
            minutes[one["minute"]] = minutes.get(one["minute"], 0) + one["count"]
            before = receipts.get(one["recorder"], [None, None])
            told = one["prompt"], one["newest"]
            receipts[one["recorder"]] = [_later(*pair) for pair in zip(before, told, strict=True)]
        self.read = sum(minutes.values())
        self._cut_cells = self._recounted(self.state.cells.add(minutes))
        cells = self.state.cells
        # Few bytes may be very many events, if those are all alike.
        self.publication.is_small &= self.state.rows <= SMALL_ROWS_MAX
        self._new_cells = self._cut_cells | {cells.cell_of(minute) for minute in minutes}
        return self._placed(prepare(rows))

    def _recount_receipts(self) -> None:
        """Who received what until when, without the segments that were removed.

        Only the last receipts matter, and mostly they are still there: then little is read.
        """
        state = self.state
        newest = max(watermarks(state.known_receipts()).values(), default=0.0)
        rows = self._read(state.coverage.paths)
        for chosen in (rows.where(f"received >= {newest - SILENT_S!r}D"), rows):
            found = chosen.groupBy("recorder").agg(*map(expr, RECEIPTS)).collect()
            state.receipts = {one["recorder"]: [one["prompt"], one["newest"]] for one in found}
            if any((one["prompt"] or -math.inf) >= newest for one in found):
                return

    def _recounted(self, large: Iterable[int]) -> set[int]:
        """Cut cells that are too large, and count those of removed segments.

        Gives the cells in which everything is computed again.
        """
        cells = self.state.cells
        gone = {
            cell
            for first, last in self._gone
            for cell in cells.between(_minute(first), _minute(last))
        }
        if self.is_whole or not (counted := gone.union(large)):
            return set()
        rows = self._log_rows(counted).groupBy(expr(MINUTE).alias("minute")).count()
        minutes = {one["minute"]: one["count"] for one in rows.collect()}
        made = set[int]()
        for cell in counted:
            pieces = cells.recount(cell, minutes)
            if len(pieces) > 1 or cell in gone:
                made.update(pieces)
        return made

    def _log_rows(self, cells: Iterable[int]) -> DataFrame:
        """The rows of the log in some cells, and some others of the same segments."""
        chosen = list(cells)
        if self.is_whole:
            paths = self.state.coverage.paths
        else:
            paths = self.state.coverage.paths_within(self.state.cells.times(chosen))
        return self._read(paths)

    def _read(self, paths: list[str]) -> DataFrame:
        return self.publication.in_one_partition(logs.read(self.spark, self.log, paths, self.since))

    def _placed(self, rows: DataFrame) -> DataFrame:
        return rows.selectExpr("*", f"{self.state.cells.sql()} AS _cell")

    # -- what it touches -----------------------------------------------------------------------

    def _keys(self, fresh: DataFrame) -> Keys:
        if self.is_whole:
            return Keys(set(self.state.cells.starts))
        old = self._old
        told = query(
            f"""
            SELECT uuid, coalesce(root_id, uuid) AS root FROM {{fresh}} WHERE class IS NOT NULL
            UNION
            SELECT id, id FROM {{fresh}} WHERE {_ELECTION}
            UNION
            SELECT {_TASK_ID}, {_TASK_ID} FROM {{fresh}}
            WHERE {_ELECTION} AND {_TASK_ID} IS NOT NULL
            UNION
            SELECT uuid, uuid FROM {{revoked}}
            """,  # noqa: S608 - our own names
            fresh=fresh,
            revoked=revocations.named(fresh),
        )
        told = self._staged(told, "told")
        cut = f"arrays_overlap(_cells, {_longs(self._cut_cells)})" if self._cut_cells else "false"
        tasks, held, revoked = old("tasks"), old("elections"), old("revocations")
        named = query(
            f"""
            WITH about AS (
                SELECT id, _task FROM {{held}}
                WHERE id IN (SELECT uuid FROM {{told}}) OR _task IN (SELECT uuid FROM {{told}})
                    OR {cut} OR _task IN (SELECT uuid FROM {{tasks}} WHERE {cut})
            )
            SELECT uuid FROM {{told}}
            UNION SELECT id FROM about
            UNION SELECT _task FROM about WHERE _task IS NOT NULL
            UNION SELECT uuid FROM {{revoked}} WHERE {cut}
            UNION SELECT uuid FROM {{tasks}} WHERE {cut}
            """,  # noqa: S608 - our own names
            told=told,
            held=held,
            revoked=revoked,
            tasks=tasks,
        )
        named = self._staged(named, "named")
        if self._gone:
            left = self._staged(self._left_of(named, tasks, held), "left")
            named = self._staged(named.union(left.select("uuid")).distinct(), "still")
            told = told.union(left)
        roots = query(
            """
            SELECT root AS uuid FROM {told}
            UNION SELECT uuid FROM {named}
            UNION SELECT root FROM {tasks} AS tasks LEFT SEMI JOIN {named} AS named
                ON tasks.uuid = named.uuid
            """,
            told=told,
            named=named,
            tasks=tasks,
        )
        roots = self._staged(roots, "roots")
        families = self._of(tasks.select("uuid", "root", "_cell", "_cells"), roots, "root")
        families = self._staged(families, "families")
        members = self._staged(named.union(families.select("uuid")).distinct(), "members")
        touched = sequences.touched(fresh)
        blocks = old("_blocks")
        if self._cut_cells:
            touched = touched.union(blocks.where(cut).select(*touched.columns)).distinct()
        touched = self._staged(touched, "touched")
        keys = Keys(set(self._new_cells), named, members, roots, touched)
        of_blocks = sequences.only(blocks, touched)
        reached = query(
            """
            SELECT DISTINCT 'tasks' AS name, _cell, explode(_cells) AS cell FROM {families}
            UNION
            SELECT 'elections', _cell, explode(_cells) FROM {held} AS held
                LEFT SEMI JOIN {named} AS named ON held.id = named.uuid
            UNION
            SELECT 'revocations', _cell, explode(_cells) FROM {revoked} AS revoked
                LEFT SEMI JOIN {named} AS named ON revoked.uuid = named.uuid
            UNION
            SELECT 'blocks', NULL, explode(_cells) FROM {blocks}
            """,
            families=families,
            held=held,
            revoked=revoked,
            named=named,
            blocks=of_blocks,
        )
        for one in reached.collect():
            keys.cells.add(one["cell"])
            keys.parts.setdefault(one["name"], set()).add(one["_cell"])
        return keys

    def _left_of(self, named: DataFrame, tasks: DataFrame, held: DataFrame) -> DataFrame:
        """What is left of these tasks and elections: (uuid, root).

        Once the greatest event of a task is removed, another one may name another root; so may
        that of an election another task.
        """
        cells = query(
            """
            SELECT explode(_cells) AS cell FROM {tasks} AS tasks
                LEFT SEMI JOIN {named} AS named ON tasks.uuid = named.uuid
            UNION
            SELECT explode(_cells) FROM {held} AS held
                LEFT SEMI JOIN {named} AS named ON held.id = named.uuid
            """,
            tasks=tasks,
            held=held,
            named=named,
        )
        rows = prepare(self._log_rows({one["cell"] for one in cells.collect()}))
        return query(
            f"""
            SELECT rows.uuid, coalesce(root_id, rows.uuid) AS root FROM {{rows}} AS rows
                LEFT SEMI JOIN {{named}} AS named ON rows.uuid = named.uuid
            WHERE class IS NOT NULL
            UNION
            SELECT {_TASK_ID}, {_TASK_ID} FROM {{rows}} AS rows
                LEFT SEMI JOIN {{named}} AS named ON rows.id = named.uuid
            WHERE {_ELECTION} AND {_TASK_ID} IS NOT NULL
            """,  # noqa: S608 - our own names
            rows=rows,
            named=named,
        )

    def _staged(self, rows: DataFrame, name: str) -> DataFrame:
        """What later steps go on from, written: plans that grow on and on take Spark minutes."""
        return self.publication.keep(rows, name)

    def _old(self, name: str, parts: Collection[int] | None = None) -> DataFrame:
        return self.publication.read(name, stored(name), parts)

    # -- events --------------------------------------------------------------------------------

    def _events(self, keys: Keys) -> DataFrame:
        """All events of the cells, each once."""
        rows = self._within(self._placed(self._log_rows(keys.cells)), keys).drop("_cell")
        return self.publication.keep(self._placed(self._each(rows)), "events")

    def _within(self, rows: DataFrame, keys: Keys) -> DataFrame:
        if self.is_whole:
            return rows
        return rows.where(f"_cell IN ({_listed(keys.cells)})")

    @staticmethod
    def _of(
        rows: DataFrame, keys: DataFrame | None, column: str = "uuid", how: str = "left_semi"
    ) -> DataFrame:
        """The rows whose column is one of the keys, or (`left_anti`) the others."""
        return rows if keys is None else rows.join(keys, rows[column] == keys["uuid"], how)

    # -- workers, numbers ----------------------------------------------------------------------

    def _lives(self, events: DataFrame, keys: Keys) -> DataFrame:
        """When workers began and ended; gives the statuses of their lives."""
        births = workers.births(events)
        if not self.is_whole:
            before = self._old("_facts")
            if not workers.outdated(before, births).isEmpty():
                raise Rebuild("the start of a worker was recorded late")
            births = births.union(self._births_elsewhere(before, births)).distinct()
        self._births = self._staged(births, "births")
        made = workers.life_facts(events, self._births)
        self.publication.replace("_facts", made, "_cell", None if self.is_whole else keys.cells)
        self._facts = self._staged(workers.merge_life_facts(self._old("_facts")), "facts")
        return self._staged(workers.statuses(self._facts, self._log_ends), "statuses")

    def _workers(self, events: DataFrame, keys: Keys) -> DataFrame:
        """Publishes all else of workers and of what they numbered; gives findings about clocks."""
        publication, parts = self.publication, None if self.is_whole else keys.cells
        for name, made in (
            ("_drifts", workers.drifts(events, self._births)),
            ("_unclocked", clock_audit.unclocked(events)),
        ):
            publication.replace(name, made, "_cell", parts)
        new_blocks = sequences.blocks(
            events if keys.blocks is None else sequences.only(_with_block(events), keys.blocks)
        )
        if keys.blocks is not None:
            others = sequences.only(self._old("_blocks"), keys.blocks, "left_anti")
            new_blocks = others.unionByName(new_blocks)
        publication.replace("_blocks", new_blocks.coalesce(1))
        blocks, drifts = self._old("_blocks"), workers.merge_drifts(self._old("_drifts"))
        missing = sequences.missing_numbers(blocks)
        lives = workers.workers(self._facts, drifts, missing, self._log_ends)
        publication.replace("workers", lives.coalesce(1))
        publication.replace("gaps", gaps.gaps(blocks).coalesce(1))
        return clock_audit.of_senders(blocks, self._old("_unclocked"))

    def _births_elsewhere(self, facts: DataFrame, births: DataFrame) -> DataFrame:
        """The births that are known, without those whose events are no longer in the log."""
        if not self._gone:
            return workers.known_births(facts)
        again = _listed(self._cut_cells)
        others = workers.known_births(facts.where(f"_cell NOT IN ({again})"))
        known = workers.known_births(facts.where(f"_cell IN ({again})"))
        if not known.subtract(births).intersect(others).isEmpty():
            raise Rebuild("the start of a worker was removed from the log")
        return others

    # -- tasks and what is about them ----------------------------------------------------------

    def _tasks(self, own: DataFrame, keys: Keys) -> DataFrame:
        """Publishes `tasks`; gives the new rows of it."""
        raw = self._within(self._placed(prepare(self._log_rows(keys.cells))), keys)
        rows = self._of(raw.where("class IS NOT NULL"), keys.members)
        summary = task_fold.summarise(rows.select(*task_fold.EVENT_COLUMNS))
        folded = self._staged(task_fold.tasks(summary), "fold")
        made = tasks_table(folded, own, self._staged).select(*stored("tasks").names)
        if keys.members is None:
            self.publication.replace("tasks", made, "_cell")
            return self._old("tasks")
        made = self._staged(made, "tasks")
        self._homes = {one["_cell"] for one in made.select("_cell").distinct().collect()}
        self._homes |= keys.parts.get("tasks", set())
        self._merge("tasks", made, keys.members)
        return made

    def _merge(
        self, name: str, made: DataFrame, replaced: DataFrame | None, column: str = "uuid"
    ) -> None:
        """Publish new rows of whole families in place of the old ones, which have these keys."""
        made = made.select(*stored(name).names)
        if replaced is None:
            self.publication.replace(name, made, "_cell")
            return
        others = self._of(self._old(name, self._homes), replaced, column, "left_anti")
        self.publication.replace(name, others.unionByName(made), "_cell", self._homes)

    def _lineage(self, tasks: DataFrame, own: DataFrame, keys: Keys) -> None:
        homes = tasks.selectExpr("root AS root_id", "_cell").distinct()
        made = lineage.lineage(tasks, own, self._staged).join(homes, "root_id")
        self._merge("lineage", made, keys.roots, "root_id")

    def _attempts(self, own: DataFrame, tasks: DataFrame, keys: Keys, statuses: DataFrame) -> None:
        """Executions of these families, and those that were open and are judged otherwise now."""
        lived = workers.with_lives(own, self._births)
        made = attempts.attempts(lived, tasks.select("uuid", "name", "_queue"))
        made = made.join(tasks.select("uuid", "_cell"), "uuid").select(*stored("attempts").names)
        if keys.members is None:
            self.publication.replace("attempts", attempts.judged(made, statuses), "_cell")
            return
        before = self._old("attempts").where("ended IS NULL AND ended_clock IS NULL")
        after = attempts.judged(before, statuses)
        changed = after.join(
            before.select("uuid", "attempt", before["reason"].alias("was"),
                          before["outcome"].alias("had")),
            ["uuid", "attempt"],
        ).where("NOT (reason <=> was AND outcome <=> had)")  # fmt: skip
        parts = self._homes | {one["_cell"] for one in changed.select("_cell").distinct().collect()}
        others = self._of(self._old("attempts", parts), keys.members, how="left_anti")
        rows = attempts.judged(others.unionByName(made), statuses)
        self.publication.replace("attempts", rows, "_cell", parts)

    def _clock_audit(
        self, own: DataFrame, tasks: DataFrame, findings: DataFrame, keys: Keys
    ) -> None:
        """Findings about tasks are kept by family; those about senders are made anew."""
        found = clock_audit.of_tasks(own, tasks.select("uuid", "root"))
        made = found.join(tasks.select("uuid", "_cell"), "uuid")
        made = made.select(*stored("clock_audit").names)
        senders = findings.selectExpr("*", "CAST(NULL AS BIGINT) AS _cell")
        if keys.members is None:
            self.publication.replace("clock_audit", made.unionByName(senders), "_cell")
            return
        others = self._of(self._old("clock_audit", self._homes), keys.members, how="left_anti")
        rows = others.unionByName(made).unionByName(senders)
        self.publication.replace("clock_audit", rows, "_cell", [*self._homes, None])

    def _elections(self, about: DataFrame, keys: Keys) -> None:
        if not self._has_elections and not self.publication.rows_of("elections"):
            self.publication.replace_by_nothing("elections", stored("elections"))
            return
        made = elections.elections(about).selectExpr("*", "_cells[0] AS _cell")
        if keys.named is None:
            judged = elections.judged(made, self._log_ends)
            self.publication.replace("elections", judged, "_cell")
            return
        made = self._staged(self._of(made, keys.named, "id"), "elections")
        before = self._old("elections")
        after = elections.judged(before, self._log_ends)
        changed = after.join(before.select("id", before["verdict"].alias("was")), "id")
        homes = made.select("_cell").union(changed.where("verdict != was").select("_cell"))
        parts = keys.parts.get("elections", set())
        parts |= {one["_cell"] for one in homes.distinct().collect()}
        if not parts:
            return
        others = self._of(self._old("elections", parts), keys.named, "id", "left_anti")
        rows = elections.judged(others.unionByName(made), self._log_ends)
        self.publication.replace("elections", rows, "_cell", parts)

    def _revocations(self, about: DataFrame, tasks: DataFrame, keys: Keys) -> None:
        if not self._has_revocations and not self.publication.rows_of("revocations"):
            self.publication.replace_by_nothing("revocations", stored("revocations"))
            return
        names = tasks.select("uuid", "name")
        made = revocations.revocations(about, names, self._staged).selectExpr(
            "*", "_cells[0] AS _cell"
        )
        if keys.named is None:
            self.publication.replace("revocations", made, "_cell")
            return
        made = self._staged(self._of(made, keys.named), "revocations")
        parts = keys.parts.get("revocations", set())
        parts |= {one["_cell"] for one in made.select("_cell").distinct().collect()}
        if not parts:
            return
        others = self._of(self._old("revocations", parts), keys.named, how="left_anti")
        self.publication.replace("revocations", others.unionByName(made), "_cell", parts)

    # -- rates ---------------------------------------------------------------------------------

    def _rates(self, events: DataFrame, keys: Keys) -> None:
        publication, parts = self.publication, None if self.is_whole else keys.cells
        executed = self._old("attempts")
        tasks = self.publication.read("tasks", stored("tasks"), cells=parts)
        counted = rates.counts(events, tasks.select("uuid", "name"))
        times = self.state.cells.times(keys.cells)
        made = rates.rates(counted, self._ended_in(executed, times), "rates")
        before = self._old("rates", parts)
        publication.replace("rates", made, "_cell", parts)
        minutes = self._old("rates")
        days = None
        if parts is not None:
            day = f"CAST(floor(minute / 86400) * {DAY_MINUTES} AS BIGINT)"
            changed = self._old("rates", parts).unionByName(before).selectExpr(f"{day} AS day")
            days = {one["day"] for one in changed.distinct().collect()}
            within = (self.state.cells.between(one, one + DAY_MINUTES - 1) for one in days)
            minutes = self._old("rates", set().union(*within))
            minutes = minutes.where(f"{day} IN ({', '.join(map(str, days)) or 'NULL'})")
            times = [(one * MINUTE_S, (one + DAY_MINUTES) * MINUTE_S) for one in sorted(days)]
        for name in ("rates_hourly", "rates_daily"):
            longer = rates.longer(minutes, name)
            made = rates.rates(longer, self._ended_in(executed, times), name)
            publication.replace(name, made, "_cell", days)

    def _ended_in(self, executed: DataFrame, times: Collection[tuple[float, float]]) -> DataFrame:
        """The executions that started or ended in these spans of time."""
        if self.is_whole:
            return executed
        asked = (
            f"({column} >= {float(since)!r}D AND {column} < {float(until)!r}D)"
            for column in ("started", "ended")
            for since, until in _joined(times)
        )
        return executed.where(" OR ".join(asked) or "false")

    # -- queues --------------------------------------------------------------------------------

    def _queues(self, tasks: DataFrame, keys: Keys) -> None:
        executed, known, parts = self._old("attempts"), self._old("tasks"), None
        cell = self.state.cells.sql("CAST(minute / 60 AS BIGINT)")
        asked = lasting = "true"
        if not self.is_whole:
            parts = self._queue_cells(tasks, keys)
            times = _joined(self.state.cells.times(parts))
            # Said of columns of the files, so that those are skipped that have nothing of it.
            executed = executed.where(f"started >= {float(times[0][0])!r}D")
            known = known.where(f"_due >= {float(times[0][0]) - queues.WAIT_S_MAX!r}D")
            lasting = " OR ".join(
                f"(due < {float(until)!r}D AND until >= {float(since)!r}D)"
                for since, until in times
            )
            asked = f"{cell} IN ({_listed(parts)})"
        waits = queues.waits(executed, known, self._log_ends).where(lasting)
        made = queues.queues(waits).where(asked).selectExpr("*", f"{cell} AS _cell")
        self.publication.replace("queues", made, "_cell", parts)

    def _queue_cells(self, tasks: DataFrame, keys: Keys) -> set[int]:
        """The cells in which something waits otherwise than before."""
        cells, read = self.state.cells, self.publication.read
        was_executed, were = (
            self._of(read(name, stored(name), self._homes, before=True), keys.members)
            for name in ("attempts", "tasks")
        )
        executed = self._of(self._old("attempts", self._homes), keys.members)
        waits = queues.waits(was_executed, were, self._log_ended).union(
            queues.waits(executed, tasks, self._log_ends)
        )
        seen = queues.minutes(waits).selectExpr(
            f"{cells.sql('first')} AS first", f"{cells.sql('last')} AS last"
        )
        spans = [(one["first"], one["last"]) for one in seen.distinct().collect()]
        # What waits and is not touched, waits on; minutes behind the last cell may get a new one.
        ends = sorted(map(_minute, (self._log_ended, self._log_ends)))
        spans += [(ends[0], ends[1]), (self._last_cell, END)]
        return self._cut_cells.union(*(cells.between(*span) for span in spans))

    # -- the order -----------------------------------------------------------------------------

    def _timeline(self, fresh: DataFrame, events: DataFrame) -> None:
        publication, ranges = self.publication, self.state.ranges
        source = events if self.is_whole else fresh
        ranges.extend(source)
        rows = timeline.lean(source, ranges)
        if self.is_whole:
            touched = set(ranges.bases)
        else:
            again = "false"
            if self._gone:  # what was of these cells is replaced by what is of them
                again = f"{self.state.cells.sql()} IN ({_listed(self._cut_cells)})"
                rows = rows.unionByName(timeline.lean(events.where(again), ranges))
            rows = self._staged(rows, "ordered")
            before = self._old("timeline").where(again).select("_range")
            ranged = rows.select("_range").union(before)
            touched = {one["_range"] for one in ranged.distinct().collect()}
            others = self._old("timeline", touched).where(f"NOT {again}").drop("_number")
            rows = others.unionByName(rows)
        made = timeline.timeline(rows, touched, is_unique=self.is_whole)
        publication.replace_sorted("timeline", made, "_range", touched)
        ranges.count(dict.fromkeys(touched, 0) | publication.rows_by_part("timeline"))
        publication.made["timeline"]["bases"] = {str(k): v for k, v in ranges.bases.items()}


def _with_block(events: DataFrame) -> DataFrame:
    return events.selectExpr("*", f"{sequences.BLOCK} AS block").where("seq IS NOT NULL")


def _longs(values: Iterable[int]) -> str:
    return f"array({_listed(values)})"


def _listed(values: Iterable[int]) -> str:
    return ", ".join(f"{value}L" for value in sorted(values))


def _minute(time_s: float) -> int:
    """The minute of a moment, which may be infinite."""
    return int(max(BEGINNING * MINUTE_S, min(END * MINUTE_S, time_s)) // MINUTE_S)


def _later(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)


def _joined(times: Collection[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans with those joined that follow each other."""
    made: list[tuple[float, float]] = []
    for since, until in sorted(times):
        if made and since <= made[-1][1]:
            made[-1] = made[-1][0], max(until, made[-1][1])
        else:
            made.append((since, until))
    return made
