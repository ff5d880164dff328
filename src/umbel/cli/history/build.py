"""`umbel history build`: tables from the event log, by Spark.

Spark needs seconds to start and says nothing meanwhile: a terminal shows the step it is at. With
`--follow` the build has a thread of its own, so that a signal ends it after what it has begun; a
second one ends it at once, which the tables survive.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from umbel.cli.errors import FINE, print_line
from umbel.cli.group import Invocation
from umbel.cli.history.moments import read_time
from umbel.cli.history.spark_options import SparkChoice, log_option, spark_options
from umbel.cli.plain import plain_json

if TYPE_CHECKING:
    from umbel.pipeline.build import Options, Run

EPILOG = """\b
Examples:
  umbel history build --log events --tables tables           # what is new since the last time
  umbel history build --log events --tables tables --follow  # go on until Ctrl-C
  umbel history build --log events --tables today --since 24h
  umbel history build --log /shared/events --tables /shared/tables --master spark://host:7077
  umbel history build --log events --tables tables --conf spark.driver.memory=4g
  umbel history build --log s3://b/l --tables s3://b/t --packages org.apache.hadoop:hadoop-aws:3.5.0

\b
Settings of Spark: --conf goes before spark-defaults.conf (SPARK_CONF_DIR, or SPARK_HOME/conf), and
that before Umbel's own. --packages gets a connector for an object store: the error that names a
missing one has the right version.
"""


@click.command(
    "build",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@log_option
@click.option(
    "--tables",
    "directory",
    required=True,
    metavar="DIR",
    help="Where the tables go; what is there is brought up to date.",
)
@spark_options
@click.option("--full", is_flag=True, help="Read the whole log, not only what is new.")
@click.option("--follow", is_flag=True, help="Go on as the log grows, until Ctrl-C.")
@click.option(
    "--since",
    metavar="T",
    callback=read_time,
    help="Only events sent after this time: UTC, with a zone, Unix seconds, or 24h.",
)
@click.option(
    "--skip-damaged",
    is_flag=True,
    help="Leave out segments of the log that cannot be read, and count them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON object.")
@click.pass_obj
def build(
    invocation: Invocation,
    log: str,
    directory: str,
    spark: SparkChoice,
    full: bool,
    follow: bool,
    since: float | None,
    skip_damaged: bool,
    as_json: bool,
) -> int:
    """Make or renew the tables from the event log, on Spark (Java 17 or newer).

    Killed at any point, the tables stay as they were, and the next build goes on from there.
    """
    told = {"full": full, "follow": follow, "since": since, "skip_damaged": skip_damaged}
    with spark.options(invocation, log=log, tables=directory, **told) as options:
        run = _follow(options) if follow else _build(options)
    if as_json:
        click.echo(plain_json(_facts(run)))
    elif not invocation.quiet:
        click.echo(str(run))
    return FINE


def _build(options: Options) -> Run:
    from umbel.pipeline.build import build as build_tables

    return build_tables(options)


def _facts(run: Run) -> dict[str, Any]:
    return {**asdict(run), "duplicate": run.duplicate}


# -- following ---------------------------------------------------------------------------------


def _follow(options: Options) -> Run:
    """Build in a thread; signals of this process come to the main one, and not to Spark."""
    ended = threading.Event()
    outcome: list[Run | BaseException] = []

    def work() -> None:
        try:
            outcome.append(_build(options))
        except BaseException as exc:  # noqa: BLE001 - told by the main thread
            outcome.append(exc)
        finally:
            ended.set()

    with _stopping(options.stop):
        threading.Thread(target=work, name="history-build", daemon=True).start()
        while not ended.wait(0.2):
            pass
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    return result


@contextlib.contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """The first signal asks for the end, the second one is it."""

    def ask(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print_line("publishing what was read, then ending; Ctrl-C again ends at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
