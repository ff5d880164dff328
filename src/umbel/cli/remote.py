"""What `umbel inspect` and `umbel control` have in common: commands to nodes, and their answers.

Both are groups of commands that a table describes (`Entry`): the parameters of a command carry the
names that its arguments have on the wire. The commands of the application itself follow those of
the table; their arguments are given as NAME=VALUE. The options that say whom to ask may stand
before the command or after it. A command may be written with `-` or with `_`.

For help and completion the application is looked at if it can be had without a word: one that can
not be imported only lacks its own commands.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import click
from click.shell_completion import CompletionItem

from umbel.cli import apps
from umbel.cli.asking import TIMEOUT_S, Address, carry_out
from umbel.cli.errors import CommandFailed
from umbel.cli.group import Invocation, split_names

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

COMPLETION = """\b
Completion of commands, options and names of tasks in the shell:
  eval "$(_UMBEL_COMPLETE=bash_source umbel)"      in ~/.bashrc
  eval "$(_UMBEL_COMPLETE=zsh_source umbel)"       in ~/.zshrc
  _UMBEL_COMPLETE=fish_source umbel | source       in ~/.config/fish/config.fish
"""
EXIT_CODES = """\b
Exit codes: 0 fine, 1 a node answered an error, 2 the command was wrong or there is no broker,
69 nobody answered, or a node that was named with -d did not.
"""
EPILOG = f"{EXIT_CODES}\n\n{COMPLETION}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One command of the table."""

    name: str
    help: str
    params: tuple[click.Parameter, ...] = ()
    aliases: tuple[str, ...] = ()
    #: Makes the arguments on the wire from the parameters; None: they are the same.
    arguments: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    #: Carries it out, where asking and showing is not all.
    run: Callable[[Umbel, Address, dict[str, Any], Invocation], int] | None = None


# -- the group ---------------------------------------------------------------------------------


def address_options() -> list[click.Parameter]:
    """The options that say whom to ask; for groups and for commands."""
    return [
        click.Option(
            ["-d", "--destination"],
            multiple=True,
            callback=split_names,
            metavar="NODES",
            help="Ask only these nodes: a@host,b@host.",
        ),
        click.Option(
            ["--pattern"], metavar="GLOB", help="Ask only nodes of such names: 'w*@host'."
        ),
        click.Option(
            ["-t", "--timeout", "timeout_s"],
            type=click.FloatRange(min=0, min_open=True, max=3600),
            metavar="S",
            help=f"Wait so long for answers [{TIMEOUT_S:g}].",
        ),
        click.Option(["-j", "--json", "as_json"], is_flag=True, help="Print JSON: {node: answer}."),
    ]


class RemoteGroup(click.Group):
    """The commands of a table, and those of the application."""

    entries: ClassVar[Mapping[str, Entry]] = {}
    reads: ClassVar[bool] = True  # which of the application's commands belong here
    #: Where the other commands are: their names, and the verb.
    elsewhere: ClassVar[tuple[Callable[[], Iterable[str]], str]] = (tuple, "")

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Those of the table, then those of the application, if it can be found."""
        own = (
            [] if ctx.find_root().params.get("app_name") is None else list(_own_quietly(self, ctx))
        )
        return [*self.entries, *(name for name in own if name not in self.entries)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, however it is spelled."""
        entry = self.find(cmd_name)
        if entry is None:
            plainly = cmd_name.replace("-", "_")
            if ctx.resilient_parsing or ctx.find_root().params.get("app_name") is None:
                entry = _own_quietly(self, ctx).get(plainly)
            else:
                entry = self.own(_load(ctx)).get(plainly)
        return None if entry is None else _as_command(entry)

    def find(self, name: str) -> Entry | None:
        """The command of the table that is meant by a name."""
        plainly = name.replace("-", "_")
        found = self.entries.get(plainly)
        return found or next((e for e in self.entries.values() if plainly in e.aliases), None)

    def own(self, app: Umbel) -> dict[str, Entry]:
        """The commands of the application."""
        return {
            command.name: Entry(
                command.name,
                command.help or "A command of the application.",
                (click.Argument(["pairs"], nargs=-1, metavar="[NAME=VALUE]..."),),
                arguments=lambda given: read_pairs(given["pairs"]),
            )
            for command in app.own_commands
            if command.reads == self.reads
        }

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one was probably meant."""
        name = args[0]
        looks_like_one = not ctx.resilient_parsing and not name.startswith("-")
        if looks_like_one and self.get_command(ctx, name) is None:
            raise click.UsageError(self._unknown(ctx, name), ctx)
        return super().resolve_command(ctx, args)

    def _unknown(self, ctx: click.Context, name: str) -> str:
        known, plainly = self.list_commands(ctx), name.replace("-", "_")
        app, (others, verb) = app_quietly(ctx), self.elsewhere
        if plainly in others() or (app is not None and app.own_commands.get(plainly) is not None):
            return f"{plainly!r} is a command of '{verb}': use 'umbel ... {verb} {plainly}'"
        close = difflib.get_close_matches(plainly, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"
        return f"unknown command {name!r} of '{ctx.info_name}': {hint}"

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names with `-` are completed for those who write them so."""
        if "-" not in incomplete.lstrip("-") or incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        found = super().shell_complete(ctx, incomplete.replace("-", "_"))
        return [CompletionItem(item.value.replace("_", "-"), help=item.help) for item in found]


def _as_command(entry: Entry) -> click.Command:
    @click.pass_context
    def run(ctx: click.Context, /, **given: Any) -> int:
        invocation: Invocation = ctx.obj
        parent = ctx.parent.params if ctx.parent is not None else {}
        address = _address(parent, given)
        app = invocation.app(one_shot=True)
        try:
            if entry.run is not None:
                return entry.run(app, address, given, invocation)
            arguments = entry.arguments(given) if entry.arguments is not None else wire(given)
            return carry_out(app, entry.name, arguments, address, invocation)
        finally:
            app.close()

    return click.Command(
        entry.name,
        params=[*entry.params, *address_options()],
        callback=run,
        help=entry.help,
        short_help=entry.help,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _address(before: Mapping[str, Any], after: dict[str, Any]) -> Address:
    """The options after the command over those before it; takes them out of `after`."""
    chosen = {
        name: after.pop(name) or before.get(name)
        for name in ("destination", "pattern", "timeout_s", "as_json")
    }
    if chosen["destination"] and chosen["pattern"]:
        raise CommandFailed("--destination and --pattern exclude each other: give one of them")
    return Address(
        list(chosen["destination"] or ()),
        chosen["pattern"],
        chosen["timeout_s"] or TIMEOUT_S,
        bool(chosen["as_json"]),
    )


def wire(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as arguments on the wire."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in given.items()
    }


# -- arguments of the application's own commands -------------------------------------------------


def read_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """`limit=5 name=a`: values are JSON where they can be, else text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise CommandFailed(f"argument {pair!r}: give NAME=VALUE, such as limit=5")
        if name in found:
            raise CommandFailed(f"argument {name!r} is given twice: give it once")
        found[name] = _read_value(name, text)
    return found


def _read_value(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        if text.lstrip().startswith(("[", "{", '"')):
            raise CommandFailed(
                f"argument {name}={text!r} begins like JSON but is none ({exc}): quote it for the "
                "shell, as in 'ids=[1, 2]'"
            ) from None
        return text


# -- the application, while commands are looked up -------------------------------------------------


def _load(ctx: click.Context) -> Umbel:
    app = ctx.find_object(Invocation)
    assert app is not None
    found = app.app(one_shot=True)
    apps.load_modules(found)
    return found


def app_quietly(ctx: click.Context) -> Umbel | None:
    """The application, for help and completion, if it can be had without a word."""
    from umbel.cli.apps import find_app

    root = ctx.find_root()
    name = root.params.get("app_name")
    if name is None:
        return None
    workdir = root.params.get("workdir")
    silence = io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
            if workdir and ctx.resilient_parsing:
                stack.enter_context(contextlib.chdir(workdir))
            app = find_app(name)
            app.load_modules()
            return app
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - a user's module may raise anything
        return None


def _own_quietly(group: RemoteGroup, ctx: click.Context) -> dict[str, Entry]:
    app = app_quietly(ctx)
    return {} if app is None else group.own(app)


def task_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes names of tasks that the application knows."""
    app = app_quietly(ctx)
    known = () if app is None else sorted(app.tasks)
    return [CompletionItem(name) for name in known if name.startswith(incomplete)]


def queue_names(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes names of queues that the application knows."""
    app = app_quietly(ctx)
    known = () if app is None else sorted(app.queues)
    return [CompletionItem(name) for name in known if name.startswith(incomplete)]
