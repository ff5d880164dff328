"""From a function to a registered task: what `@app.task` does."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from umbel.app.autoretry import add_autoretry
from umbel.app.task import Task
from umbel.exceptions import AlreadyRegistered, ImproperlyConfigured

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
    """Let `task_annotations` overwrite options of tasks: by name, or of all under `*`."""
    tables = app.conf.task_annotations or ()
    for table in tables if isinstance(tables, (list, tuple)) else (tables,):
        for name, changes in table.items():
            tasks = app.tasks.values() if name == "*" else [app.tasks.get(name)]
            for task in tasks:
                if task is None:
                    continue
                check_options(task.name, changes, type(task))
                for option, value in changes.items():
                    setattr(task, option, value)


def _source(task: Task) -> str:
    body = getattr(task, "__wrapped__", None) or type(task).run
    code = getattr(body, "__code__", None)
    if code is None:
        return f"{type(task).__module__}.{type(task).__qualname__}"
    return f"{code.co_filename}:{code.co_firstlineno}"


def check_options(name: str, options: Mapping[str, Any], base: type[Task] = Task) -> None:
    """Refuse options of the wrong type, and names that look like a slip of the pen."""
    for option, value in options.items():
        if value is None:
            continue
        if not hasattr(base, option):
            close = difflib.get_close_matches(option, vars(Task), n=1, cutoff=0.8)
            if close:
                _refuse(name, option, value, f"there is no such option; did you mean {close[0]!r}?")
        elif option in _SWITCHES and not isinstance(value, bool):
            _refuse(name, option, value, "give True or False")
        elif option in _COUNTS and not _is_number(value, int):
            _refuse(name, option, value, "give a whole number")
        elif option in _NUMBERS and (not _is_number(value, (int, float)) or value < 0):
            _refuse(name, option, value, "give seconds as a number that is not negative")
        elif option == "rate_limit":
            try:
                parse_rate(value)
            except ValueError as exc:
                raise ImproperlyConfigured(f"task {name!r}: {exc}") from None
    for option in ("autoretry_for", "dont_autoretry_for", "throws"):
        for kind in options.get(option) or ():
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                _refuse(name, option, kind, "give a tuple of exception classes")


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


def _refuse(name: str, option: str, value: Any, way_out: str) -> None:
    raise ImproperlyConfigured(f"task {name!r}: option {option}={value!r}: {way_out}")
