"""`umbel history report`: one page that shows it all."""

from __future__ import annotations

import click

from umbel.cli.errors import FINE
from umbel.cli.group import Invocation
from umbel.cli.history.opening import opened, tables_option

EPILOG = """\b
Example:
  umbel history report --tables tables -o report.html
"""


@click.command(
    "report",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@tables_option
@click.option(
    "-o",
    "--output",
    "target",
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="The file to write.",
)
@click.option("--title", default="What the cluster did", metavar="TEXT", help="What stands on top.")
@click.pass_obj
def report(invocation: Invocation, directory: str, target: str, title: str) -> int:
    """Write one page with plots: throughput, times, workers, elections, failures, gaps.

    The page needs no network and runs no script; it can be sent to anybody.
    """
    with opened(directory) as tables:
        from umbel.pipeline.report.page import write

        size = write(tables, target, title)
    if not invocation.quiet:
        click.echo(f"wrote {target} ({max(1, size // 1024):,} KiB)")
    return FINE
