"""`umbel history check`: whether the tables say what the log says."""

from __future__ import annotations

from dataclasses import asdict

import click

from umbel.cli.errors import FAILED, FINE, print_line
from umbel.cli.group import Invocation
from umbel.cli.history.opening import tables_option
from umbel.cli.history.spark_options import SparkChoice, log_option, spark_options
from umbel.cli.plain import plain, plain_json

SAMPLE = 5

EPILOG = """\b
Examples:
  umbel history check --log events --tables tables              # five spans of time, by chance
  umbel history check --log events --tables tables --sample 50
  umbel history check --log events --tables tables --full       # as long as a full build

\b
Exit code 1 if a table differs; 'umbel history build --full' then makes all of them anew. Segments
that are newer than the last build are not checked. A build with --follow waits meanwhile.
"""


@click.command(
    "check",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@log_option
@tables_option
@click.option(
    "--sample",
    type=click.IntRange(1, 2**31),
    default=SAMPLE,
    show_default=True,
    metavar="N",
    help="Compute N random spans of time again, each of about 100,000 events.",
)
@click.option("--full", is_flag=True, help="Compute everything again.")
@spark_options
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
@click.pass_obj
def check(
    invocation: Invocation,
    log: str,
    directory: str,
    sample: int,
    full: bool,
    spark: SparkChoice,
    as_json: bool,
) -> int:
    """Compare the tables with the event log: compute rows again, and look for differences."""
    with spark.options(invocation, log=log, tables=directory) as options:
        from umbel.pipeline.checking import check as compare

        verdict = compare(options, None if full else sample)
    if as_json:
        click.echo(plain_json(asdict(verdict)))
    else:
        for finding in verdict.findings:
            print_line(plain(finding))
        if verdict.findings or not invocation.quiet:
            click.echo(str(verdict))
    return FAILED if verdict.findings else FINE
