"""From the options of a call to a message and its destination.

`prepare` is the only place where calling options are given a meaning: what the caller said
wins over the task's own attributes, those over the routes, those over the settings. A call
made inside a running task inherits its root and names it as parent.

What is the same for many calls is worked out once, in `app.forms`; here is what differs.
"""

from __future__ import annotations

import difflib
import os
import socket
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from time import time_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from umbel.app.context import current_request
from umbel.app.forms import STEERING, Form, Times, checked_priority, seconds
from umbel.app.publish import RetryPolicy
from umbel.app.routes import Destination
from umbel.broker.amqp.tables import check_headers
from umbel.broker.ids import fresh_id
from umbel.broker.sessions.connections import is_rabbitmq
from umbel.wire.outgoing import Parcel, properties_of, write_task_v1
from umbel.wire.redaction import by_name
from umbel.wire.times import format_time

if TYPE_CHECKING:
    from umbel.app.task import Task
    from umbel.app.umbel import Umbel

# RabbitMQ keeps a message's lifetime in 32 bits of milliseconds and closes the channel over more;
# what lives longer is left to the worker, which reads the `expires` header.
EXPIRATION_MAX_S = 2**32 // 1000 - 1
_TIMES: Final = frozenset({"countdown", "eta", "expires"})
_LINKS: Final = frozenset({"link", "link_error", "chain", "chord"})
_STAMPS: Final = frozenset({"stamped_headers", "stamps"})
# Options that are header fields as they are, unless they say nothing.
_FIELDS: Final = {
    "group_id": "group",
    "group_index": "group_index",
    "retries": "retries",
    "replaced_task_nesting": "replaced_task_nesting",
}
_PATIENCE: Final = frozenset({"retry", "retry_policy"})
# Options that every call in a batch has, or may have, and that steer nothing.
_PLAIN: Final = frozenset({"task_id", "reply_to", "root_id", "parent_id"})
_RARE: Final = frozenset({*_TIMES, *_STAMPS, *_FIELDS})
KNOWN_OPTIONS = frozenset(
    {
        *STEERING, *_RARE, *_LINKS, *_PATIENCE, "add_to_parent", "argsrepr", "correlation_id",
        "headers", "kwargsrepr", "origin", "parent_id", "reply_to", "root_id", "task_id",
    }
)  # fmt: skip


class Call(NamedTuple):
    """A message that is ready to be sent."""

    id: str
    message: Parcel
    destination: Destination
    policy: RetryPolicy | None  # None: as the settings say
    ignore_result: bool
    parent_id: str | None
    name: str


def origin() -> str:
    """How this process names itself in messages."""
    return f"gen{os.getpid()}@{socket.gethostname()}"


def prepare(
    app: Umbel,
    name: str,
    args: Any,
    kwargs: Any,
    options: Mapping[str, Any],
    task: Task | None,
    ignore_result: bool | None = None,
    known: dict[str, Form] | None = None,
) -> Call:
    """Turn one call into a message; raises before anything is sent if an option is wrong.

    `ignore_result` is for options that say nothing of it; None on the wire lets the worker's task
    decide. `known` are the forms of calls by name that are prepared together with this one.
    """
    args = () if args is None else args
    kwargs = {} if kwargs is None else kwargs
    is_plain = options.keys() <= _PLAIN
    if not is_plain and not options.keys() <= KNOWN_OPTIONS:
        _check_spelling(name, options)
    form = known.get(name) if is_plain and known is not None else None
    if form is None:
        form = app.forms.find(name, args, kwargs, options, task, ignore_result)
        if is_plain and known is not None and app.forms.are_kept:
            known[name] = form
    if form.more:
        is_plain = False
        options = {**form.more, **{n: v for n, v in options.items() if v is not None}}
    get = options.get
    task_id, root_id, parent_id = _lineage(name, options)
    is_usual = is_plain or _RARE.isdisjoint(options)
    times = form.times if is_usual else _times(app, name, options, form.times)
    properties = properties_of(
        task_id,
        get("reply_to") or app.reply_to,
        _callers_priority(app, name) if form.priority is None else form.priority,
        form.delivery_mode,
        times.expires_in_s,
    )
    if app.conf.task_protocol == 1:
        message = _write_v1(app, name, args, kwargs, options, form, times, properties)
    else:
        rules = by_name(app.conf.task_redact_names) if task is None else task.redaction
        argsrepr, kwargsrepr = get("argsrepr"), get("kwargsrepr")
        own: dict[str, Any] = {
            "id": task_id,
            "root_id": root_id,
            "argsrepr": rules.args_repr(args) if argsrepr is None else argsrepr,
            "kwargsrepr": rules.kwargs_repr(kwargs) if kwargsrepr is None else kwargsrepr,
            "umbel_clock": app.clock.forward(),
            "umbel_sent": time_ns() // 1_000_000,
        }
        if parent_id is not None:
            own["parent_id"] = parent_id
        if not is_usual:
            _add_fields(own, options, times)
        if not is_plain:
            _check_headers(app, options, own)
        embed = None if is_plain or _LINKS.isdisjoint(options) else _embed(options)
        message = form.writer.write(own, args, kwargs, properties, embed, get("headers"))
    if times.destination is not form.times.destination:
        to = times.destination
        message = message._replace(exchange=to.exchange, routing_key=to.routing_key)
    ignored = form.ignore_result
    if ignored is None and task is not None:
        ignored = task.ignores_result
    is_patient_as_usual = is_plain or _PATIENCE.isdisjoint(options)
    policy = None if is_patient_as_usual else _own_policy(app, options)
    return Call(task_id, message, times.destination, policy, bool(ignored), parent_id, name)


def prepare_signature(app: Umbel, sig: Mapping[str, Any]) -> Call:
    """Turn a plain signature into a message, its arguments checked."""
    return prepare_checked(app, sig["task"], sig["args"], sig["kwargs"], sig["options"] or {})


def prepare_checked(
    app: Umbel,
    name: str,
    args: Any,
    kwargs: Any,
    options: Mapping[str, Any],
    known: dict[str, Form] | None = None,
) -> Call:
    """Turn a call by name into a message, its arguments checked if the task is known here."""
    task = app.tasks.get(name)
    args, kwargs = args or (), kwargs or {}
    if task is None:
        return prepare(app, name, args, kwargs, options, None, None, known)
    if task.typing:
        task.check_arguments(args, kwargs)
    return prepare(app, name, args, kwargs, options, task, task.ignores_result, known)


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


def _lineage(name: str, options: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """The ids of the call itself, of what began it all, and of what sends it."""
    task_id = options.get("task_id") or fresh_id()
    if not isinstance(task_id, str):
        if not isinstance(task_id, uuid.UUID):
            raise TypeError(f"task_id={task_id!r} of {name}: give text, or leave it out")
        task_id = str(task_id)
    root_id, parent_id = options.get("root_id"), options.get("parent_id")
    caller = current_request()
    if caller is not None and caller.id is not None:
        root_id = root_id or caller.root_id or caller.id
        parent_id = parent_id or caller.id
    return task_id, root_id or task_id, parent_id


def _times(app: Umbel, name: str, options: Mapping[str, Any], usual: Times) -> Times:
    if _TIMES.isdisjoint(options):
        return usual
    now, to = app.now(), usual.destination
    eta = _eta(app, name, options, now)
    if eta is not None:
        to = app.router.delayed(to, (eta - now).total_seconds(), app.write_url)
    expires, expires_in_s = _expires(app, name, options.get("expires"), now)
    return Times(to, format_time(eta) if eta is not None else None, expires, expires_in_s)


def _add_fields(own: dict[str, Any], options: Mapping[str, Any], times: Times) -> None:
    """Add the header fields that few calls have."""
    if times.eta is not None:
        own["eta"] = times.eta
    if times.expires is not None:
        own["expires"] = times.expires
    for option, field in _FIELDS.items():
        value = options.get(option)
        if value is not None:
            own[field] = value
    if not _STAMPS.isdisjoint(options):
        stamped = options.get("stamped_headers")
        own["stamped_headers"] = None if stamped is None else list(stamped)
        own["stamps"] = stamps_of(options)


def _check_headers(app: Umbel, options: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse headers and stamps of the caller that the broker would change."""
    headers, stamps = options.get("headers"), own.get("stamps")
    if (headers or stamps) and is_rabbitmq(app.write_url):
        check_headers({**(headers or {}), **(stamps or {})})


def _embed(options: Mapping[str, Any]) -> dict[str, Any]:
    get = options.get
    return {
        "callbacks": _signatures(get("link")),
        "errbacks": _signatures(get("link_error")),
        "chain": get("chain"),
        "chord": get("chord"),
    }


def _write_v1(
    app: Umbel,
    name: str,
    args: Any,
    kwargs: Any,
    options: Mapping[str, Any],
    form: Form,
    times: Times,
    properties: dict[str, Any],
) -> Parcel:
    embed = _embed(options)
    message = write_task_v1(
        name=name,
        id=properties["correlation_id"],
        args=args,
        kwargs=kwargs,
        serializer=form.serializer,
        compression=form.compression,
        eta=times.eta,
        expires=times.expires,
        group_id=options.get("group_id"),
        group_index=options.get("group_index"),
        retries=options.get("retries") or 0,
        time_limit=form.time_limit,
        soft_time_limit=form.soft_time_limit,
        callbacks=_with_chain(app, embed["callbacks"], embed["chain"]),
        errbacks=embed["errbacks"],
        chord=embed["chord"],
        headers=options.get("headers"),
    )
    exchange, routing_key = form.writer.address
    return message._replace(properties=properties, exchange=exchange, routing_key=routing_key)


def _own_policy(app: Umbel, options: Mapping[str, Any]) -> RetryPolicy:
    conf, enabled = app.conf, options.get("retry")
    return RetryPolicy(
        {**conf.task_publish_retry_policy, **(options.get("retry_policy") or {})},
        conf.task_publish_retry if enabled is None else bool(enabled),
    )


def _callers_priority(app: Umbel, name: str) -> int:
    caller = current_request()
    inherited = None if caller is None else (caller.delivery_info or {}).get("priority")
    return checked_priority(app, name, inherited)


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


def stamps_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The stamps among the options, by name."""
    names = options.get("stamped_headers") or ()
    stamps = dict(options.get("stamps") or {})
    stamps.update({name: options[name] for name in names if name in options})
    return stamps


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
