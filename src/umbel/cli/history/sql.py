"""`umbel history sql`: one SELECT over the tables."""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from umbel.cli.errors import FINE, TIMED_OUT, CommandFailed, print_line
from umbel.cli.group import Invocation
from umbel.cli.history.opening import limit_option, opened, tables_option, telling
from umbel.cli.plain import plain_json

if TYPE_CHECKING:
    from umbel.pipeline.reading import Answer

LIMIT = 1_000
TIMEOUT_S = 300.0

EPILOG = """\b
Examples:
  umbel history sql --tables tables "SELECT state, count(*) AS n FROM tasks GROUP BY ALL ORDER BY n"
  umbel history sql --tables tables "SELECT name, max(runtime) FROM attempts GROUP BY ALL" --csv
  umbel history sql --tables tables "FROM attempts JOIN workers ON worker = hostname" --limit 9
  umbel history sql --tables tables --json --limit 0 -    # the query comes from standard input

\b
The language is duckdb's. Tables and columns: 'umbel history show --tables DIR'. Times are Unix
seconds: to_timestamp(started), epoch(timestamp '2026-11-16 07:30'). Only the tables can be read;
nothing can be written, loaded or set.
"""


@click.command(
    "sql",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.argument("query")
@tables_option
@limit_option(LIMIT, "rows")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    default=TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="End the query after this many seconds; 0 waits for ever.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--csv", "as_csv", is_flag=True, help="CSV with the names of the columns on top.")
@click.pass_obj
def sql(
    invocation: Invocation,
    query: str,
    directory: str,
    limit: int,
    timeout_s: float,
    as_json: bool,
    as_csv: bool,
) -> int:
    """Answer QUERY, one SELECT over any of the tables; - reads it from standard input."""
    from umbel.cli.history.show import print_json, print_sheet
    from umbel.pipeline.errors import TooLong

    if as_json and as_csv:
        raise click.UsageError("choose one of --json and --csv")
    text = sys.stdin.read() if query == "-" else query
    with opened(directory) as tables:
        try:
            with telling(invocation.quiet) as tell:
                tell("running the query")
                answer = tables.sql(text, timeout_s or None)
                rows = _begun(answer.rows)
            kept = itertools.islice(rows, limit) if limit else rows
            if as_json:
                print_json(answer, kept)
            elif as_csv:
                _print_csv(answer, kept)
            else:
                print_sheet(answer, kept, invocation.color)
            more = limit and next(rows, None) is not None
        except TooLong as exc:
            raise CommandFailed(str(exc), TIMED_OUT) from None
    if more and not invocation.quiet:
        print_line(f"there are more than {limit} rows: --limit 0 shows all")
    return FINE


def _begun(rows: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """The rows, of which the first is there: until then the query runs."""
    first = list(itertools.islice(rows, 1))
    return itertools.chain(first, rows)


def _print_csv(answer: Answer, rows: Iterator[tuple[Any, ...]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(answer.columns)
    for row in rows:
        writer.writerow([_csv_cell(value) for value in row])


def _csv_cell(value: Any) -> Any:
    """Flags, lists and structures as JSON has them; the rest as it is."""
    return plain_json(value) if isinstance(value, (bool, list, tuple, dict)) else value
