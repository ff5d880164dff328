"""`umbel result`: what became of a task."""

from __future__ import annotations

import click

from umbel.cli import outcomes
from umbel.cli.errors import FINE, CommandFailed, reaching
from umbel.cli.group import Invocation


@click.command("result", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("task_id", metavar="ID")
@click.option("--traceback", is_flag=True, help="Show the worker's traceback of a failed task.")
@click.option("--wait", is_flag=True, help="Wait until the task has ended.")
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="S", help="Wait so long at most (--wait)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def result(
    invocation: Invocation,
    task_id: str,
    traceback: bool,
    wait: bool,
    timeout: float | None,
    as_json: bool,
) -> int:
    """Show the result of the task ID.

    A task that nobody has heard of looks like one that has not begun: PENDING.

    Exit codes: 0 it succeeded or has not ended, 1 it failed or was revoked, 2 the result backend
    could not be asked, 3 it has not ended in time (--wait).
    """
    if timeout is not None and not wait:
        raise CommandFailed("--timeout has a meaning with --wait only: add --wait")
    app = invocation.app(one_shot=True)
    if app.result_url.startswith("disabled://"):
        raise CommandFailed(
            f"application {app.main!r} keeps no results: configure result_backend, or use "
            "--result-backend"
        )
    try:
        with reaching(app, app.result_url):
            found = app.AsyncResult(task_id)
            code = outcomes.wait(found, timeout) if wait else FINE
            if code != FINE and not as_json:
                return code
            shown = outcomes.show(found, as_document=as_json, traceback=traceback)
            return code or shown
    finally:
        app.close()
