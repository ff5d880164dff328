"""Do the tables say what the log says? `umbel history check` computes them again and compares.

In full: all tables are made anew from the segments that the published ones cover. On a sample: some
cells (`umbel.pipeline.cells`) are chosen by chance, and everything that has events in them is
computed again, as a build does for segments that were removed. Either way the rows of files that
came out otherwise are compared with those of the files that they would replace, row for row. Files
that hold the same rows in another order are equal.

Before that, the files themselves: each must be there with the rows that the index counts, and
Delta's log must name just these.

Nothing is published. The check takes its turn as builds do, since it writes into the same working
directory, and files that it reads must not be removed meanwhile. A build that follows the log waits
for it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from umbel.pipeline import delta, storage
from umbel.pipeline.build import Builder, Options
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.footers import read_footer
from umbel.pipeline.increment import Rebuild, State
from umbel.pipeline.log import open_log
from umbel.pipeline.places import Place
from umbel.pipeline.session import check_master, explaining
from umbel.pipeline.tables import stored
from umbel.pipeline.turns import WAIT_S

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# More cells: a difference is found sooner; each takes about a second of CPU time.
SAMPLE: Final = 5
SHOWN_CHARS_MAX: Final = 300


@dataclass(slots=True)
class Verdict:
    """What was compared, and what differs."""

    segments: int = 0  # of the log, that the tables cover
    unread: int = 0  # newer ones, which the next build reads
    cells: int = 0  # in which everything was computed again
    cells_in_all: int = 0
    rows: int = 0  # that were compared
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.findings:
            return f"{len(self.findings)} tables differ from what the log says"
        extent = f"{self.cells} of {self.cells_in_all} cells"
        what = "all" if self.cells == self.cells_in_all else extent
        newer = f"; {self.unread:,} newer segments are not in the tables yet" if self.unread else ""
        return (
            f"the tables say what the log says: {self.rows:,} rows compared, "
            f"{what} of {self.segments:,} segments{newer}"
        )


def check(
    options: Options,
    sample: int | None = SAMPLE,
    spark: SparkSession | None = None,
    dice: random.Random | None = None,
) -> Verdict:
    """Compare the tables with the log, on this many cells, or everything (None)."""
    if spark is None:
        check_master(options.master)
    log, tables = open_log(options.log), Place(options.tables)
    builder = Builder(log, tables, options, spark)
    try:
        with (
            explaining(f"cannot check {options.tables} against {options.log}"),
            builder.turn(WAIT_S),
        ):
            try:
                return _checked(builder, sample, dice or random.SystemRandom())
            finally:
                storage.clean(tables)
    finally:
        builder.close()


def _checked(builder: Builder, sample: int | None, dice: random.Random) -> Verdict:
    storage.take_back_delta(builder.tables)
    storage.clean(builder.tables)
    index, state = builder.published()
    if not index:
        raise HistoryError(
            f"{builder.tables.shown} has no tables of a whole log: run 'umbel history build' first"
        )
    listing = builder.look(state.coverage)
    if listing.removed:
        raise HistoryError(
            f"{len(listing.removed):,} segments were removed from the log after the last build: "
            "run 'umbel history build' first"
        )
    full_cells = [
        cell for cell, rows in zip(state.cells.starts, state.cells.rows, strict=True) if rows
    ]
    verdict = Verdict(len(state.coverage.paths), len(listing.fresh), 0, len(full_cells))
    verdict.findings += _broken_files(builder.tables, index)
    if verdict.findings:
        return verdict
    if sample is None or sample >= len(full_cells):
        chosen = full_cells
        made = _anew(builder, state)
    else:
        chosen = sorted(dice.sample(full_cells, sample))
        try:
            made = _again(builder, index, state, chosen)
        except Rebuild:  # what was chosen cannot be computed by itself
            chosen = full_cells
            made = _anew(builder, state)
    verdict.cells = len(chosen)
    for name in sorted(index["tables"]):
        if not name.startswith("_") and name != "runs":
            builder.options.progress(f"comparing {name}")
            before, after = index["tables"][name], made["tables"].get(name, {"files": []})
            try:
                with explaining("cannot be read"):
                    count, finding = _compared(builder.spark, builder.tables, name, before, after)
            except HistoryError as exc:
                count, finding = 0, f"{name}: {exc}"
            verdict.rows += count
            verdict.findings += [finding] if finding else []
    return verdict


def _anew(builder: Builder, before: State) -> Mapping[str, Any]:
    """All tables, from the segments that the published ones cover."""
    index: Mapping[str, Any] = {}
    state, run = State(), builder.new_run()
    batches = list(builder.batches(before.coverage.paths))
    for number, paths in enumerate(batches, 1):
        later = {path for batch in batches[number:] for path in batch}
        state.coverage = before.coverage.without(later)
        index = builder.take(run, index, state, paths).index
    return index


def _again(
    builder: Builder, index: Mapping[str, Any], before: State, cells: Sequence[int]
) -> Mapping[str, Any]:
    """The tables, with everything that has events in these cells computed again."""
    state = State.of_json(before.as_json(""))
    # Up to the last second before the next cell, which is not asked for.
    times = [(since, until - 1) for since, until in state.cells.times(cells)]
    return builder.take(builder.new_run(), index, state, [], times).index


def _broken_files(tables: Place, index: Mapping[str, Any]) -> list[str]:
    found = []
    for name, entry in index["tables"].items():
        try:
            bad = [
                one["path"]
                for one in entry["files"]
                if read_footer(tables, one["path"]).num_rows != one["rows"]
            ]
        except HistoryError as exc:
            found.append(f"{name}: {exc}")
            continue
        if bad:
            found.append(f"{name}: {bad[0]} does not have the rows that it had when it was written")
        elif entry.get("version") is not None and not delta.is_of(tables, name, entry):
            found.append(f"{name}: the Delta log names other files than {storage.INDEX}")
    return found


def _compared(
    spark: SparkSession,
    tables: Place,
    name: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> tuple[int, str]:
    """How many rows were compared, and what differs; of files that are the same, none."""
    same = {one["path"] for one in before["files"]} & {one["path"] for one in after["files"]}
    published = _rows(spark, tables, name, before, same)
    computed = _rows(spark, tables, name, after, same)
    lost, found = computed.exceptAll(published), published.exceptAll(computed)
    told = []
    for rows, text in ((lost, "missing"), (found, "not what the log says")):
        if (count := rows.count()) > 0:
            (example,) = rows.selectExpr("to_json(struct(*)) AS text").take(1)
            told.append(f"{count:,} rows {text}, such as {example['text'][:SHOWN_CHARS_MAX]}")
    count = sum(one["rows"] for one in before["files"] if one["path"] not in same)
    return count, f"{name}: {'; '.join(told)}" if told else ""


def _rows(
    spark: SparkSession,
    tables: Place,
    name: str,
    entry: Mapping[str, Any],
    left_out: Collection[str],
) -> DataFrame:
    """The rows as readers see them, of all files but some."""
    files = [one for one in entry["files"] if one["path"] not in left_out]
    rows = storage.read_files(spark, tables, files, stored(name))
    shown = [column for column in rows.columns if not column.startswith("_")]
    if bases := entry.get("bases"):
        pairs = ", ".join(f"{int(key)}L, {int(base)}L" for key, base in bases.items())
        return rows.selectExpr(f"element_at(map({pairs}), _range) + _number AS position", *shown)
    return rows.select(*shown)
