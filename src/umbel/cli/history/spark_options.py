"""Options of the verbs that run Spark: the log, the tables, the master, and settings of Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import click

from umbel.cli.history.opening import needing_packages

_Command = TypeVar("_Command", bound=Callable[..., Any])

log_option = click.option(
    "--log",
    required=True,
    metavar="DIR",
    help="The event log, as 'umbel record' writes it.",
)
_OPTIONS = (
    click.option(
        "--master",
        metavar="URL",
        help="Where Spark runs: spark://HOST:PORT, yarn, k8s://HOST:PORT (default local[*]).",
    ),
    click.option(
        "--conf",
        multiple=True,
        metavar="KEY=VALUE",
        help="A setting of Spark; may be given several times.",
    ),
    click.option(
        "--packages",
        multiple=True,
        metavar="A:B:C,...",
        help="Maven packages for Spark, as GROUP:ARTIFACT:VERSION.",
    ),
    click.option("--jars", multiple=True, metavar="FILE,...", help="Jar files for Spark."),
)


def spark_options(command: _Command) -> _Command:
    """`--master`, `--conf`, `--packages` and `--jars`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class Chosen(NamedTuple):
    """Where Spark runs, and with which settings on top of ours."""

    master: str
    settings: Mapping[str, str]


def chosen(
    places: tuple[str, ...],
    master: str | None,
    conf: tuple[str, ...],
    packages: tuple[str, ...],
    jars: tuple[str, ...],
) -> Chosen:
    """What the options say, once Spark is known to be able to reach these directories."""
    with needing_packages():
        from umbel.pipeline import connectors, settings
        from umbel.pipeline.session import LOCAL
    given = settings.read_conf(conf, packages, jars)
    connectors.check(places, {**settings.read_defaults(), **given})
    return Chosen(settings.master_of(master, given, LOCAL), given)
