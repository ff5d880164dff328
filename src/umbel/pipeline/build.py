"""`umbel history build`: from the log to the tables.

The segments of the log are listed once per build (`umbel.pipeline.log`), so that all tables cover
the same events, whatever a recorder writes meanwhile. Segments that no build has read are new; a
build carries them through to the tables (`umbel.pipeline.increment`), in batches if there are very
many, and each batch ends with a published index. Killed before that, the batch is read again.
Without new segments the build ends before Spark is started.

Segments that were removed from the log are taken out of the tables likewise. Everything is made
anew, by the same steps, if there are no tables yet, with `full` or `since`, if most of the log was
removed, and if new events say something that cannot be added to what there is (`Rebuild`).

Nobody sees a table before all of them are written: the index is replaced as the very last step.
`runs` has a row for every build.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import SparkSession

from umbel.pipeline import log as logs
from umbel.pipeline import storage, turns
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.increment import STATE_FORMAT, Increment, Rebuild, State
from umbel.pipeline.log import Coverage, Listing
from umbel.pipeline.places import Place
from umbel.pipeline.probing import probe
from umbel.pipeline.session import (
    LOCAL,
    SHORT_BYTES,
    SHORT_LIVED,
    check_master,
    explaining,
    is_local,
    is_small,
    session,
    sized,
)
from umbel.pipeline.storage import Publication
from umbel.pipeline.turns import Busy, Turn
from umbel.version import __version__

# A batch of about six million events: more need more memory, fewer read old events more often.
BYTES_PER_BATCH: Final = 320 * 2**20
FILES_PER_BATCH: Final = 10_000
FOLLOW_POLL_S: Final = 5.0
# Shorter: tables are younger; longer: less of the machine goes into them.
PUBLISH_EVERY_S: Final = 15.0
# The share of its time that `--follow` may spend building: the machine has other things to do.
BUSY_MAX: Final = 0.9
RUNS_MAX: Final = 1_000
# If more of the segments are gone, it is quicker to make everything anew.
REMOVED_MAX: Final = 0.5
# Where an error of Spark names a segment.
_SEGMENT: Final = re.compile(r"events/([^/]+)/([^/]+?\.parquet)")

RUN_KINDS: Final = {
    "run": "text",
    "mode": "text",  # full, increments, since
    "began": "number",
    "seconds": "number",
    "since": "number",
    "read": "whole",  # rows of the log that were new to this run
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
    storage.tighten_old(tables)
    builder = Builder(log, tables, options, spark)
    try:
        with explaining(f"cannot build {options.tables} from {options.log}"):
            if options.follow:
                return builder.follow()
            with builder.turn():
                return builder.build()
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
    ) -> None:
        self.log, self.tables, self.options = log, tables, options
        self._spark, self._is_own, self._is_probed = spark, spark is None, False
        self._turn: Turn | None = None
        self._follows: str | None = None  # the published run that this build goes on from
        self._damaged: logs.Segments = {}
        self._gone = set[str]()  # segments that were removed while they were read
        self._is_anew = False  # what the last build left is of no use
        self._fresh_bytes = self._log_bytes = 0

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
            is_short = self._fresh_bytes < SHORT_BYTES
            self._spark = session(
                self.options.master,
                settings=self.options.settings,
                java_options=SHORT_LIVED if is_short else "",
                is_small=is_small(self._log_bytes) and not self.options.follow,
            )
        if self._turn is not None:
            self._turn.share(self._spark)
        if not self._is_probed:
            probe(self._spark, self.log, self.tables)
            self._is_probed = True
        return self._spark

    @contextlib.contextmanager
    def turn(self, wait_s: float = 0.0) -> Iterator[None]:
        """Be the only one that writes the tables; raises `Busy` if another one does."""
        with turns.turn(self.tables, self.options.progress, wait_s) as own:
            self._turn = own
            try:
                yield
            except BaseException:
                self.close()  # or Java might still write when somebody else does
                raise
            finally:
                self._turn = None

    def started(self, log_bytes: int) -> SparkSession:
        """Spark; if it is not running yet, started for this many bytes of the log."""
        self._fresh_bytes = max(self._fresh_bytes, log_bytes)
        self._log_bytes = max(self._log_bytes, log_bytes)
        return self.spark

    def build(self) -> Run:
        """Read what there is and publish."""
        run = self.new_run()
        while True:
            try:
                return self._advance(run, *self.open())
            except Rebuild as exc:
                self._start_over(str(exc))
            except (HistoryError, FileNotFoundError) as exc:
                if not self._leave_out(exc) and not self._is_gone(exc):
                    raise

    def follow(self) -> Run:
        """Go on until told to stop; publish what is new now and then, and at the end.

        Each time takes a turn of its own, so that others can check the tables or shorten the log.
        """
        options, done, due_at = self.options, self.new_run(), 0.0
        with self.turn():
            pass  # another build that follows is refused here
        while True:
            stopping = options.stop.is_set()
            if logs.segments(self.log) and (stopping or time.monotonic() >= due_at):
                began = time.monotonic()
                with contextlib.suppress(Busy), self.turn():
                    run = self.build()
                    if run.read:
                        options.progress(str(run))
                        done, took_s = run, time.monotonic() - began
                        due_at = began + max(options.publish_every_s, took_s / BUSY_MAX)
            if stopping:
                return done
            options.progress("waiting for events")
            left_s = due_at - time.monotonic()
            options.stop.wait(min(left_s, options.poll_s) if left_s > 0 else options.poll_s)

    def open(self) -> tuple[dict[str, Any], State, Listing]:
        """The tables until now, what the last build left, and what the log has on top of them."""
        storage.take_back_delta(self.tables)
        storage.clean(self.tables)
        self._follows = storage.published_run(self.tables)
        index: dict[str, Any] = {}
        state = State()
        if self.options.mode == "increments" and not self._is_anew:
            index, state = self.published()
        listing = self.look(state.coverage)
        if len(listing.removed) > len(state.coverage.paths) * REMOVED_MAX:
            self._start_over(f"{len(listing.removed):,} segments were removed from the log")
            return self.open()
        return index, state, listing

    def published(self) -> tuple[dict[str, Any], State]:
        """The index of the tables and what the last build left; both empty if there is nothing."""
        index = storage.read_index(self.tables)
        told = storage.read_state(self.tables, index)
        if told is None or told.get("format") != STATE_FORMAT:
            return {}, State()
        if told["log"] != self.log.url:
            raise HistoryError(
                f"the tables in {self.tables.shown} are made from the log {told['log']}, not from "
                f"{self.log.shown}: take another directory, or build with --full"
            )
        return index, State.of_json(told)

    def _start_over(self, reason: str) -> None:
        self._is_anew = True
        self.options.progress(f"{reason}: building everything anew")

    def look(self, before: Coverage) -> Listing:
        """The log as it is now, for a build that follows one with this coverage."""
        for day, names in self._damaged.items():
            known = before.skipped.setdefault(day, [])
            known += [name for name in names if name not in known]
        listing = logs.look(self.log, before, skip_damaged=self.options.skip_damaged)
        if not listing.coverage.read:
            raise HistoryError(f"the log {self.log.shown} has no segment that can be read")
        return listing

    def _is_gone(self, exc: Exception) -> bool:
        """Whether an error is about a segment that was removed from the log since it was listed."""
        found = _SEGMENT.search(str(exc))
        if found is None or found[0] in self._gone:
            return False
        self._gone.add(found[0])
        return found[2] not in self.log.names(f"{logs.EVENTS}/{found[1]}")

    def _leave_out(self, exc: Exception) -> bool:
        """Whether to try again without the segment that an error is about."""
        found = _SEGMENT.search(str(exc)) if self.options.skip_damaged else None
        if found is None or found[2] in self._damaged.get(found[1], ()):
            return False
        self._damaged.setdefault(found[1], []).append(found[2])
        self.options.progress(f"leaving out {found[0]}, which is damaged")
        return True

    def new_run(self) -> Run:
        """A run that begins now."""
        now = datetime.now(UTC)
        name = storage.new_run_id(now)
        return Run(name, self.options.mode, now.timestamp(), self.options.since)

    def _advance(self, run: Run, index: dict[str, Any], state: State, listing: Listing) -> Run:
        """Carry new segments through to the tables, in batches."""
        if index and not listing.fresh and not listing.removed:
            if state.coverage != listing.coverage:  # compacted, with nothing new in it
                state.coverage = listing.coverage
                state_path = f"{storage.WORK}/state-{index['run']}.json"
                self.tables.write_json(state_path, state.as_json(self.log.url))
            return self._nothing_new(run, index, state)
        run.read = 0
        self._fresh_bytes = sum(map(self.log.size, listing.fresh))
        self._log_bytes = sum(map(self.log.size, listing.coverage.paths))
        # Who reads meanwhile sees what was there before, and not the beginning of something new.
        is_shown = bool(index) or not storage.read_index(self.tables)
        batches = list(self.batches(listing.fresh)) or [[]]
        gone = state.coverage.times_of(listing.removed)
        for number, paths in enumerate(batches, 1):
            left = {path for later in batches[number:] for path in later}
            state.coverage = listing.coverage.without(left)
            publication = self.take(run, index, state, paths, gone)
            index, gone = publication.index, []
            if is_shown or not left:
                self._publish(run, publication, state)
                storage.clean(self.tables)
        self._is_anew = False
        return run

    def batches(self, fresh: list[str]) -> Iterator[list[str]]:
        """Segments in parts that fit into memory."""
        batch: list[str] = []
        size = 0
        for path in fresh:
            batch.append(path)
            size += self.log.size(path)
            if size >= BYTES_PER_BATCH or len(batch) >= self.options.files_per_batch:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def take(
        self,
        run: Run,
        index: Mapping[str, Any],
        state: State,
        paths: list[str],
        gone: Collection[tuple[float, float]] = (),
    ) -> Publication:
        """Write what one batch changes, and the removal of segments of these times."""
        began = time.monotonic()
        run.run = storage.new_run_id(datetime.now(UTC))
        log_bytes = self._log_bytes if gone else sum(map(self.log.size, paths))
        is_here = is_local(self.spark.sparkContext.master or "")
        publication = Publication(
            self.spark,
            self.tables,
            run.run,
            index,
            self._follows,
            is_small=is_here and is_small(self._log_bytes),
        )
        is_on_disk = self.log.is_local and self.tables.is_local
        sizes = sized(self.spark, log_bytes, self._log_bytes, is_on_disk=is_on_disk)
        try:
            with explaining(f"cannot read {self.options.log}"), sizes:
                increment = Increment(
                    publication,
                    self.log,
                    state,
                    paths,
                    gone=gone,
                    since=self.options.since,
                    is_small=is_small(self._log_bytes),
                    step=run.timed,
                    progress=self.options.progress,
                )
                increment.run()
        finally:
            self.spark.catalog.clearCache()
        run.read += increment.read
        run.rows, run.kept = state.rows, state.kept
        run.batch_seconds.append(time.monotonic() - began)
        return publication

    def _publish(self, run: Run, publication: Publication, state: State) -> None:
        run.quarantined = logs.count_quarantined(self.log)
        run.skipped = state.coverage.skipped_count
        run.tasks = publication.index["tables"]["tasks"]["rows"]
        run.seconds = time.time() - run.began
        publication.replace_few("runs", self._runs(run), RUN_KINDS)
        # Tables of a part of the log are no beginning for others.
        left = {} if self.options.mode == "since" else state.as_json(self.log.url)
        publication.commit(left)
        self._follows = publication.run

    def _nothing_new(self, run: Run, index: Mapping[str, Any], state: State) -> Run:
        """What the last build found holds still."""
        run.rows, run.kept = state.rows, state.kept
        run.quarantined = logs.count_quarantined(self.log)
        run.skipped = state.coverage.skipped_count
        run.tasks, run.seconds = index["tables"]["tasks"]["rows"], time.time() - run.began
        return run

    def _runs(self, run: Run) -> list[dict[str, Any]]:
        index = storage.read_index(self.tables)
        before = storage.published_few(self.tables, index, "runs")
        before = [one for one in before if one["began"] != run.began]  # earlier batches of this run
        before.sort(key=lambda one: str(one["run"]))
        told: dict[str, Any] = {name: getattr(run, name, None) for name in RUN_KINDS}
        told |= {"batches": len(run.batch_seconds), "master": self.options.master}
        told |= {"timings": _rounded(run.timings), "version": __version__}
        return [*before[-(RUNS_MAX - 1) :], told]


def _rounded(timings: Mapping[str, float]) -> str:
    return json.dumps({step: round(seconds, 3) for step, seconds in timings.items()})
