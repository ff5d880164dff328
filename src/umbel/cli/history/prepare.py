"""`umbel history prepare`: Spark starts faster on this machine from then on."""

from __future__ import annotations

import click

from umbel.cli.errors import FINE
from umbel.cli.group import Invocation
from umbel.cli.history.opening import needing_packages, telling

EPILOG = """\b
Examples:
  umbel history prepare        # once, and again after an update of Java or of pyspark

\b
Java keeps the classes of Spark in a file of about 190 MB in ~/.cache/umbel (or XDG_CACHE_HOME).
It can be removed at any time.
"""


@click.command(
    "prepare",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.pass_obj
def prepare(invocation: Invocation) -> int:
    """Make Spark start faster here: builds of a small history take a quarter less time.

    This takes half a minute.
    """
    with needing_packages():
        from umbel.pipeline.class_archive import make
    with telling(invocation.quiet) as tell:
        tell("preparing Spark")
        path = make()
    if not invocation.quiet:
        click.echo(f"Spark starts faster from now on: {path} ({path.stat().st_size / 1e6:.0f} MB)")
    return FINE
