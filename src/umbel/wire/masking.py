"""Settings as they may be shown: every secret replaced by `**`.

A value is secret because of the name it stands under (`redis_password`, `{"api_key": ...}`) or
because of its place in an address (`amqp://user:SECRET@host`, `?password=SECRET`). When an
address can be read in two ways, the reading that hides more is taken: a report that shows too
little is a nuisance, one that shows a password is a leak.

`masked` gives plain JSON-ready values, bounded in depth; objects appear by their class only,
because nobody knows what their repr tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, timedelta, tzinfo
from typing import Any
from urllib.parse import unquote

MASK = "**"
DEPTH_MAX = 12

_SECRET = re.compile(
    r"api|token|key|secret|pass|pwd|credential|signature|auth_kwargs|private|(^|_)sig(_|$)",
    re.IGNORECASE,
)
# Names that only look secret.
_HARMLESS = re.compile(
    r"(^|_)(routing_key|keyspace|keyprefix(_\w+)?|socket_keepalive(_\w+)?|passive"
    r"|unacked(_index|_mutex)?_key)$",
    re.IGNORECASE,
)
_SEPARATOR = re.compile(r"[;,]\s*(?=[A-Za-z][\w+.-]*://)")
_ASSIGNMENT = re.compile(r"""(?P<name>[\w%.-]+)(["']?\s*=|["']\s*:)\s*(?P<value>.*)""", re.DOTALL)
# Their first keys are names of tasks, queues and schedules, which are no secrets.
_KEYED_BY_NAME = frozenset({"task_routes", "task_annotations", "task_queues", "beat_schedule"})


def is_secret(name: str) -> bool:
    """Whether what stands under this name must not be shown."""
    return bool(_SECRET.search(name)) and not _HARMLESS.search(name)


def masked(name: str, value: Any) -> Any:
    """`value` of the setting (or entry) `name`, ready to be shown."""
    return _masked(name, value, DEPTH_MAX)


def masked_url(text: str) -> str:
    """One address, or several with `;` between them, without passwords."""
    parts = _SEPARATOR.split(text)
    separators = [found.group() for found in _SEPARATOR.finditer(text)]
    shown = [_address(part) for part in parts]
    return "".join(a + b for a, b in zip(shown, [*separators, ""], strict=True))


def _masked(name: str, value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if is_secret(name):
        return MASK
    if depth == 0:
        return "..."
    if isinstance(value, (str, bytes)):
        return _text(value)
    if isinstance(value, Mapping):
        return {
            _text(str(key)): _masked("" if name in _KEYED_BY_NAME else str(key), entry, depth - 1)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_masked("", item, depth - 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_masked("", item, depth - 1) for item in value), key=str)
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (date, tzinfo)):
        return str(value)
    if isinstance(value, re.Pattern):
        return _text(value.pattern)
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"<{getattr(value, '__module__', '?')}.{value.__qualname__}>"
    label = getattr(value, "name", None)  # queues and exchanges
    shown = f" {_text(label)}" if isinstance(label, str) else ""
    return f"<{type(value).__name__}{shown}>"


def _text(value: str | bytes) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return masked_url(text) if "://" in text else _assignments(text)


def _address(text: str) -> str:
    scheme, found, rest = text.partition("://")
    before = _assignments(scheme)
    if not found or before != scheme:  # the :// may be part of the secret
        return before
    # A password may hold any character that its writer forgot to quote: the last @ counts.
    user_info, at, place = rest.rpartition("@")
    if not at:
        return f"{scheme}://{_query(_without_odd_port(rest))}"
    if "&" in user_info or "?" in user_info:
        place = _tail_of_secret(user_info, place)
    user, colon, _ = user_info.partition(":")
    # Without a colon the one word may be a user, or a key (some transports): hide it too.
    shown = f"{_query(user)}:{MASK}" if colon else MASK
    return f"{scheme}://{shown}@{_query(place)}"


def _tail_of_secret(before: str, place: str) -> str:
    """`?password=a@b` looks like user information that ends at the @; `b` is secret as well."""
    parameter = re.split(r"[?&]", before)[-1]
    if is_secret(unquote(parameter.partition("=")[0])):
        _, ampersand, others = place.partition("&")
        return MASK + ampersand + others
    return place


def _without_odd_port(rest: str) -> str:
    """What follows the colon in `user:word` without @ is half a password unless it is a port."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    for found in re.finditer(r"(?:\[[^\]]*\]|[^:,\[\]]*):(?P<port>[^,]*)", authority):
        if found["port"] and not found["port"].isdecimal():
            return f"{rest[: found.start('port')]}{MASK}"
    return rest


def _query(text: str) -> str:
    path, mark, query = text.partition("?")
    return _assignments(path) + mark + _parameters(query)


def _parameters(query: str) -> str:
    shown: list[str] = []
    hidden = False
    for part in re.split(r"([&;])", query):
        name, equals, value = part.partition("=")
        if part in {"&", ";", ""}:
            shown.append(part)
        elif equals:
            hidden = is_secret(unquote(name))
            value = masked_url(value) if "://" in value else value
            shown.append(f"{name}={MASK if hidden else value}")
        else:  # perhaps the rest of a password with an & in it
            shown.append(MASK if hidden else part)
    return "".join(shown)


def _assignments(text: str) -> str:
    """`host=a password=b` and the like: nothing is shown after the first secret name."""
    words = re.split(r"([\s&;,{}]+)", text)
    for position, word in enumerate(words):
        found = _ASSIGNMENT.search(word)
        if found and is_secret(found["name"]):
            kept = "".join(words[:position])
            return f"{kept}{word[: found.start('value')]}{MASK}"
    return text
