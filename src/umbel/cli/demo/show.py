"""Running the demo, with a live display where there is a terminal and a few lines where not."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from umbel.cli.demo import keeping, load
from umbel.cli.demo.cluster import POOLS, Cluster
from umbel.cli.demo.elections import hold_elections
from umbel.cli.demo.history import History
from umbel.cli.demo.score import Score
from umbel.cli.demo.trials import cut_connections, revoke_some

RESULTS_TIMEOUT_S = 50.0


def run_demo(scale: float, console: Console, keep: bool = False) -> int:
    """Run it all; 0 when every result was right. With `keep` it goes on until Ctrl-C."""
    directory = Path(tempfile.mkdtemp(prefix="umbel-demo-"))
    from umbel.broker.sessions.connections import leave_embedded
    from umbel.cli.demo.tasks import app

    app.conf.embedded_directory = str(directory)
    cluster, history = Cluster(directory), History(directory, console)
    dashboard = None
    began = time.monotonic()
    try:
        with console.status("starting an embedded broker and three workers"):
            # Joined first: the broker then lives until the last worker has left.
            app.backend.get_meta("is-the-broker-there")
            history.start()
            if keep:
                dashboard = keeping.Dashboard(directory, history.tables, console)
                dashboard.start()
            cluster.start()
        console.print(
            f"three workers ready after {time.monotonic() - began:.1f} s: "
            + ", ".join(worker.name for worker in cluster.workers)
        )
        passed = _run_load(app, cluster, scale, console)
        passed &= revoke_some(console)
        passed &= cut_connections(console)
        passed &= hold_elections(cluster, console)
        if keep:
            cluster.replace_killed()
        else:
            cluster.stop()
        passed &= history.finish()
        _say_where_next(console, history, time.monotonic() - began, passed)
        if dashboard is not None:
            keeping.stay(console, dashboard, threading.Event())
        return 0 if passed else 1
    finally:
        if dashboard is not None:
            dashboard.stop()
        cluster.stop()
        history.abandon()
        app.close()
        leave_embedded()
        shutil.rmtree(directory, ignore_errors=True)


def _say_where_next(console: Console, history: History, took_s: float, passed: bool) -> None:
    verdict = "everything was right" if passed else "something went wrong, see above"
    console.print(f"{verdict}; {took_s:.0f} s in all", style=None if passed else "red")
    lines = [f"  its dashboard:   {keeping.command(history.built)}"]
    if history.built is not None:
        lines.insert(0, f"  its report:      {history.report}")
        lines.append(f"  its tables:      umbel history show --tables {history.built}")
    if reason := keeping.missing():
        lines.append(f"  (the dashboard needs more: {reason})")
    lines.append("  a live cluster:  umbel demo --keep")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _run_load(app: Any, cluster: Cluster, scale: float, console: Console) -> bool:
    score, counts = Score(), load.kinds(scale)
    began = time.monotonic()
    with Display(console, counts) as display:
        for kind, count in counts.items():
            ids = score.expect(load.send(kind, count))
            app.backend.watch(ids, score.on_meta)
            display.update(score)
        score.all_sent()
        deadline = time.monotonic() + RESULTS_TIMEOUT_S
        while not score.complete.wait(0.1) and time.monotonic() < deadline:
            display.update(score)
            if cluster.dead():
                break
        display.update(score)
    elapsed_s = time.monotonic() - began
    console.print(table_of(score))
    for line in score.wrong[:10]:
        console.print(f"wrong: {line}", style="red", markup=False)
    for name in cluster.dead():
        console.print(f"worker {name} ended by itself", style="red", markup=False)
    rate = score.executions / elapsed_s
    console.print(
        f"{score.executions} tasks in {elapsed_s:.1f} s ({rate:.0f}/s); "
        f"{score.right.total()} of {score.sent.total()} results right, "
        f"{len(score.wrong)} wrong, {score.missing} missing"
    )
    return score.passed and not cluster.dead()


def table_of(score: Score) -> Table:
    """What ran where."""
    names = [f"{pool}@demo" for pool, _ in POOLS]
    table = Table(title="What ran where", title_justify="left")
    table.add_column("kind")
    for heading in ("calls", "right"):
        table.add_column(heading, justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for kind, sent in score.sent.items():
        ran = score.ran[kind]
        right = score.right[kind]
        style = None if right == sent else "red"
        cells = [str(ran[name]) for name in names]
        table.add_row(kind, str(sent), str(right), *cells, style=style)
    everywhere = [str(sum(ran[name] for ran in score.ran.values())) for name in names]
    table.add_section()
    table.add_row("all", str(score.sent.total()), str(score.right.total()), *everywhere)
    return table


class Display:
    """One bar per kind of call."""

    def __init__(self, console: Console, counts: dict[str, int]) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:8}"), BarColumn(40), MofNCompleteColumn(),
            console=console,
        )  # fmt: skip
        self._bars = {
            kind: self._progress.add_task(kind, total=count) for kind, count in counts.items()
        }
        self._live = Live(Group(self._progress), console=console, refresh_per_second=8)
        self._said_at = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, score: Score) -> None:
        """Show the numbers; where nothing can be redrawn, one line every two seconds."""
        for kind, bar in self._bars.items():
            self._progress.update(bar, completed=score.right[kind])
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said_at >= 2:
            self._said_at = now
            self._console.print(
                f"{score.right.total()} of {score.sent.total()} results right, "
                f"{score.missing} tasks under way"
            )
