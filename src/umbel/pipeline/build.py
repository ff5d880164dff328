"""`umbel history build`: from the log to the tables, in a batch or in increments.

The segments of the log are listed once per build (`umbel.pipeline.log`), so that all tables cover
the same events, whatever a recorder writes meanwhile.

*Increments*, the usual way: segments that no build has read are read in batches. Every batch
becomes a summary of its tasks; then the manifest names the summary and the segments behind it.
Killed before that, the batch is read again. What a batch costs depends on its own events, not on
the history. Without new segments the build ends before Spark is started. Segments that were removed
from the log cannot be taken out of summaries: everything is read again then. *A batch* (`full`,
`since`) summarises all segments at once, by the same functions.

Then the tables are *published*. `tasks` comes from the summaries. Tables that have a row for each
event, or look at neighbours in time, are functions of the whole log, each event once: they are
made anew, and that takes time in proportion to the log. Following a log, tables are therefore
published now and then, and never for more than a fifth of the time.

Nobody sees a table before all of them are written: the index is replaced as the very last step.
`runs` has a row for every time.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql.functions import expr

from umbel.pipeline import log as logs
from umbel.pipeline import storage, task_fold
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.events import once, prepare, unique
from umbel.pipeline.log import Coverage, Listing
from umbel.pipeline.places import Place
from umbel.pipeline.probing import probe
from umbel.pipeline.session import LOCAL, check_master, explaining, is_small, session, sized
from umbel.pipeline.storage import Publication, Tiers
from umbel.pipeline.tables import TABLES, Inputs
from umbel.pipeline.tables.tasks import tasks as tasks_table
from umbel.pipeline.turns import turn
from umbel.pipeline.watermarks import RECEIPTS, log_ends, watermarks
from umbel.version import __version__

FILES_PER_BATCH: Final = 100
FOLLOW_POLL_S: Final = 5.0
PUBLISH_EVERY_S: Final = 60.0
PUBLISH_SHARE: Final = 0.2
RUNS_MAX: Final = 1_000
# Where an error of Spark names a segment.
_SEGMENT: Final = re.compile(r"events/([^/]+)/([^/]+?\.parquet)")

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
    "skipped": "whole",  # damaged segments that were left out
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
    skip_damaged: bool = False  # leave out segments that cannot be read
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
    skipped: int = 0
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
        skipped = f" {self.skipped:,} damaged segments left out." if self.skipped else ""
        return (
            f"{self.read:,} events read, {self.kept:,} kept, {self.duplicate:,} duplicate, "
            f"{self.quarantined:,} quarantined: {self.tasks:,} tasks in {self.seconds:.1f} s"
            f"{skipped}"
        )


def build(options: Options, spark: SparkSession | None = None) -> Run:
    """Bring the tables up to date; gives the last run. What a user can put right is a
    `HistoryError`, and then the tables are as they were before.
    """
    if options.follow and options.mode != "increments":
        raise HistoryError(f"--follow reads increments: leave out --{options.mode}")
    if spark is None:
        check_master(options.master)
    log, tables = logs.open_log(options.log), Place(options.tables)
    if not options.follow and not logs.segments(log):
        raise HistoryError(
            f"the log {log.shown} has no events yet: let 'umbel record' run while tasks do"
        )
    tables.make()
    with turn(tables, options.progress) as own_turn:
        storage.tighten_old(tables)
        builder = Builder(log, tables, options, spark, own_turn.share)
        try:
            with explaining(f"cannot build {options.tables} from {options.log}"):
                return builder.follow() if options.follow else builder.build()
        finally:
            builder.close()


class Builder:
    """One log and one directory of tables. Spark is started when there is something to do."""

    def __init__(
        self,
        log: Place,
        tables: Place,
        options: Options,
        spark: SparkSession | None = None,
        on_start: Callable[[SparkSession], None] = lambda _: None,
    ) -> None:
        self.log, self.tables, self.options = log, tables, options
        self._spark, self._is_own, self._is_ready = spark, spark is None, False
        self._on_start = on_start
        self._damaged: logs.Segments = {}

    def close(self) -> None:
        """Stop Spark, if it was started here."""
        if self._spark is not None and self._is_own:
            self._spark.stop()
            self._spark = None

    @property
    def spark(self) -> SparkSession:
        """Spark, whose executors reach the log and the tables."""
        if self._spark is None:
            self.options.progress("starting Spark")
            self._spark = session(self.options.master, settings=self.options.settings)
        if not self._is_ready:
            self._on_start(self._spark)
            probe(self._spark, self.log, self.tables)
            self._is_ready = True
        return self._spark

    def build(self) -> Run:
        """Read what there is and publish."""
        while True:
            try:
                return self._increment() if self.options.mode == "increments" else self._whole()
            except HistoryError as exc:
                if not self._leave_out(exc):
                    raise

    def follow(self) -> Run:
        """Go on until told to stop; publish now and then, and at the end."""
        options, run = self.options, self.new_run()
        done, due_at, is_due = run, 0.0, False
        while True:
            stopping = options.stop.is_set()
            if logs.segments(self.log):
                try:
                    tiers, listing = self.open()
                    is_due |= self.advance(run, tiers, listing) > 0
                except HistoryError as exc:
                    if not self._leave_out(exc):
                        raise
                    continue
                if is_due and (stopping or time.monotonic() >= due_at):
                    began = time.monotonic()
                    self.publish(run, listing.coverage, tiers)
                    options.progress(str(run))
                    now, is_due = time.monotonic(), False
                    due_at = now + max(options.publish_every_s, (now - began) / PUBLISH_SHARE)
                    done, run = run, self.new_run()
            if stopping:
                return done
            options.progress("waiting for events")
            options.stop.wait(options.poll_s)

    def _increment(self) -> Run:
        run = self.new_run()
        tiers, listing = self.open()
        index = self.tables.read_json(storage.INDEX) or {}
        if not listing.fresh and tiers.published and tiers.published == index.get("run"):
            return self._nothing_new(run, index, listing)
        self.advance(run, tiers, listing)
        self.publish(run, listing.coverage, tiers)
        return run

    def _whole(self) -> Run:
        run = self.new_run()
        if self.options.full:
            storage.forget_increments(self.tables)
        listing = self._look(Coverage())
        self.publish(run, listing.coverage, None)
        return run

    def open(self) -> tuple[Tiers, Listing]:
        """The increments until now, and what the log has on top of them."""
        tiers = Tiers.open(self.tables, self.log, self.options.tiers_per_level)
        listing = self._look(tiers.coverage)
        if listing.removed:
            self.options.progress(
                f"{listing.removed:,} segments were removed from the log: reading all of it anew"
            )
            storage.forget_increments(self.tables)
            tiers = Tiers.open(self.tables, self.log, self.options.tiers_per_level)
            listing = self._look(tiers.coverage)
        tiers.clean()
        return tiers, listing

    def _look(self, before: Coverage) -> Listing:
        for day, names in self._damaged.items():
            known = before.skipped.setdefault(day, [])
            known += [name for name in names if name not in known]
        listing = logs.look(self.log, before, skip_damaged=self.options.skip_damaged)
        if not listing.coverage.read:
            raise HistoryError(f"the log {self.log.shown} has no segment that can be read")
        return listing

    def _leave_out(self, exc: HistoryError) -> bool:
        """Whether to try again without the segment that an error is about."""
        found = _SEGMENT.search(str(exc)) if self.options.skip_damaged else None
        if found is None or found[2] in self._damaged.get(found[1], ()):
            return False
        self._damaged.setdefault(found[1], []).append(found[2])
        self.options.progress(f"leaving out {found[0]}, which is damaged")
        return True

    def _nothing_new(self, run: Run, index: Mapping[str, Any], listing: Listing) -> Run:
        """What the last build found holds still."""
        told = storage.published_few(self.tables, index, "runs")
        last = max(told, key=lambda one: str(one["run"]), default={})
        run.rows, run.kept = last.get("rows") or 0, last.get("kept") or 0
        run.quarantined = logs.count_quarantined(self.log)
        run.skipped = listing.coverage.skipped_count
        run.tasks, run.seconds = index["tables"]["tasks"]["rows"], time.time() - run.began
        return run

    def new_run(self) -> Run:
        """A run that begins now."""
        now = datetime.now(UTC)
        name = storage.new_run_id(now)
        return Run(name, self.options.mode, now.timestamp(), self.options.since)

    # -- increments

    def advance(self, run: Run, tiers: Tiers, listing: Listing) -> int:
        """Summarise the segments that are new; how many batches it took."""
        fresh, size = listing.fresh, self.options.files_per_batch
        began = time.monotonic()
        for first in range(0, len(fresh), size):
            paths, left = fresh[first : first + size], fresh[first + size :]
            # A batch does not grow with the log.
            with sized(self.spark, self._bytes(paths)):
                self._take(run, tiers, paths, listing.without(left))
        if not fresh and tiers.coverage != listing.coverage and tiers.live:
            tiers.coverage = listing.coverage  # compacted, with nothing new in it
            tiers.save()
        run.timed("increments", began)
        return -(-len(fresh) // size)

    def _take(self, run: Run, tiers: Tiers, paths: list[str], coverage: Coverage) -> None:
        began = time.monotonic()
        counted = Observation()
        with explaining(f"cannot read {self.options.log}"):
            rows = logs.read(self.spark, self.log, paths)
            events = prepare(rows).select(*task_fold.EVENT_COLUMNS)
            events = events.observe(counted, expr("count(1)").alias("rows"))
            tiers.add(task_fold.summarise(events), coverage)
        run.read += counted.get["rows"]
        run.batch_seconds.append(time.monotonic() - began)
        self.options.progress(f"batch {tiers.batch}: {run.batch_seconds[-1]:.1f} s")
        began = time.monotonic()
        while tiers.compact(self.spark):
            pass
        run.timed("compaction", began)

    def _bytes(self, paths: list[str]) -> int:
        return sum(map(self.log.size, paths))

    # -- publishing

    def publish(self, run: Run, coverage: Coverage, tiers: Tiers | None) -> None:
        """Make all tables of these segments and let everybody see them.

        Without increments, by a batch.
        """
        publication = Publication(self.spark, self.tables, run.run)
        try:
            log_bytes = self._bytes(coverage.paths)
            with sized(self.spark, log_bytes):
                each = unique if is_small(log_bytes) else once
                self._make(run, publication, coverage, tiers, each)
            run.quarantined = logs.count_quarantined(self.log)
            run.skipped = coverage.skipped_count
            run.tasks = publication.made["tasks"]["rows"]
            run.seconds = time.time() - run.began
            publication.publish_few(self._runs(publication, run), RUN_KINDS, "runs")
            publication.commit()
            if tiers is not None:
                tiers.published = run.run
                tiers.save()
        finally:
            publication.clean()
            self.spark.catalog.clearCache()

    def _make(
        self,
        run: Run,
        publication: Publication,
        coverage: Coverage,
        tiers: Tiers | None,
        each: Callable[[DataFrame], DataFrame],
    ) -> None:
        raw = logs.read(self.spark, self.log, coverage.paths, self.options.since)
        summary = tiers.summary(self.spark) if tiers is not None else None
        events = self._step(run, "events", lambda: publication.keep(each(raw), "events"))
        run.rows, run.kept = _counts(events)
        if summary is None:
            run.read, summary = run.rows, task_fold.summarise(prepare(raw))
        folded = task_fold.tasks(summary)
        fold = self._step(run, "fold", lambda: publication.keep(folded, "fold"))
        tasks = self._step(
            run, "tasks", lambda: publication.publish(tasks_table(fold, events), "tasks")
        )
        inputs = Inputs(self.spark, events, tasks, _log_ends(raw))
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


def _log_ends(raw: DataFrame) -> float:
    receipts = raw.groupBy("recorder").agg(*map(expr, RECEIPTS)).collect()
    return log_ends(watermarks((row["recorder"], row["prompt"], row["newest"]) for row in receipts))


def _rounded(timings: Mapping[str, float]) -> str:
    return json.dumps({step: round(seconds, 3) for step, seconds in timings.items()})
