"""Reading the properties of a message.

Messages of one kind look alike: the same properties, the same headers in the same order, values of
the same types and often of the same lengths. A `Shape` is one such look: which bytes of a content
header never change (names, types, lengths), and where the values are. Reading a message of a known
shape is one `struct.unpack` and one comparison of all the bytes that make it that shape, so a shape
never reads a message that it does not fit. Up to `ALIKE_MAX` shapes are known for each of
`LENGTHS_MAX` lengths.

What has no shape, or none yet, is read one value after the other (`read_plainly`). What does not
look right is left to py-amqp, and so are all values except texts, 32-bit numbers, doubles, booleans
and nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from struct import Struct, calcsize, error, unpack_from
from typing import Any, Final, NamedTuple

from amqp.exceptions import FrameSyntaxError
from amqp.serialization import _read_item, decode_properties_basic

# Class, weight and length of the body come before the flags.
FLAGS_AT: Final = 12
LENGTHS_MAX: Final = 512
ALIKE_MAX: Final = 4
# So many messages of unknown shape, and all is learnt anew.
FORGET_AFTER: Final = 100_000

TEXT, OCTET, TABLE, STAMP = "s", "B", "F", "Q"
# In the order of their flags, from the highest.
PROPERTIES: Final = (
    ("content_type", TEXT),
    ("content_encoding", TEXT),
    ("application_headers", TABLE),
    ("delivery_mode", OCTET),
    ("priority", OCTET),
    ("correlation_id", TEXT),
    ("reply_to", TEXT),
    ("expiration", TEXT),
    ("message_id", TEXT),
    ("timestamp", STAMP),
    ("type", TEXT),
    ("user_id", TEXT),
    ("app_id", TEXT),
    ("cluster_id", TEXT),
)
# Types of table values that struct reads as py-amqp does, and how many bytes they have.
_NUMBERS: Final = {
    ord(letter): (code, calcsize(f">{code}"), Struct(f">{code}").unpack_from)
    for letter, code in (("I", "i"), ("L", "q"), ("t", "?"), ("d", "d"), ("b", "b"))
}
_long: Final = Struct(">I").unpack_from
# Bytes of a number after the type, for those that are left to py-amqp.
_SIZES: Final = {ord(c): n for c, n in zip("BUuilfDT", (1, 2, 2, 4, 8, 4, 5, 8), strict=True)}
# What most messages have: no stamps, no time limits.
_USUAL: Final[dict[bytes, Callable[[], Any]]] = {
    b"F\0\0\0\0": dict,
    b"A\0\0\0\0": list,
    b"A\0\0\0\2VV": lambda: [None, None],
}


class Shapeless(Exception):
    """Better read by py-amqp."""


# What reading something else as a table ends in.
_UNFIT: Final = (Shapeless, FrameSyntaxError, LookupError, ValueError, ArithmeticError, error)


class Shapes:
    """The shapes that were seen on one connection."""

    def __init__(self) -> None:
        self._known: dict[int, list[Shape]] = {}
        self._seen: set[int] = set()  # lengths that came once
        self._strange = 0

    def read(self, payload: bytes) -> dict[str, Any]:
        """The properties in a content header; raises what py-amqp raises where it can not."""
        size = len(payload)
        known = self._known.get(size)
        try:
            if known is not None:
                for shape in known:
                    found = shape.read(payload)
                    if found is not None:
                        return found
            return self._learn(payload, size, known)
        except _UNFIT:
            properties: dict[str, Any] = decode_properties_basic(payload, FLAGS_AT)[0]
            return properties

    def _learn(self, payload: bytes, size: int, known: list[Shape] | None) -> dict[str, Any]:
        """Read what has no known shape; what has come before gets one, as long as there is room.

        To make one takes as long as to read a few messages without.
        """
        self._strange += 1
        if self._strange > FORGET_AFTER:
            self._known.clear()
            self._seen.clear()
            self._strange = 0
        elif size not in self._seen:
            self._seen.add(size)
        elif known is None:
            if len(self._known) < LENGTHS_MAX:
                self._known[size] = [shape_of(payload)]
        elif len(known) < ALIKE_MAX:
            known.append(shape_of(payload))
        return read_plainly(payload)


def read_plainly(payload: bytes) -> dict[str, Any]:
    """The properties, one after the other; raises where py-amqp may know better."""
    properties: dict[str, Any] = {}
    (flags,) = unpack_from(">H", payload, FLAGS_AT)
    at, bit = FLAGS_AT + 2, 0x8000
    for name, kind in PROPERTIES:
        if flags & bit:
            if kind == TEXT:
                end = at + 1 + payload[at]
                properties[name] = payload[at + 1 : end].decode("utf-8", "surrogatepass")
                at = end
            elif kind == TABLE:
                end = at + 4 + _long(payload, at)[0]
                properties[name] = _table(payload, at + 4, end)
                at = end
            else:
                (properties[name],) = unpack_from(f">{kind}", payload, at)
                at += 1 if kind == OCTET else 8
        bit >>= 1
    if at > len(payload):
        raise Shapeless
    return properties


def _table(payload: bytes, at: int, end: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while at < end:
        stop = at + 1 + payload[at]
        name = payload[at + 1 : stop].decode("utf-8", "surrogatepass")
        kind = payload[stop]
        at = stop + 1
        if kind == 0x53:  # S, a text
            stop = at + 4 + _long(payload, at)[0]
            values[name] = payload[at + 4 : stop].decode("utf-8", "surrogatepass")
            at = stop
        elif kind == 0x56:  # V, nothing
            values[name] = None
        elif kind in _NUMBERS:
            _, size, unpack = _NUMBERS[kind]
            (values[name],) = unpack(payload, at)
            at += size
        else:
            values[name], at = _read_item(payload, at - 1)
    if at != end:
        raise Shapeless
    return values


class Value(NamedTuple):
    """Where a value is, and whose it is."""

    start: int
    code: str  # of struct
    name: str
    in_headers: bool
    is_text: bool = False
    is_nested: bool = False


class Shape:
    """One look of content headers."""

    __slots__ = (
        "_fixed",
        "_header_names",
        "_header_numbers",
        "_headers",
        "_nested",
        "_properties",
        "_property_names",
        "_property_numbers",
        "_text_count",
        "_texts",
        "_unpack",
    )  # fmt: skip

    def __init__(
        self,
        payload: bytes,
        values: list[Value],
        properties: dict[str, Any],
        headers: dict[str, Any] | None,
    ) -> None:
        # What comes before the flags is not part of the shape.
        codes, end = [f">{FLAGS_AT}x"], FLAGS_AT
        for value in values:
            codes += (f"{value.start - end}s", value.code)
            end = value.start + calcsize(f">{value.code}")
        codes.append(f"{len(payload) - end}s")
        whole = Struct("".join(codes))
        parts = whole.unpack(payload)
        self._unpack = whole.unpack
        self._fixed = parts[::2]
        self._properties, self._headers = properties, headers
        at = {value: 2 * number + 1 for number, value in enumerate(values)}
        mine = [v for v in values if v.in_headers]
        others = [v for v in values if not v.in_headers]
        texts = [v for v in (*mine, *others) if v.is_text]
        self._text_count = len(texts)
        self._texts = _getter([at[v] for v in texts])
        self._header_names = [v.name for v in mine if v.is_text]
        self._property_names = [v.name for v in others if v.is_text]
        self._nested = [(v.name, at[v]) for v in mine if v.is_nested]
        self._header_numbers = [(v.name, at[v]) for v in mine if not (v.is_text or v.is_nested)]
        self._property_numbers = [(v.name, at[v]) for v in others if not v.is_text]

    def read(self, payload: bytes) -> dict[str, Any] | None:
        """The properties, where the payload has this shape."""
        parts = self._unpack(payload)
        if parts[::2] != self._fixed:
            return None
        properties = self._properties.copy()
        texts: list[str] = []
        if self._text_count:
            # All at once: decoding each one takes longer than everything else here.
            joined = b"\0".join(self._texts(parts))
            try:
                texts = joined.decode("utf-8", "surrogatepass").split("\0")
            except UnicodeDecodeError:
                return None
            if len(texts) != self._text_count:
                return None  # there are such characters in it
        if self._headers is not None:
            headers = properties["application_headers"] = self._headers.copy()
            headers.update(zip(self._header_names, texts, strict=False))
            for name, number in self._header_numbers:
                headers[name] = parts[number]
            for name, number in self._nested:
                headers[name] = _nested(parts[number])
        properties.update(zip(self._property_names, texts[len(self._header_names) :], strict=True))
        for name, number in self._property_numbers:
            properties[name] = parts[number]
        return properties


def shape_of(payload: bytes) -> Shape:
    """The shape of a content header; raises when it has none, or is cut off."""
    values: list[Value] = []
    properties: dict[str, Any] = {}
    headers: dict[str, Any] | None = None
    (flags,) = unpack_from(">H", payload, FLAGS_AT)
    at, bit = FLAGS_AT + 2, 0x8000
    for name, kind in PROPERTIES:
        if flags & bit:
            properties[name] = None
            if kind == TEXT:
                size = payload[at]
                values.append(Value(at + 1, f"{size}s", name, False, is_text=True))
                at += 1 + size
            elif kind == TABLE:
                headers = {}
                at = _walk(payload, at, values, headers)
            else:
                values.append(Value(at, kind, name, False))
                at += 1 if kind == OCTET else 8
        bit >>= 1
    if at > len(payload):
        raise Shapeless
    return Shape(payload, values, properties, headers)


def _walk(payload: bytes, at: int, values: list[Value], headers: dict[str, Any]) -> int:
    """Note the values of a table and the names of those that are nothing; where it ends."""
    (size,) = _long(payload, at)
    at += 4
    end = at + size
    while at < end:
        size = payload[at]
        name = payload[at + 1 : at + 1 + size].decode("utf-8", "surrogatepass")
        at += 1 + size
        kind = payload[at]
        if name in headers:
            raise Shapeless
        headers[name] = None
        if kind == 0x53:  # S, a text
            (size,) = _long(payload, at + 1)
            values.append(Value(at + 5, f"{size}s", name, True, is_text=True))
            at += 5 + size
        elif kind == 0x56:  # V, nothing
            at += 1
        elif kind in _NUMBERS:
            code, size, _ = _NUMBERS[kind]
            values.append(Value(at + 1, code, name, True))
            at += 1 + size
        else:
            size = _size_of(payload, at, kind)
            values.append(Value(at, f"{size}s", name, True, is_nested=True))
            at += size
        if at > end:
            raise Shapeless
    return at


def _size_of(payload: bytes, at: int, kind: int) -> int:
    if kind in b"FAx":
        return 5 + int(_long(payload, at + 1)[0])
    if kind not in _SIZES:
        raise Shapeless
    return 1 + _SIZES[kind]


def _nested(raw: bytes) -> Any:
    """A value with its type before it."""
    usual = _USUAL.get(raw)
    if usual is not None:
        return usual()
    value, end = _read_item(raw, 0)
    if end != len(raw):
        raise Shapeless
    return value


def _getter(numbers: list[int]) -> Callable[[Any], Any]:
    if len(numbers) == 1:
        only = numbers[0]
        return lambda parts: (parts[only],)
    return itemgetter(*numbers) if numbers else tuple
