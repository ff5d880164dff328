"""From an exception to one line on stderr and an exit code.

    0    fine
    1    the task or the worker failed
    2    the command was wrong, or the broker could not be reached by a one-shot command
    3    time-out
    69   nobody answered
    130  interrupted

Passwords in addresses are masked whoever wrote the text.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from umbel.exceptions import BackendError, ImproperlyConfigured, NotRegistered, QueueNotFound

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

FINE, FAILED, WRONG, TIMED_OUT, INTERRUPTED = 0, 1, 2, 3, 130
NOBODY = 69
REFUSED = 78  # by the broker: starting again does not help

_LINE_CHARS_MAX = 1_000
_show_tracebacks = False


class CommandFailed(Exception):
    """Ends a command with a line for the user and an exit code."""

    def __init__(self, text: str, code: int = WRONG) -> None:
        super().__init__(text)
        self.code = code


def show_tracebacks() -> None:
    """The user asked for everything."""
    global _show_tracebacks
    _show_tracebacks = True


def report(exc: BaseException) -> int:
    """Say what happened in one line, and give the exit code."""
    if isinstance(exc, SystemExit):
        return exc.code if isinstance(exc.code, int) else (FINE if exc.code is None else FAILED)
    if isinstance(exc, (KeyboardInterrupt, click.Abort)):
        return INTERRUPTED
    if isinstance(exc, BrokenPipeError):
        # Whoever read our output has gone; the interpreter must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    if _show_tracebacks or os.environ.get("UMBEL_TRACEBACK", "") not in ("", "0"):
        traceback.print_exception(exc)
    text, code = _explain(exc)
    print_line(text)
    return code


def _explain(exc: BaseException) -> tuple[str, int]:
    if isinstance(exc, CommandFailed):
        return str(exc), exc.code
    if isinstance(exc, click.UsageError):
        return _usage(exc), WRONG
    if isinstance(exc, click.ClickException):
        return exc.format_message(), WRONG
    if isinstance(exc, (ImproperlyConfigured, QueueNotFound, NotRegistered)):
        return str(exc), WRONG
    if isinstance(exc, BackendError):
        return str(exc), WRONG
    where = place(exc)
    shown = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
    return f"unexpected {shown} ({where}); --traceback shows all of it", FAILED


def _usage(exc: click.UsageError) -> str:
    """What click says, with the right word where it can be guessed."""
    if isinstance(exc, click.NoSuchOption):
        return _unknown_option(exc)
    message = exc.format_message().rstrip(".")
    message = message[:1].lower() + message[1:]
    if exc.ctx is not None and isinstance(exc, (click.MissingParameter, click.BadArgumentUsage)):
        return f"{message}: see '{exc.ctx.command_path} --help'"
    return message


def _unknown_option(exc: click.NoSuchOption) -> str:
    name = exc.option_name
    context = exc.ctx
    if context is not None and context.parent is not None:
        root = context.find_root()
        if any(name in parameter.opts for parameter in root.command.params):
            return (
                f"option {name} goes before the verb: "
                f"{root.command_path} {name} ... {context.info_name}"
            )
    path = context.command_path if context is not None else "umbel"
    if exc.possibilities:
        return f"unknown option {name} of '{path}': did you mean {exc.possibilities[0]}?"
    return f"unknown option {name} of '{path}': see '{path} --help'"


def print_line(text: str, prefix: str = "umbel: ") -> None:
    """One line on stderr, whatever the text holds."""
    from umbel.wire.secret_texts import mask_addresses

    line = " ".join(mask_addresses(text).split())
    if len(line) > _LINE_CHARS_MAX:
        line = f"{line[:_LINE_CHARS_MAX]}..."
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{prefix}{line}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def log_to_stderr(name: str, level: int) -> Iterator[None]:
    """Write the records of a logger to stderr, one line each, with tracebacks."""
    from umbel.wire.redaction import redacted_text

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print_line(record.getMessage())
            if record.exc_info and record.exc_info[1] is not None:
                text = "".join(traceback.format_exception(record.exc_info[1]))
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(redacted_text(text))

    logger, handler = logging.getLogger(name), Lines()
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def place(exc: BaseException) -> str:
    """Where it happened, as file:line: the innermost frame of the user's own code, if any."""
    if isinstance(exc, SyntaxError) and exc.filename:
        return f"{_short(exc.filename)}:{exc.lineno}"
    frames = traceback.extract_tb(exc.__traceback__)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith("<frozen") and not _is_installed(frame.filename)
    ]
    chosen = (own or frames)[-1:]
    return "".join(f"{_short(frame.filename)}:{frame.lineno}" for frame in chosen) or "nowhere"


def _is_installed(filename: str) -> bool:
    import umbel

    ours, standard = (str(Path(module.__file__ or "").parent) for module in (umbel, os))
    return "site-packages" in filename or filename.startswith((ours, standard))


def _short(filename: str) -> str:
    relative = os.path.relpath(filename)
    return filename if relative.startswith("..") else relative


@contextlib.contextmanager
def reaching(app: Umbel, url: object = None) -> Iterator[None]:
    """What a broker or backend that is not there looks like becomes one line and exit code 2."""
    from kombu.exceptions import OperationalError
    from redis.exceptions import RedisError

    from umbel.broker.sessions.connections import masked

    try:
        yield
    except (OperationalError, RedisError, OSError) as exc:
        if isinstance(exc, (BrokenPipeError, TimeoutError)) and not isinstance(exc, RedisError):
            raise
        target = masked(url if isinstance(url, (str, list, tuple)) else app.write_url)
        reason = " ".join(str(exc).split()) or type(exc).__name__
        said = reason if target in reason else f"cannot reach {target}: {reason}"
        raise CommandFailed(said) from exc
