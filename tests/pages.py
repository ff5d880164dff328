"""What stands in the documentation: blocks of code, command lines, and how these are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import click

from tests.workers import ROOT
from umbel.cli.group import cli

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Every page that is written by hand."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [path for path in found if path.name not in {"commands.md", "settings.md"}]


def blocks(page: str, kind: str) -> list[str]:
    """The blocks of one kind on a page (README.md, docs/events.md), in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [found[2] for found in BLOCK.finditer(text) if found[1] == kind]


class Command(NamedTuple):
    """A command of a console block, and the lines that it is said to print."""

    line: str
    printed: list[str]


def commands(page: str) -> list[Command]:
    """The commands of a page's console blocks, without remarks."""
    found: list[Command] = []
    for block in blocks(page, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Command(re.sub(r" +#.*", "", line[2:]), []))
            elif found and line.strip() and not line.lstrip().startswith("#"):
                found[-1].printed.append(line)
    return found


def parse(words: list[str]) -> None:
    """Read a command line as the program does, without running it; raises click's errors."""
    assert words[0] == "umbel"
    context = cli.make_context("umbel", words[1:])
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)
