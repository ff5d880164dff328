"""What the verbs share: options, what is missing, and what went wrong."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from umbel.cli.errors import CommandFailed
from umbel.cli.plain import plain

if TYPE_CHECKING:
    from umbel.pipeline.reading import Tables

_Command = TypeVar("_Command", bound=Callable[..., Any])
_PACKAGES = frozenset(
    {"deltalake", "duckdb", "fsspec", "numpy", "pandas", "py4j", "pyarrow", "pyspark"}
)

tables_option = click.option(
    "--tables",
    "directory",
    required=True,
    metavar="DIR",
    help="Where the tables are, as 'umbel history build' left them.",
)


def limit_option(default: int, of: str) -> Callable[[_Command], _Command]:
    """`--limit N`: print at most N of these."""
    return click.option(
        "--limit",
        type=click.IntRange(0, 2**53),
        default=default,
        show_default=True,
        metavar="N",
        help=f"The most {of} to print; 0 prints all.",
    )


@contextlib.contextmanager
def needing_packages() -> Iterator[None]:
    """A package that is not installed becomes one line that tells how to get it."""
    try:
        yield
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise CommandFailed(
            f"'umbel history' needs the package {package}: pip install 'umbel[history]'"
        ) from None


@contextlib.contextmanager
def opened(directory: str) -> Iterator[Tables]:
    """The tables of the last build."""
    with needing_packages():
        from umbel.pipeline.reading import Tables
    with Tables(directory) as tables:
        yield tables


@contextlib.contextmanager
def telling(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows the step that a command is at, where there is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        shown = progress.add_task("starting")
        yield lambda step: progress.update(shown, description=plain(step))


def names_of(value: str | None) -> list[str]:
    """`a, b,c` as a list."""
    names = [name.strip() for name in (value or "").split(",")]
    return [name for name in names if name]


def read_names(ctx: click.Context, param: click.Parameter, value: Any) -> list[str]:
    """Names with commas between, given once or several times; for click's `callback`."""
    return [name for text in value or () for name in names_of(text)]
