"""Values that go through serializers: strategies for hypothesis, and what has to come back.

`CARRIED` are the values that a serializer carries, `ANYTHING` those that a caller may try. A value
comes back as it was, except that tuples come back as lists and that JSON turns keys which are not
text into text, as Python's json module does (`expected`).
"""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

from hypothesis import strategies as st

SERIALIZERS = ("json", "msgpack", "yaml")

# -- strategies --------------------------------------------------------------------------------

_odd_zones = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
_zones = st.none() | st.integers(-80_000, 80_000).map(
    lambda seconds: timezone(timedelta(seconds=seconds))
)
_minute_zones = st.none() | st.integers(-23 * 60, 23 * 60).map(
    lambda minutes: timezone(timedelta(minutes=minutes))
)
_utf8 = st.text(st.characters(exclude_categories=["Cs"]))
# With halves of surrogate pairs, but no two of them that make a pair.
_python_text = st.text().filter(lambda text: not _has_pair(text))
_scalars = {
    "json": st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**307), 10**307),
        st.floats(),
        _python_text,
        st.binary(),
        st.datetimes(timezones=_zones),
        st.dates(),
        st.times(timezones=_zones),
        st.decimals(),
        st.sampled_from([Decimal("Infinity"), Decimal("-Infinity"), Decimal("NaN"), Decimal("-0")]),
        st.uuids(),
    ),
    "msgpack": st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        _utf8,
        st.binary(),
    ),
    "yaml": st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**307), 10**307),
        st.floats(),
        _utf8,
        st.binary(),
        st.dates(),
        st.datetimes(timezones=_minute_zones),
    ),
}
_keys = {"json": _python_text, "msgpack": _utf8 | st.integers(0, 9), "yaml": _utf8}


def _nested(scalars: Any, keys: Any, leaves: int = 12) -> Any:
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=5),
            st.lists(inner, max_size=5).map(tuple),
            st.dictionaries(keys, inner, max_size=5),
        ),
        max_leaves=leaves,
    )


CARRIED = {
    name: _nested(_scalars[name], _keys[name]).filter(lambda value: not _has_wrapping(value))
    for name in SERIALIZERS
}


class Colour(enum.Enum):
    RED = 1


class Word(enum.StrEnum):
    YES = "yes"


@dataclass
class Point:
    x: int


class Pair(NamedTuple):
    left: int
    right: str


# What looks like something else, has no form in some serializer, or lies beyond a limit.
_odd = st.sampled_from(
    [
        Colour.RED,
        Word.YES,
        Point(1),
        Pair(1, "b"),
        {1, 2},
        frozenset({1}),
        bytearray(b"a"),
        timedelta(seconds=5),
        range(3),
        object(),
        "\ud83d\ude00",
        "\ud800",
        2**64,
        10**400,
        {"__type__": "decimal", "__value__": "1"},
        {"__type__": "unknown", "__value__": 1},
        {1: "a", "1": "b"},
        {True: 1, "true": 2},
        {None: 1},
        {(1, 2): 3},
        {Decimal(1): 2},
        {date(2026, 1, 1): 1},
        [[[[[]]]]],
        time(1, 2),
        UUID(int=5),
        Decimal("1.10"),
        datetime(2026, 1, 1, tzinfo=timezone(timedelta(seconds=30))),
    ]
)
ANYTHING = _nested(
    st.one_of(
        *_scalars.values(),
        _odd,
        st.datetimes(timezones=_odd_zones),
        st.times(timezones=_odd_zones),
    ),
    st.text() | st.integers(0, 3) | st.booleans() | st.none() | st.floats(allow_nan=False),
)

# One of each, at several depths, for tests in which every value costs a message.
EXAMPLES: dict[str, list[Any]] = {
    "json": [
        Decimal("0.1"),
        Decimal("NaN"),
        Decimal("-Infinity"),
        datetime(2026, 11, 17, 1, 2, 3, 4),  # noqa: DTZ001 - a naive time is a value too
        datetime(2026, 11, 17, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=5, minutes=30))),
        date(2026, 11, 17),
        time(1, 2, 3, 4),
        time(1, 2, 3, tzinfo=timezone(timedelta(hours=-3))),
        UUID(int=7),
        b"text",
        b"\xff\x00",
        10**300,
        -(2**63),
        math.nan,
        math.inf,
        -0.0,
        1e-300,
        "\ud800 half, \u2028, \x00, \U0001f600",
        "",
        None,
        True,
        {"deep": [[{"price": Decimal("1.10"), "tags": (b"a", b"\xfe")}]], "": [{}, []]},
    ],
    "msgpack": [
        b"\xff\x00",
        2**64 - 1,
        -(2**63),
        math.nan,
        -math.inf,
        "\u2028, \x00, \U0001f600",
        None,
        False,
        {"deep": [[{"raw": b"\xfe", "pair": (1, 2.5)}]], "": [{}, []]},
    ],
    "yaml": [
        b"\xff\x00",
        date(2026, 11, 17),
        datetime(2026, 11, 17, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=5, minutes=30))),
        10**300,
        math.nan,
        "\u2028, \x00, \U0001f600",
        "null",
        "1:20",
        {"deep": [[{"raw": b"\xfe", "pair": (1, 2.5)}]], "<<": [{}, []]},
    ],
}
# What they cannot carry: the sender gets an error.
REFUSED: dict[str, list[Any]] = {
    "json": [{1, 2}, object(), Colour.RED, timedelta(1), 10**400, "\ud83d\ude00", {1: 1, "1": 2}],
    "msgpack": [Decimal(1), UUID(int=1), date(2026, 1, 1), {1}, Point(1), 2**64, "\ud800"],
    "yaml": [Decimal(1), UUID(int=1), time(1), Point(1), "\ud800", {(1, 2): 3}],
}


# -- what comes back ---------------------------------------------------------------------------


def expected(value: Any, serializer: str) -> Any:
    """What a value comes back as, if it comes back at all."""
    if isinstance(value, (list, tuple)):
        return [expected(one, serializer) for one in value]
    if isinstance(value, dict):
        return {
            _key(key) if serializer == "json" else key: expected(one, serializer)
            for key, one in value.items()
        }
    return value


def same(got: Any, wanted: Any) -> bool:
    """Equal in value and kind, at every depth; not-a-number is equal to itself."""
    if isinstance(wanted, list):
        return type(got) is list and len(got) == len(wanted) and all(map(same, got, wanted))
    if isinstance(wanted, dict):
        return (
            type(got) is dict
            and got.keys() == wanted.keys()
            and all(same(got[key], one) for key, one in wanted.items())
        )
    if isinstance(wanted, bool) or wanted is None:
        return got is wanted
    for kind in (str, bytes, int, float):
        if isinstance(wanted, kind):
            return type(got) is kind and (got == wanted or (_is_nan(got) and _is_nan(wanted)))
    if isinstance(wanted, Decimal):
        return type(got) is Decimal and str(got) == str(wanted)
    return type(got) is type(wanted) and got == wanted


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(key)


def _has_pair(text: str) -> bool:
    return any(
        "\ud800" <= one <= "\udbff" and "\udc00" <= other <= "\udfff"
        for one, other in pairwise(text)
    )


def _has_wrapping(value: Any) -> bool:
    """Whether a mapping in it looks like a wrapped value of JSON."""
    if isinstance(value, dict):
        wrapping = value.keys() == {"__type__", "__value__"}
        return wrapping or any(map(_has_wrapping, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_wrapping, value))
