"""`umbel history` and its verbs."""

from __future__ import annotations

import click

from umbel.cli.history.build import build
from umbel.cli.history.check import check
from umbel.cli.history.picture import at
from umbel.cli.history.prepare import prepare
from umbel.cli.history.report import report
from umbel.cli.history.retain import retain
from umbel.cli.history.show import show
from umbel.cli.history.sql import sql

EPILOG = """\b
Examples:
  umbel -A shop record --log events                        # all the time, somewhere
  umbel history build --log events --tables tables         # now and then; or --follow
  umbel history check --log events --tables tables         # are the tables right?
  umbel history show tasks --tables tables --where "state = 'FAILURE'" --order "failed desc"
  umbel history sql --tables tables "SELECT state, count(*) FROM tasks GROUP BY ALL"
  umbel history at --tables tables --time "2026-11-16 07:30"
  umbel history report --tables tables -o report.html
  umbel history retain --log events --tables tables --days 30
"""


@click.group(
    "history",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)
def history() -> None:
    """What the cluster did: build tables from the event log, and look at them."""


for _verb in (build, check, show, sql, at, report, retain, prepare):
    history.add_command(_verb)
