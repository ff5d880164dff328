"""JSON as peers write it: Python's dialect, with a wrapping for a few more types.

Out, `datetime`, `date`, `time`, `Decimal`, `UUID` and `bytes` become
`{"__type__": T, "__value__": V}`; a method `__json__` may offer a replacement; NaN and the
infinities are written as Python writes them. In, the same is undone.

Reading takes a fast path that handles everything usual, and falls back to a slower one for
what only Python's dialect knows (NaN, lone surrogates), for wrapped values and for long runs
of digits. Both paths give the same values. Depth and digits are bounded, and whatever goes
wrong is a `Refusal`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from functools import lru_cache
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
# Beyond this, looking at every value first costs more than the faster encoder saves.
_PLAIN_COUNT_MAX: Final = 24
_PLAIN_LEVELS_MAX: Final = 3

_decode_fast: Final = msgspec.json.Decoder().decode
_encode_fast: Final = msgspec.json.Encoder().encode


class EncodeError(UmbelError, TypeError, ValueError):
    """A value cannot be written in the chosen serializer; the text says which and why."""


def dumps_json(value: Any) -> bytes:
    """`value` as JSON that peers read; raises `EncodeError` when it has no such form."""
    if _is_plain(value):
        try:
            return _encode_fast(value)
        except (ValueError, OverflowError):
            pass  # integers beyond 64 bits and lone surrogates are for the other encoder
    try:
        return _encoder.encode(value).encode("ascii")
    except (TypeError, ValueError, RecursionError) as exc:
        raise EncodeError(
            f"cannot write {safe_repr(value, 80)} as json: {exc}:"
            " pass plain values, or give the class a __json__ method"
        ) from exc
    except Exception as exc:  # raised by somebody's __json__
        raise EncodeError(f"cannot write {safe_repr(value, 80)} as json: {exc!r}") from exc


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


def _is_plain(value: Any, levels: int = _PLAIN_LEVELS_MAX) -> bool:
    """Whether both encoders agree on `value`: small, shallow, of plain types and finite floats."""
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
    for item in items:  # noqa: SIM110 - a generator costs more than the walk
        if type(item) not in _PLAIN and not _is_plain(item, levels - 1):
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


def _wrap(value: Any) -> Any:
    """What the encoder writes for a value that JSON does not know."""
    reduce = getattr(value, "__json__", None)
    if reduce is not None:
        return reduce()
    for kind, name, write in _WRITERS:
        if isinstance(value, kind):
            return {"__type__": name, "__value__": write(value)}
    if isinstance(value, bytes):
        try:
            return {"__type__": "bytes", "__value__": value.decode("utf-8")}
        except UnicodeDecodeError:
            return {"__type__": "base64", "__value__": base64.b64encode(value).decode("ascii")}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _unwrap(found: dict[str, Any]) -> Any:
    """The value behind a wrapping; any other mapping as it is."""
    if len(found) != 2 or "__type__" not in found or "__value__" not in found:
        return found
    kind = found["__type__"]
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise ValueError(f"unknown __type__ {safe_repr(kind, 80)}")
    return read(found["__value__"])


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


_encoder: Final = json.JSONEncoder(separators=(",", ":"), default=_wrap)

# A datetime is a date too, so it has to be asked for first.
_WRITERS: Final[tuple[tuple[type, str, Callable[[Any], Any]], ...]] = (
    (datetime, "datetime", datetime.isoformat),
    (date, "date", date.isoformat),
    (time, "time", time.isoformat),
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
