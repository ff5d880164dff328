"""`umbel demo`."""

from __future__ import annotations

import click
from rich.console import Console


@click.command()
@click.option(
    "--scale",
    type=click.FloatRange(0.01, 100),
    default=1.0,
    show_default=True,
    help="How much to send; 1 makes some three thousand tasks.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Leave the cluster running afterwards, with a dashboard, until Ctrl-C.",
)
def demo(scale: float, keep: bool) -> int:
    """Run a whole cluster here and check every result.

    Starts an embedded broker and three workers with different pools in a temporary directory,
    sends fast, slow, failing, retried and delayed tasks, chains and chords, shows the progress
    and a table of what ran where. Then some waiting tasks are revoked, and every connection to the
    broker is cut in the middle of the work. Then the workers elect one of them to do something
    once, and do so again while the one that would have done it is killed. All the while every event
    is recorded; in the end Spark makes tables of them, and a page that shows what happened. Exits
    with 1 if any result is wrong or lost, or anything was done twice.
    """
    from umbel.cli.demo.show import run_demo

    return run_demo(scale, Console(), keep)
