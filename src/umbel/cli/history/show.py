"""`umbel history show`: rows of a table."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from umbel.cli.errors import FINE, print_line
from umbel.cli.group import Invocation
from umbel.cli.history.opening import limit_option, opened, read_names, tables_option
from umbel.cli.plain import plain_json

if TYPE_CHECKING:
    from umbel.pipeline.reading import Answer, Tables

LIMIT = 50
# So many rows are lined up together; what comes after them has lines of its own width.
ROWS_TOGETHER = 1_000
CHARS_ON_TERMINAL_MAX, CHARS_MAX = 60, 500

EPILOG = """\b
Examples:
  umbel history show --tables tables                           # which tables there are
  umbel history show tasks --tables tables --where "name = 'shop.charge' and queue_wait > 10"
  umbel history show tasks --tables tables --where "started > epoch(timestamp '2026-11-16 07:30')"
  umbel history show attempts --tables tables --columns worker,outcome,reason --order "ended desc"
  umbel history show timeline --tables tables --order position --limit 0 --json | jq .type

\b
Times are Unix seconds in the tables and in JSON, and are shown in UTC otherwise.
"""


@click.command(
    "show",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.argument("table", required=False)
@tables_option
@click.option("--where", metavar="EXPRESSION", help="Only rows for which this SQL holds.")
@click.option(
    "--columns",
    multiple=True,
    metavar="A,B",
    callback=read_names,
    help="What to show: names, or all; a table with many columns shows some unless told.",
)
@click.option(
    "--order",
    multiple=True,
    metavar="A,B",
    callback=read_names,
    help="Columns to sort by, each with asc or desc after it if wanted.",
)
@limit_option(LIMIT, "rows")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, all columns.")
@click.pass_obj
def show(
    invocation: Invocation,
    table: str | None,
    directory: str,
    where: str | None,
    columns: list[str],
    order: list[str],
    limit: int,
    as_json: bool,
) -> int:
    """Show rows of TABLE, or which tables there are.

    Tables: timeline, tasks, attempts, workers, elections, revocations, clock_audit, rates,
    lineage, gaps, runs.
    """
    from umbel.cli.history import cells

    with opened(directory) as tables:
        if table is None:
            _list(tables, as_json, invocation.color)
            return FINE
        known = list(tables.table(table).columns)
        wanted = known if as_json and not columns else cells.chosen(table, columns, known)
        answer = tables.query(table, where, order, limit + 1 if limit else 0, wanted)
        rows = iter(answer.rows)
        kept = itertools.islice(rows, limit) if limit else rows
        if as_json:
            print_json(answer, kept)
        else:
            print_sheet(answer, kept, invocation.color)
        if limit and next(rows, None) is not None and not invocation.quiet:
            print_line(f"there are more than {limit} rows: --limit 0 shows all")
    return FINE


def print_json(answer: Answer, rows: Iterator[tuple[Any, ...]]) -> None:
    """One JSON object per line."""
    names = list(answer.columns)
    write = sys.stdout.write
    for row in rows:
        write(f"{plain_json(dict(zip(names, row, strict=True)))}\n")


def print_sheet(answer: Answer, rows: Iterator[tuple[Any, ...]], color: bool | None) -> None:
    """Rows lined up for a terminal."""
    from umbel.cli.history.cells import cell, is_right
    from umbel.cli.sheets import Sheet, plain_lines
    from umbel.cli.sheets import show as show_sheets

    on_terminal = sys.stdout.isatty()
    chars_max = CHARS_ON_TERMINAL_MAX if on_terminal else CHARS_MAX
    columns = list(answer.columns.items())
    right = frozenset(name for name, kind in columns if is_right(kind, name))
    begun = False
    while True:
        part = [
            tuple(
                cell(value, kind, name, chars_max)
                for value, (name, kind) in zip(row, columns, strict=True)
            )
            for row in itertools.islice(rows, ROWS_TOGETHER)
        ]
        if begun and not part:
            return
        sheet = Sheet(tuple(answer.columns), part, right)
        if on_terminal and part:
            show_sheets([sheet], color=color)
        else:
            click.echo("\n".join(plain_lines(sheet)[begun:]))
        begun = True
        if not part:
            return


def _list(tables: Tables, as_json: bool, color: bool | None) -> None:
    from umbel.cli.plain import plain
    from umbel.cli.sheets import Row, Sheet
    from umbel.cli.sheets import show as show_sheets

    if as_json:
        for name, table in tables.tables.items():
            facts = {"table": name, "rows": table.rows, "columns": table.columns}
            click.echo(plain_json({**facts, **({"broken": table.broken} if table.broken else {})}))
        return
    rows: list[Row] = [
        (
            plain(name),
            "" if table.rows is None else f"{table.rows:,}",
            plain(table.broken or ", ".join(table.columns), 2_000),
        )
        for name, table in tables.tables.items()
    ]
    show_sheets([Sheet(("table", "rows", "columns"), rows, frozenset({"rows"}))], color=color)
