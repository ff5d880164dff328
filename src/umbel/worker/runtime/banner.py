"""What a worker tells about itself before it begins: who it is, what it runs and from where.

`describe` collects the facts, without secrets; `render` gives plain lines, which are the same
everywhere; `show` draws them as a panel when a person is looking.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TextIO

from umbel.broker.sessions.connections import is_embedded, masked
from umbel.version import __version__

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.worker.runtime.worker import Worker

TASKS_SHOWN_MAX = 40
BUILTIN_PREFIXES = ("celery.", "umbel.")


def describe(worker: Worker) -> list[tuple[str, list[str]]]:
    """The facts as (label, lines), in the order in which they are shown."""
    app, plan = worker.app, worker.plan
    queues = [
        f"{name}  exchange={queue.exchange.name}({queue.exchange.type})  key={queue.routing_key}"
        for name, queue in app.queues.consumed.items()
    ]
    own = sorted(name for name in app.tasks if not name.startswith(BUILTIN_PREFIXES))
    tasks = own[:TASKS_SHOWN_MAX]
    if len(own) > TASKS_SHOWN_MAX:
        tasks.append(f"... and {len(own) - TASKS_SHOWN_MAX} more")
    return [
        ("node", [f"{plan.hostname}  umbel {__version__}  pid {os.getpid()}"]),
        ("app", [app.main]),
        ("transport", [_place(app, app.read_url)]),
        ("results", [_place(app, app.result_url)]),
        ("pool", [f"{plan.pool}, {plan.concurrency} at a time"]),
        ("queues", queues or ["none"]),
        ("tasks", tasks or ["none: no task is registered"]),
    ]


def _place(app: Umbel, url: Any) -> str:
    if is_embedded(url):
        return f"embedded  ({app.directory or '.'}/.umbel)"
    if str(url).startswith("disabled://"):
        return "disabled"
    return masked(url)


def render(worker: Worker) -> str:
    """The facts as plain lines."""
    facts = describe(worker)
    width = max(len(label) for label, _ in facts)
    lines: list[str] = []
    for label, values in facts:
        for number, value in enumerate(values):
            lines.append(f"{label if number == 0 else '':<{width}}  {value}")
    return "\n".join(lines)


def show(worker: Worker, stream: TextIO, *, color: bool | None = None) -> None:
    """Write the banner; a panel on a terminal, plain lines elsewhere."""
    if not stream.isatty():
        stream.write(f"{render(worker)}\n")
        stream.flush()
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for label, values in describe(worker):
        table.add_row(Text(label, style="bold green"), Text("\n".join(values)))
    console = Console(file=stream, no_color=True if color is False else None, highlight=False)
    console.print(Panel(table, title="umbel", title_align="left", expand=False))
