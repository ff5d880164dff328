"""The page of commands, and the examples in help texts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.pages import parse
from umbel.cli.commands_page import page
from umbel.cli.group import VERBS, cli

EXAMPLE = re.compile(r"^ +(umbel .*?)(?: +#.*)?$", re.MULTILINE)


def helps(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Every command with its help."""
    answer = CliRunner().invoke(cli, [*path, "--help"])
    assert answer.exit_code == 0, (path, answer.output)
    yield " ".join(path), answer.output
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from helps(below, (*path, name))


HELPS = dict(helps(cli))
EXAMPLES = [found for text in HELPS.values() for found in EXAMPLE.findall(text)]


def test_the_page_is_what_the_commands_say() -> None:
    written = Path(__file__).parents[3] / "docs" / "commands.md"
    assert written.read_text(encoding="utf-8") == page(), (
        "run: python -m umbel.cli.commands_page docs/commands.md"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_examples(verb: str) -> None:
    assert re.search(
        rf"^  Examples:\n(?: +umbel .*\n)*? +umbel .*\b{verb}\b", HELPS[verb], re.MULTILINE
    )


@pytest.mark.parametrize("line", dict.fromkeys(EXAMPLES))
def test_an_example_can_be_typed(line: str) -> None:
    parse(shlex.split(line.partition(" | ")[0]))


def test_examples_with_a_wrong_option_would_be_found() -> None:
    with pytest.raises(click.UsageError):
        parse(shlex.split("umbel -A shop worker --no-such-option"))
