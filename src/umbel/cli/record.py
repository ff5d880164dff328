"""`umbel record`: every event of the cluster, kept in a log of Parquet segments.

Without a further word it records until it is told to end. `--import`, `--check` and `--compact` do
one thing with the log and end; they need no broker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from umbel.cli.errors import (
    FAILED,
    FINE,
    INTERRUPTED,
    CommandFailed,
    log_to_stderr,
    print_line,
    reaching,
)
from umbel.cli.group import Invocation
from umbel.cli.plain import plain
from umbel.cli.sheets import Sheet, show

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.recorder.checking import Finding
    from umbel.recorder.log import Log
    from umbel.recorder.options import Options
    from umbel.recorder.run import Recorder
    from umbel.recorder.segments import Segments

INCARNATIONS_SHOWN_MAX = 50
GAPS_SHOWN_MAX = 4
PATHS_SHOWN_MAX = 5
ROLL_ROWS_MAX = 1_000_000


def _finite(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a number of seconds")
    return value


def _seconds(name: str, *, default: float, least: float, text: str) -> Callable[[Any], Any]:
    return click.option(
        name,
        f"{name.strip('-').replace('-', '_')}_s",
        type=click.FloatRange(min=least),
        default=default,
        show_default=True,
        metavar="S",
        callback=_finite,
        help=text,
    )


@click.command("record", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--log", "url", required=True, metavar="DIR", help="A directory, or a URL: s3://…")
@_seconds("--roll-age", default=10.0, least=0.0, text="Write a segment when so old.")
@click.option(
    "--roll-rows",
    type=click.IntRange(1, ROLL_ROWS_MAX),
    default=50_000,
    show_default=True,
    metavar="N",
    help="Write a segment with so many events.",
)
@_seconds(
    "--compact-every",
    default=600.0,
    least=0.0,
    text="Merge small segments so often while recording; 0: never. Only in local directories.",
)
@_seconds(
    "--keep-compacted",
    default=3_600.0,
    least=0.0,
    text="Keep segments so long after they were merged, for readers that still use them.",
)
@click.option(
    "--import",
    "files",
    multiple=True,
    metavar="FILE",
    help="Take events from JSON lines instead, also gzipped; '-' is standard input.",
)
@click.option("--check", "is_check", is_flag=True, help="Show what is in the log, and its gaps.")
@click.option("--compact", "is_compact", is_flag=True, help="Merge small segments now, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as a JSON object.")
@click.pass_obj
def record(
    invocation: Invocation,
    url: str,
    roll_age_s: float,
    roll_rows: int,
    compact_every_s: float,
    keep_compacted_s: float,
    files: tuple[str, ...],
    is_check: bool,
    is_compact: bool,
    as_json: bool,
) -> int:
    """Keep every event of the cluster in a log on disk, until Ctrl-C or SIGTERM.

    A message is acknowledged when its events are on disk. Several recorders may share the work.

    A broker that is away is waited for.

    Exit codes: 0 after an orderly end too, 1 not everything could be written, or --check found what
    cannot be read, 2 a wrong log or command, 130 --import was interrupted.
    """
    if (len(files) > 0) + is_check + is_compact > 1:
        raise CommandFailed("choose one of --import, --check and --compact")
    with _log_errors():
        from umbel.recorder.log import Log
        from umbel.recorder.options import Options

        log = Log(url)
        if is_check:
            return _check(log.open(create=False), invocation, as_json)
        if is_compact:
            return _compact(log.open(create=False), invocation, keep_compacted_s, as_json)
        options = Options(roll_rows=roll_rows, roll_age_s=roll_age_s)
        if files:
            return _import(log, options, files, invocation, as_json)
        return _record(log, options, invocation, compact_every_s, keep_compacted_s, as_json)


@contextlib.contextmanager
def _log_errors() -> Iterator[None]:
    """What is wrong with the log, or missing to use it, is one line and exit code 2."""
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in {"pyarrow", "fsspec"}:
            raise
        raise CommandFailed(
            f"'umbel record' needs the package {exc.name}: pip install 'umbel[record]'"
        ) from None
    except Exception as exc:
        from umbel.recorder.errors import LogError

        if isinstance(exc, LogError):
            raise CommandFailed(str(exc)) from exc
        raise


# -- recording -----------------------------------------------------------------------------------


def _record(
    log: Log,
    options: Options,
    invocation: Invocation,
    compact_every_s: float,
    keep_compacted_s: float,
    as_json: bool,
) -> int:
    from umbel.recorder.compaction import LIVE_MERGE_MIN, Compaction, Keeper
    from umbel.recorder.run import Recorder

    app = _app(invocation)
    try:
        with contextlib.ExitStack() as stack:
            level = logging.ERROR if invocation.quiet else logging.INFO
            stack.enter_context(log_to_stderr("umbel.recorder", level))
            recorder = Recorder(app, log.open(), options)
            stop = stack.enter_context(_stop_by_signal())
            if compact_every_s and log.is_local:
                compaction = Compaction(log, keep_s=keep_compacted_s, merge_min=LIVE_MERGE_MIN)
                stack.enter_context(Keeper(compaction, compact_every_s))
            if not invocation.quiet:
                print_line(f"recording {_place(app)} to {log.url}, Ctrl-C ends")
                if sys.stderr.isatty() and not as_json:
                    stack.enter_context(_figures(recorder))
            with reaching(app, app.read_url):
                recorder.run(stop)
    finally:
        app.close()
    _summarise(_figures_of(recorder), as_json, invocation.quiet)
    return FAILED if recorder.unwritten_count else FINE


def _app(invocation: Invocation) -> Umbel:
    from umbel.broker.sessions.connections import check, is_embedded

    app = invocation.app_or_default()
    if invocation.app_name is None:
        if is_embedded(app.read_url):
            raise CommandFailed(
                "nothing to record: name a broker with -b or an application with -A"
            )
        check(app.read_url)
    return app


def _place(app: Umbel) -> str:
    from umbel.cli.feed import place

    return place(app)


@contextlib.contextmanager
def _stop_by_signal() -> Iterator[threading.Event]:
    """An event that is set by SIGTERM and Ctrl-C; the second one interrupts."""
    stop = threading.Event()
    is_asked = False

    def ask(signum: int, frame: object) -> None:
        nonlocal is_asked
        if is_asked:
            raise KeyboardInterrupt
        is_asked = True
        # Not from here: whoever was interrupted may hold the lock inside the event.
        threading.Thread(target=stop.set, name="umbel-stop", daemon=True).start()

    with _handling(ask):
        yield stop


@contextlib.contextmanager
def _handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _figures(recorder: Recorder) -> contextlib.AbstractContextManager[Any]:
    """A line at the bottom of the terminal that tells how it stands."""
    from rich.console import Console
    from rich.live import Live

    def line() -> str:
        counts = recorder.counts
        waiting = counts.received - counts.recorded
        return (
            f"{counts.recorded:,} events in {counts.segments:,} segments, "
            f"{waiting:,} not written yet"
        )

    console = Console(stderr=True, highlight=False)
    return Live(get_renderable=line, console=console, transient=True, refresh_per_second=2)


def _figures_of(recorder: Recorder) -> dict[str, int]:
    figures = dataclasses.asdict(recorder.counts)
    figures["events"] = figures.pop("recorded")
    first = ("events", "quarantined", "segments")
    rest = (name for name in figures if name not in first)
    return {name: figures[name] for name in (*first, *rest) if figures[name] is not None}


def _counts(segments: Segments) -> dict[str, int]:
    return {
        "events": segments.events_written,
        "quarantined": segments.quarantined_written,
        "segments": segments.segments_written,
        "bytes": segments.bytes_written,
    }


def _summarise(counts: dict[str, int], as_json: bool, quiet: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(counts).decode())
    elif not quiet:
        told = [f"{counts[name]:,} {name}" for name in counts if counts[name] or name == "events"]
        print_line(", ".join(told))


# -- importing -----------------------------------------------------------------------------------


def _import(
    log: Log, options: Options, files: tuple[str, ...], invocation: Invocation, as_json: bool
) -> int:
    from umbel.recorder.importing import STDIN, Importer, Summary, opened
    from umbel.recorder.segments import Segments

    for path in files:
        if path != STDIN:
            with opened(path):  # a mistyped name makes no log
                pass
    segments = Segments(log.open(), options)

    def ask(signum: int, frame: object) -> None:
        importer.stop()
        if importer.is_waiting:
            raise KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        progress: Callable[[Summary], None] = lambda _: None  # noqa: E731 - replaced on a terminal
        if sys.stderr.isatty() and not invocation.quiet:
            progress = _progress(stack)
        importer = Importer(segments, progress)
        stack.enter_context(_handling(ask))
        for path in files:
            importer.read(path)
            if importer.is_stopped:
                break
    counts = {"lines": importer.summary.lines, **_counts(segments)}
    _summarise(counts, as_json, invocation.quiet)
    if importer.is_stopped:
        print_line(f"interrupted: {importer.summary.lines:,} lines are in the log, not all")
        return INTERRUPTED
    return FINE


def _progress(stack: contextlib.ExitStack) -> Callable[[Any], None]:
    from rich.console import Console

    status = stack.enter_context(Console(stderr=True, highlight=False).status("importing"))
    return lambda summary: status.update(
        f"{summary.lines:,} lines, {summary.events:,} events, {summary.quarantined:,} quarantined"
    )


# -- compacting and checking ---------------------------------------------------------------------


def _compact(log: Log, invocation: Invocation, keep_s: float, as_json: bool) -> int:
    from umbel.recorder.compaction import Compaction, told

    try:
        outcome = Compaction(log, keep_s=keep_s).run()
    except OSError as exc:
        raise CommandFailed(f"cannot compact the log {log.url}: {exc}") from exc
    if as_json:
        click.echo(msgspec.json.encode(outcome).decode())
    elif not invocation.quiet:
        print_line(told(outcome))
    return FINE


def _check(log: Log, invocation: Invocation, as_json: bool) -> int:
    from umbel.recorder.checking import check

    try:
        finding = check(log)
    except OSError as exc:
        raise CommandFailed(f"cannot read the log {log.url}: {exc}") from exc
    if as_json:
        click.echo(msgspec.json.encode(finding.as_json()).decode())
    else:
        _show(finding, invocation)
    return FAILED if finding.unreadable else FINE


def _show(finding: Finding, invocation: Invocation) -> None:
    days = f"{finding.days[0]} to {finding.days[-1]}" if finding.days else "no day"
    click.echo(
        f"{finding.url}: {finding.events.rows:,} events in {finding.events.segments:,} segments, "
        f"{days}; {len(finding.incarnations):,} incarnations, {finding.missing:,} events missing"
    )
    if finding.replaced.segments:
        click.echo(f"{finding.replaced.segments:,} segments are compacted and not removed yet")
    if finding.quarantine.rows:
        click.echo(f"{finding.quarantine.rows:,} rows in quarantine")
    _show_paths("cannot be read", finding.unreadable)
    _show_paths("without a manifest: the numbers in it are not known", finding.foreign)
    incomplete = [one for one in finding.incarnations if one.missing]
    rows: list[tuple[str, ...]] = []
    for one in sorted(incomplete, key=lambda one: -one.missing)[:INCARNATIONS_SHOWN_MAX]:
        shown = ", ".join(
            f"{first}" if first == last else f"{first}-{last}"
            for first, last in one.gaps[:GAPS_SHOWN_MAX]
        )
        more = len(one.gaps) - GAPS_SHOWN_MAX
        rows.append(
            (
                plain(one.hostname, 64),
                str(one.inc),
                f"{one.seen[0][0]}-{one.seen[-1][1]}",
                str(one.missing),
                f"{shown} and {more} more" if more > 0 else shown,
            )
        )
    titles = ("NODE", "INCARNATION", "NUMBERS", "MISSING", "GAPS")
    show([Sheet(titles, rows, frozenset({"INCARNATION", "MISSING"}))], color=invocation.color)
    if len(incomplete) > len(rows):
        click.echo(f"and {len(incomplete) - len(rows):,} incarnations more")


def _show_paths(text: str, paths: list[str]) -> None:
    for path in paths[:PATHS_SHOWN_MAX]:
        click.echo(f"{plain(path)} {text}")
    if len(paths) > PATHS_SHOWN_MAX:
        click.echo(f"and {len(paths) - PATHS_SHOWN_MAX:,} more")
