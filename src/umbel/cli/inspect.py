"""`umbel inspect`: ask running nodes."""

from __future__ import annotations

from typing import Any

import click

from umbel.cli.remote import EPILOG, Entry, RemoteGroup, address_options

_ENTRIES = (
    Entry("ping", "Who is there."),
    Entry("clock", "The logical clocks."),
    Entry("active", "Tasks that run.", aliases=("dump_active",)),
    Entry("reserved", "Tasks that were taken and wait for a slot.", aliases=("dump_reserved",)),
    Entry("scheduled", "Tasks that wait for their eta.", aliases=("dump_schedule",)),
    Entry(
        "query_task",
        "Where the tasks with these ids are: active, reserved or scheduled.",
        (click.Argument(["ids"], nargs=-1, required=True, metavar="ID..."),),
    ),
    Entry("revoked", "Ids of revoked tasks.", aliases=("dump_revoked",)),
    Entry(
        "registered",
        "Tasks that nodes know, with the ATTRIBUTEs that they set.",
        (
            click.Argument(["taskinfoitems"], nargs=-1, metavar="[ATTRIBUTE]..."),
            click.Option(["--all", "builtins"], is_flag=True, help="Built-in tasks too."),
        ),
        aliases=("dump_tasks", "registered_tasks"),
    ),
    Entry("stats", "Pool, clock, memory, broker, and how many tasks were run."),
    Entry(
        "conf",
        "Settings that were changed. Secrets are masked.",
        (
            click.Option(
                ["--defaults", "with_defaults"], is_flag=True, help="Those at their default too."
            ),
        ),
        aliases=("dump_conf",),
    ),
    Entry("active_queues", "Queues that nodes consume from."),
    Entry("queue_lengths", "How many messages wait in these queues."),
    Entry("elections", "Elections that are open, and the winners of those decided lately."),
    Entry("report", "Versions and settings, for a bug report. Secrets are masked."),
    Entry("memsample", "Take a sample of the memory in use, and show it."),
    Entry(
        "memdump",
        "The samples taken so far: about SAMPLES of them [10].",
        (click.Argument(["samples"], type=click.IntRange(1, 10_000), default=10),),
    ),
    Entry(
        "objgraph",
        "Draw what keeps objects of TYPE [Request] alive; nodes need the package objgraph.",
        (
            click.Argument(["type"], default="Request"),
            click.Option(["--num"], type=click.IntRange(1), default=200, help="So many [200]."),
            click.Option(["--max-depth"], type=click.IntRange(1), default=10, help="Depth [10]."),
        ),
    ),
)


def _others() -> Any:
    from umbel.cli.control import ControlGroup

    return ControlGroup.entries


class InspectGroup(RemoteGroup):
    """The commands that only ask."""

    entries = {entry.name: entry for entry in _ENTRIES}
    reads = True
    elsewhere = (_others, "control")


@click.group(
    "inspect",
    cls=InspectGroup,
    params=address_options(),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)
@click.pass_context
def inspect(ctx: click.Context, /, **_: Any) -> None:
    """Ask running nodes what they do and how they are. Nothing is changed.

    Commands of the application itself (@app.control_command(reads=True)) take NAME=VALUE.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
