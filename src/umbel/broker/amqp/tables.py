"""Writing the properties of a message, as py-amqp writes them, byte for byte.

Names and whole tables that come again and again are written once: names are kept (`_names`), and
a caller that knows a part of the headers to be constant gives it written (`table_items`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from io import BytesIO
from struct import Struct, error
from typing import Any, Final

from amqp.exceptions import AMQPError, FrameSyntaxError
from amqp.serialization import _write_item, loads

from umbel.broker.amqp.shapes import OCTET, PROPERTIES, STAMP, TABLE, TEXT
from umbel.wire.jsontext import EncodeError

_LONG, _LONG_LONG, _SHORT = Struct(">I"), Struct(">Q"), Struct(">H")
_TEXT, _INTEGER, _LARGE_INTEGER = Struct(">cI"), Struct(">ci"), Struct(">cq")
_INTEGER_MAX: Final = 2**31 - 1
_LARGE: Final = 2**63
_BYTES: Final = [bytes((number,)) for number in range(256)]
_IN_ORDER: Final = [(name, kind, 0x8000 >> n) for n, (name, kind) in enumerate(PROPERTIES)]
NAMES_MAX: Final = 1024
# As they are in a table: each process has few.
_names: dict[str, bytes] = {}


def properties(values: Mapping[str, Any], headers: bytes | None = None) -> bytes:
    """The flags and the properties of a content header; `headers`, if given, is their table."""
    flags, parts = 0, []
    for name, kind, flag in _IN_ORDER:
        if kind == TABLE and headers is not None:
            flags |= flag
            parts.append(headers)
            continue
        value = values.get(name)
        if value is not None:
            flags |= flag
            parts.append(_property(name, kind, value))
    return _SHORT.pack(flags) + b"".join(parts)


@lru_cache(maxsize=256, typed=True)
def around(
    content_type: str, content_encoding: str, delivery_mode: Any, priority: Any, reply_to: Any
) -> tuple[bytes, bytes, bytes]:
    """The properties of messages that differ in headers and correlation id only.

    What comes before the headers, between them and the correlation id, and behind it.
    """
    values = {
        "content_type": content_type,
        "content_encoding": content_encoding,
        "delivery_mode": delivery_mode,
        "priority": priority,
        "correlation_id": "",
        "reply_to": reply_to,
    }
    flags, parts = 0, {}
    for name, kind, flag in _IN_ORDER:
        value = values.get(name)
        parts[name] = b"" if value is None else _property(name, kind, value)
        if value is not None or kind == TABLE:
            flags |= flag
    return (
        _SHORT.pack(flags) + parts["content_type"] + parts["content_encoding"],
        parts["delivery_mode"] + parts["priority"],
        parts["reply_to"],
    )


def _property(name: str, kind: str, value: Any) -> bytes:
    try:
        if kind == TEXT:
            return short_text(value)
        if kind == OCTET:
            return bytes((value,))
        if kind == STAMP:
            return _LONG_LONG.pack(value)
        return table(value)
    except (error, TypeError, ValueError) as exc:
        raise FrameSyntaxError(f"{name} of a message can not be {value!r:.100}: {exc}") from None


def short_text(value: Any) -> bytes:
    """A text of at most 255 bytes."""
    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value or b""
    if not isinstance(raw, bytes):
        raise TypeError(f"{type(value).__name__} is not text")
    if len(raw) > 255:
        raise ValueError(f"{len(raw)} bytes are more than 255")
    return _BYTES[len(raw)] + raw


def table(values: Mapping[Any, Any]) -> bytes:
    """A whole table."""
    return closed(table_items(values.items()))


def check_headers(headers: Mapping[str, Any]) -> None:
    """Raise `EncodeError` for a header that would arrive as another value, or not at all.

    A table has times of whole seconds without a zone, and byte strings that look like text are
    read as text.
    """
    for name, value in headers.items():
        if not _is_exact(value):
            raise EncodeError(
                f"header {name!r:.100} cannot be sent to RabbitMQ as {value!r:.100}:"
                " send it as text, or as an argument of the task"
            )


def _is_exact(value: Any) -> bool:
    if value is None or isinstance(value, str | bool | float):
        return True
    if isinstance(value, list | tuple):
        return all(map(_is_exact, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_exact, value.values()))
    try:
        read = loads("F", table({"": value}), 0)[0][0][""]
    except (AMQPError, TypeError, ValueError, ArithmeticError, error):
        return False
    return isinstance(value, type(read)) and bool(read == value)


def closed(items: bytes) -> bytes:
    """A table of these items."""
    return _LONG.pack(len(items)) + items


def table_items(items: Iterable[tuple[Any, Any]]) -> bytes:
    """Names and values, without the length of the table before them."""
    parts: list[bytes] = []
    for name, value in items:
        written = _names.get(name) or _name(name)
        if type(value) is str:
            raw = value.encode() if value.isascii() else value.encode("utf-8", "surrogatepass")
            parts += (written, _TEXT.pack(b"S", len(raw)), raw)
        else:
            parts += (written, _value(name, value))
    return b"".join(parts)


def _value(name: Any, value: Any) -> bytes:
    """A value with its type before it."""
    kind = type(value)
    if value is None:
        return b"V"
    if kind is bool:
        return b"t\1" if value else b"t\0"
    if kind is int and -_INTEGER_MAX <= value <= _INTEGER_MAX:
        return _INTEGER.pack(b"I", value)
    if kind is int and -_LARGE <= value < _LARGE:
        return _LARGE_INTEGER.pack(b"L", value)
    if kind is dict:
        return b"F" + table(value)
    if kind is list:
        return b"A" + closed(b"".join([_value(name, one) for one in value]))
    out = BytesIO()
    try:
        _write_item(value, out.write, [])
    except (ValueError, error) as exc:
        raise FrameSyntaxError(
            f"header {name!r:.100} can not be sent as {kind.__name__}: {value!r:.100} {exc}"
        ) from None
    return out.getvalue()


def _name(name: Any) -> bytes:
    written = short_text(name)
    if type(name) is str:
        if len(_names) >= NAMES_MAX:
            _names.clear()
        _names[name] = written
    return written
