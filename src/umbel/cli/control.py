"""`umbel control`: have running nodes do something.

`shutdown` is the one command without an answer. So that one knows who is meant, nodes are pinged
first; on a terminal it is then asked whether they shall really end.
"""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from umbel.cli import reply_tables
from umbel.cli.asking import Address, ask, carry_out, doubts, why_nobody
from umbel.cli.errors import FINE, NOBODY, CommandFailed, print_line, reaching
from umbel.cli.group import Invocation
from umbel.cli.remote import (
    EPILOG,
    Entry,
    RemoteGroup,
    address_options,
    queue_names,
    task_names,
)

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel


def _signal(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The name of a signal as nodes know it; the way there is on their host."""
    if value is None or ctx.resilient_parsing:
        return value
    from umbel.worker.control.commands.revoking import signal_number

    try:
        signal_number(value)
    except ValueError as exc:
        raise CommandFailed(str(exc)) from None
    name = value.upper()
    return name if name.isdecimal() or name.startswith("SIG") else f"SIG{name}"


def _rate(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """A plain number is one; 0 lifts a limit."""
    try:
        number = float(value or "")
    except ValueError:
        return value
    if not math.isfinite(number):
        return value
    return int(number) if number.is_integer() else number


def _stamps(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    for pair in value:
        name, equals, _ = pair.partition("=")
        if (not equals or not name) and not ctx.resilient_parsing:
            raise CommandFailed(f"stamp {pair!r}: give NAME=VALUE, such as customer=7")
    return value


def _json(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    if value is None or ctx.resilient_parsing:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as exc:
        raise CommandFailed(f"{param.human_readable_name} {value!r} is not JSON: {exc}") from None


def _pausing(
    command: str, app: Umbel, address: Address, given: dict[str, Any], invocation: Invocation
) -> int:
    from umbel.app.control.control import pause_arguments

    to_all = not address.destination and address.pattern is None
    arguments = pause_arguments(given["queue"], to_all=to_all)
    return carry_out(app, command, arguments, address, invocation)


def _election(app: Umbel, address: Address, given: dict[str, Any], invocation: Invocation) -> int:
    from umbel.app import elections
    from umbel.exceptions import NotForElection

    try:
        arguments = elections.request(app, given["id"], given["topic"], given["action"])
    except NotForElection as exc:
        raise CommandFailed(str(exc)) from None
    return carry_out(app, "election", arguments, address, invocation)


def _shutdown(app: Umbel, address: Address, given: dict[str, Any], invocation: Invocation) -> int:
    replies = ask(app, "ping", {}, address)
    there = sorted(replies.by_node)
    shown = reply_tables.names(there)
    if not invocation.quiet:
        for line in doubts(replies, address):
            print_line(line)
    if not given["yes"] and sys.stdin.isatty():
        who = f"{len(there)} nodes ({shown})" if there else "all nodes (none of them answers)"
        if not click.confirm(f"have {who} end?", err=True):
            print_line("nobody was told to end")
            return FINE
    with reaching(app, app.write_url):
        app.control.shutdown(destination=address.destination or None, pattern=address.pattern)
    if address.as_json:
        click.echo(reply_tables.as_json(dict.fromkeys(there)))
    elif there:
        click.echo(f"told to end when their tasks have ended: {shown}")
    if not there and not invocation.quiet:
        print_line(why_nobody(app, address, invocation))
    return FINE if there else NOBODY


_IDS = click.Argument(["task_id"], nargs=-1, required=True, metavar="ID...")
_TASK = click.Argument(["task_name"], metavar="TASK", shell_complete=task_names)
_QUEUE = click.Argument(["queue"], shell_complete=queue_names)
_COUNT = click.Argument(["n"], type=click.IntRange(1), default=1)
_TERMINATE = (
    click.Option(["--terminate"], is_flag=True, help="End those that run, too."),
    click.Option(
        ["-s", "--signal"],
        default="SIGTERM",
        callback=_signal,
        metavar="NAME",
        help="The signal that ends them [SIGTERM].",
    ),
)
_SECONDS = click.FloatRange(min=0, min_open=True)

_ENTRIES = (
    Entry("revoke", "Do not run the tasks with these ids.", (_IDS, *_TERMINATE)),
    Entry(
        "revoke_by_stamped_headers",
        "Do not run tasks that carry one of these stamps.",
        (
            click.Argument(
                ["headers"], nargs=-1, required=True, metavar="NAME=VALUE...", callback=_stamps
            ),
            *_TERMINATE,
        ),
    ),
    Entry(
        "terminate",
        "End the tasks with these ids with SIGNAL, and do not run them again.",
        (click.Argument(["signal"], callback=_signal), _IDS),
    ),
    Entry(
        "rate_limit",
        "Let TASK start so often on each node: 10 (a second), 5/m, 100/h; 0 lifts the limit.",
        (_TASK, click.Argument(["rate_limit"], metavar="RATE", callback=_rate)),
    ),
    Entry(
        "time_limit",
        "Give TASK so many seconds: after SOFT it is told to end, after HARD it is ended; a limit "
        "without a number is lifted.",
        (
            _TASK,
            click.Argument(["soft"], type=_SECONDS, required=False),
            click.Argument(["hard"], type=_SECONDS, required=False),
        ),
    ),
    Entry("pool_grow", "Run N [1] more tasks at a time.", (_COUNT,)),
    Entry("pool_shrink", "Run N [1] fewer tasks at a time.", (_COUNT,)),
    Entry(
        "pool_restart",
        "Replace what runs tasks, and import MODULEs before.",
        (
            click.Argument(["modules"], nargs=-1, metavar="[MODULE]..."),
            click.Option(["--reload"], is_flag=True, help="Import modules anew that are known."),
        ),
        arguments=lambda given: {
            "modules": list(given["modules"]) or None,
            "reload": given["reload"],
        },
    ),
    Entry(
        "autoscale",
        "Let pools grow to MAX and shrink to MIN by themselves.",
        (
            click.Argument(["max"], type=click.IntRange(1), required=False),
            click.Argument(["min"], type=click.IntRange(0), required=False),
        ),
    ),
    Entry(
        "add_consumer",
        "Consume from QUEUE, too.",
        (
            _QUEUE,
            click.Argument(["exchange"], required=False),
            click.Argument(["exchange_type"], metavar="[TYPE]", required=False),
            click.Argument(["routing_key"], metavar="[KEY]", required=False),
        ),
    ),
    Entry("cancel_consumer", "Consume from QUEUE no longer.", (_QUEUE,)),
    Entry(
        "pause",
        "Take no messages from QUEUE until it is resumed; who joins later neither, unless only "
        "some nodes are told.",
        (_QUEUE,),
        run=partial(_pausing, "pause"),
    ),
    Entry(
        "resume",
        "Take messages from a paused QUEUE again.",
        (_QUEUE,),
        run=partial(_pausing, "resume"),
    ),
    Entry("enable_events", "Tell monitors what becomes of tasks."),
    Entry("disable_events", "Tell monitors no longer what becomes of tasks."),
    Entry("heartbeat", "Send a heartbeat now."),
    Entry(
        "election",
        "Have the nodes elect one of them, which carries out ACTION (JSON).",
        (
            click.Argument(["id"]),
            click.Argument(["topic"]),
            click.Argument(["action"], required=False, callback=_json),
        ),
        run=_election,
    ),
    Entry(
        "shutdown",
        "End when the tasks that run have ended. Nodes do not answer to this.",
        (click.Option(["-y", "--yes"], is_flag=True, help="Do not ask."),),
        run=_shutdown,
    ),
)


def _others() -> Any:
    from umbel.cli.inspect import InspectGroup

    return InspectGroup.entries


class ControlGroup(RemoteGroup):
    """The commands that change something."""

    entries = {entry.name: entry for entry in _ENTRIES}
    reads = False
    elsewhere = (_others, "inspect")


@click.group(
    "control",
    cls=ControlGroup,
    params=address_options(),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)
@click.pass_context
def control(ctx: click.Context, /, **_: Any) -> None:
    """Have running nodes do something, all of them or some.

    Commands of the application itself (@app.control_command) take NAME=VALUE.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
