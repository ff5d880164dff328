"""`umbel history retain`: old days go from the log and from the tables.

The pipeline decides with Spark what has to stay (`umbel.pipeline.retention`), the recorder's side
changes the log (`umbel.recorder.retention`), and a build takes what went out of the tables. An
earlier run that was killed is finished first, so that nothing is decided from half a log.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from umbel.cli.errors import FINE, CommandFailed
from umbel.cli.group import Invocation
from umbel.cli.history.spark_options import SparkChoice, spark_options
from umbel.cli.plain import plain_json

if TYPE_CHECKING:
    from umbel.pipeline.build import Options
    from umbel.recorder.retention import Outcome

DAYS_MAX = 100_000
REMOVING = "removing old days from the log"
EPILOG = """\b
Examples:
  umbel history retain --log events --tables tables --days 30             # today and 30 days before
  umbel history retain --log events --tables tables --days 30 --dry-run   # what would go

\b
Every night, from cron:
  10 3 * * *  cd /var/lib/shop && umbel -q history retain --log events --tables tables --days 30

\b
Events of older days are kept if they are needed: those of tasks that have not ended, or that had an
event since, and what tells when their workers started.
"""


@click.command(
    "retain",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--log", "url", required=True, metavar="DIR", help="The event log to shorten.")
@click.option(
    "--tables",
    "directory",
    required=True,
    metavar="DIR",
    help="The tables of this log; they are brought up to date before and after.",
)
@click.option(
    "--days",
    required=True,
    type=click.IntRange(1, DAYS_MAX),
    metavar="N",
    help="Keep today and this many days before it. Days are those of receipt, in UTC.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@spark_options
@click.option(
    "--skip-damaged",
    is_flag=True,
    help="Leave out segments of the log that cannot be read; those of old days are removed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON object.")
@click.pass_obj
def retain(
    invocation: Invocation,
    url: str,
    directory: str,
    days: int,
    dry_run: bool,
    spark: SparkChoice,
    skip_damaged: bool,
    as_json: bool,
) -> int:
    """Remove old days from the event log, and from the tables made of it.

    Recorders may go on meanwhile. Killed at any point, nothing has happened, or the next run
    finishes what this one began.
    """
    with (
        spark.options(invocation, log=url, tables=directory, skip_damaged=skip_damaged) as options,
        _log_errors(url),
    ):
        outcome = shorten(options, days, is_dry=dry_run)
    if as_json:
        click.echo(plain_json({**outcome.as_json(), "dry_run": dry_run}))
    elif not invocation.quiet:
        click.echo(_line(outcome, is_dry=dry_run))
    return FINE


def shorten(
    options: Options,
    days: int,
    *,
    is_dry: bool = False,
    now_s: float | None = None,
    spark: Any = None,
) -> Outcome:
    """Remove what is older than today and this many days; what was removed."""
    from umbel.pipeline.retention import opened
    from umbel.recorder.log import Log
    from umbel.recorder.retention import OldDay, Retention, cutoff_of, pending

    now_s = time.time() if now_s is None else now_s
    cutoff = cutoff_of(days, now_s)
    with opened(options, spark) as work:
        log = Log(options.log).open(create=False)
        changer = Retention(log)
        if is_dry and pending(log) is not None:
            raise CommandFailed(
                f"days of the log {log.url} are only half removed, as a run was killed: run "
                "without --dry-run to finish it"
            )
        is_finished = not is_dry and changer.finish()
        work.build()
        plan = work.decide(cutoff, now_s)
        old = [
            OldDay(one.day, one.segments, one.rows, one.carried, one.batches) for one in plan.days
        ]
        if is_dry:
            outcome = changer.preview(cutoff, old)
        else:
            options.progress(REMOVING)
            outcome = changer.apply(cutoff, old)
            work.build()
    outcome.carried += plan.unchanged
    outcome.finished = is_finished
    return outcome


@contextlib.contextmanager
def _log_errors(url: str) -> Iterator[None]:
    """What is wrong with the log is one line and exit code 2."""
    from umbel.recorder.errors import LogError

    try:
        yield
    except LogError as exc:
        raise CommandFailed(str(exc)) from exc
    except OSError as exc:
        raise CommandFailed(f"cannot change the log {url}: {exc.strerror or exc}") from exc


def _line(outcome: Outcome, *, is_dry: bool) -> str:
    carried = f"{_number(outcome.carried, 'older event')} carried over"
    if not outcome.segments:
        return f"nothing to remove before {outcome.cutoff}; {carried}"
    refused = f" and {outcome.quarantined:,} quarantined" if outcome.quarantined else ""
    return (
        f"{'would be removed' if is_dry else 'removed'}: {_number(outcome.days, 'day')} before "
        f"{outcome.cutoff}, {_number(outcome.segments, 'segment')}, "
        f"{_number(outcome.events, 'event')}{refused}; {carried}; {_size(outcome.bytes)} freed"
    )


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:,} bytes"
