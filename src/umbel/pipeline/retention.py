"""`umbel history retain`: which rows of old days stay in the log, decided with the tables.

The days are those of the log's folders. Everything in folders before the *cutoff* goes, but for
what is still needed to tell what happened since. That is *carried over*:

| what                       | which                                                             |
| -------------------------- | ----------------------------------------------------------------- |
| tasks                      | all events of tasks with an event in a kept day, of open ones, and |
|                            | of those that a carried-over election is about                    |
| elections                  | all events of those with an event in a kept day, or about a task  |
|                            | that is carried over                                              |
| revocations                | those that name a task that is carried over                       |
| lives of workers           | of each that has an event in a kept day, or one that is carried   |
|                            | over, and of the next and the last life of the same host name:    |
|                            | its first and last `worker-online`, its last `worker-offline`,    |
|                            | and its last heartbeat if it has none in a kept day. So it begins |
|                            | and ends when it did, and has the same status                     |
| numbers                    | events with a greater number than one in a kept day has, of the   |
|                            | same series, and all events of their tasks                        |

A task is *open* if it has not ended, and was not lost with its worker. If nothing about it was
recorded for `STALE_S`, it is not open any more, unless its eta is still to come: so nothing is
carried over for ever.

Carried-over rows lose their number (`seq`), since the numbers around them are gone on purpose, and
are not to be reported as lost. Where days meet, and after a redelivery, a sender's events are not
received in the order of their numbers. So those of the old days behind the first number of the kept
days stay, with it: what a kept day lacks then is missing indeed, and what is before is no hole but
a `beginning`.

The tables must cover the log. Nothing is changed here: rows are written below the tables'
directory, and whoever asked puts them into the log (`umbel.recorder.retention`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr

from umbel.cluster.event_rows import COLUMNS
from umbel.pipeline import log as logs
from umbel.pipeline import storage
from umbel.pipeline.build import Builder, Options, Run
from umbel.pipeline.events import prepare
from umbel.pipeline.increment import State
from umbel.pipeline.places import Place
from umbel.pipeline.queries import query
from umbel.pipeline.session import check_master, explaining, sized
from umbel.pipeline.storage import Publication
from umbel.pipeline.tables import revocations, stored, workers
from umbel.pipeline.tables.due import moment
from umbel.pipeline.turns import WAIT_S

# Longer: tasks whose end nobody recorded are carried over for longer. Shorter: a task that waits
# for this long, and is then run, has lost its beginning.
STALE_S: Final = 90 * 86_400.0
BATCH_ROWS: Final = 20_000
_ENDED: Final = (
    "(state IN ('SUCCESS', 'FAILURE', 'REVOKED') "
    "OR state = 'REJECTED' AND NOT coalesce(requeue, false))"
)
# What a task is in that is with no worker: an attempt that was lost before is not the last word.
_WAITS: Final = "state IN ('PENDING', 'RECEIVED', 'RETRY', 'REJECTED')"
_SIGNS: Final = "type IN ('worker-online', 'worker-offline', 'worker-heartbeat')"
_SERIES: Final = ("hostname", "incarnation", "series")
_FOLDER: Final = re.compile(r"day=\d{4}-\d{2}-\d{2}")
_DAY: Final = r"regexp_extract(_metadata.file_path, '/day=([^/]+)/[^/]*$', 1)"


@dataclass(frozen=True, slots=True)
class OldDay:
    """What was decided about the events of one day."""

    day: str
    segments: tuple[str, ...]  # the names of those that were looked at
    rows: int
    carried: int
    batches: Callable[[], Iterator[pa.Table]]  # the rows that are carried over


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided about all old days."""

    cutoff: str
    days: list[OldDay] = field(default_factory=list)  # of which something goes
    unchanged: int = 0  # events of older days of which everything stays


@contextlib.contextmanager
def opened(options: Options, spark: SparkSession | None = None) -> Iterator[Retention]:
    """A log and its tables, which nobody else builds meanwhile. Raises `HistoryError`."""
    if spark is None:
        check_master(options.master)
    log, tables = logs.open_log(options.log), Place(options.tables)
    tables.make()
    storage.tighten_old(tables)
    builder = Builder(log, tables, options, spark)
    try:
        with explaining(f"cannot build {options.tables} from {options.log}"), builder.turn(WAIT_S):
            yield Retention(builder)
    finally:
        builder.close()


class Retention:
    """Builds tables, and decides by them; made by `opened`."""

    def __init__(self, builder: Builder) -> None:
        self._builder, self._log, self._tables = builder, builder.log, builder.tables

    def build(self) -> Run | None:
        """Bring the tables up to date; None if the log is empty."""
        return self._builder.build() if logs.segments(self._log) else None

    def decide(self, cutoff: str, now_s: float) -> Plan:
        """Which rows stay of the days before the cutoff (`YYYY-MM-DD`). The tables must be built.

        Only segments that the tables cover are looked at.
        """
        index = storage.read_index(self._tables)
        told = storage.read_state(self._tables, index)
        if not told or not logs.segments(self._log):
            return Plan(cutoff)
        covered = State.of_json(told).coverage
        names: dict[str, tuple[str, ...]] = {}
        for some in (covered.read, covered.replaced, covered.skipped):
            for day, found in some.items():
                if _is_before(day, cutoff):
                    names[day] = (*names.get(day, ()), *found)
        if not names:
            return Plan(cutoff)
        self._builder.options.progress("old days")
        log_bytes = sum(map(self._log.size, covered.paths))
        spark = self._builder.started(log_bytes)
        publication = Publication(spark, self._tables, self._new_run(), index)
        with sized(spark, log_bytes, log_bytes):
            choice = _Choice(publication, self._log, covered.paths, cutoff, now_s)
            counts = choice.write()
        days, unchanged = [], 0
        for day, segments in sorted(names.items()):
            rows, carried, is_same = counts.get(day, (0, 0, True))
            if is_same and rows == carried and day not in covered.skipped:
                unchanged += rows
                continue
            batches = self._reader(choice.folders, day)
            days.append(OldDay(day.removeprefix("day="), segments, rows, carried, batches))
        return Plan(cutoff, days, unchanged)

    def _new_run(self) -> str:
        return storage.new_run_id(datetime.now(UTC))

    def _reader(self, folders: list[str], day: str) -> Callable[[], Iterator[pa.Table]]:
        def read() -> Iterator[pa.Table]:
            for folder in folders:
                for name in self._tables.names(f"{folder}/{day}"):
                    if name.endswith(".parquet") and not name.startswith((".", "_")):
                        with self._tables.open(f"{folder}/{day}/{name}") as file:
                            for batch in pq.ParquetFile(file).iter_batches(BATCH_ROWS):
                                yield pa.Table.from_batches([batch])

        return read


def _is_before(folder: str, cutoff: str) -> bool:
    """Whether a folder has the events of a day before the cutoff; others are left alone."""
    return _FOLDER.fullmatch(folder) is not None and folder < f"day={cutoff}"


class _Choice:
    """The rows of old days that are carried over, written by day."""

    def __init__(
        self, publication: Publication, log: Place, paths: list[str], cutoff: str, now_s: float
    ) -> None:
        self._publication, self._now_s = publication, now_s
        self.spark = publication.spark
        is_old = {path: _is_before(path.split("/")[1], cutoff) for path in paths}
        self._births = workers.known_births(self._table("_facts"))
        self._old = self._read(log, [path for path in paths if is_old[path]])
        self._kept = self._read(log, [path for path in paths if not is_old[path]])
        self.folders: list[str] = []

    def write(self) -> dict[str, tuple[int, int, bool]]:
        """Write the rows; gives rows, carried rows, and whether those are as they were, by day."""
        old = self._with_first_numbers()
        tasks, elections = self._about(old)
        chosen = self._chosen(old, tasks, elections)
        chosen = self._written(chosen, "carried")
        signs = self._written(self._signs(old, chosen), "signs")
        counts: dict[str, tuple[int, int, bool]] = {}
        carried = chosen.select("day", "changed").unionByName(signs.select("day", "changed"))
        told = {
            one["day"]: (one["count"], one["changed"])
            for one in carried.groupBy("day")
            .agg(expr("count(1)").alias("count"), expr("bool_or(changed)").alias("changed"))
            .collect()
        }
        for one in self._old.groupBy("day").count().collect():
            count, changed = told.get(one["day"], (0, False))
            counts[f"day={one['day']}"] = one["count"], count, not changed
        return counts

    # -- what there is

    def _read(self, log: Place, paths: list[str]) -> DataFrame:
        """Rows of the log, prepared, with the day of their folder and the life of their sender."""
        rows = logs.read(self.spark, log, paths)
        rows = rows.selectExpr("*", f"{_DAY if paths else 'CAST(NULL AS STRING)'} AS day")
        return workers.with_lives(prepare(rows), self._births)

    def _table(self, name: str) -> DataFrame:
        return self._publication.read(name, stored(name))

    def _with_first_numbers(self) -> DataFrame:
        """The old rows, and whether their numbers are behind the first one of the kept days."""
        firsts = self._kept.where("seq IS NOT NULL").groupBy(*_SERIES)
        return query(
            """
            SELECT old.*, coalesce(seq >= first, false) AS is_numbered
            FROM {old} AS old LEFT JOIN {firsts} AS firsts
                ON old.hostname = firsts.hostname AND old.incarnation <=> firsts.incarnation
                AND old.series <=> firsts.series AND seq IS NOT NULL
            """,
            old=self._old,
            firsts=firsts.agg(expr("min(seq)").alias("first")),
        )

    # -- tasks and elections

    def _about(self, old: DataFrame) -> tuple[DataFrame, DataFrame]:
        """The tasks (uuid) and the elections (id) that are carried over."""
        held = self._table("elections").select("id", "_task")
        tasks = self._staged(
            query(
                """
                SELECT uuid FROM {kept} WHERE class IS NOT NULL
                UNION SELECT uuid FROM {old} WHERE class IS NOT NULL AND is_numbered
                UNION SELECT uuid FROM {open}
                """,
                kept=self._kept,
                old=old,
                open=self._open(old),
            ),
            "known",
        )
        still = query(
            """
            SELECT DISTINCT id FROM {kept} WHERE type LIKE 'worker-elect%' AND id IS NOT NULL
            UNION SELECT id FROM {old} WHERE type LIKE 'worker-elect%' AND is_numbered
            """,
            kept=self._kept,
            old=old,
        )
        elections = self._staged(self._elections(held, still, tasks), "about")
        tasks = self._staged(
            query(
                """
                SELECT uuid FROM {tasks} UNION SELECT id FROM {elections}
                UNION SELECT _task FROM {elections} WHERE _task IS NOT NULL
                """,
                tasks=tasks,
                elections=elections,
            ),
            "tasks",
        )
        return tasks, elections

    def _elections(self, held: DataFrame, still: DataFrame, tasks: DataFrame) -> DataFrame:
        return query(
            """
            SELECT id, _task FROM {held}
            WHERE id IN (SELECT id FROM {still}) OR id IN (SELECT uuid FROM {tasks})
                OR _task IN (SELECT uuid FROM {tasks})
            """,
            held=held,
            still=still,
            tasks=tasks,
        )

    def _open(self, old: DataFrame) -> DataFrame:
        """The open tasks (uuid)."""
        return query(
            f"""
            WITH lasts AS (
                SELECT uuid, max_by(outcome, attempt) AS outcome FROM {{attempts}} GROUP BY uuid
            ), unended AS (
                SELECT tasks.uuid, {moment("eta")} AS due
                FROM {{tasks}} AS tasks LEFT JOIN lasts ON tasks.uuid = lasts.uuid
                WHERE NOT coalesce({_ENDED}, false)
                    AND ({_WAITS} OR NOT coalesce(outcome = 'LOST', false))
            )
            SELECT unended.uuid FROM unended JOIN {{old}} AS old ON unended.uuid = old.uuid
            WHERE old.class IS NOT NULL
            GROUP BY unended.uuid
            HAVING max(received) >= {self._now_s - STALE_S!r}D OR max(due) > {self._now_s!r}D
            """,  # noqa: S608 - our own names
            attempts=self._table("attempts"),
            tasks=self._table("tasks"),
            old=old,
        )

    def _chosen(self, old: DataFrame, tasks: DataFrame, elections: DataFrame) -> DataFrame:
        """All rows that are carried over for another reason than as a sign of a life."""
        return query(
            f"""
            WITH revoked AS (
                SELECT old.*, explode(from_json(raw, '{revocations.RAW}').ids) AS named
                FROM {{old}} AS old WHERE type = 'worker-revocation' AND NOT is_numbered
            ), naming AS (
                SELECT * FROM revoked LEFT SEMI JOIN {{tasks}} AS tasks ON named = tasks.uuid
            )
            SELECT * FROM {{old}} AS old LEFT SEMI JOIN {{tasks}} AS tasks ON old.uuid = tasks.uuid
            WHERE class IS NOT NULL
            UNION ALL
            SELECT * FROM {{old}} AS old LEFT SEMI JOIN {{elections}} AS held ON old.id = held.id
            WHERE type LIKE 'worker-elect%' AND NOT is_numbered
            UNION ALL
            SELECT DISTINCT * EXCEPT (named) FROM naming
            UNION ALL
            SELECT * FROM {{old}} WHERE is_numbered AND class IS NULL AND NOT {_SIGNS}
            """,  # noqa: S608 - our own names
            old=old,
            tasks=tasks,
            elections=elections,
        )

    # -- lives

    def _signs(self, old: DataFrame, chosen: DataFrame) -> DataFrame:
        """The rows that say when the lives began and ended, and those behind the first number."""
        alive = self._kept.groupBy("hostname", "life").agg(
            expr("bool_or(type = 'worker-heartbeat')").alias("beats")
        )
        lives = query(
            """
            WITH seen AS (
                SELECT hostname, life, bool_or(beats) AS beats FROM (
                    SELECT hostname, life, beats FROM {alive}
                    UNION ALL SELECT hostname, life, false FROM {chosen}
                ) GROUP BY hostname, life
            ), ordered AS (
                SELECT hostname, incarnation AS life,
                    lead(incarnation) OVER following AS next,
                    last(incarnation) OVER (PARTITION BY hostname ORDER BY online, incarnation
                        ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) AS last
                FROM {workers} WINDOW following AS (PARTITION BY hostname ORDER BY online,
                    incarnation)
            ), others AS (
                SELECT ordered.hostname, explode(array(next, last)) AS life
                FROM ordered LEFT SEMI JOIN seen
                    ON ordered.hostname = seen.hostname AND ordered.life <=> seen.life
            )
            SELECT hostname, life, bool_or(beats) AS beats FROM (
                SELECT hostname, life, beats FROM seen
                UNION ALL SELECT hostname, life, false FROM others WHERE life IS NOT NULL
            ) GROUP BY hostname, life
            """,
            alive=alive,
            chosen=chosen,
            workers=self._table("workers"),
        )
        place = "PARTITION BY old.hostname, old.life, type ORDER BY"
        ties = "pid, clock, received, recorder, raw"
        return query(
            f"""
            WITH signs AS (
                SELECT old.*, lives.hostname IS NOT NULL AS is_alive,
                    coalesce(beats, false) AS beats,
                    row_number() OVER ({place} timestamp, {ties}) AS number,
                    row_number() OVER ({place} timestamp DESC, {ties}) AS number_back,
                    row_number() OVER ({place} order_clock DESC, timestamp DESC, {ties}) AS rank
                FROM {{old}} AS old LEFT JOIN {{lives}} AS lives
                    ON old.hostname = lives.hostname AND old.life <=> lives.life
                WHERE {_SIGNS}
            )
            SELECT * EXCEPT (is_alive, beats, number, number_back, rank) FROM signs
            WHERE is_numbered OR is_alive AND CASE type
                WHEN 'worker-online' THEN number = 1 OR number_back = 1
                WHEN 'worker-offline' THEN number_back = 1
                ELSE rank = 1 AND NOT beats END
            """,  # noqa: S608 - our own names
            old=old,
            lives=lives,
        )

    # -- writing

    def _staged(self, rows: DataFrame, name: str) -> DataFrame:
        return self._publication.keep(rows, f"retain_{name}")

    def _written(self, rows: DataFrame, name: str) -> DataFrame:
        """Write rows by day, as they go into the log."""
        columns = (
            "IF(is_numbered, seq, NULL) AS seq" if column == "seq" else column for column in COLUMNS
        )
        changed = "seq IS NOT NULL AND NOT is_numbered AS changed"
        made = rows.selectExpr(*columns, "life", changed, "day")
        folder = f"{storage.WORK}/retain_{name}-{self._publication.run}"
        tables = self._publication.tables
        made.write.mode("overwrite").partitionBy("day").parquet(tables.at(folder))
        self.folders.append(folder)
        if not any(one.startswith("day=") for one in tables.names(folder)):
            return made.limit(0)
        return self.spark.read.schema(made.schema).parquet(tables.at(folder))
