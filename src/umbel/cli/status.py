"""`umbel status`: who is there.

Listens to heartbeats for a few seconds. Where the application can ask its nodes directly (its
`control`), it does so meanwhile, so that a node that is heard but does not answer is told from
one that does.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import click

from umbel.cli.errors import FINE, NOBODY, print_line
from umbel.cli.event_lines import software
from umbel.cli.group import Invocation
from umbel.cli.outcomes import as_json as to_json
from umbel.cli.plain import plain
from umbel.cli.rollcall import ALIVE, NO_ANSWER, NO_EVENTS, NodeStatus, RollCall, refused_text
from umbel.wire.events import Event

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

TIMEOUT_S = 3.0
# How long one wait for an event lasts at most, so that the end is not missed.
TAKE_S = 0.1
PING_S = 1.0
FILE_WIDTH = 200
NAMES_SHOWN_MAX = 5


class Source(Protocol):
    """Where events come from; see `umbel.cli.feed`."""

    def take(self, timeout_s: float) -> Event | None:
        """The next event, or None when none came in time."""


@click.command("status", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-t",
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    default=TIMEOUT_S,
    show_default=True,
    metavar="S",
    help="Listen so long at most.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def status(invocation: Invocation, timeout_s: float, as_json: bool) -> int:
    """Show the nodes of the cluster: alive or not, what they do, what they run.

    Listens to heartbeats, which come every two seconds, and ends early when all has been told.

    Exit codes: 0 somebody is there, 2 no broker, 69 nobody answered.
    """
    from umbel.cli.feed import Feed, place

    app = invocation.app()
    asking = Asking(app, timeout_s)
    try:
        with Feed(app) as feed:
            asking.start()
            began_s = time.monotonic()
            roll = RollCall(began_s)
            listen(feed, roll, began_s + timeout_s, time.monotonic)
            now_s = time.monotonic()
            rows = roll.rows(now_s, asking.answers(began_s + timeout_s - now_s))
    finally:
        app.close()
    waited_s = round(now_s - began_s, 1)
    if as_json:
        click.echo(to_json(document(rows, place(app), waited_s, roll.task_event_count)))
    else:
        show(rows, color=invocation.color)
    if not invocation.quiet:
        for remark in remarks(rows, place(app), waited_s, roll.task_event_count):
            print_line(remark)
    return FINE if any(row.alive for row in rows) else NOBODY


def listen(source: Source, roll: RollCall, until_s: float, clock: Callable[[], float]) -> None:
    """Take events until the deadline, or until nothing new is to be expected."""
    while True:
        now_s = clock()
        if now_s >= until_s or roll.complete(now_s):
            return
        event = source.take(min(TAKE_S, until_s - now_s))
        if event is not None:
            roll.event(event, clock())


class Asking:
    """Asks every node for a sign of life, in a thread, if the application can."""

    def __init__(self, app: Umbel, timeout_s: float) -> None:
        self._control: Any = getattr(app, "control", None)
        self._timeout_s = timeout_s
        self._answers: set[str] | None = None
        self._thread = threading.Thread(target=self._ask, name="umbel-ping", daemon=True)

    def start(self) -> None:
        """Begin, where there is a way to ask."""
        if self._control is not None:
            self._thread.start()

    def answers(self, timeout_s: float) -> Collection[str] | None:
        """Who answered; None when nobody could be asked."""
        if self._control is None:
            return None
        self._thread.join(max(0.0, timeout_s))
        return self._answers

    def _ask(self) -> None:
        try:
            replies = self._control.ping(timeout=min(PING_S, self._timeout_s))
            self._answers = {str(name) for reply in replies or () for name in reply}
        except Exception:  # noqa: BLE001 - what was heard is shown all the same
            self._answers = None


def document(
    rows: Sequence[NodeStatus], place: str, waited_s: float, task_event_count: int
) -> dict[str, Any]:
    """The answer for `--json`; texts of nodes are made safe for a terminal."""
    nodes = [
        {
            key: plain(value) if isinstance(value, str) or key.startswith("sw_") else value
            for key, value in asdict(row).items()
        }
        for row in rows
    ]
    return {
        "broker": place,
        "listened_s": waited_s,
        "task_events_heard": task_event_count,
        "nodes": nodes,
    }


def show(rows: Sequence[NodeStatus], *, color: bool | None) -> None:
    """A table, as wide as it needs to be where no terminal limits it."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    terminal = sys.stdout.isatty()
    console = Console(
        file=sys.stdout,
        no_color=True if color is False else None,
        highlight=False,
        width=None if terminal else FILE_WIDTH,
    )
    table = Table(box=SIMPLE_HEAD if terminal else None, pad_edge=False)
    for title in ("node", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("clock", "active", "processed", "load", "lost"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("events", "version"):
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(text, style) for text, style in cells(row)))
    console.print(table)
    console.print(Text(summary(rows)))


def cells(row: NodeStatus) -> list[tuple[str, str]]:
    """The texts of a row with their styles."""
    good = row.alive and row.state not in (NO_ANSWER, NO_EVENTS)
    load = "" if row.load is None else f"{row.load:.2f}"
    events = {True: "on", False: "off", None: "?"}[row.task_events]
    return [
        (plain(row.hostname, 64), "bold"),
        (row.state, "green" if good else "bold red"),
        (_number(row.clock), ""),
        (_number(row.active), ""),
        (_number(row.processed), ""),
        (load, ""),
        (_number(row.lost), "yellow" if row.lost else ""),
        (events, "" if row.task_events else "yellow"),
        (software(row.sw_ident, row.sw_ver), ""),
    ]


def summary(rows: Sequence[NodeStatus]) -> str:
    """The last line."""
    counted = Counter(row.state for row in rows)
    parts = [f"{counted.pop(ALIVE, 0)} alive"]
    parts += [f"{count} {state}" for state, count in sorted(counted.items())]
    nodes = "node" if len(rows) == 1 else "nodes"
    return f"{len(rows)} {nodes}: {', '.join(parts)}"


def remarks(
    rows: Sequence[NodeStatus], place: str, waited_s: float, task_event_count: int
) -> Iterator[str]:
    """What the table does not explain by itself."""
    if not rows:
        yield (
            f"nobody was heard within {waited_s:g} s on {place}: no worker runs, or all run with "
            "--without-heartbeat, or on another broker, virtual host or database"
        )
        return
    mute = [plain(row.hostname, 64) for row in rows if row.state == NO_ANSWER]
    if mute:
        yield f"{_names(mute)} sent heartbeats but did not answer: stuck, or remote control is off"
    off = [plain(row.hostname, 64) for row in rows if row.task_events is False]
    if off:
        yield f"events of tasks are off on {_names(off)}: start workers with -E to see tasks"
    elif not task_event_count and any(row.task_events is None for row in rows):
        yield (
            "heartbeats only: no event of a task was heard, so nothing ran just now, or workers "
            "were started without -E"
        )
    for row in rows:
        if row.refused_queues:
            queues = _names(row.refused_queues)
            yield (
                f"the broker does not let {plain(row.hostname, 64)} consume {queues}: "
                "'umbel inspect stats' shows the reason"
            )
        if row.refused:
            told = ", ".join(refused_text(*one) for one in row.refused.items())
            yield (
                f"{plain(row.hostname, 64)} refused {told} since it started: "
                "'umbel doctor' shows what to do"
            )
    losing = [plain(row.hostname, 64) for row in rows if row.lost]
    if losing:
        yield f"events were lost on {_names(losing)}: monitors have not seen all that happened"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN_MAX])
    more = len(names) - NAMES_SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
