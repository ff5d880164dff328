"""`umbel events`: what happens in the cluster, as it happens, one line each.

The first event of a task alone tells its name; later lines show it too, as long as the task is
remembered. Filters apply to what is shown, not to what is remembered.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import click

from umbel.app.events.state import State
from umbel.cli.errors import FINE, TIMED_OUT, print_line
from umbel.cli.event_lines import Lines
from umbel.cli.group import Invocation
from umbel.cli.plain import plain, plain_json
from umbel.wire.events import Event

TASKS_REMEMBERED_MAX = 10_000
NODES_SHOWN_MAX = 5
# How long one wait for an event lasts at most, so that a broken connection is told soon.
TAKE_S = 0.5


class Source(Protocol):
    """Where events come from; see `umbel.cli.feed`."""

    @property
    def condition(self) -> str:
        """How it stands with the broker; empty when all is well."""

    @property
    def dropped(self) -> int:
        """Events that came faster than they were taken."""

    @property
    def refused(self) -> Mapping[str, int]:
        """Events that were none, by reason."""

    @property
    def missing(self) -> int:
        """Events that never came."""

    @property
    def missing_by_node(self) -> Mapping[str, int]:
        """The same, as far as it is known whose they were."""

    def take(self, timeout_s: float) -> Event | None:
        """The next event, or None when none came in time."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events are shown: those that match one of each kind of pattern that was given."""

    types: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    def accepts(self, event: Event, name: Any) -> bool:
        """Whether to show an event of the task `name`, if that is known."""
        uuid = event.get("uuid")
        return (
            _matches(event["type"], self.types)
            and _matches(event["hostname"], self.nodes)
            and _matches(name, self.tasks)
            and (not self.ids or (isinstance(uuid, str) and uuid.startswith(self.ids)))
        )


def _matches(text: Any, patterns: tuple[str, ...]) -> bool:
    if not patterns:
        return True
    return isinstance(text, str) and any(fnmatchcase(text, pattern) for pattern in patterns)


@click.command("events", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--type", "types", multiple=True, metavar="GLOB", help="Such as 'task-*'.")
@click.option("--task", "tasks", multiple=True, metavar="GLOB", help="Of tasks of this name.")
@click.option("--node", "nodes", multiple=True, metavar="GLOB", help="Of this node: 'w1@*'.")
@click.option(
    "--id", "ids", multiple=True, metavar="ID", help="Of this task; its beginning will do."
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="End after so many.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="End when none came for so long.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--no-color", is_flag=True, help="No colours.")
@click.pass_obj
def events(
    invocation: Invocation,
    types: tuple[str, ...],
    tasks: tuple[str, ...],
    nodes: tuple[str, ...],
    ids: tuple[str, ...],
    limit: int | None,
    timeout_s: float | None,
    as_json: bool,
    no_color: bool,
) -> int:
    """Show what happens in the cluster, as it happens, until Ctrl-C.

    Filters may be given several times; events of tasks come from workers started with -E.

    Exit codes: 0 also after Ctrl-C, 2 no broker, 3 no event in time.
    """
    from umbel.cli.feed import Feed, place

    app = invocation.app()
    color = False if no_color else invocation.color
    follower = Follower(
        json_writer() if as_json else line_writer(color),
        Filter(types, tasks, nodes, ids),
        quiet=invocation.quiet,
    )
    try:
        with Feed(app) as feed:
            if sys.stdout.isatty() and not invocation.quiet and not as_json:
                print_line(f"listening on {place(app)}, Ctrl-C ends")
            return follower.run(feed, limit, timeout_s)
    finally:
        app.close()


Write = Callable[[Event, Any, float | None], None]


class Follower:
    """Takes events, shows those that are wanted, and tells at the end what it saw."""

    def __init__(
        self,
        write: Write,
        wanted: Filter,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write, self._wanted = write, wanted
        self._quiet, self._clock = quiet, clock
        self._state = State(max_tasks=TASKS_REMEMBERED_MAX)
        self._condition = ""
        self.seen = self.shown = self.task_events = 0

    def run(self, source: Source, limit: int | None = None, timeout_s: float | None = None) -> int:
        """Follow until the limit, the time-out or Ctrl-C; returns the exit code."""
        try:
            code = self._follow(source, limit, timeout_s)
        except KeyboardInterrupt:
            code = FINE
            if sys.stderr.isatty():
                sys.stderr.write("\n")  # behind the terminal's ^C
        if not self._quiet:
            print_line(self.summary(source))
        return code

    def _follow(self, source: Source, limit: int | None, timeout_s: float | None) -> int:
        last_s = self._clock()
        while True:
            wait_s = TAKE_S
            if timeout_s is not None:
                left_s = last_s + timeout_s - self._clock()
                if left_s <= 0:
                    print_line(self._nothing(timeout_s))
                    return TIMED_OUT
                wait_s = min(wait_s, left_s)
            event = source.take(wait_s)
            self._tell_condition(source.condition)
            if event is None or not self._show(event):
                continue
            last_s = self._clock()
            if limit is not None and self.shown >= limit:
                return FINE

    def _show(self, event: Event) -> bool:
        self.seen += 1
        self._state.event(event)
        name, waited_s = event.get("name"), None
        if event["type"].startswith("task-"):
            self.task_events += 1
            task = self._state.tasks.get(event["uuid"])
            if task is not None:
                name = name or task.name
                if task.received is not None and task.started is not None:
                    waited_s = task.started - task.received
        if not self._wanted.accepts(event, name):
            return False
        self._write(event, name, waited_s)
        self.shown += 1
        return True

    def _tell_condition(self, condition: str) -> None:
        if condition != self._condition:
            self._condition = condition
            if not self._quiet:
                print_line(condition or "connected again")

    def _nothing(self, timeout_s: float) -> str:
        said = (
            f"no such event for {timeout_s:g} s" if self.seen else f"no event for {timeout_s:g} s"
        )
        if self.seen and not self.task_events:
            said += ", heartbeats only: workers send events of tasks with -E"
        return said

    def summary(self, source: Source) -> str:
        """One line: what was seen, and what was not."""
        return "; ".join(_summary(self, source))


def _summary(follower: Follower, source: Source) -> Iterator[str]:
    seen, shown = follower.seen, follower.shown
    yield f"{seen} event{'s' if seen != 1 else ''}" + (f", {shown} shown" if shown != seen else "")
    refused = {reason: count for reason, count in source.refused.items() if count}
    if refused:
        told = ", ".join(f"{plain(reason, 40)} {refused[reason]}" for reason in sorted(refused))
        yield f"{sum(refused.values())} refused ({told})"
    if source.missing:
        lost = source.missing_by_node
        worst = sorted(lost, key=lambda node: (-lost[node], node))[:NODES_SHOWN_MAX]
        told = ", ".join(f"{plain(node, 64)} {lost[node]}" for node in worst)
        more = f" and {len(lost) - len(worst)} nodes more" if len(lost) > len(worst) else ""
        yield f"{source.missing} missing by their numbers ({told}{more})"
    if source.dropped:
        yield f"{source.dropped} dropped here, as they came faster than they were written"


def json_writer() -> Write:
    """Writes one object per line, at once."""

    def write(event: Event, name: Any, waited_s: float | None) -> None:
        sys.stdout.write(f"{plain_json(event)}\n")
        sys.stdout.flush()

    return write


def line_writer(color: bool | None) -> Write:
    """Writes one line per event, at once; coloured and cut to the width on a terminal."""
    from rich.console import Console

    console = Console(file=sys.stdout, no_color=True if color is False else None, highlight=False)
    lines = Lines(console.width if console.is_terminal else None)
    coloured = console.is_terminal and not console.no_color and console.color_system is not None
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")

    def write(event: Event, name: Any, waited_s: float | None) -> None:
        if lines.width is not None:
            lines.width = console.width
        line = lines.line(event, name, waited_s)
        if coloured:
            console.print(line, soft_wrap=True)
        else:
            sys.stdout.write(f"{line.plain}\n")
        sys.stdout.flush()

    return write
