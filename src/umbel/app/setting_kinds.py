"""The kinds of value that a setting can have, and how each is checked.

A kind says in words what it takes, turns a value given in Python into the stored one, and
reads one from the text of an environment variable. Values are coerced only where nothing is
lost: an int for a float, a whole float for an int, a `timedelta` for seconds, any list, tuple
or set of strings. Text is never taken for a number or a boolean except from the environment,
where everything is text.

A value that does not fit raises `Misfit`, whose text continues the sentence "setting ... is
...: it". Names, values and the masking of secrets are the caller's business (`app.conf`).
Containers are copied on the way in, so that the caller's later changes do not reach us.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta, tzinfo
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from umbel.files import read_umask


class Misfit(ValueError):
    """The value is not of this kind; the text says what would be."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value: `what` in words, `check` for Python, `parse` for text."""

    what: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any]


def optional(kind: Kind) -> Kind:
    """The same kind, or None (`null` in the environment)."""
    return replace(
        kind,
        what=f"{kind.what}, or None",
        check=lambda value: None if value is None else kind.check(value),
        parse=lambda text: None if text.strip().lower() == "null" else kind.parse(text),
    )


def either(*kinds: Kind) -> Kind:
    """The first of several kinds that fits."""
    what = " or ".join(kind.what for kind in kinds)

    def check(value: Any) -> Any:
        for kind in kinds:
            try:
                return kind.check(value)
            except Misfit:
                continue
        raise Misfit(f"must be {what}")

    def parse(text: str) -> Any:
        for kind in kinds:
            try:
                return kind.check(kind.parse(text))
            except Misfit:
                continue
        raise Misfit(f"must be {what}")

    return Kind(what, check, parse)


def _umask(value: Any) -> str:
    try:
        return f"{read_umask(value):03o}"
    except ValueError as exc:
        raise Misfit(str(exc)) from None


UMASK = Kind("an octal number up to 077 as text", _umask, str)


# -- numbers and booleans --------------------------------------------------------------------


def _check_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise Misfit("must be True or False")


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in {"true", "yes", "on", "1"}:
        return True
    if lowered in {"false", "no", "off", "0"}:
        return False
    raise Misfit("must be true or false")


BOOL = Kind("a boolean", _check_bool, _parse_bool)


def _span(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f" from {least:g} to {most:g}" if most < 1e6 else f" from {least} to {most}"
    if least is not None:
        return f", {least:g} or more"
    return ""


def integer(least: int | None = None, most: int | None = None) -> Kind:
    """A whole number in a range."""
    what = f"a whole number{_span(least, most)}"

    def check(value: Any) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise Misfit(f"must be {what}")
        number = int(value)
        if (least is not None and number < least) or (most is not None and number > most):
            raise Misfit(f"must be {what}")
        return number

    def parse(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise Misfit(f"must be {what}") from None

    return Kind(what, check, parse)


def number(least: float | None = None, *, infinite: bool = False, unit: str = "") -> Kind:
    """A finite number (or also infinity), stored as a float."""
    what = f"a number{unit}{_span(least, None)}"

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Misfit(f"must be {what}")
        try:
            found = float(value)
        except OverflowError:
            found = math.nan
        if math.isnan(found) or (math.isinf(found) and not infinite):
            raise Misfit(f"must be {what}")
        if least is not None and found < least:
            raise Misfit(f"must be {what}")
        return found

    def parse(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise Misfit(f"must be {what}") from None

    return Kind(what, check, parse)


def seconds(least: float = 0) -> Kind:
    """A number of seconds, stored as a float; a `timedelta` will do."""
    plain = number(least, unit=" of seconds")

    def check(value: Any) -> float:
        return float(plain.check(value.total_seconds() if isinstance(value, timedelta) else value))

    return Kind(plain.what, check, plain.parse)


def _check_whole_seconds(value: Any) -> int:
    spelled = value.total_seconds() if isinstance(value, timedelta) else value
    try:
        return int(integer(0).check(spelled))
    except Misfit:
        raise Misfit("must be whole seconds (or a timedelta of whole seconds), 0 or more") from None


WHOLE_SECONDS = Kind("whole seconds or a timedelta", _check_whole_seconds, integer(0).parse)


# -- text ------------------------------------------------------------------------------------


def _check_text(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise Misfit("must be a string that is not empty")


TEXT = Kind("a string", _check_text, str)


def _check_path(value: Any) -> str:
    found = os.fspath(value) if isinstance(value, os.PathLike) else value
    return _check_text(found)


PATH = Kind("a path", _check_path, str)


def choice(*options: Any, aliases: Mapping[Any, Any] | None = None) -> Kind:
    """One of a few values; an alias is stored as what it stands for."""
    known = {**{option: option for option in options}, **(aliases or {})}
    listed = ", ".join(str(option) for option in options)

    def check(value: Any) -> Any:
        try:
            if not isinstance(value, bool) and value in known:
                return known[value]
        except TypeError:  # a list or the like: it can not be one of ours
            pass
        raise Misfit(_which(value, known, listed))

    def parse(text: str) -> Any:
        return int(text) if text.isdecimal() else text

    return Kind(f"one of {listed}", check, parse)


def _which(value: Any, known: Iterable[Any], listed: str) -> str:
    names = [option for option in known if isinstance(option, str)]
    close = difflib.get_close_matches(value, names, 1) if isinstance(value, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"must be one of {listed}{hint}"


SERIALIZERS = ("json", "msgpack", "yaml")
_CONTENT_TYPES = ("application/json", "application/x-msgpack", "application/x-yaml")


def _check_serializer(value: Any) -> str:
    if isinstance(value, str) and value in {"pickle", "application/x-python-serialize"}:
        raise Misfit(
            "is refused: unpickling runs whatever code the sender wrote, so whoever reaches the "
            f"broker owns the worker; choose one of {', '.join(SERIALIZERS)}"
        )
    known = (*SERIALIZERS, *_CONTENT_TYPES)
    if not isinstance(value, str) or value not in known:
        raise Misfit(_which(value, known, ", ".join(SERIALIZERS)))
    return value


SERIALIZER = Kind(f"one of {', '.join(SERIALIZERS)}", _check_serializer, str)

COMPRESSION = choice(
    "gzip",
    "zlib",
    "bzip2",
    "lzma",
    "brotli",
    "zstd",
    aliases={
        "bzip": "bzip2",
        "xz": "lzma",
        "zstandard": "zstd",
        "application/x-gzip": "gzip",
        "application/x-bz2": "bzip2",
        "application/x-lzma": "lzma",
        "application/x-brotli": "brotli",
        "application/zstd": "zstd",
    },
)


def _check_exchange_type(value: Any) -> str:
    usual = ("direct", "topic", "fanout", "headers")
    if isinstance(value, str) and (value in usual or value.startswith("x-")):
        return value
    raise Misfit(_which(value, usual, ", ".join(usual)) + " (or a plugin's, starting with x-)")


EXCHANGE_TYPE = Kind("one of direct, topic, fanout, headers", _check_exchange_type, str)

_RATE = re.compile(r"\d+(\.\d+)?(/[smh])?")


def _check_rate(value: Any) -> str | float:
    if isinstance(value, str) and _RATE.fullmatch(value):
        return value
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if numeric and math.isfinite(value) and value >= 0:
        return float(value)
    raise Misfit("must be a rate such as '10/s', '5/m', '1/h', or a number per second")


RATE = Kind("a rate ('10/s', '5/m', '1/h') or a number per second", _check_rate, str)


def _check_level(value: Any) -> str | int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and value.upper() in logging.getLevelNamesMapping():
        return value.upper()
    raise Misfit("must be a log level: DEBUG, INFO, WARNING, ERROR or CRITICAL")


LOG_LEVEL = Kind("a log level", _check_level, str)


def _check_log_format(value: Any) -> str:
    text = _check_text(value)
    try:
        logging.Formatter(text)
    except ValueError as exc:
        raise Misfit(f"must be a log format in % style ({exc})") from None
    return text


LOG_FORMAT = Kind("a log format in % style", _check_log_format, str)


def _check_timezone(value: Any) -> str | tzinfo:
    if isinstance(value, tzinfo):
        return value
    text = _check_text(value)
    try:
        ZoneInfo(text)
    except (ValueError, OSError, KeyError):  # unknown, not a zone file, or outside the tree
        close = difflib.get_close_matches(text, available_timezones(), 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise Misfit(f"must name a time zone such as 'Europe/Berlin'{hint}") from None
    return text


TIMEZONE = Kind("the name of a time zone", _check_timezone, str)


# -- addresses -------------------------------------------------------------------------------

_ADDRESS = "must be an address such as redis://host:6379/0 or amqp://user:password@host:5672/vhost"


def _check_url(value: Any) -> str:
    if isinstance(value, str) and all("://" in part for part in _split(value)) and _split(value):
        return value
    raise Misfit(_ADDRESS)


def _split(text: str) -> list[str]:
    return [part for part in text.split(";") if part.strip()]


def _check_urls(value: Any) -> str | list[str]:
    if isinstance(value, (list, tuple)) and value:
        return [_check_url(one) for one in value]
    if isinstance(value, str):
        return _check_url(value)
    raise Misfit(f"{_ADDRESS}, or a list of them")


def _parse_urls(text: str) -> Any:
    return parse_json(text) if text.lstrip().startswith("[") else text


URLS = Kind("an address, several with ';' between, or a list", _check_urls, _parse_urls)


def _check_backend(value: Any) -> str:
    if isinstance(value, str) and value in {"redis", "rpc", "disabled", "embedded"}:
        return f"{value}://"
    if isinstance(value, str) and "://" in value:
        return value
    raise Misfit("must be an address such as redis://host:6379/1, rpc:// or disabled://")


BACKEND = Kind("an address", _check_backend, str)


# -- containers and objects ------------------------------------------------------------------


def parse_json(text: str) -> Any:
    """What the JSON in an environment variable says."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Misfit("must be JSON when given by the environment") from None


def _check_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise Misfit("must be a dictionary with strings as keys")


DICT = Kind("a dictionary", _check_dict, parse_json)


def strings(each: Kind = TEXT, what: str = "strings") -> Kind:
    """A list, tuple or set of strings, stored as a tuple (a set is sorted)."""

    def check(value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            raise Misfit(f"must be a list of {what}: write [{value!r}]")
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise Misfit(f"must be a list of {what}")
        if not all(isinstance(item, str) for item in value):
            raise Misfit(f"must be a list of {what}")
        ordered = sorted(value) if isinstance(value, (set, frozenset)) else value
        return tuple(each.check(item) for item in ordered)

    def parse(text: str) -> Any:
        if text.lstrip().startswith("["):
            return parse_json(text)
        return [part.strip() for part in text.split(",") if part.strip()]

    return Kind(f"a list of {what}", check, parse)
