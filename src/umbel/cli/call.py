"""`umbel call`: send one task.

Values after the name are its positional arguments. Each is read as JSON; a plain word that is
none is text, so `7` is a number, `hello` and `'"7"'` are texts. What begins like a JSON list,
object or string and is none is refused rather than sent as text.
"""

from __future__ import annotations

import difflib
import json
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from umbel.cli import apps, outcomes
from umbel.cli.errors import FINE, CommandFailed, print_line, reaching
from umbel.cli.group import Invocation
from umbel.wire.limits import Refusal
from umbel.wire.times import parse_time

if TYPE_CHECKING:
    from umbel.app.results import AsyncResult
    from umbel.app.umbel import Umbel

_NEGATIVE_NUMBER = re.compile(r"-(\d|\.\d)[\d.eE+-]*")
_SHIELD = "\0"


class CallCommand(click.Command):
    """Takes negative numbers for what they are: values, not options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Shield such values from click, unless they belong to the option before them."""
        taking = {name for p in self.params if not _is_flag(p) for name in p.opts}
        shielded = [
            f"{_SHIELD}{word}"
            if _NEGATIVE_NUMBER.fullmatch(word) and before not in taking
            else word
            for before, word in zip(["", *args], args, strict=False)
        ]
        return super().parse_args(ctx, shielded)


def _is_flag(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Argument) or bool(getattr(parameter, "is_flag", False))


@click.command("call", cls=CallCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name")
@click.argument("values", nargs=-1, metavar="[ARGUMENT]...")
@click.option("-a", "--args", "args_json", metavar="JSON", help="The arguments as a JSON list.")
@click.option("-k", "--kwargs", "kwargs_json", metavar="JSON", help="Keyword arguments, an object.")
@click.option("--countdown", type=float, metavar="S", help="Run it in so many seconds.")
@click.option("--eta", metavar="TIME", help="Run it at this time (ISO 8601).")
@click.option("--expires", metavar="S|TIME", help="Do not run it after this.")
@click.option("-Q", "--queue", help="The queue to send it to.")
@click.option("--exchange", help="The exchange to send it to.")
@click.option("--routing-key", help="The routing key to send it with.")
@click.option("--priority", type=click.IntRange(0, 255), help="Its priority.")
@click.option("--serializer", metavar="NAME", help="json, msgpack or yaml.")
@click.option("--wait", is_flag=True, help="Wait for the result and print it.")
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="S", help="Wait so long at most (--wait)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def call(
    invocation: Invocation,
    /,
    name: str,
    values: tuple[str, ...],
    args_json: str | None,
    kwargs_json: str | None,
    eta: str | None,
    expires: str | None,
    wait: bool,
    timeout: float | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Send the task NAME and print its id; with --wait also its result.

    ARGUMENTs are JSON, or plain words: 7 is a number, hello is text.

    Exit codes: 1 the task failed, 2 it could not be sent, 3 no result in time.
    """
    args = _arguments(values, args_json)
    kwargs = _keywords(kwargs_json)
    if timeout is not None and not wait:
        raise CommandFailed("--timeout has a meaning with --wait only: add --wait")
    app = invocation.app(one_shot=True)
    apps.load_modules(app)
    if wait and app.result_url.startswith("disabled://"):
        raise CommandFailed("--wait needs a result backend: configure one, or use --result-backend")
    chosen = {key: value for key, value in options.items() if value is not None}
    if eta is not None:
        chosen["eta"] = _moment(app, "--eta", eta)
    if expires is not None:
        chosen["expires"] = _expiry(app, expires)
    _doubt_name(app, name, quiet=invocation.quiet)
    result = _send(app, name, args, kwargs, chosen)
    try:
        return _tell(app, result, wait=wait, timeout_s=timeout, as_json=as_json)
    finally:
        app.close()


def _tell(
    app: Umbel, result: AsyncResult, *, wait: bool, timeout_s: float | None, as_json: bool
) -> int:
    if not wait:
        click.echo(outcomes.as_json({"id": result.id}) if as_json else result.id)
        return FINE
    if not as_json:
        click.echo(result.id, err=True)  # standard output is the result and nothing else
    with reaching(app, app.result_url):
        code = outcomes.wait(result, timeout_s)
        if code != FINE:
            if as_json:
                click.echo(outcomes.as_json(outcomes.document(result)))
            return code
        return outcomes.show(result, as_document=as_json)


def _send(app: Umbel, name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> AsyncResult:
    task = app.tasks.get(name)
    try:
        if task is not None and task.typing:
            task.check_arguments(args, kwargs)
        with reaching(app, app.write_url):
            return app.send_task(name, args, kwargs, **options)
    except Refusal as refusal:
        raise CommandFailed(refusal.text) from refusal
    except (TypeError, ValueError) as exc:
        raise CommandFailed(f"{name} can not be called like this: {exc}") from exc


def _doubt_name(app: Umbel, name: str, *, quiet: bool) -> None:
    """A task need not be known here to be sent; a slip of the keyboard is worth a remark."""
    if name in app.tasks or quiet:
        return
    close = difflib.get_close_matches(name, list(app.tasks), 1, 0.8)
    hint = f": did you mean {close[0]!r}?" if close else ""
    print_line(f"note: task {name!r} is not registered in this application{hint}")


def _arguments(values: tuple[str, ...], args_json: str | None) -> list[Any]:
    if args_json is None:
        return [_value(number, text) for number, text in enumerate(values, 1)]
    if values:
        raise CommandFailed("arguments are given twice: after the name and with --args; choose one")
    found = _json("--args", args_json)
    if not isinstance(found, list):
        raise CommandFailed(f"--args {args_json!r} must be a JSON list, such as '[7, \"a\"]'")
    return found


def _keywords(kwargs_json: str | None) -> dict[str, Any]:
    if kwargs_json is None:
        return {}
    found = _json("--kwargs", kwargs_json)
    if not isinstance(found, dict):
        raise CommandFailed(
            f"--kwargs {kwargs_json!r} must be a JSON object, such as '{{\"a\": 1}}'"
        )
    return found


def _value(number: int, text: str) -> Any:
    text = text.removeprefix(_SHIELD)
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        if text.lstrip().startswith(("[", "{", '"')):
            raise CommandFailed(
                f"argument {number} {text!r} begins like JSON but is none ({exc}): quote it for "
                "the shell, as in '[1, 2]' or '\"text\"'"
            ) from None
        return text


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise CommandFailed(f"{option} {text!r} is not JSON: {exc}") from None


def _moment(app: Umbel, option: str, text: str) -> datetime:
    try:
        return parse_time(text, app.timezone)
    except Refusal:
        raise CommandFailed(
            f"{option} {text!r} is not a time: give ISO 8601, such as 2030-01-31T08:00:00+01:00"
        ) from None


def _expiry(app: Umbel, text: str) -> float | datetime:
    try:
        return float(text)
    except ValueError:
        return _moment(app, "--expires", text)
