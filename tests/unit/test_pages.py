"""The documentation: links lead somewhere, command lines can be typed, code compiles."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.pages import blocks, commands, pages, parse
from tests.workers import ROOT

NAMES = [str(path.relative_to(ROOT)) for path in pages()]
TOOLS = {"rabbitmqctl", "redis-cli", ".", "git", "make", "mkdir", "pip", "python", "sleep"}
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)")


def anchors(path: Path) -> set[str]:
    """What headings of a page can be linked to by, as hosts of Markdown make it."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for file, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        target = (path.parent / file) if file else path
        assert target.exists(), f"{name} links to {file}, which is not there"
        if anchor:
            assert anchor[1:] in anchors(target), f"{name} links to {file}{anchor}"


@pytest.mark.parametrize("name", NAMES)
def test_command_lines_can_be_typed(name: str) -> None:
    for command in commands(name):
        inner = re.fullmatch(r"[A-Z]+=\$\((.*)\)", command.line)
        words = shlex.split((inner[1] if inner else command.line).partition(" | ")[0])
        if words[0] == "umbel":
            parse(words)
        else:
            assert words[0] in TOOLS, command.line


@pytest.mark.parametrize("name", NAMES)
def test_code_compiles(name: str) -> None:
    for block in blocks(name, "python"):
        compile(block, name, "exec")


def test_something_was_looked_at() -> None:
    assert sum(len(blocks(name, "python")) for name in NAMES) > 10
    assert sum(len(commands(name)) for name in NAMES) > 25
