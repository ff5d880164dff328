"""What the calls of one task have in common, worked out once: a `Form`.

Where a message goes and how it is written follows from the task's attributes, the settings, the
routes, and a few options, the *steering* ones. All other options say something of one call. So
the outcome is kept for every set of steering options that comes up, and a call fills in the rest.

| what a form was made of | how a change of it is noticed                               |
| ----------------------- | ----------------------------------------------------------- |
| the settings            | their revision                                              |
| the queues              | their revision                                              |
| the task's attributes   | they are part of the key                                    |
| steering options        | likewise; with anything but plain values nothing is kept    |
| routes                  | a table is a setting; with a function as route nothing is kept |

Two threads may make the same form at the same time; either will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from umbel.app.publish import RetryPolicy
from umbel.app.routes import ADDRESS, Destination
from umbel.wire.outgoing import TaskWriter

if TYPE_CHECKING:
    from umbel.app.task import Task
    from umbel.app.umbel import Umbel

# Task attributes that act as calling options when the caller does not give them.
TASK_DEFAULTS: Final = (
    "queue",
    "exchange",
    "routing_key",
    "priority",
    "serializer",
    "compression",
    "expires",
    "delivery_mode",
    "time_limit",
    "soft_time_limit",
)
STEERING: Final = frozenset(
    {*TASK_DEFAULTS, "exchange_type", "ignore_result", "shadow", "timelimit"} - {"expires"}
)
# When there are more, callers make up names as they go, and all are forgotten.
FORMS_MAX: Final = 1000

_PLAIN: Final = frozenset({str, int, float, bool})
_attributes = attrgetter(*TASK_DEFAULTS)


class Times(NamedTuple):
    """When a call is to run, and where it goes until then."""

    destination: Destination
    eta: str | None = None
    expires: str | None = None
    expires_in_s: float | None = None


class Form(NamedTuple):
    """How calls with the same steering options are sent."""

    times: Times  # of a call that says nothing about them
    writer: TaskWriter
    priority: int | None  # None: that of the task that calls
    delivery_mode: int
    ignore_result: bool | None
    serializer: str
    compression: str | None
    time_limit: float | None
    soft_time_limit: float | None
    more: Mapping[str, Any]  # what the task and the routes say of the other options


class _Kept(NamedTuple):
    revisions: tuple[int, int]  # of the settings and the queues
    by_table: bool  # whether routes depend on nothing but the key
    forms: dict[Any, Form]


class Forms:
    """The forms of one application."""

    def __init__(self, app: Umbel) -> None:
        self._app = app
        self._router, self._queues = app.router, app.queues
        self._kept = _Kept((-1, -1), False, {})
        self._patience: tuple[dict[str, Any], bool, RetryPolicy] | None = None

    def find(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        options: Mapping[str, Any],
        task: Task | None,
        ignore_result: bool | None = None,
    ) -> Form:
        """The form for a call; raises if an option of it is wrong."""
        # The revisions are read before what they stand for: what is kept under them is never older.
        revisions = (self._app.conf.revision, self._queues.revision)
        kept = self._kept
        if kept.revisions != revisions or len(kept.forms) > FORMS_MAX:
            kept = self._kept = _Kept(revisions, self._router.is_table, {})
        key = _key(name, options, task, ignore_result) if kept.by_table else None
        try:
            form = kept.forms.get(key)
        except TypeError:  # an attribute of the task that is no key of a dictionary
            key = form = None
        if form is not None:
            return form
        if not kept.by_table:
            return self._make(name, args, kwargs, dict(options), task, ignore_result)
        steering = {option: value for option, value in options.items() if option in STEERING}
        form = self._make(name, args, kwargs, steering, task, ignore_result)
        if key is not None:
            kept.forms[key] = form
        return form

    @property
    def are_kept(self) -> bool:
        """Whether a form depends on nothing but the name, the task and the steering options."""
        return self._kept.by_table

    def policy(self) -> RetryPolicy:
        """How patiently messages are sent, as the settings say; they may be altered in place."""
        conf = self._app.conf
        given, enabled = conf.task_publish_retry_policy, conf.task_publish_retry
        kept = self._patience
        if kept is None or kept[0] != given or kept[1] is not enabled:
            kept = self._patience = (dict(given), enabled, RetryPolicy(given, enabled))
        return kept[2]

    def _make(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        options: dict[str, Any],
        task: Task | None,
        ignore_result: bool | None,
    ) -> Form:
        app, conf = self._app, self._app.conf
        if ignore_result is not None and options.get("ignore_result") is None:
            options["ignore_result"] = ignore_result
        if task is not None:
            _fill_in(options, task)
        chosen = self._router.options_for(options, name, args, kwargs, task)
        destination = self._router.destination(chosen)
        hard, soft = _limits(name, chosen)
        serializer = chosen.get("serializer") or conf.task_serializer
        compression = chosen.get("compression") or conf.task_compression
        ignore_result = chosen.get("ignore_result")
        writer = TaskWriter(
            name=name, serializer=serializer, compression=compression, time_limit=hard,
            soft_time_limit=soft, shadow=chosen.get("shadow"), origin=app.origin,
            ignore_result=ignore_result, address=(destination.exchange, destination.routing_key),
            limits=app.limits,
        )  # fmt: skip
        return Form(
            Times(destination), writer, _priority(app, name, chosen), destination.delivery_mode,
            ignore_result, serializer, compression, hard, soft,
            {n: v for n, v in chosen.items() if n not in STEERING and v is not None},
        )  # fmt: skip


def _key(
    name: str, options: Mapping[str, Any], task: Task | None, ignore_result: bool | None
) -> Any:
    """What a form is kept under; None where it can not be."""
    key = (name, ignore_result, None if task is None else _attributes(task))
    if STEERING.isdisjoint(options):
        return key
    steering: list[Any] = []
    for option, value in options.items():
        if option in STEERING and value is not None:
            kind = type(value)
            if kind not in _PLAIN:
                return None
            steering += (option, kind, value)  # 1 is not True, and 1.0 is written otherwise
    return (*key, *steering)


def _fill_in(options: dict[str, Any], task: Task) -> None:
    # A queue that the caller names is the whole address.
    queued = options.get("queue") is not None
    for option in TASK_DEFAULTS:
        if options.get(option) is None and not (queued and option in ADDRESS):
            value = getattr(task, option, None)
            if value is not None:
                options[option] = value


def _limits(name: str, options: Mapping[str, Any]) -> tuple[float | None, float | None]:
    if options.get("timelimit"):
        hard, soft = options["timelimit"]
    else:
        hard, soft = options.get("time_limit"), options.get("soft_time_limit")
    for option, limit in (("time_limit", hard), ("soft_time_limit", soft)):
        if limit is not None and seconds(name, option, limit) < 0:
            raise ValueError(f"{option}={limit!r} of {name}: it can not be negative")
    return (
        hard.total_seconds() if isinstance(hard, timedelta) else hard,
        soft.total_seconds() if isinstance(soft, timedelta) else soft,
    )


def seconds(name: str, option: str, value: Any) -> float:
    """A delay in seconds from a number or a timedelta."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{option}={value!r} of {name}: give seconds as a number, or a timedelta")
    return float(value)


def _priority(app: Umbel, name: str, options: Mapping[str, Any]) -> int | None:
    priority = options.get("priority")
    if priority is None and app.conf.task_inherit_parent_priority:
        return None
    return checked_priority(app, name, priority)


def checked_priority(app: Umbel, name: str, priority: Any) -> int:
    """The priority that was chosen, or else the default one."""
    if priority is None:
        priority = app.conf.task_default_priority
    if priority is None:
        return 0
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 255:
        raise ValueError(f"priority={priority!r} of {name}: give a whole number from 0 to 255")
    return priority
