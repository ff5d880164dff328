"""JSON as peers write it: Python's dialect, with a wrapping for a few more types.

Out, `datetime`, `date`, `time`, `Decimal`, `UUID` and `bytes` become
`{"__type__": T, "__value__": V}`; a method `__json__` may offer a replacement; NaN and the
infinities are written as Python writes them. In, the same is undone.

What is read equals what was written, except that tuples become lists and keys that are not text
become text, as with Python's `json`. A value that would come back as another one, or be refused by
whoever reads it, is an `EncodeError` for whoever writes it: a mapping that looks like a wrapping,
two keys with one text, two halves of a surrogate pair, a value beyond the limits.

Reading takes a fast path that handles everything usual, and falls back to a slower one for
what only Python's dialect knows (NaN, lone surrogates), for wrapped values and for long runs
of digits. Both paths give the same values. Depth and digits are bounded, and whatever goes
wrong is a `Refusal`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from math import isfinite
from typing import Any, Final
from uuid import UUID

import msgspec

from umbel.exceptions import UmbelError
from umbel.wire.limits import (
    DEFAULT_LIMITS,
    INTEGER_TOO_LARGE,
    TOO_BIG,
    TOO_DEEP,
    UNDECODABLE,
    Limits,
    Refusal,
)
from umbel.wire.reprs import safe_repr

_CONTAINERS: Final = frozenset({list, dict, tuple})
_PLAIN: Final = frozenset({str, int, bool, type(None)})
_TEXT_ONLY: Final = frozenset({str})
_WRAPPING: Final = frozenset({"__type__", "__value__"})
_WRAPPING_BYTES_MIN: Final = len('{"__type__":1,"__value__":1}')
_PLAIN_KINDS: Final = _PLAIN | _CONTAINERS | {float}
_SEQUENCES: Final = (list, tuple)
_NESTING: Final = (list, tuple, dict)
# Read back, these two are one character.
_SURROGATE_PAIR: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")
# Beyond this, looking at every value first costs more than the faster encoder saves.
_PLAIN_COUNT_MAX: Final = 24
_PLAIN_LEVELS_MAX: Final = 3

_decode_fast: Final = msgspec.json.Decoder().decode
_encode_fast: Final = msgspec.json.Encoder().encode


class EncodeError(UmbelError, TypeError, ValueError):
    """A value cannot be written in the chosen serializer; the text says which and why."""


def dumps_json(value: Any, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """`value` as JSON that peers read as the same; raises `EncodeError` when it has no such form.

    `limits` are those of whoever will read it.
    """
    body = None
    if is_small_and_plain(value) or _is_plain_throughout(value, limits):
        try:  # noqa: SIM105 - which takes longer than most values
            body = _encode_fast(value)
        except (ValueError, OverflowError):
            pass  # lone surrogates are for the other encoder
    if body is None:
        body = _dumps_slowly(value)
    size = len(body)
    if size >= _WRAPPING_BYTES_MIN and b"__type__" in body:
        _check_wrappings(value)
    if size > limits.integer_digits:
        _check_digits(value, body, limits)
    return body


def loads_json(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Any:
    """The value that `data` says; raises nothing but `Refusal`."""
    size = len(data)
    if b"__type__" in data or (
        size > limits.integer_digits and _has_long_digit_run(data, limits.integer_digits)
    ):
        value = _loads_slowly(data, limits)
    else:
        try:
            value = _decode_fast(data)
        except RecursionError:
            raise too_deep(limits) from None
        except Exception:  # noqa: BLE001 - the slow path decides, and says what is wrong
            value = _loads_slowly(data, limits)
    # Fewer brackets than the limit cannot be nested beyond it, which is nearly always so.
    if size > limits.depth and _has_more_brackets(data, limits.depth):
        check_depth(value, limits)
    return value


def check_depth(value: Any, limits: Limits) -> None:
    """Refuse a decoded value whose lists and mappings are nested beyond the limit."""
    if type(value) not in _CONTAINERS:
        return
    level = [value]
    for _ in range(limits.depth):
        level = [
            child
            for container in level
            for child in (container.values() if type(container) is dict else container)
            if type(child) in _CONTAINERS
        ]
        if not level:
            return
    raise too_deep(limits)


def too_deep(limits: Limits) -> Refusal:
    """The refusal of a value nested beyond the limit."""
    return Refusal(
        TOO_DEEP, f"the body is nested deeper than {limits.depth} levels: send a flatter value"
    )


def integer_too_large(limits: Limits) -> Refusal:
    """The refusal of a number with more digits than the limit."""
    return Refusal(
        INTEGER_TOO_LARGE,
        f"the body has an integer of more than {limits.integer_digits} digits: send it as text",
    )


def undecodable(what: str, why: object) -> Refusal:
    """The refusal of bytes that are not what their content type says."""
    return Refusal(UNDECODABLE, f"the body is not valid {what}: {str(why)[:200]}")


def is_small_and_plain(value: Any, levels: int = _PLAIN_LEVELS_MAX) -> bool:
    """Whether all encoders agree on `value`: small, shallow, of plain types and finite floats."""
    kind = type(value)
    if kind is dict:
        if len(value) > _PLAIN_COUNT_MAX or not levels:
            return False
        for key in value:
            if type(key) is not str:
                return False
        items = value.values()
    elif kind is list or kind is tuple:
        if len(value) > _PLAIN_COUNT_MAX or not levels:
            return False
        items = value
    else:
        return kind in _PLAIN or (kind is float and isfinite(value))
    for item in items:
        if type(item) not in _PLAIN and not is_small_and_plain(item, levels - 1):
            return False
    return True


def _has_more_brackets(data: bytes, count: int) -> bool:
    """Whether more than so many open; to look for the next one is quicker than to count all."""
    for sign in (b"[", b"{"):
        at = data.find(sign)
        while at >= 0:
            count -= 1
            if count < 0:
                return True
            at = data.find(sign, at + 1)
    return False


def _has_long_digit_run(data: bytes, digits: int) -> bool:
    """Whether there may be more than `digits` digits in a row; errs on the side of yes.

    Such a run covers one of every `digits + 1` positions, so only these are looked at.
    """
    step = digits + 1
    half = (step + 1) // 2  # the run reaches at least so far to one side of that position
    for at in range(digits, len(data), step):
        if 48 <= data[at] <= 57 and (
            data[at : at + half].isdigit() or data[max(0, at - half + 1) : at + 1].isdigit()
        ):
            return True
    return False


class _LongInteger(Exception):
    """Leaves the parser when a number has too many digits."""


@lru_cache(maxsize=8)
def _slow_decoder(digits: int) -> json.JSONDecoder:
    def parse_int(text: str) -> int:
        if len(text) > digits and len(text.lstrip("-")) > digits:
            raise _LongInteger
        return int(text)

    return json.JSONDecoder(object_hook=_unwrap, parse_int=parse_int)


def _loads_slowly(data: bytes, limits: Limits) -> Any:
    try:
        return _slow_decoder(limits.integer_digits).decode(data.decode("utf-8"))
    except _LongInteger:
        raise integer_too_large(limits) from None
    except RecursionError:
        raise too_deep(limits) from None
    except MemoryError:
        raise Refusal(TOO_BIG, "there is not enough memory to decode the body") from None
    except Exception as exc:  # noqa: BLE001 - malformed text, or a wrapped value that is not what it claims
        raise undecodable("json", exc) from None


def _is_plain_throughout(value: Any, limits: Limits) -> bool:
    """The same for a value of any size; refuses what is not read as it is.

    Looks at the types of all values of one level at a time, which takes less time than to look at
    each value, and less than the faster encoder saves.
    """
    level, is_plain = [value], type(value) in _CONTAINERS
    for _ in range(limits.depth):
        dicts = [one for one in level if isinstance(one, dict)]
        if dicts and not set(map(type, chain.from_iterable(dicts))) <= _TEXT_ONLY:
            is_plain = False
            for mapping in dicts:
                _check_keys(mapping)
        others = [one for one in level if isinstance(one, _SEQUENCES)]
        members = [*chain.from_iterable(others), *chain.from_iterable(map(dict.values, dicts))]
        kinds = set(map(type, members))
        if not kinds <= _PLAIN_KINDS:
            is_plain = False
        elif float in kinds and is_plain:
            is_plain = all(map(isfinite, [one for one in members if type(one) is float]))
        nested = {kind for kind in kinds if issubclass(kind, _NESTING)}
        if not nested:
            return is_plain
        level = [one for one in members if type(one) in nested]
    raise _refused(value, too_deep(limits).text)


def _dumps_slowly(value: Any) -> bytes:
    try:
        text = _encoder.encode(value)
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError:
            if _SURROGATE_PAIR.search(text):
                raise ValueError(
                    "it has both halves of a surrogate pair: write one character instead"
                ) from None
        return _ascii_encoder.encode(value).encode("ascii")
    except (TypeError, ValueError, RecursionError) as exc:
        raise _refused(
            value, f"{exc}: pass plain values, or give the class a __json__ method"
        ) from exc
    except Exception as exc:  # raised by somebody's __json__
        raise _refused(value, repr(exc)) from exc


def _check_digits(value: Any, body: bytes, limits: Limits) -> None:
    """Refuse integers of more digits than are read."""
    if _has_long_digit_run(body, limits.integer_digits):
        try:
            _loads_slowly(body, limits)
        except Refusal as refusal:
            raise _refused(value, refusal.text) from None


def _check_wrappings(value: Any) -> None:
    """Refuse a mapping that looks like a wrapped value."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if one.keys() == _WRAPPING:
                raise _refused(
                    one,
                    "readers take a mapping of just __type__ and __value__ for a wrapped value:"
                    " add another key, or rename one",
                )
            waiting += one.values()
        elif isinstance(one, _SEQUENCES):
            waiting += one


def _check_keys(mapping: dict[Any, Any]) -> None:
    """Refuse a mapping two keys of which become the same text."""
    if len({_key_text(key) for key in mapping}) < len(mapping):
        raise _refused(mapping, "two of its keys become the same text: use text as keys")


def _key_text(key: Any) -> Any:
    """The text that Python's JSON makes of a key; the encoder refuses those that have none."""
    return json.dumps(key) if key is None or isinstance(key, int | float) else key


def _refused(value: Any, why: str) -> EncodeError:
    return EncodeError(f"cannot write {safe_repr(value, 80)} as json: {why}")


def _wrap(value: Any) -> Any:
    """What the encoder writes for a value that JSON does not know."""
    reduce = getattr(value, "__json__", None)
    if reduce is not None:
        return _replacement(reduce())
    for kind, name, write in _WRITERS:
        if isinstance(value, kind):
            return {"__type__": name, "__value__": write(value)}
    if isinstance(value, bytes):
        try:
            return {"__type__": "bytes", "__value__": value.decode("utf-8")}
        except UnicodeDecodeError:
            return {"__type__": "base64", "__value__": base64.b64encode(value).decode("ascii")}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _replacement(value: Any) -> Any:
    """What a `__json__` has returned; it may be a wrapping, of a type that readers know."""
    is_wrapping = isinstance(value, dict) and value.keys() == _WRAPPING
    if not (is_wrapping and value["__type__"] in _READERS):
        _check_wrappings(value)
        _is_plain_throughout(value, DEFAULT_LIMITS)
    return value


def _unwrap(found: dict[str, Any]) -> Any:
    """The value behind a wrapping; any other mapping as it is."""
    if len(found) != 2 or "__type__" not in found or "__value__" not in found:
        return found
    kind = found["__type__"]
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise ValueError(f"unknown __type__ {safe_repr(kind, 80)}")
    return read(found["__value__"])


def _write_moment(value: datetime | time) -> str:
    offset = value.utcoffset()
    if offset is not None and offset.microseconds:
        raise ValueError(f"an offset of {offset} is not read back: use whole seconds")
    return value.isoformat()


def _read_uuid(value: Any) -> UUID:
    return UUID(hex=value["hex"])


def _write_uuid(value: UUID) -> dict[str, str]:
    return {"hex": value.hex}


def _read_date(value: Any) -> date:
    return datetime.fromisoformat(value).date()


def _read_decimal(value: Any) -> Decimal:
    if not isinstance(value, str):
        raise TypeError(f"a decimal is written as text, not {safe_repr(value, 80)}")
    return Decimal(value)


_encoder: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_wrap)
_ascii_encoder: Final = json.JSONEncoder(separators=(",", ":"), default=_wrap)

# A datetime is a date too, so it has to be asked for first.
_WRITERS: Final[tuple[tuple[type, str, Callable[[Any], Any]], ...]] = (
    (datetime, "datetime", _write_moment),
    (date, "date", date.isoformat),
    (time, "time", _write_moment),
    (Decimal, "decimal", str),
    (UUID, "uuid", _write_uuid),
)
_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "datetime": datetime.fromisoformat,
    "date": _read_date,
    "time": time.fromisoformat,
    "decimal": _read_decimal,
    "uuid": _read_uuid,
    "bytes": lambda value: value.encode("utf-8"),
    "base64": lambda value: base64.b64decode(value.encode("utf-8")),
}
