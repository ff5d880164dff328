"""What a worker writes: text for people, or one JSON object per line for machines.

Every line that is logged while a task runs carries the task's id and name, whoever logs it: the
filter on our handler asks the context, so loggers of the user's modules, of libraries, and what
a task prints are all covered. Lines inside tasks have a format of their own.

Nothing that looks like the password of an address is ever written: it is masked in the last
step, when the text is complete, so tracebacks are covered too. From tracebacks, which hold what
others wrote, values under secret names (`task_redact_names`) are taken out as well.

Forked pool processes inherit the handler. It holds no lock that the logging module does not
renew after a fork, appends whole lines, and finds a rotated file again by its path.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import logging.handlers
import os
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any, TextIO

from umbel.app.context import current_request, current_task
from umbel.exceptions import ImproperlyConfigured
from umbel.files import open_file
from umbel.wire.secret_texts import Names, mask_addresses, secret_names

if TYPE_CHECKING:
    from umbel.app.conf import Conf

PARTIAL_LINE_CHARS_MAX = 65_536
_COLORS = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[1;31m",
}
_RESET = "\x1b[0m"

logger = logging.getLogger("umbel.worker")


def setup(
    level: int | str,
    logfile: str | None,
    json: bool,
    color: bool | None,
    conf: Conf,
) -> Logging:
    """Send the log of this process where it was asked for; `close` puts everything back.

    With `worker_hijack_root_logger` off the root logger stays the user's: only a log file that
    was asked for by name is attached, to Umbel's own loggers.
    """
    handler = _handler(logfile)
    wants_color = color if color is not None else conf.worker_log_color
    if wants_color is None:
        wants_color = logfile is None and _is_terminal(handler)
    zone = _zone(conf)
    secret = secret_names(conf.task_redact_names)
    formatter: logging.Formatter = (
        JSONFormatter(zone, secret)
        if json
        else TextFormatter(
            conf.worker_log_format, conf.worker_task_log_format, zone, secret, color=wants_color
        )
    )
    handler.setFormatter(formatter)
    handler.addFilter(TaskFilter())
    return Logging(handler, level, conf, own_only=not conf.worker_hijack_root_logger)


class Logging:
    """The log of a worker, from `setup` until `close`."""

    def __init__(
        self, handler: logging.Handler, level: int | str, conf: Conf, *, own_only: bool
    ) -> None:
        self.handler = handler
        self._target = logging.getLogger("umbel") if own_only else logging.getLogger()
        self._before = (list(self._target.handlers), self._target.level)
        self._own_only = own_only
        self._conf = conf
        if not own_only:
            for old in list(self._target.handlers):
                self._target.removeHandler(old)
        if not own_only or isinstance(handler, logging.FileHandler):
            self._target.addHandler(handler)
        self._target.setLevel(level)
        logging.captureWarnings(True)

    def say(self, text: str) -> None:
        """Write one line whatever the level is: for what an operator always wants to know."""
        if logger.isEnabledFor(logging.INFO):
            logger.info(text)
        else:
            self.handler.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None))

    @contextlib.contextmanager
    def redirected(self) -> Iterator[None]:
        """What is printed in the block goes to the log, if the settings want it so."""
        if not self._conf.worker_redirect_stdouts:
            yield
            return
        number = logging.getLevelName(str(self._conf.worker_redirect_stdouts_level).upper())
        level = number if isinstance(number, int) else logging.WARNING
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = LogStream(before[0], level), LogStream(before[1], level)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            sys.stdout, sys.stderr = before

    def close(self) -> None:
        """Put back what was there before."""
        logging.captureWarnings(False)
        self._target.removeHandler(self.handler)
        handlers, level = self._before
        for old in handlers:
            if old not in self._target.handlers:
                self._target.addHandler(old)
        self._target.setLevel(level)
        self.handler.close()


class TaskFilter(logging.Filter):
    """Puts `task_id` and `task_name` on every record; None outside of tasks.

    Attach it to a handler of your own to use both in its format.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def filter(self, record: logging.LogRecord) -> bool:
        """Never drops a record; what a caller gave as `extra` stays."""
        if not hasattr(record, "task_id"):
            request, task = current_request(), current_task()
            record.task_id = request.id if request is not None else None
            record.task_name = task.name if task is not None else None
        elif not hasattr(record, "task_name"):
            record.task_name = None
        pid = record.process or self._pid
        if pid != self._pid and record.processName == "MainProcess":
            record.processName = f"pool-{pid}"
        return True


class RedactingFormatter(logging.Formatter):
    """Takes values under secret names out of tracebacks."""

    def __init__(self, plain: str | None, secret: Names) -> None:
        super().__init__(plain)
        self._secret = secret

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name that logging calls
        """The traceback without secrets."""
        return self._secret.masked(super().formatException(ei))

    def _own(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record as we may write it: handlers before ours leave their traceback in it."""
        if not record.exc_text:
            return record
        own = copy.copy(record)
        own.exc_text = self._secret.masked(record.exc_text)
        return own


class TextFormatter(RedactingFormatter):
    """Lines for people, in the formats of the settings."""

    def __init__(
        self, plain: str, in_task: str, zone: tzinfo | None, secret: Names, *, color: bool
    ) -> None:
        super().__init__(plain, secret)
        self._in_task = logging.PercentStyle(in_task)
        self._outside = logging.PercentStyle(plain)
        self._times_wanted = self._in_task.usesTime() or self._outside.usesTime()
        self._zone = zone
        self._color = color

    def usesTime(self) -> bool:  # noqa: N802 - the name that logging calls
        """Whether either format shows the time."""
        return self._times_wanted

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """The time in the zone of the settings."""
        moment = datetime.fromtimestamp(record.created, self._zone)
        return f"{moment:%Y-%m-%d %H:%M:%S},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, in the format of tasks when one runs."""
        inside = getattr(record, "task_id", None) is not None
        return (self._in_task if inside else self._outside).format(record)

    def format(self, record: logging.LogRecord) -> str:
        """The complete text, exception included, without secrets."""
        text = mask_addresses(super().format(self._own(record)))
        color = _COLORS.get(record.levelno, "") if self._color else ""
        return f"{color}{text}{_RESET}" if color else text


class JSONFormatter(RedactingFormatter):
    """One JSON object per line; what can not be encoded appears by its repr."""

    def __init__(self, zone: tzinfo | None, secret: Names) -> None:
        super().__init__(None, secret)
        self._zone = zone

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON, exception included, without secrets."""
        moment = datetime.fromtimestamp(record.created, self._zone or UTC)
        task_id, task_name = _subject(record)
        line: dict[str, Any] = {
            "timestamp": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": mask_addresses(record.getMessage()),
            "task_id": task_id,
            "task_name": task_name,
            "process": record.process,
        }
        if record.exc_info and record.exc_info[1] is not None:
            exc = record.exc_info[1]
            line["exception"] = {
                "type": type(exc).__name__,
                "message": mask_addresses(self._secret.masked(_text_of(exc))),
                "traceback": mask_addresses(self.formatException(record.exc_info)),
            }
        elif record.exc_text:
            line["exception"] = {"traceback": mask_addresses(self._secret.masked(record.exc_text))}
        if record.stack_info:
            line["stack"] = mask_addresses(record.stack_info)
        return json.dumps(line, ensure_ascii=False, default=repr)


def _subject(record: logging.LogRecord) -> tuple[Any, Any]:
    """The task that a line is about: it was logged inside it, or by the worker about it."""
    task_id, task_name = getattr(record, "task_id", None), getattr(record, "task_name", None)
    about = record.name.startswith("umbel.") and str(record.msg).startswith("Task %s[%s]")
    if task_id is None and about and isinstance(record.args, tuple) and len(record.args) >= 2:
        task_name, task_id = record.args[:2]
    return task_id, task_name


def _text_of(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # noqa: BLE001 - a hostile __str__ is the task's, not ours
        return f"<{type(exc).__name__}: str failed>"


_handling = threading.local()  # `busy` while a thread is inside the handling of a record


class LogStream:
    """Stands in for `sys.stdout` or `sys.stderr`: whole lines become log records.

    A line belongs to the task that began it. A part without an end is written when the stream
    is flushed, when another task writes on the same thread, or when it has become too long. What
    is written while a record is being handled (a failing handler complains on stderr) goes
    to the real stream, or it would come back here for ever.
    """

    def __init__(self, stream: TextIO, level: int) -> None:
        self._stream = stream
        self._level = level
        self._logger = logging.getLogger("umbel.redirected")
        self._local = threading.local()

    def write(self, text: str) -> int:
        """Take text in; complete lines are logged."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        local = self._local
        if getattr(_handling, "busy", False):
            return self._stream.write(text)
        owner = _owner()
        if getattr(local, "owner", owner) != owner:
            self._emit_partial()
        local.owner = owner
        *lines, rest = (getattr(local, "partial", "") + text).split("\n")
        local.partial = rest
        for line in lines:
            self._emit(line, owner)
        if len(rest) > PARTIAL_LINE_CHARS_MAX:
            self._emit_partial()
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Log the line that has no end yet."""
        if getattr(_handling, "busy", False):
            self._stream.flush()
        else:
            self._emit_partial()

    def isatty(self) -> bool:
        """A log is no terminal."""
        return False

    def __getattr__(self, name: str) -> Any:
        # fileno, buffer, encoding, ...: those of the real stream.
        return getattr(self._stream, name)

    def _emit_partial(self) -> None:
        local = self._local
        rest, local.partial = getattr(local, "partial", ""), ""
        if rest:
            self._emit(rest, getattr(local, "owner", (None, None)))

    def _emit(self, line: str, owner: tuple[str | None, str | None]) -> None:
        line = line.rstrip()
        if not line:
            return
        _handling.busy = True
        try:
            extra = {"task_id": owner[0], "task_name": owner[1]}
            self._logger.log(self._level, "%s", line, extra=extra)
        finally:
            _handling.busy = False


def _owner() -> tuple[str | None, str | None]:
    request, task = current_request(), current_task()
    return (request.id if request else None, task.name if task else None)


class _LogFile(logging.handlers.WatchedFileHandler):
    """A log file; one that is made here is made like other files of ours."""

    def _open(self) -> Any:
        return open_file(self.baseFilename, self.mode, self.encoding, self.errors)


def _handler(logfile: str | None) -> logging.Handler:
    if logfile is None or logfile == "-":
        return logging.StreamHandler(sys.stderr)
    try:
        return _LogFile(logfile, encoding="utf-8")
    except OSError as exc:
        raise ImproperlyConfigured(
            f"log file {logfile!r} can not be written: {exc.strerror}; give a path that can"
        ) from None


def _is_terminal(handler: logging.Handler) -> bool:
    stream = getattr(handler, "stream", None)
    return bool(stream is not None and stream.isatty() and not os.environ.get("NO_COLOR"))


def _zone(conf: Conf) -> tzinfo | None:
    """The zone of the settings; None is the machine's own."""
    if conf.timezone:
        from zoneinfo import ZoneInfo

        return conf.timezone if isinstance(conf.timezone, tzinfo) else ZoneInfo(conf.timezone)
    return UTC if conf.enable_utc else None
