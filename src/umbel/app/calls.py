"""From the options of a call to a message and its destination.

`prepare` is the only place where calling options are given a meaning: what the caller said
wins over the task's own attributes, those over the routes, those over the settings. A call
made inside a running task inherits its root and names it as parent.
"""

from __future__ import annotations

import difflib
import os
import socket
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from umbel.app.context import current_request
from umbel.app.publish import RetryPolicy
from umbel.app.routes import Destination
from umbel.wire.tasks import OutgoingTask, write_task, write_task_v1
from umbel.wire.times import format_time

if TYPE_CHECKING:
    from umbel.app.task import Task
    from umbel.app.umbel import Umbel

# Task attributes that act as calling options when the caller does not give them.
TASK_DEFAULTS = (
    "queue",
    "exchange",
    "routing_key",
    "priority",
    "serializer",
    "compression",
    "expires",
    "delivery_mode",
)
KNOWN_OPTIONS = frozenset(
    {
        *TASK_DEFAULTS, "add_to_parent", "argsrepr", "chain", "chord", "correlation_id",
        "countdown", "eta", "exchange_type", "group_id", "group_index", "headers",
        "ignore_result", "kwargsrepr", "link", "link_error", "origin", "parent_id",
        "replaced_task_nesting", "reply_to", "retries", "retry", "retry_policy", "root_id",
        "shadow", "soft_time_limit", "stamped_headers", "stamps", "task_id", "time_limit",
        "timelimit",
    }
)  # fmt: skip


class Call(NamedTuple):
    """A message that is ready to be sent."""

    id: str
    message: OutgoingTask
    destination: Destination
    policy: RetryPolicy
    ignore_result: bool
    parent_id: str | None


def origin() -> str:
    """How this process names itself in messages."""
    return f"gen{os.getpid()}@{socket.gethostname()}"


def prepare(
    app: Umbel, name: str, args: Any, kwargs: Any, options: Mapping[str, Any], task: Task | None
) -> Call:
    """Turn one call into a message; raises before anything is sent if an option is wrong."""
    conf = app.conf
    args = () if args is None else args
    kwargs = {} if kwargs is None else kwargs
    if not options.keys() <= KNOWN_OPTIONS:
        _check_spelling(name, options)
    chosen = _merge(app, name, args, kwargs, dict(options), task)
    destination = app.router.destination(chosen)
    ids = _lineage(chosen)
    now = app.now()
    eta = _eta(name, chosen, now)
    expires, expires_in_s = _expires(name, chosen.get("expires"), now)
    ignore_result = chosen.get("ignore_result")
    if ignore_result is None and task is not None:
        ignore_result = task.ignores_result
    hard, soft = _limits(chosen)
    fields: dict[str, Any] = {
        "name": name,
        "id": ids["id"],
        "args": args,
        "kwargs": kwargs,
        "serializer": chosen.get("serializer") or conf.task_serializer,
        "compression": chosen.get("compression") or conf.task_compression,
        "eta": format_time(eta) if eta is not None else None,
        "expires": expires,
        "expires_in_s": expires_in_s,
        "retries": chosen.get("retries") or 0,
        "group_id": chosen.get("group_id"),
        "group_index": chosen.get("group_index"),
        "time_limit": hard,
        "soft_time_limit": soft,
        "reply_to": chosen.get("reply_to") or app.reply_to,
        "priority": _priority(app, name, chosen),
        "delivery_mode": destination.delivery_mode,
        "callbacks": _signatures(chosen.get("link")),
        "errbacks": _signatures(chosen.get("link_error")),
        "chord": chosen.get("chord"),
        "headers": chosen.get("headers"),
    }
    if conf.task_protocol == 1:
        message = write_task_v1(**fields)
    else:
        message = write_task(
            **fields,
            root_id=ids["root_id"],
            parent_id=ids["parent_id"],
            shadow=chosen.get("shadow"),
            argsrepr=chosen.get("argsrepr"),
            kwargsrepr=chosen.get("kwargsrepr"),
            origin=app.origin,
            ignore_result=ignore_result,
            replaced_task_nesting=chosen.get("replaced_task_nesting") or 0,
            stamped_headers=chosen.get("stamped_headers"),
            stamps=_stamps(chosen),
            chain=chosen.get("chain"),
        )
    enabled = chosen.get("retry")
    policy = RetryPolicy(
        {**conf.task_publish_retry_policy, **(chosen.get("retry_policy") or {})},
        conf.task_publish_retry if enabled is None else bool(enabled),
    )
    return Call(ids["id"], message, destination, policy, bool(ignore_result), ids["parent_id"])


def _check_spelling(name: str, options: Mapping[str, Any]) -> None:
    # Peers put options of their own into signatures, so only what looks like a slip is refused.
    stamped = options.get("stamped_headers") or ()
    for option in options.keys() - KNOWN_OPTIONS - set(stamped):
        close = difflib.get_close_matches(option, KNOWN_OPTIONS, n=1, cutoff=0.8)
        if close:
            raise TypeError(
                f"{name} was called with the unknown option {option}={options[option]!r}: "
                f"did you mean {close[0]!r}?"
            )


def _merge(
    app: Umbel, name: str, args: Any, kwargs: Any, options: dict[str, Any], task: Task | None
) -> dict[str, Any]:
    if task is not None:
        for option in TASK_DEFAULTS:
            if options.get(option) is None:
                value = getattr(task, option, None)
                if value is not None:
                    options[option] = value
        for option in ("time_limit", "soft_time_limit"):
            if options.get(option) is None:
                options[option] = getattr(task, option, None)
    addressed = options.get("queue") is not None or (
        options.get("exchange") is not None and options.get("routing_key") is not None
    )
    if addressed:
        return options
    return app.router.options_for(options, name, args, kwargs, task)


def _lineage(options: Mapping[str, Any]) -> dict[str, Any]:
    task_id = options.get("task_id") or str(uuid.uuid4())
    root_id, parent_id = options.get("root_id"), options.get("parent_id")
    caller = current_request()
    if caller is not None and caller.id is not None:
        root_id = root_id or caller.root_id or caller.id
        parent_id = parent_id or caller.id
    return {"id": task_id, "root_id": root_id or task_id, "parent_id": parent_id}


def seconds(name: str, option: str, value: Any) -> float:
    """A delay in seconds from a number or a timedelta."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{option}={value!r} of {name}: give seconds as a number, or a timedelta")
    return float(value)


def _later(name: str, option: str, now: datetime, delay_s: float) -> datetime:
    try:
        return now + timedelta(seconds=delay_s)
    except (OverflowError, ValueError):
        raise ValueError(
            f"{option}={delay_s!r} of {name} lies beyond the year 9999: give a smaller delay"
        ) from None


def _eta(name: str, options: Mapping[str, Any], now: datetime) -> datetime | None:
    countdown, eta = options.get("countdown"), options.get("eta")
    if countdown is not None:
        return _later(name, "countdown", now, seconds(name, "countdown", countdown))
    if eta is None:
        return None
    if isinstance(eta, str):
        eta = datetime.fromisoformat(eta)
    if not isinstance(eta, datetime):
        raise TypeError(f"eta={eta!r} of {name}: give a datetime")
    return eta if eta.tzinfo is not None else eta.replace(tzinfo=now.tzinfo)


def _expires(name: str, expires: Any, now: datetime) -> tuple[str | None, float | None]:
    if expires is None:
        return None, None
    if isinstance(expires, str):
        expires = datetime.fromisoformat(expires)
    if not isinstance(expires, datetime):
        expires = _later(name, "expires", now, seconds(name, "expires", expires))
    elif expires.tzinfo is None:
        expires = expires.replace(tzinfo=now.tzinfo)
    return format_time(expires), (expires - now).total_seconds()


def _limits(options: Mapping[str, Any]) -> tuple[float | None, float | None]:
    if options.get("timelimit"):
        hard, soft = options["timelimit"]
        return hard, soft
    return options.get("time_limit"), options.get("soft_time_limit")


def _stamps(options: Mapping[str, Any]) -> dict[str, Any]:
    names = options.get("stamped_headers") or ()
    stamps = dict(options.get("stamps") or {})
    stamps.update({name: options[name] for name in names if name in options})
    return stamps


def _priority(app: Umbel, name: str, options: Mapping[str, Any]) -> int:
    priority = options.get("priority")
    if priority is None and app.conf.task_inherit_parent_priority:
        caller = current_request()
        if caller is not None:
            priority = (caller.delivery_info or {}).get("priority")
    if priority is None:
        priority = app.conf.task_default_priority
    if priority is None:
        return 0
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 255:
        raise ValueError(f"priority={priority!r} of {name}: give a whole number from 0 to 255")
    return priority


def _signatures(link: Any) -> list[Any] | None:
    if not link:
        return None
    return list(link) if isinstance(link, (list, tuple)) else [link]
