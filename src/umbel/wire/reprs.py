"""Short texts of values, for headers, events and logs.

`safe_repr` reads like `repr` for ordinary values, but its result is bounded in length, its
work is bounded for huge, deep and self-referencing values, and it never raises because of the
value. The text can always be encoded as UTF-8. What it cannot bound is the time that somebody
else's `__repr__` takes; it calls at most one per value that fits into the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

_SCALARS: Final = frozenset({int, float, bool, type(None)})
_SMALL_COUNT: Final = 32
_SMALL_TEXT: Final = 256
_BITS_SHOWN_MAX: Final = 4096  # longer integers are described, as printing them is quadratic
_ELLIPSIS: Final = "..."


def safe_repr(value: object, max_chars: int = 1024, max_depth: int = 3) -> str:
    """The `repr` of `value` in at most `max_chars`; never raises because of the value."""
    if value is None:
        return "None"[:max_chars]
    if _is_small(value) and max_depth > 0:
        text = repr(value)
        if len(text) <= max_chars:
            return text
    pieces: list[str] = []
    left = max_chars + 1  # one more than fits tells a full text from a cut one
    for piece in _pieces(value, max_chars, max_depth):
        pieces.append(piece)
        left -= len(piece)
        if left <= 0:
            break
    text = "".join(pieces)
    if len(text) > max_chars:
        text = text[: max(0, max_chars - len(_ELLIPSIS))] + _ELLIPSIS[:max_chars]
    return text


def shown_name(name: str, max_chars: int = 100) -> str:
    """A name that somebody has given himself, for a line of a log: as it is, or its `repr`."""
    plain = name.isprintable() and len(name) <= max_chars
    return name if plain else safe_repr(name, max_chars)


def _is_small(value: object) -> bool:
    """Whether `value` is a short flat container of plain values: the usual arguments."""
    kind = type(value)
    items: Iterable[Any]
    if kind is tuple or kind is list:
        items = value  # type: ignore[assignment]
    elif kind is dict:
        items = value.values()  # type: ignore[attr-defined]
        for key in islice(value, _SMALL_COUNT):  # type: ignore[call-overload]
            if type(key) is not str or len(key) > _SMALL_TEXT:
                return False
    else:
        return False
    if len(value) > _SMALL_COUNT:  # type: ignore[arg-type]
        return False
    for item in items:
        kind = type(item)
        if kind is str:
            if len(item) > _SMALL_TEXT:
                return False
        elif kind not in _SCALARS or (kind is int and item.bit_length() > _BITS_SHOWN_MAX):
            return False
    return True


def _pieces(value: Any, max_chars: int, depth: int) -> Iterator[str]:
    """The text of `value` in pieces, each bounded; made lazily, so a full text stops the walk."""
    if isinstance(value, str | bytes | bytearray):
        yield _text_repr(value, max_chars)
    elif isinstance(value, dict):
        yield from _container_pieces("{", "}", value, _pairs(value, max_chars, depth - 1), depth)
    elif isinstance(value, list | deque):
        yield from _container_pieces("[", "]", value, _items(value, max_chars, depth - 1), depth)
    elif isinstance(value, tuple):
        close = ",)" if len(value) == 1 else ")"
        yield from _container_pieces("(", close, value, _items(value, max_chars, depth - 1), depth)
    elif isinstance(value, set | frozenset):
        if value:
            items = _items(value, max_chars, depth - 1)
            yield from _container_pieces("{", "}", value, items, depth)
        else:
            yield f"{type(value).__name__}()"
    elif isinstance(value, int) and value.bit_length() > _BITS_SHOWN_MAX:
        yield f"<int of {value.bit_length()} bits>"
    else:
        yield _foreign_repr(value, max_chars)


def _container_pieces(
    start: str, end: str, value: Any, inner: Iterator[str], depth: int
) -> Iterator[str]:
    if type(value) not in (dict, list, tuple, set):
        start, end = f"{type(value).__name__}({start}", f"{end})"
    yield start
    if depth > 0:
        try:
            yield from inner
        except Exception as exc:  # noqa: BLE001 - somebody else's __iter__ or items(): the text goes on
            yield f"<unreadable: {type(exc).__name__}>"
    elif value:
        yield _ELLIPSIS
    yield end


def _items(value: Iterable[Any], max_chars: int, depth: int) -> Iterator[str]:
    for index, item in enumerate(value):
        if index:
            yield ", "
        yield from _pieces(item, max_chars, depth)


def _pairs(value: dict[Any, Any], max_chars: int, depth: int) -> Iterator[str]:
    for index, (key, item) in enumerate(value.items()):
        if index:
            yield ", "
        yield from _pieces(key, max_chars, depth)
        yield ": "
        yield from _pieces(item, max_chars, depth)


def _text_repr(value: str | bytes | bytearray, max_chars: int) -> str:
    """The repr of no more of a text than can be shown."""
    if len(value) <= max_chars:
        return _foreign_repr(value, max_chars)
    return _foreign_repr(value[:max_chars], max_chars * 10) + _ELLIPSIS


def _foreign_repr(value: object, max_chars: int) -> str:
    """Whatever `repr` says, made bounded and encodable; a description when it fails."""
    try:
        text = repr(value)
        if len(text) > max_chars:
            text = text[:max_chars] + _ELLIPSIS
        if not text.isascii():
            text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    except (Exception, SystemExit, GeneratorExit) as exc:  # noqa: BLE001 - somebody else's code
        return f"<unrepresentable {type(value).__name__}: {type(exc).__name__}>"
    return text
