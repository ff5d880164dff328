"""The page as a whole, and how it gets to the disk: complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Final

from umbel.files import open_file
from umbel.pipeline.errors import HistoryError
from umbel.pipeline.reading import Tables
from umbel.pipeline.report.facts import Facts
from umbel.pipeline.report.sections import sections, tiles
from umbel.pipeline.report.shapes import moment, seconds, text
from umbel.pipeline.report.style import CSS
from umbel.version import __version__

# Nothing is fetched and nothing runs, whatever should have got into a text.
_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
TITLE: Final = "What the cluster did"


def page(tables: Tables, title: str = TITLE) -> str:
    """The whole page as a text."""
    facts = Facts(tables)
    parts = sections(facts)
    links = "".join(f'<li><a href="#{part.key}">{part.title}</a></li>' for part in parts)
    body = "".join(part.html() for part in parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{text(title)}</title>
<style>{CSS}</style>
</head>
<body>
<header><h1>{text(title)}</h1><p class="soft">{_when(facts)}</p></header>
<nav><ul>{links}</ul></nav>
<main>{tiles(facts)}{body}</main>
<footer>Umbel {text(__version__)}, build {text(facts.run)} of {text(facts.directory)},
page made {moment(time.time())} UTC. All times are UTC, by the senders' clocks.</footer>
</body>
</html>
"""


def _when(facts: Facts) -> str:
    if facts.span is None:
        return "There are no events yet."
    first, last = facts.span.first, facts.span.last
    return f"{moment(first)} to {moment(last)} UTC, {seconds(last - first)}"


def write(tables: Tables, target: str | os.PathLike[str], title: str = TITLE) -> int:
    """Write the page under its name when it is complete; gives its size in bytes."""
    path = Path(target)
    if path.is_dir():
        raise HistoryError(f"cannot write {path}: it is a directory")
    content = page(tables, title).encode("utf-8", "backslashreplace")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open_file(beside, "xb") as file:
            file.write(content)
        beside.replace(path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise HistoryError(f"cannot write {path}: {exc.strerror or exc}") from exc
    return len(content)
