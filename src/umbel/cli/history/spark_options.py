"""Options of the verbs that run Spark: the log, the tables, the master, and settings of Spark."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from umbel.cli.errors import log_to_stderr
from umbel.cli.group import Invocation
from umbel.cli.history.opening import needing_packages, telling

if TYPE_CHECKING:
    from umbel.pipeline.build import Options

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


def spark_options(command: Callable[..., int]) -> Callable[..., int]:
    """`--master`, `--conf`, `--packages` and `--jars`, for a command with a parameter `spark`."""

    @functools.wraps(command)
    def run(
        *args: Any,
        master: str | None,
        conf: tuple[str, ...],
        packages: tuple[str, ...],
        jars: tuple[str, ...],
        **others: Any,
    ) -> int:
        return command(*args, spark=SparkChoice(master, conf, packages, jars), **others)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


class SparkChoice(NamedTuple):
    """Where Spark is to run, and with which settings, as the command line has it."""

    master: str | None
    conf: tuple[str, ...]
    packages: tuple[str, ...]
    jars: tuple[str, ...]

    @contextlib.contextmanager
    def options(
        self, invocation: Invocation, *, log: str, tables: str, **others: Any
    ) -> Iterator[Options]:
        """The options of a build, whose progress and warnings are shown while the block runs.

        Directories that Spark could not reach are refused here, before it is started.
        """
        with needing_packages():
            from umbel.pipeline import connectors, settings
            from umbel.pipeline.build import Options
            from umbel.pipeline.session import LOCAL
        given = settings.read_conf(self.conf, self.packages, self.jars)
        connectors.check((log, tables), {**settings.read_defaults(), **given})
        with log_to_stderr("umbel.history", logging.WARNING), telling(invocation.quiet) as tell:
            yield Options(
                log=log,
                tables=tables,
                master=settings.master_of(self.master, given, LOCAL),
                settings=given,
                progress=tell,
                **others,
            )
