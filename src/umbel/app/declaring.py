"""From a function to a registered task: what `@app.task` does."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

from umbel.app.autoretry import add_autoretry
from umbel.app.task import Task
from umbel.exceptions import AlreadyRegistered, ImproperlyConfigured
from umbel.wire.redaction import fault_of

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel

_NUMBERS = ("time_limit", "soft_time_limit", "default_retry_delay", "retry_backoff_max")
_SWITCHES = (
    "acks_late",
    "acks_on_failure_or_timeout",
    "reject_on_worker_lost",
    "ignore_result",
    "store_errors_even_if_ignored",
    "track_started",
    "retry_jitter",
    "typing",
    "send_events",
)
_COUNTS = ("max_retries", "priority")
_EXCEPTIONS = ("autoretry_for", "dont_autoretry_for", "throws")
_CHECKED = {
    *_NUMBERS, *_SWITCHES, *_COUNTS, *_EXCEPTIONS, "rate_limit", "redact", "retry_backoff",
}  # fmt: skip
_RATES = {"s": 1.0, "m": 60.0, "h": 3600.0}


def make_task(app: Umbel, fun: Callable[..., Any], options: Mapping[str, Any]) -> Task:
    """A task object whose body is `fun`."""
    chosen = dict(options)
    base = chosen.pop("base", None) or app.task_cls
    bind = chosen.pop("bind", False)
    name = chosen.pop("name", None) or app.task_name(fun)
    retry_kwargs = chosen.get("retry_kwargs") or {}
    if "max_retries" in retry_kwargs and "max_retries" not in chosen:
        chosen["max_retries"] = retry_kwargs["max_retries"]
    check_options(name, chosen, base)
    attributes = {
        **chosen,
        "app": app,
        "name": name,
        "run": fun if bind else staticmethod(fun),
        "abstract": False,
        "__doc__": fun.__doc__,
        "__module__": fun.__module__,
        "__wrapped__": staticmethod(fun),
    }
    task: Task = type(fun.__name__, (base,), attributes)()
    add_autoretry(task)
    return task


def adopt(app: Umbel, task: Task) -> Task:
    """Make an instance of a hand-written class a task of `app`."""
    task.app = app
    task.name = task.name or app.task_name(type(task))
    kind = type(task)
    check_options(task.name, {o: getattr(task, o) for o in dir(kind) if o in _CHECKED}, kind)
    add_autoretry(task)
    return register(app, task)


def register(app: Umbel, task: Task) -> Task:
    """Put `task` into the registry; the same function declared twice is one task."""
    known = app.tasks.get(task.name)
    if known is not None and _source(known) != _source(task):
        raise AlreadyRegistered(
            f"two functions are called {task.name!r}: {_source(known)} and {_source(task)}; "
            "give one of them another name, @app.task(name=...)"
        )
    if known is not None:
        return known
    app.tasks[task.name] = task
    return task


def annotate(app: Umbel) -> None:
    """Let `task_annotations` overwrite options of tasks: by name, or of all under `*`.

    An object with a method `annotate(task)` chooses by itself.
    """
    tables = app.conf.task_annotations or ()
    for table in tables if isinstance(tables, (list, tuple)) else (tables,):
        if not isinstance(table, Mapping):
            for chosen in app.tasks.values():
                _change(chosen, table.annotate(chosen) or {})
            continue
        for name, changes in table.items():
            tasks = app.tasks.values() if name == "*" else [app.tasks.get(name)]
            for task in tasks:
                if task is not None:
                    _change(task, changes)


def _change(task: Task, changes: Mapping[str, Any]) -> None:
    check_options(task.name, changes, type(task))
    for option, value in changes.items():
        # A function takes the place of a method, such as on_failure.
        setattr(task, option, MethodType(value, task) if inspect.isfunction(value) else value)


def _source(task: Task) -> str:
    body = getattr(task, "__wrapped__", None) or type(task).run
    code = getattr(body, "__code__", None)
    if code is None:
        return f"{type(task).__module__}.{type(task).__qualname__}"
    return f"{code.co_filename}:{code.co_firstlineno}"


def check_options(name: str, options: Mapping[str, Any], base: type[Task] = Task) -> None:
    """Refuse options of the wrong type, and names that look like a slip of the pen."""
    for option, value in options.items():
        if value is not None:
            way_out = _fault(option, value, base)
            if way_out:
                raise ImproperlyConfigured(f"task {name!r}: option {option}={value!r}: {way_out}")
    hard, soft = options.get("time_limit"), options.get("soft_time_limit")
    if hard and soft and soft > hard:
        raise ImproperlyConfigured(
            f"task {name!r}: option soft_time_limit={soft!r}: it never comes before "
            f"time_limit={hard!r}; lower it"
        )


def _fault(option: str, value: Any, base: type[Task]) -> str:
    if not hasattr(base, option):
        close = difflib.get_close_matches(option, vars(Task), n=1, cutoff=0.8)
        return f"there is no such option; did you mean {close[0]!r}?" if close else ""
    if option in _SWITCHES:
        return "" if isinstance(value, bool) else "give True or False"
    if option in _COUNTS:
        return "" if _is_number(value, int) else "give a whole number"
    if option in _NUMBERS:
        fits = _is_number(value, (int, float)) and value >= 0
        return "" if fits else "give seconds as a number that is not negative"
    if option == "retry_backoff":
        fits = isinstance(value, (bool, int, float)) and value >= 0
        return "" if fits else "give True, or the seconds to begin with"
    if option in _EXCEPTIONS:
        fits = isinstance(value, (tuple, list)) and all(map(_is_exception, value))
        return "" if fits else "give a tuple of exception classes"
    if option == "redact":
        return fault_of(value)
    if option == "rate_limit":
        try:
            parse_rate(value)
        except ValueError as exc:
            return str(exc)
    return ""


def parse_rate(rate: str | float | None) -> float:
    """Tasks per second that a rate limit such as `10/s`, `5/m`, `1/h` or 2.5 allows; 0 is none."""
    if rate is None or rate == "":
        return 0.0
    if isinstance(rate, str):
        number, _, unit = rate.partition("/")
        try:
            amount, per = float(number), _RATES[unit.strip() or "s"]
        except (ValueError, KeyError):
            raise ValueError(
                f"rate limit {rate!r}: give a number, or one per second, minute or hour "
                "such as '10/s', '5/m' or '1/h'"
            ) from None
    elif _is_number(rate, (int, float)):
        amount, per = float(rate), 1.0
    else:
        raise ValueError(f"rate limit {rate!r}: give a number or text such as '10/s'")
    if not 0 <= amount < float("inf"):
        raise ValueError(f"rate limit {rate!r}: it can not be negative or infinite")
    return amount / per


def _is_number(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_exception(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)
