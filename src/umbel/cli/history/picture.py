"""`umbel history at`: the cluster as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from umbel.cli.errors import FINE
from umbel.cli.group import Invocation
from umbel.cli.history.moments import read_time, shown_time
from umbel.cli.history.opening import limit_option, opened, tables_option
from umbel.cli.plain import plain, plain_json, seconds

if TYPE_CHECKING:
    from umbel.cli.sheets import Sheet
    from umbel.pipeline.at import Picture, TaskThen

LIMIT = 20

EPILOG = """\b
Examples:
  umbel history at --tables tables --time "2026-11-16 07:30:12.5"
  umbel history at --tables tables --time "15m ago"
  umbel history at --tables tables --clock 120345 --json
"""


@click.command(
    "at",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@tables_option
@click.option(
    "--clock",
    type=click.IntRange(0, 2**63 - 1),
    metavar="N",
    help="At this value of the logical clock: causes and effects stay together.",
)
@click.option(
    "--time",
    "moment",
    metavar="T",
    callback=read_time,
    help="At this time: UTC, with a zone, Unix seconds, or '15m ago'.",
)
@limit_option(LIMIT, "tasks and elections of a kind")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def at(
    invocation: Invocation,
    directory: str,
    clock: int | None,
    moment: float | None,
    limit: int,
    as_json: bool,
) -> int:
    """Show the cluster as it was: nodes, running and waiting tasks, winners of elections."""
    if (clock is None) == (moment is None):
        raise click.UsageError("give --clock N or --time T")
    with opened(directory) as tables:
        from umbel.pipeline.at import at as picture_at

        picture = picture_at(tables, clock=clock, time=moment, limit=limit)
    if as_json:
        click.echo(plain_json(picture.as_dict()))
    else:
        _print(picture, invocation.color)
    return FINE


def _print(picture: Picture, color: bool | None) -> None:
    from umbel.cli.sheets import Sheet, show

    click.echo(
        f"clock {picture.clock}, {shown_time(picture.time)} UTC, "
        f"{picture.events:,} events until then"
    )
    for heading, count, sheet in (
        ("nodes", picture.counts["nodes"], _nodes(picture)),
        ("running", picture.counts["running"], _tasks(picture.running, picture.time)),
        ("waiting", picture.counts["waiting"], _tasks(picture.waiting, picture.time)),
        (
            "started, but their node was gone",
            picture.counts["orphaned"],
            _tasks(picture.orphaned, picture.time),
        ),
        ("elections won", picture.counts["leaders"], _leaders(picture)),
    ):
        assert isinstance(sheet, Sheet)
        if not count and not sheet.rows:
            if heading in {"nodes", "running", "waiting"}:
                click.echo(f"\n{heading}: none")
            continue
        rest = " alive" if heading == "nodes" else ""
        if heading != "nodes" and len(sheet.rows) < count:
            rest = f", {len(sheet.rows):,} shown"
        click.echo(f"\n{heading}: {count:,}{rest}")
        show([sheet], color=color)


def _nodes(picture: Picture) -> Sheet:
    from umbel.cli.sheets import Row, Sheet

    rows: list[Row] = [
        (
            plain(node.hostname, 64),
            "alive" if node.alive else node.how,
            shown_time(node.since),
            seconds(max(0.0, picture.time - node.last_heartbeat)) if node.last_heartbeat else "",
            str(node.running) if node.alive else "",
            shown_time(node.ended),
        )
        for node in picture.nodes
    ]
    titles = ("node", "state", "since", "heartbeat before", "running", "ended")
    return Sheet(titles, rows, frozenset({"heartbeat before", "running"}))


def _tasks(tasks: list[TaskThen], now: float) -> Sheet:
    from umbel.cli.sheets import Row, Sheet

    rows: list[Row] = [
        (
            plain(task.uuid, 64),
            plain(task.name, 60),
            task.state if task.state.isprintable() else plain(task.state, 40),
            plain(task.worker, 64),
            seconds(max(0.0, now - task.since)),
        )
        for task in tasks
    ]
    return Sheet(("task", "name", "state", "node", "for"), rows, frozenset({"for"}))


def _leaders(picture: Picture) -> Sheet:
    from umbel.cli.sheets import Row, Sheet

    rows: list[Row] = [
        (
            plain(leader.id, 64),
            plain(leader.topic, 40),
            plain(leader.winner, 64) + ("" if leader.alive else " (gone)"),
            shown_time(leader.decided),
        )
        for leader in picture.leaders
    ]
    return Sheet(("election", "topic", "winner", "decided"), rows)
