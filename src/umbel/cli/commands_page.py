"""Writes docs/commands.md from the commands: `python -m umbel.cli.commands_page FILE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from umbel.cli.group import cli

WIDTH = 100
_INTRODUCTION = """\
# Commands

<!-- Written by `python -m umbel.cli.commands_page docs/commands.md`: change the help texts in
src/umbel/cli instead. -->

What `umbel COMMAND --help` says. `python -m umbel` is the same program.
"""


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([_INTRODUCTION, *_entries(cli, "umbel", None, 2)])


def _entries(
    command: click.Command, name: str, parent: click.Context | None, level: int
) -> Iterator[str]:
    context = click.Context(
        command, parent, name, terminal_width=WIDTH, help_option_names=["-h", "--help"]
    )
    text = click.unstyle(command.get_help(context))
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    yield f"{'#' * level} `{context.command_path}`\n\n```text\n{lines}\n```\n"
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from _entries(found, below, context, min(level + 1, 4))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
