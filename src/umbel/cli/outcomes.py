"""What became of a task, as the command line shows it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from umbel.cli.errors import FAILED, FINE, TIMED_OUT, print_line
from umbel.wire.results import READY_STATES

if TYPE_CHECKING:
    from umbel.app.results import AsyncResult

PENDING_TEXT = "pending, or unknown to this result backend"


def as_json(value: Any) -> str:
    """JSON on one line; what JSON has no form for appears by its repr."""
    return json.dumps(value, ensure_ascii=False, default=repr)


def as_text(value: Any) -> str:
    """Text as it is, anything else as JSON."""
    return value if isinstance(value, str) else as_json(value)


def document(result: AsyncResult, *, traceback: bool = False) -> dict[str, Any]:
    """The state of a task for `--json`."""
    state = result.state
    found: dict[str, Any] = {"id": result.id, "state": state}
    if state in ("FAILURE", "RETRY", "REVOKED"):
        found["error"] = _error(result.result)
    elif state != "PENDING":
        found["result"] = result.result
    for name in ("name", "worker", "date_done"):
        value = getattr(result, name)
        if value is not None:
            found[name] = value
    if traceback and result.traceback:
        found["traceback"] = result.traceback
    return found


def show(result: AsyncResult, *, as_document: bool, traceback: bool = False) -> int:
    """Print the state of a task; returns the exit code that goes with it."""
    state = result.state
    if as_document:
        click.echo(as_json(document(result, traceback=traceback)))
    elif state == "SUCCESS":
        click.echo(as_text(result.result))
    elif state == "PENDING":
        click.echo(f"{state}: {PENDING_TEXT}")
    elif state in READY_STATES or state == "RETRY":
        _show_error(result, state, traceback)
    else:
        detail = f": {as_text(result.result)}" if result.result is not None else ""
        click.echo(f"{state}{detail}")
    return FAILED if state in READY_STATES and state != "SUCCESS" else FINE


def wait(result: AsyncResult, timeout_s: float | None) -> int:
    """Wait for the end of a task; `FINE`, or `TIMED_OUT` after a line that says so."""
    try:
        result.get(timeout=timeout_s, propagate=False)
    except TimeoutError:
        print_line(f"task {result.id} has not ended within {timeout_s:g} s: it goes on")
        return TIMED_OUT
    return FINE


def _show_error(result: AsyncResult, state: str, traceback: bool) -> None:
    if traceback and result.traceback:
        click.echo(result.traceback.rstrip(), err=True)
    error = _error(result.result)
    text = f"{error['type']}: {error['message']}" if error["message"] else error["type"]
    if state == "RETRY":
        click.echo(f"{state}: {text}")
    else:
        print_line(f"task {result.id} ended as {state}: {text}")


def _error(value: Any) -> dict[str, str]:
    if isinstance(value, BaseException):
        return {"type": type(value).__name__, "message": str(value)}
    return {"type": "error", "message": as_text(value)}
