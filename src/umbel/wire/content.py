"""Bodies and their content types: what is accepted, and how it is read and written.

Three serializers exist: json (the default), msgpack, and yaml when its package is installed.
Pickle is known by name only, to refuse it: reading it means running code that the sender
chose. Which of the three are read is decided by the caller's accept set, before a single byte
is looked at.

Reading raises nothing but `Refusal`; writing raises `EncodeError`, or `ImproperlyConfigured`
for a serializer that does not exist.

What is read equals what was written, except that tuples become lists and that JSON makes text of
keys. Whatever a serializer cannot carry is an `EncodeError`, also where the library underneath
would write something similar (msgspec writes a `Decimal` as text in msgpack). So is what exceeds
the limits of whoever reads it.

| serializer | carries                                                                          |
| ---------- | -------------------------------------------------------------------------------- |
| all        | None, booleans, numbers, text, bytes, lists, mappings                            |
| json       | and `datetime`, `date`, `time`, `Decimal`, `UUID`; integers of any size          |
| msgpack    | no integers beyond 64 bits, no halves of surrogate pairs                         |
| yaml       | and `datetime` (zones of whole minutes), `date`, sets; no halves of pairs either |
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec

from umbel.exceptions import ImproperlyConfigured
from umbel.wire.jsontext import (
    EncodeError,
    check_depth,
    dumps_json,
    is_small_and_plain,
    loads_json,
    too_deep,
    undecodable,
)
from umbel.wire.limits import (
    CONTENT_DISALLOWED,
    CONTENT_UNKNOWN,
    DEFAULT_LIMITS,
    TOO_BIG,
    Limits,
    Refusal,
)
from umbel.wire.reprs import safe_repr
from umbel.wire.yamltext import dumps_yaml, loads_yaml, yaml_module

__all__ = [
    "JSON",
    "MSGPACK",
    "PICKLE",
    "YAML",
    "EncodeError",
    "Encoded",
    "accept_set",
    "as_bytes",
    "check_size",
    "decode",
    "dumps_json",
    "encode",
    "ensure_accepted",
    "loads_json",
    "serializer_type",
]

JSON: Final = "application/json"
MSGPACK: Final = "application/x-msgpack"
YAML: Final = "application/x-yaml"
PICKLE: Final = "application/x-python-serialize"

CONTENT_TYPES: Final = {"json": JSON, "msgpack": MSGPACK, "yaml": YAML}
_NAMES: Final = {JSON: "json", MSGPACK: "msgpack", YAML: "yaml", PICKLE: "pickle"}
_CHOICES: Final = "json, msgpack, yaml"


class Encoded(NamedTuple):
    """A body and what its message says about it."""

    body: bytes
    content_type: str
    content_encoding: str


def encode(value: Any, serializer: str = "json", limits: Limits = DEFAULT_LIMITS) -> Encoded:
    """`value` written by a serializer given by name or content type.

    `limits` are those of whoever will read it.
    """
    content_type = serializer_type(serializer)
    if content_type == JSON:
        encoded = Encoded(dumps_json(value, limits), JSON, "utf-8")
    elif content_type == MSGPACK:
        encoded = Encoded(_dumps_msgpack(value, limits), MSGPACK, "binary")
    else:
        encoded = Encoded(dumps_yaml(value, limits), YAML, "utf-8")
    check_size(encoded.body, content_type, limits)
    return encoded


def check_size(body: bytes, content_type: str, limits: Limits) -> None:
    """Refuse to send a body that whoever reads it would refuse."""
    if len(body) > limits.body_bytes:
        text = _too_big(len(body), limits).text
        raise EncodeError(f"cannot write the value as {_NAMES[content_type]}: {text}")


def decode(
    body: bytes | str | memoryview | bytearray,
    content_type: str,
    content_encoding: str | None,  # peers ignore it for these types, and so do we
    *,
    accept: frozenset[str],
    limits: Limits = DEFAULT_LIMITS,
) -> Any:
    """The value of a body, if its type is accepted and it is within the limits."""
    ensure_accepted(content_type, accept)
    data = body if type(body) is bytes else as_bytes(body, limits)
    if len(data) > limits.body_bytes:
        raise _too_big(len(data), limits)
    if content_type == JSON:
        return loads_json(data, limits)
    if content_type == MSGPACK:
        return _loads_msgpack(data, limits)
    return loads_yaml(data, limits)


def accept_set(names: Iterable[str]) -> frozenset[str]:
    """The content types of serializers given by name or content type."""
    return frozenset(serializer_type(name) for name in names)


def serializer_type(name: str) -> str:
    """The content type of one serializer, given by name or content type, if it exists here."""
    content_type = CONTENT_TYPES.get(name)
    if content_type is None:
        content_type = name
        if name in ("pickle", PICKLE):
            raise ImproperlyConfigured(
                "serializer 'pickle' is never used, as reading it runs the sender's code:"
                f" choose one of {_CHOICES}"
            )
        if name not in CONTENT_TYPES.values():
            raise ImproperlyConfigured(
                f"unknown serializer {safe_repr(name, 80)}: choose one of {_CHOICES}"
            )
    if content_type == YAML and yaml_module() is None:
        raise ImproperlyConfigured(
            "serializer 'yaml' needs the package PyYAML: install it, or choose json or msgpack"
        )
    return content_type


def ensure_accepted(content_type: object, accept: frozenset[str]) -> None:
    """Refuse a content type that is not accepted or not known."""
    name = _NAMES.get(content_type) if isinstance(content_type, str) else None
    if name is not None and content_type in accept and name != "pickle":
        return
    if name is None:
        raise Refusal(
            CONTENT_UNKNOWN,
            f"unknown content type {safe_repr(content_type, 80)}: send one of {_CHOICES}",
        )
    if name == "pickle":
        way_out = f"it is never accepted, send one of {_CHOICES}"
    else:
        way_out = f"add {name!r} to accept_content, or send one of {', '.join(sorted(accept))}"
    raise Refusal(CONTENT_DISALLOWED, f"refused content of type {name} ({content_type}): {way_out}")


def as_bytes(body: bytes | str | memoryview | bytearray, limits: Limits) -> bytes:
    """A body as bytes, whatever the transport made of it, if it is not too big."""
    if type(body) is bytes:
        data = body
    elif isinstance(body, str):
        if len(body) > limits.body_bytes:
            raise _too_big(len(body), limits)
        try:
            data = body.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise undecodable("utf-8", exc) from None
    elif isinstance(body, bytes | bytearray | memoryview):
        size = body.nbytes if isinstance(body, memoryview) else len(body)
        if size > limits.body_bytes:
            raise _too_big(size, limits)
        data = bytes(body)
    else:
        raise undecodable("content", f"expected bytes, got {type(body).__name__}")
    if len(data) > limits.body_bytes:
        raise _too_big(len(data), limits)
    return data


def _too_big(size: int, limits: Limits) -> Refusal:
    return Refusal(
        TOO_BIG,
        f"the body has {size} bytes, more than {limits.body_bytes}:"
        " send less, or a reference to the data",
    )


_SCALARS: Final = frozenset({str, int, float, bool, bytes, type(None)})
_SEQUENCES: Final = frozenset({list, tuple})
_PLAIN: Final = _SCALARS | _SEQUENCES | {dict}


def _is_plain(value: Any, levels: int) -> bool:
    """Whether there is nothing but plain types in `value`, nested no deeper than `levels`."""
    level = [value]
    for _ in range(levels + 1):
        kinds = set(map(type, level))
        if kinds <= _SCALARS:
            return True
        if not kinds <= _PLAIN:
            return False
        dicts = [one for one in level if type(one) is dict]
        if dicts and not set(map(type, chain.from_iterable(dicts))) <= _SCALARS:
            return False
        others = [one for one in level if type(one) in _SEQUENCES]
        level = [*chain.from_iterable(others), *chain.from_iterable(map(dict.values, dicts))]
    return False


def _plain(value: Any, levels: int) -> Any:
    """`value` in plain types only; raises for what has none, or is nested beyond `levels`."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    reduce = getattr(value, "__json__", None)
    if reduce is not None:
        return _plain(reduce(), levels)
    if isinstance(value, list | tuple | dict):
        if levels == 0:
            raise ValueError("it is nested too deep: send a flatter value")
        if isinstance(value, dict):
            return {_plain_key(key): _plain(one, levels - 1) for key, one in value.items()}
        return [_plain(one, levels - 1) for one in value]
    if isinstance(value, str):
        return str.__str__(value)
    plain: type[Any]
    for plain in (int, float, bytes):
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"{kind.__name__} has no msgpack form: pass plain values, or use json")


def _plain_key(key: Any) -> Any:
    if isinstance(key, tuple):  # read as a tuple again
        return tuple(_plain_key(one) for one in key)
    return _plain(key, 0)


_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder().decode


def _dumps_msgpack(value: Any, limits: Limits) -> bytes:
    try:
        if is_small_and_plain(value) or _is_plain(value, limits.depth):
            return _pack(value)
        return _pack(_plain(value, limits.depth))
    except Exception as exc:  # somebody's __json__ may raise anything
        raise EncodeError(f"cannot write {safe_repr(value, 80)} as msgpack: {exc}") from exc


def _loads_msgpack(data: bytes, limits: Limits) -> Any:
    try:
        value = _unpack(data)
    except RecursionError:
        raise too_deep(limits) from None
    except MemoryError:
        raise Refusal(TOO_BIG, "there is not enough memory to decode the body") from None
    except Exception as exc:  # noqa: BLE001 - whatever is wrong with it, it is not msgpack
        raise undecodable("msgpack", exc) from None
    if len(data) > limits.depth:
        check_depth(value, limits)
    return value
