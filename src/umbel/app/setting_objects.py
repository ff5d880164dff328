"""Kinds of settings that hold structures and objects: queues, routes, policies, TLS options.

Only the shape is checked here, so that a wrong one is refused where it was set; what the parts
mean (a dotted name that leads nowhere, an option that no queue has) is for their users to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from umbel.app.setting_kinds import (
    BOOL,
    DICT,
    Kind,
    Misfit,
    integer,
    optional,
    parse_json,
    seconds,
)

_POLICY = {
    "max_retries": optional(integer(0)),
    "interval_start": seconds(),
    "interval_step": seconds(),
    "interval_max": seconds(),
}


def _check_policy(value: Any) -> dict[str, Any]:
    given: dict[str, Any] = DICT.check(value)
    for key, entry in given.items():
        if key == "retry_errors":
            continue
        if key not in _POLICY:
            raise Misfit(f"has the entry {key!r}: use {', '.join(_POLICY)}, retry_errors")
        try:
            _POLICY[key].check(entry)
        except Misfit as exc:
            raise Misfit(f"has {key!r}: {entry!r}, which {exc}") from None
    return given


RETRY_POLICY = Kind("a retry policy", _check_policy, parse_json)


def _check_queues(value: Any) -> Any:
    if isinstance(value, Mapping):
        if all(isinstance(n, str) and isinstance(o, Mapping) for n, o in value.items()):
            return dict(value)
    elif isinstance(value, (list, tuple, set, frozenset)) and all(
        isinstance(item, (str, Mapping)) or isinstance(getattr(item, "name", None), str)
        for item in value
    ):
        return list(value)
    raise Misfit("must be a list of kombu.Queue objects or names, or {name: {options}}")


QUEUES = Kind("a list of queues or {name: {options}}", _check_queues, parse_json)


def _is_route(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, (str, re.Pattern)) for key in value)
    return isinstance(value, str) or callable(value) or hasattr(value, "route_for_task")


def _check_routes(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        if all(_is_route(one) or _is_pairs(one) for one in value):
            return [dict(one) if _is_pairs(one) else one for one in value]
    elif _is_route(value):
        return dict(value) if isinstance(value, Mapping) else value
    raise Misfit("must be {pattern: route}, a function, a dotted name of one, or a list of these")


def _is_pairs(value: Any) -> bool:
    """Routes in order: [(pattern, route), ...]."""
    return isinstance(value, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in value
    )


ROUTES = Kind("routes", _check_routes, parse_json)


def _check_annotations(value: Any) -> Any:
    def fits(one: Any) -> bool:
        if isinstance(one, Mapping):
            return all(isinstance(k, str) and isinstance(v, Mapping) for k, v in one.items())
        return hasattr(one, "annotate")

    if isinstance(value, (list, tuple)) and all(fits(one) for one in value):
        return list(value)
    if not isinstance(value, (list, tuple)) and fits(value):
        return dict(value) if isinstance(value, Mapping) else value
    raise Misfit("must be {task name or '*': {attribute: value}}, or a list of these")


ANNOTATIONS = Kind("{task name or '*': {attribute: value}}", _check_annotations, parse_json)


def _check_callable(value: Any) -> Any:
    if callable(value):
        return value
    raise Misfit("must be a function")


def _parse_callable(_text: str) -> Any:
    raise Misfit("must be a function, which the environment can not give")


FUNCTION = Kind("a function", _check_callable, _parse_callable)


def _check_ssl(value: Any) -> bool | dict[str, Any]:
    if isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return dict(DICT.check(value))
    raise Misfit("must be True, False, or a dictionary of TLS options")


def _parse_ssl(text: str) -> Any:
    return parse_json(text) if text.lstrip().startswith("{") else BOOL.parse(text)


SSL = Kind("a boolean or a dictionary of TLS options", _check_ssl, _parse_ssl)
