"""From the options of a call to a message and its destination.

`prepare` is the only place where calling options are given a meaning: what the caller said
wins over the task's own attributes, those over the routes, those over the settings. A call
made inside a running task inherits its root and names it as parent.
"""

from __future__ import annotations

import difflib
import os
import socket
import time
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from umbel.app.context import current_request
from umbel.app.publish import RetryPolicy
from umbel.app.routes import ADDRESS, Destination
from umbel.wire.redaction import by_name
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
# RabbitMQ keeps a message's lifetime in 32 bits of milliseconds and closes the channel over more;
# what lives longer is left to the worker, which reads the `expires` header.
EXPIRATION_MAX_S = 2**32 // 1000 - 1
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
    name: str


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
    ids = _lineage(name, chosen)
    now = app.now()
    eta = _eta(app, name, chosen, now)
    if eta is not None:
        destination = app.router.delayed(destination, (eta - now).total_seconds(), app.write_url)
    expires, expires_in_s = _expires(app, name, chosen.get("expires"), now)
    # None on the wire: the worker's task decides.
    ignore_result = chosen.get("ignore_result")
    ignored = task.ignores_result if ignore_result is None and task is not None else ignore_result
    hard, soft = _limits(name, chosen)
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
        fields["callbacks"] = _with_chain(app, fields["callbacks"], chosen.get("chain"))
        message = write_task_v1(**fields)
    else:
        rules = by_name(conf.task_redact_names) if task is None else task.redaction
        argsrepr, kwargsrepr = chosen.get("argsrepr"), chosen.get("kwargsrepr")
        message = write_task(
            **fields,
            root_id=ids["root_id"],
            parent_id=ids["parent_id"],
            shadow=chosen.get("shadow"),
            argsrepr=rules.args_repr(args) if argsrepr is None else argsrepr,
            kwargsrepr=rules.kwargs_repr(kwargs) if kwargsrepr is None else kwargsrepr,
            origin=app.origin,
            ignore_result=ignore_result,
            replaced_task_nesting=chosen.get("replaced_task_nesting") or 0,
            stamped_headers=chosen.get("stamped_headers"),
            stamps=stamps_of(chosen),
            chain=chosen.get("chain"),
            clock=app.clock.forward(),
            sent_ms=time.time_ns() // 1_000_000,
        )
    enabled = chosen.get("retry")
    policy = RetryPolicy(
        {**conf.task_publish_retry_policy, **(chosen.get("retry_policy") or {})},
        conf.task_publish_retry if enabled is None else bool(enabled),
    )
    return Call(ids["id"], message, destination, policy, bool(ignored), ids["parent_id"], name)


def prepare_signature(app: Umbel, sig: Mapping[str, Any]) -> Call:
    """Turn a plain signature into a message, its arguments checked."""
    task = app.tasks.get(sig["task"])
    args, kwargs = sig["args"] or (), sig["kwargs"] or {}
    if task is not None and task.typing:
        task.check_arguments(args, kwargs)
    options = dict(sig["options"] or {})
    if task is not None and options.get("ignore_result") is None:
        options["ignore_result"] = task.ignores_result
    return prepare(app, sig["task"], args, kwargs, options, task)


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
        # A queue that the caller names is the whole address.
        queued = options.get("queue") is not None
        for option in TASK_DEFAULTS:
            if options.get(option) is None and not (queued and option in ADDRESS):
                value = getattr(task, option, None)
                if value is not None:
                    options[option] = value
        for option in ("time_limit", "soft_time_limit"):
            if options.get(option) is None:
                options[option] = getattr(task, option, None)
    return app.router.options_for(options, name, args, kwargs, task)


def _lineage(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    task_id = options.get("task_id") or uuid.uuid4()
    if isinstance(task_id, uuid.UUID):
        task_id = str(task_id)
    elif not isinstance(task_id, str):
        raise TypeError(f"task_id={task_id!r} of {name}: give text, or leave it out")
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


def _moment(app: Umbel, name: str, option: str, value: datetime | str) -> datetime:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(
            f"{option}={value!r} of {name}: give a datetime, or its ISO-8601 text"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=app.timezone)


def _eta(app: Umbel, name: str, options: Mapping[str, Any], now: datetime) -> datetime | None:
    countdown, eta = options.get("countdown"), options.get("eta")
    if countdown is not None:
        delay_s = seconds(name, "countdown", countdown)
        return _later(name, "countdown", now, delay_s) if delay_s else None
    if eta is None:
        return None
    if not isinstance(eta, (datetime, str)):
        raise TypeError(f"eta={eta!r} of {name}: give a datetime")
    return _moment(app, name, "eta", eta)


def _expires(app: Umbel, name: str, expires: Any, now: datetime) -> tuple[str | None, float | None]:
    if expires is None:
        return None, None
    if isinstance(expires, (datetime, str)):
        moment = _moment(app, name, "expires", expires)
    else:
        moment = _later(name, "expires", now, seconds(name, "expires", expires))
    left_s = (moment - now).total_seconds()
    return format_time(moment), left_s if left_s <= EXPIRATION_MAX_S else None


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


def stamps_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The stamps among the options, by name."""
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


def _with_chain(app: Umbel, callbacks: list[Any] | None, chain: Any) -> list[Any] | None:
    """Protocol 1 has no chain: each step becomes a callback of the one before it."""
    if not chain:
        return callbacks
    from umbel.app.canvas import signature

    following: Any = None
    for step in chain:  # the last one first
        linked = signature(step, app=app).clone()
        if following is not None:
            linked.link(following)
        following = linked
    return [*(callbacks or ()), following]


def _signatures(link: Any) -> list[Any] | None:
    if not link:
        return None
    return list(link) if isinstance(link, (list, tuple)) else [link]
