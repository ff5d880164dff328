"""`umbel history build`: from the log to the tables, in a batch or in increments.

*Increments*, the usual way: Spark reads the segments as a stream, each of them once. Every
micro-batch becomes a summary of its tasks, written under the number of the batch; then the manifest
names it, then the stream notes the batch as done. Killed between any two of these steps the same
batch comes again under the same number, and replaces what it left behind. What a micro-batch
costs depends on its own events, not on the history. *A batch* (`full`, `since`) summarises all
segments at once, by the same functions.

Then the tables are *published*. `tasks` comes from the summaries. Tables that have a row for each
event, or look at neighbours in time, are functions of the whole log, each event once: they are
made anew, and that takes time in proportion to the log. Following a log, tables are therefore
published now and then, and never for more than a fifth of the time.

Nobody sees a table before all of them are written: the index is replaced as the very last step.
`runs` has a row for every time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.streaming.query import StreamingQuery

from umbel.pipeline import storage, task_fold
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.events import once, prepare, unique
from umbel.pipeline.places import Place
from umbel.pipeline.session import LOCAL, PARTITION_BYTES, explaining, is_small, session, sized
from umbel.pipeline.storage import Publication, Tiers
from umbel.pipeline.tables import TABLES, Inputs
from umbel.pipeline.tables.tasks import tasks as tasks_table
from umbel.pipeline.turns import turn
from umbel.version import __version__

FILES_PER_BATCH: Final = 100
FOLLOW_POLL_S: Final = 5.0
PUBLISH_EVERY_S: Final = 60.0
PUBLISH_SHARE: Final = 0.2
RUNS_MAX: Final = 1_000

RUN_KINDS: Final = {
    "run": "text",
    "mode": "text",  # full, increments, since
    "began": "number",
    "seconds": "number",
    "since": "number",
    "read": "whole",  # rows of the log that this run folded
    "rows": "whole",  # rows of the log behind the tables
    "kept": "whole",  # events, each once
    "duplicate": "whole",  # rows that say again what another one said
    "quarantined": "whole",  # refused by the recorders
    "tasks": "whole",
    "batches": "whole",
    "timings": "text",  # JSON: seconds by step
    "master": "text",
    "version": "text",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `umbel history build` was told."""

    log: str
    tables: str
    master: str = LOCAL
    full: bool = False
    follow: bool = False
    since: float | None = None  # Unix seconds: only events that were sent after it
    # More files in a batch: fewer batches, each longer, and more work is lost by a kill.
    files_per_batch: int = FILES_PER_BATCH
    # Fewer: tables are read faster between two runs; more: each event is written again less often.
    tiers_per_level: int = storage.TIERS_PER_LEVEL
    publish_every_s: float = PUBLISH_EVERY_S
    poll_s: float = FOLLOW_POLL_S
    settings: Mapping[str, str] = field(default_factory=dict)  # of Spark, on top of ours
    progress: Callable[[str], None] = lambda _: None
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def mode(self) -> str:
        """How the log is read."""
        return "since" if self.since is not None else "full" if self.full else "increments"


@dataclass(slots=True)
class Run:
    """What was done: a row of the table `runs`."""

    run: str
    mode: str
    began: float
    since: float | None = None
    read: int = 0
    rows: int = 0
    kept: int = 0
    quarantined: int = 0
    tasks: int = 0
    seconds: float = 0.0
    batch_seconds: list[float] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def duplicate(self) -> int:
        """Rows of the log that were another one's copy."""
        return self.rows - self.kept

    def timed(self, step: str, began: float) -> None:
        """Note what a step took."""
        self.timings[step] = self.timings.get(step, 0.0) + time.monotonic() - began

    def __str__(self) -> str:
        return (
            f"{self.read:,} events read, {self.kept:,} kept, {self.duplicate:,} duplicate, "
            f"{self.quarantined:,} quarantined: {self.tasks:,} tasks in {self.seconds:.1f} s"
        )


def build(options: Options, spark: SparkSession | None = None) -> Run:
    """Bring the tables up to date; gives the last run. What a user can put right is a
    `HistoryError`, and then the tables are as they were before.
    """
    if options.follow and options.mode != "increments":
        raise HistoryError(f"--follow reads increments: leave out --{options.mode}")
    log, tables = storage.open_log(options.log), Place(options.tables)
    if not options.follow:
        storage.check_segments(log)
    tables.make()
    with turn(tables, options.progress) as own_turn:
        options.progress("starting Spark")
        own = spark is None
        running = session(options.master, settings=options.settings) if spark is None else spark
        try:
            own_turn.share(running)
            builder = Builder(running, log, tables, options)
            with explaining(f"cannot build {options.tables} from {options.log}"):
                return builder.follow() if options.follow else builder.build()
        finally:
            if own:
                running.stop()


class Builder:
    """One log, one directory of tables, one session."""

    def __init__(self, spark: SparkSession, log: Place, tables: Place, options: Options) -> None:
        self.spark, self.log, self.tables, self.options = spark, log, tables, options
        self._failure: HistoryError | None = None

    def build(self) -> Run:
        """Read what there is and publish."""
        run = self.new_run()
        if self.options.mode == "increments":
            tiers = self.open_tiers()
            self.advance(run, tiers)
            self.publish(run, tiers.summary(self.spark))
        else:
            if self.options.full:
                storage.forget_increments(self.tables)
            self.publish(run, None)
        return run

    def follow(self) -> Run:
        """Go on until told to stop; publish now and then, and at the end."""
        options, tiers, run = self.options, None, self.new_run()
        done, due_at, is_due = run, 0.0, False
        while True:
            stopping = options.stop.is_set()
            if tiers is None and storage.has_segments(self.log):
                tiers = self.open_tiers()
            if tiers is not None:
                is_due |= self.advance(run, tiers) > 0
            if tiers is not None and is_due and (stopping or time.monotonic() >= due_at):
                began = time.monotonic()
                self.publish(run, tiers.summary(self.spark))
                options.progress(str(run))
                now, is_due = time.monotonic(), False
                due_at = now + max(options.publish_every_s, (now - began) / PUBLISH_SHARE)
                done, run = run, self.new_run()
            if stopping:
                return done
            options.progress("waiting for events")
            options.stop.wait(options.poll_s)

    def new_run(self) -> Run:
        """A run that begins now."""
        now = datetime.now(UTC)
        name = storage.new_run_id(now)
        return Run(name, self.options.mode, now.timestamp(), self.options.since)

    # -- increments

    def open_tiers(self) -> Tiers:
        """The summaries of all increments until now."""
        return Tiers.open(self.tables, self.log, self.options.tiers_per_level)

    def advance(self, run: Run, tiers: Tiers) -> int:
        """Summarise the segments that are new; how many batches it took."""
        before = len(run.batch_seconds)

        def take(rows: DataFrame, number: int) -> None:
            try:
                with explaining(f"cannot read {self.options.log}"):
                    self._take(run, tiers, rows, number)
            except HistoryError as exc:
                self._failure = exc
                raise

        began = time.monotonic()
        stream = storage.stream_log(self.spark, self.log, self.options.files_per_batch)
        writer = stream.writeStream.foreachBatch(take).trigger(availableNow=True)
        writer = writer.option("checkpointLocation", tiers.checkpoint_url)
        # A batch does not grow with the log.
        with sized(self.spark, min(self.log.bytes_in("events"), PARTITION_BYTES)):
            self._await(writer.start())
        run.timed("increments", began)
        return len(run.batch_seconds) - before

    def _await(self, query: StreamingQuery) -> None:
        try:
            query.awaitTermination()
        except Exception:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            query.stop()

    def _take(self, run: Run, tiers: Tiers, rows: DataFrame, number: int) -> None:
        began = time.monotonic()
        counted = Observation()
        events = prepare(rows).select(*task_fold.EVENT_COLUMNS)
        events = events.observe(counted, expr("count(1)").alias("rows"))
        if tiers.add(task_fold.summarise(events), number):
            run.read += counted.get["rows"]
        run.batch_seconds.append(time.monotonic() - began)
        self.options.progress(f"batch {number}: {run.batch_seconds[-1]:.1f} s")
        began = time.monotonic()
        while tiers.compact(self.spark):
            pass
        run.timed("compaction", began)

    # -- publishing

    def publish(self, run: Run, summary: DataFrame | None) -> None:
        """Make all tables and let everybody see them; without a summary, by a batch."""
        publication = Publication(self.spark, self.tables, run.run)
        try:
            log_bytes = self.log.bytes_in("events")
            with sized(self.spark, log_bytes):
                each = unique if is_small(log_bytes) else once
                self._make(run, publication, summary, each)
            run.quarantined = storage.count_quarantined(self.log)
            run.tasks = publication.made["tasks"]["rows"]
            run.seconds = time.time() - run.began
            publication.publish_few(self._runs(publication, run), RUN_KINDS, "runs")
            publication.commit()
        finally:
            publication.clean()
            self.spark.catalog.clearCache()

    def _make(
        self,
        run: Run,
        publication: Publication,
        summary: DataFrame | None,
        each: Callable[[DataFrame], DataFrame],
    ) -> None:
        raw = storage.read_log(self.spark, self.log, self.options.since)
        events = self._step(run, "events", lambda: publication.keep(each(raw), "events"))
        run.rows, run.kept = _counts(events)
        if summary is None:
            run.read, summary = run.rows, task_fold.summarise(prepare(raw))
        folded = task_fold.tasks(summary)
        fold = self._step(run, "fold", lambda: publication.keep(folded, "fold"))
        tasks = self._step(
            run, "tasks", lambda: publication.publish(tasks_table(fold, events), "tasks")
        )
        inputs = Inputs(self.spark, events, tasks)
        for name, table in TABLES.items():
            make = partial(_published, publication, table, inputs, name)
            self._step(run, name, make)

    def _step(self, run: Run, name: str, make: Callable[[], DataFrame]) -> DataFrame:
        self.options.progress(name)
        began = time.monotonic()
        made = make()
        run.timed(name, began)
        return made

    def _runs(self, publication: Publication, run: Run) -> list[dict[str, Any]]:
        before = sorted(publication.published_few("runs"), key=lambda one: str(one["run"]))
        told: dict[str, Any] = {name: getattr(run, name, None) for name in RUN_KINDS}
        told |= {"batches": len(run.batch_seconds), "master": self.options.master}
        told |= {"timings": _rounded(run.timings), "version": __version__}
        return [*before[-(RUNS_MAX - 1) :], told]


def _published(
    publication: Publication, table: Callable[[Inputs], DataFrame], inputs: Inputs, name: str
) -> DataFrame:
    return publication.publish(table(inputs), name)


def _counts(events: DataFrame) -> tuple[int, int]:
    """Rows of the log, and events."""
    told = events.selectExpr("sum(copies) AS rows", "count(1) AS kept").first()
    return (told["rows"] or 0, told["kept"]) if told is not None else (0, 0)


def _rounded(timings: Mapping[str, float]) -> str:
    return json.dumps({step: round(seconds, 3) for step, seconds in timings.items()})
