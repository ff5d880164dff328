"""Asking nodes, and saying what came back; for `umbel inspect` and `umbel control`.

    exit code 0    everybody who answered did so without an error
    exit code 1    a node answered an error
    exit code 69   nobody answered, or a node that was named did not

Errors of nodes and remarks go to standard error, answers to standard output.
"""

from __future__ import annotations

import contextlib
import difflib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from umbel.cli import main, reply_tables, sheets
from umbel.cli.errors import FAILED, FINE, NOBODY, CommandFailed, print_line, reaching
from umbel.cli.group import Invocation
from umbel.cli.plain import plain

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

TIMEOUT_S = 1.0
ERROR_CHARS_MAX = 500


@dataclass(frozen=True, slots=True)
class Address:
    """Whom to ask, how long to wait, how to show it."""

    destination: list[str] = field(default_factory=list)
    pattern: str | None = None
    timeout_s: float = TIMEOUT_S
    as_json: bool = False


@dataclass(slots=True)
class Replies:
    """What came back."""

    by_node: dict[str, Any] = field(default_factory=dict)
    twice: set[str] = field(default_factory=set)  # names under which several nodes answered


def ask(app: Umbel, method: str, arguments: Mapping[str, Any], address: Address) -> Replies:
    """Send a command and gather what is answered; `CommandFailed` when there is no broker."""
    try:
        with reaching(app, app.write_url):
            found = app.control.broadcast(
                method,
                arguments=dict(arguments),
                destination=address.destination or None,
                pattern=address.pattern,
                reply=True,
                timeout=left_s(address.timeout_s),
            )
    except ValueError as exc:
        raise CommandFailed(f"{method}: {exc}") from exc
    replies = Replies()
    for reply in found or ():
        replies.twice |= replies.by_node.keys() & reply.keys()
        replies.by_node.update(reply)
    return replies


def left_s(timeout_s: float) -> float:
    """What is left of a timeout that began with the command; replies get a second at least."""
    if main.began is None:
        return timeout_s
    return max(min(timeout_s, TIMEOUT_S), main.began + timeout_s - time.monotonic())


def carry_out(
    app: Umbel, method: str, arguments: Mapping[str, Any], address: Address, invocation: Invocation
) -> int:
    """Ask, show what is answered, and give the exit code."""
    replies = ask(app, method, arguments, address)
    shown = reply_tables.without_secrets(method, replies.by_node)
    if address.as_json:
        click.echo(reply_tables.as_json(shown))
    else:
        parts = reply_tables.parts_for(method, shown, time.time())
        sheets.show(parts, color=invocation.color)
        for line in errors_of(method, replies.by_node):
            print_line(line)
    if not invocation.quiet:
        if not address.as_json and replies.by_node and not parts:
            for line in emptiness(method, replies.by_node):
                print_line(line)
        for line in doubts(replies, address):
            print_line(line)
        if not replies.by_node:
            print_line(why_nobody(app, address, invocation))
    return exit_code(replies, address)


def exit_code(replies: Replies, address: Address) -> int:
    """See the module's text."""
    if any(reply_tables.error_in(answer) is not None for answer in replies.by_node.values()):
        return FAILED
    missing = set(address.destination) - replies.by_node.keys()
    return NOBODY if missing or not replies.by_node else FINE


def errors_of(method: str, by_node: Mapping[str, Any]) -> Iterator[str]:
    """The errors, a line each."""
    for node in sorted(by_node):
        error = reply_tables.error_in(by_node[node])
        if error == repr(KeyError(method)):
            yield f"{plain(node, 64)} does not know the command {method}"
        elif error is not None:
            yield f"{plain(node, 64)} answered an error: {plain(error, ERROR_CHARS_MAX)}"


def emptiness(method: str, by_node: Mapping[str, Any]) -> Iterator[str]:
    """That there is nothing to show is worth a line, unless an error tells more."""
    fine = [node for node in sorted(by_node) if reply_tables.error_in(by_node[node]) is None]
    if fine:
        yield f"{method}: nothing on {reply_tables.names(fine)}"


def doubts(replies: Replies, address: Address) -> Iterator[str]:
    """What is odd about those who answered."""
    if replies.twice:
        twice = reply_tables.names(sorted(replies.twice))
        yield (
            f"several nodes answered as {twice}, one answer of each is shown: give every worker a "
            "name of its own (-n)"
        )
    missing = sorted(set(address.destination) - replies.by_node.keys())
    if missing and replies.by_node:
        yield f"{reply_tables.names(missing)} did not answer within {address.timeout_s:g} s"


def why_nobody(app: Umbel, address: Address, invocation: Invocation) -> str:
    """Why nobody may have answered, as far as one more question can tell."""
    from umbel.cli.feed import place

    asked = address.destination or ([address.pattern] if address.pattern else [])
    there = _who_is_there(app, address) if asked else []
    waited = f"within {address.timeout_s:g} s on {place(app)}"
    if there:
        close = difflib.get_close_matches(asked[0], there, 1)
        hint = f"did you mean {close[0]}?" if close else f"who answers: {reply_tables.names(there)}"
        return f"{reply_tables.names(asked)}: nobody of that name answered {waited}; {plain(hint)}"
    name = f" -A {invocation.app_name}" if invocation.app_name else ""
    return (
        f"nobody answered {waited}: no worker runs, or all are busy starting, or run on another "
        f"broker, virtual host or database, or without remote control; 'umbel{name} doctor' looks"
    )


def _who_is_there(app: Umbel, address: Address) -> list[str]:
    with contextlib.suppress(Exception):
        return sorted(ask(app, "ping", {}, Address(timeout_s=address.timeout_s)).by_node)
    return []
