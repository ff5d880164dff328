"""`umbel top`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from umbel.cli.errors import FAILED, FINE, CommandFailed
from umbel.cli.group import Invocation

if TYPE_CHECKING:
    from umbel.cli.top.screen import Top


@click.command("top", context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_obj
def top(invocation: Invocation) -> int:
    """Show the cluster live: workers, task types with rates and times, running tasks.

    Keys: q quit, p pause, s sort, tab next table, / filter, ? all keys. Figures of tasks need
    workers started with -E.
    """
    from umbel.cli.feed import Feed, place

    if invocation.color is False:
        os.environ["NO_COLOR"] = "1"  # Textual looks here, when it is imported
    screen = _screen()
    app = invocation.app()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CommandFailed(
            "top needs a terminal: 'umbel status' and 'umbel events' write to files and pipes"
        )
    try:
        with Feed(app) as feed:
            shown = screen(feed, place(app))
            shown.run()
            return FAILED if shown.return_code else FINE
    finally:
        app.close()


def _screen() -> type[Top]:
    try:
        from umbel.cli.top.screen import Top
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != "textual":
            raise
        raise CommandFailed(
            "'umbel top' needs the package textual: pip install 'umbel[top]'"
        ) from None
    return Top
