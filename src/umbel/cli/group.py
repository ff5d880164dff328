"""The verbs, and the options that stand before them.

A verb is imported when it is used: `umbel --version` loads no broker library.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from umbel import files
from umbel.cli import errors
from umbel.cli.examples import with_examples
from umbel.version import __version__

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

# verb -> (module:command, what `umbel --help` says). The order is that of the help.
VERBS = {
    "worker": ("umbel.cli.worker:worker", "Take tasks from the broker and run them."),
    "call": ("umbel.cli.call:call", "Send a task, and wait for its result if asked to."),
    "result": ("umbel.cli.result:result", "Show what became of a task."),
    "status": ("umbel.cli.status:status", "Show which nodes are there and what they do."),
    "events": ("umbel.cli.events:events", "Show what happens in the cluster, as it happens."),
    "inspect": ("umbel.cli.inspect:inspect", "Ask running nodes what they do and how they are."),
    "control": ("umbel.cli.control:control", "Have running nodes do something."),
    "top": ("umbel.cli.top.command:top", "Show the cluster live on the terminal."),
    "doctor": ("umbel.cli.doctor:doctor", "Look for what is wrong with a cluster."),
    "record": ("umbel.cli.record:record", "Keep every event in a log on disk."),
    "purge": ("umbel.cli.purge:purge", "Remove all waiting messages from queues."),
    "history": ("umbel.cli.history.command:history", "Tell what the cluster did, from its events."),
    "dashboard": ("umbel.cli.dashboard:dashboard", "Serve the web view of the cluster."),
    "demo": ("umbel.cli.demo.command:demo", "Run a whole cluster here and check its results."),
    "sim": ("umbel.cli.sim:sim", "Play a cluster under faults and check what it promises."),
    "report": ("umbel.cli.report:report", "Show versions and settings, for a bug report."),
}

_SILENCE = logging.NullHandler()
ONE_SHOT_RETRIES = {"max_retries": 2}

EPILOG = """\b
Exit codes:
  0    fine; also a worker that was asked to stop and let its tasks end
  1    the task or the worker failed, or the worker was stopped cold
  2    the command was wrong, or a one-shot command found no broker
  3    timeout (of --wait; of events --timeout)
  69   nobody answered (status, inspect, control, doctor)
  78   the broker refuses what the worker needs: starting it again does not help
  130  interrupted

\b
Completion in the shell:
  eval "$(_UMBEL_COMPLETE=bash_source umbel)"   # or zsh_source, fish_source
"""


@dataclass(slots=True)
class Invocation:
    """What stands before the verb."""

    app_name: str | None = None
    broker: str | None = None
    backend: str | None = None
    config: str | None = None
    quiet: bool = False
    color: bool | None = None
    file_umask: str | None = None

    def app(self, *, one_shot: bool = False) -> Umbel:
        """The application that is meant, with the options applied to its settings.

        A one-shot command does not outwait a result backend that is down, as a worker does.
        """
        from umbel.broker.sessions.connections import check
        from umbel.cli import apps

        if self.app_name is None:
            raise errors.CommandFailed(
                "no application: name its module with -A, as in 'umbel -A shop worker'"
            )
        app = self.configure(apps.find_app(self.app_name))
        if one_shot and "result_backend_transport_options" not in app.conf.changed():
            app.conf.result_backend_transport_options = {"retry_policy": ONE_SHOT_RETRIES}
        check(app.read_url)
        check(app.write_url)
        assert app.backend is not None  # made here, so that a wrong address is refused at once
        return app

    def app_or_default(self) -> Umbel:
        """The application of -A, or one that knows the environment only."""
        if self.app_name is not None:
            return self.app()
        from umbel.app.umbel import Umbel

        return self.configure(Umbel("default"))

    def configure(self, app: Umbel) -> Umbel:
        """Put the options of the command line over the settings."""
        from umbel.cli import apps

        if self.config is not None:
            apps.see_directory()
            app.config_from_object(self.config)
        given = {"broker_url": self.broker, "result_backend": self.backend}
        chosen = {name: value for name, value in given.items() if value is not None}
        if chosen:
            app.close()
            app.conf.update(chosen)
        if self.file_umask is not None:
            app.conf.file_umask = self.file_umask
        files.set_umask(files.read_umask(app.conf.file_umask))
        return app


class Verbs(click.Group):
    """A group whose commands are loaded on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every verb."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, imported now."""
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return with_examples(cmd_name, command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or say which one was probably meant."""
        verb = args[0]
        if verb not in VERBS and not verb.startswith("-") and not ctx.resilient_parsing:
            close = difflib.get_close_matches(verb, VERBS, 1)
            hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(VERBS)}"
            raise click.UsageError(f"unknown command {verb!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


def _read_umask(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if not value:
        return None
    try:
        files.read_umask(value)
    except ValueError as exc:
        raise click.BadParameter(f"{value!r} {exc}") from None
    return value


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)
@click.option(
    "-A",
    "--app",
    "app_name",
    metavar="MODULE[:APP]",
    envvar="UMBEL_APP",
    help="The module of the application, and its name there if it is not obvious.",
)
@click.option("-b", "--broker", metavar="URL", help="Broker to use instead of the configured one.")
@click.option("--result-backend", "backend", metavar="URL", help="Where results are kept.")
@click.option(
    "--config",
    metavar="MODULE",
    envvar="UMBEL_CONFIG_MODULE",
    help="A module with settings.",
)
@click.option("--workdir", metavar="DIR", help="Change to this directory first.")
@click.option(
    "--file-umask",
    metavar="OCTAL",
    envvar="UMBEL_FILE_UMASK",
    callback=_read_umask,
    help="What others may not do with files that are written: 077 (anything; the default), "
    "027 (the group may read).",
)
@click.option("-q", "--quiet", is_flag=True, help="No banner, no remarks.")
@click.option("--no-color", "-C", is_flag=True, help="No colours.")
@click.option("--traceback", is_flag=True, help="Show the whole traceback of an error.")
@click.version_option(__version__, prog_name="umbel", message="%(prog)s %(version)s")
@click.pass_context
def cli(
    ctx: click.Context,
    app_name: str | None,
    broker: str | None,
    backend: str | None,
    config: str | None,
    workdir: str | None,
    file_umask: str | None,
    quiet: bool,
    no_color: bool,
    traceback: bool,
) -> None:
    """Umbel runs background tasks on Redis, RabbitMQ, or a private embedded broker."""
    if traceback:
        errors.show_tracebacks()
    if workdir is not None:
        _change_directory(workdir)
    ctx.color = False if no_color or os.environ.get("NO_COLOR") else None
    # A worker sets up its log itself; every other verb says all there is to say in its own words.
    logging.getLogger("umbel").addHandler(_SILENCE)
    if file_umask is not None:
        files.set_umask(files.read_umask(file_umask))
    # The application's own setting wins over the environment, and the option over both.
    is_given = ctx.get_parameter_source("file_umask") is ParameterSource.COMMANDLINE
    ctx.obj = Invocation(
        app_name, broker, backend, config, quiet, ctx.color, file_umask if is_given else None
    )
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _change_directory(path: str) -> None:
    try:
        os.chdir(path)
    except OSError as exc:
        raise errors.CommandFailed(f"--workdir {path!r}: {exc.strerror}") from None


def split_names(ctx: click.Context, param: click.Parameter, value: Any) -> list[str]:
    """`-Q a,b -Q c` as a list without repetitions; for click's `callback`."""
    names = [name.strip() for text in value or () for name in text.split(",")]
    if not all(names):
        raise click.BadParameter("empty name: give names with commas between, such as a,b")
    return list(dict.fromkeys(names))
