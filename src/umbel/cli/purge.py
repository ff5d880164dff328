"""`umbel purge`: remove every waiting message from queues, after asking.

Messages that a worker has taken already are not waiting and stay.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from umbel.cli.errors import FINE, CommandFailed, reaching
from umbel.cli.group import Invocation, split_names

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel


@click.command("purge", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-Q", "--queues", multiple=True, callback=split_names, help="Only these: a,b.")
@click.option("-X", "--exclude-queues", multiple=True, callback=split_names, help="All but these.")
@click.option("-f", "--force", is_flag=True, help="Do not ask.")
@click.pass_obj
def purge(invocation: Invocation, queues: list[str], exclude_queues: list[str], force: bool) -> int:
    """Remove all waiting messages of the application's queues. There is no way back.

    Without a terminal to ask on, --force is needed.
    """
    app = invocation.app()
    if not force and not sys.stdin.isatty():
        raise CommandFailed("purge asks first and there is no terminal to ask on: use -f")
    if queues:
        app.queues.select(queues)
    if exclude_queues:
        app.queues.deselect(exclude_queues)
    try:
        waiting = count_waiting(app, list(app.queues.consumed))
        total = sum(waiting.values())
        if not total:
            click.echo(f"nothing to remove: no message waits in {', '.join(waiting) or 'no queue'}")
            return FINE
        parts = ", ".join(f"{name}: {count}" for name, count in waiting.items())
        if not force and not click.confirm(f"remove {total} messages ({parts}) for good?"):
            click.echo("nothing was removed")
            return FINE
        removed = empty(app, waiting)
        click.echo(f"removed {removed} messages ({parts})")
    finally:
        app.close()
    return FINE


@contextlib.contextmanager
def _connected(app: Umbel) -> Iterator[Any]:
    from umbel.broker.sessions.session import opened

    with reaching(app, app.read_url), opened(app.connection()) as connection:
        yield connection


def count_waiting(app: Umbel, names: list[str]) -> dict[str, int]:
    """How many messages wait in each queue; 0 for one that the broker does not know."""
    with _connected(app) as connection:
        return {name: _count(connection, app.queues.find(name)) for name in names}


def empty(app: Umbel, waiting: dict[str, int]) -> int:
    """Remove what waits in these queues; returns how many messages that were."""
    removed = 0
    with _connected(app) as connection:
        for name, count in waiting.items():
            if count:
                with connection.channel() as channel:
                    removed += int(app.queues.find(name)(channel).purge() or 0)
    return removed


def _count(connection: Any, queue: Any) -> int:
    # Asking for a queue that is not there closes the channel: each question gets its own.
    channel = connection.channel()
    try:
        return int(queue(channel).queue_declare(passive=True).message_count)
    except connection.channel_errors:
        return 0
    finally:
        try:
            channel.close()
        except connection.connection_errors + connection.channel_errors:
            pass
