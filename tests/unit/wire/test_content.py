"""Content: what is accepted, what peers wrote is read, what we write peers read."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, time
from decimal import Decimal
from uuid import UUID

import pytest
from kombu import serialization

from umbel.exceptions import ImproperlyConfigured
from umbel.wire import content
from umbel.wire.content import EncodeError, accept_set, decode, dumps_json, encode, loads_json
from umbel.wire.limits import REASONS, Limits, Refusal

ALL = accept_set(["json", "msgpack", "yaml"])

RICH = [
    datetime(2026, 11, 15, 19, 38, 48, 413148, tzinfo=UTC),
    datetime(2026, 11, 15, 19, 38),  # noqa: DTZ001 - a naive time is a value too
    date(2026, 11, 15),
    time(19, 38, 48),
    Decimal("1.10"),
    UUID("12345678-1234-5678-1234-567812345678"),
    b"text",
    b"\xff\x00binary",
    {"nested": [b"x", {"when": date(1, 1, 1)}]},
    2**70,
    "\ud800 lone",
    "snowman \u2603 \U0001f600",
    float("inf"),
    -0.0,
    1e300,
    True,
    None,
]


def reason_of(body, content_type="application/json", accept=ALL, **kwargs) -> str:
    with pytest.raises(Refusal) as caught:
        decode(body, content_type, "utf-8", accept=accept, **kwargs)
    assert caught.value.reason in REASONS
    assert str(caught.value) == caught.value.text
    assert caught.value.text
    return caught.value.reason


@pytest.mark.parametrize("value", RICH, ids=repr)
def test_what_we_write_as_json_a_peer_reads_as_the_same(value):
    body, content_type, encoding = encode([value], "json")
    assert serialization.loads(body, content_type, encoding, accept={"json", content_type}) == [
        value
    ]


@pytest.mark.parametrize("value", RICH, ids=repr)
def test_what_a_peer_writes_as_json_we_read_as_the_same(value):
    content_type, encoding, body = serialization.dumps([value], serializer="json")
    assert decode(body, content_type, encoding, accept=ALL) == [value]
    assert decode(body.encode(), content_type, encoding, accept=ALL) == [value]
    assert decode(memoryview(body.encode()), content_type, encoding, accept=ALL) == [value]


@pytest.mark.parametrize("serializer", ["msgpack", "yaml"])
def test_plain_values_cross_between_us_and_peers_in_both_directions(serializer):
    value = [[1, -5, 2.5, "ü", None, True], {"k": {"deep": [1]}}, {"callbacks": None}]
    content_type, encoding, body = serialization.dumps(value, serializer=serializer)
    assert decode(body, content_type, encoding, accept=ALL) == value
    ours = encode(value, serializer)
    assert (ours.content_type, ours.content_encoding) == (content_type, encoding)
    assert serialization.loads(*ours, accept={content_type}) == value


def test_nan_crosses_in_both_directions():
    assert math.isnan(loads_json(serialization.dumps([math.nan], "json")[2].encode())[0])
    assert math.isnan(serialization.loads(dumps_json([math.nan]), "application/json", "utf-8")[0])


def test_keys_and_tuples_become_what_pythons_json_makes_of_them():
    value = {1: (1, 2), None: 3, False: 4, 2.5: 5}
    assert json.loads(dumps_json(value)) == json.loads(json.dumps(value))


def test_json_is_compact():
    assert dumps_json([1, {"a": 2, "b": (math.inf,)}]) == b'[1,{"a":2,"b":[Infinity]}]'
    assert dumps_json([1, {"a": 2}]) == b'[1,{"a":2}]'


def test_an_object_may_say_how_it_is_written():
    class Money:
        def __json__(self):
            return {"cents": 5}

    assert loads_json(dumps_json([Money()])) == [{"cents": 5}]
    assert decode(*encode([Money()], "msgpack"), accept=ALL) == [{"cents": 5}]


def test_subclasses_of_plain_types_are_written_as_the_plain_types():
    class Text(str):
        __slots__ = ()

    class Number(int):
        pass

    class Record(dict):
        pass

    value = [Text("a"), Number(3), Record(x=1)]
    for serializer in ("json", "msgpack", "yaml"):
        assert decode(*encode(value, serializer), accept=ALL) == ["a", 3, {"x": 1}]


@pytest.mark.parametrize("serializer", ["json", "msgpack", "yaml"])
def test_what_cannot_be_written_is_an_error_that_says_so(serializer):
    class Opaque:
        pass

    class Hostile:
        def __json__(self):
            raise RuntimeError("no")

    endless: list[object] = []
    endless.append(endless)
    for value in (Opaque(), Hostile()):
        with pytest.raises(EncodeError, match=serializer):
            encode([value], serializer)
    if serializer != "yaml":  # which writes a reference
        with pytest.raises(EncodeError):
            encode(endless, serializer)


def test_a_set_is_refused_as_peers_refuse_it():
    with pytest.raises(EncodeError, match="set"):
        dumps_json({1, 2})


@pytest.mark.parametrize("name", ["pickle", "application/x-python-serialize"])
def test_pickle_is_refused_by_name(name):
    with pytest.raises(ImproperlyConfigured, match="pickle"):
        accept_set(["json", name])
    with pytest.raises(ImproperlyConfigured, match="pickle"):
        encode([1], name)


def test_an_unknown_serializer_is_refused_with_the_choices():
    with pytest.raises(ImproperlyConfigured, match=r"'jsno': choose one of json, msgpack, yaml"):
        accept_set(["jsno"])


def test_yaml_without_its_package_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(content, "yaml_module", lambda: None)
    with pytest.raises(ImproperlyConfigured, match="PyYAML"):
        accept_set(["yaml"])


def test_names_and_content_types_mean_the_same():
    assert accept_set(["json", "yaml"]) == accept_set(["application/json", "application/x-yaml"])


def test_content_that_is_not_accepted_is_disallowed_before_it_is_read():
    only_json = accept_set(["json"])
    assert reason_of(b"", "application/x-yaml", only_json) == "content-disallowed"
    assert reason_of(b"", "application/x-msgpack", only_json) == "content-disallowed"
    assert reason_of(b"", "application/x-python-serialize") == "content-disallowed"
    hostile = frozenset({"application/x-python-serialize"})
    assert reason_of(b"", "application/x-python-serialize", hostile) == "content-disallowed"


@pytest.mark.parametrize("content_type", ["text/plain", "", None, 5, [], {}, "application/data"])
def test_content_nobody_knows_is_refused_as_unknown(content_type):
    assert reason_of(b"[]", content_type) == "content-unknown"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'"\xed\xa0\x80"',
        b"[1] x",
        b"\xef\xbb\xbf[]",
        "\ud800",
        b'{"__type__": "nosuch", "__value__": 1}',
        b'{"__type__": ["datetime"], "__value__": 1}',
        b'{"__type__": "datetime", "__value__": 5}',
        b'{"__type__": "datetime", "__value__": "never"}',
        b'{"__type__": "decimal", "__value__": [0, [1], 0]}',
        b'{"__type__": "uuid", "__value__": {"int": 5}}',
        b'{"__type__": "uuid", "__value__": "x"}',
        b'{"__type__": "bytes", "__value__": 1}',
        b'{"__type__": "bytes", "__value__": "\\ud800"}',
        b'{"__type__": "base64", "__value__": "a"}',
    ],
    ids=repr,
)
def test_malformed_json_is_undecodable(body):
    assert reason_of(body) == "undecodable"


@pytest.mark.parametrize("body", [None, 5, [1], object()])
def test_a_body_that_is_not_bytes_is_undecodable(body):
    assert reason_of(body) == "undecodable"


def test_a_mapping_with_more_than_a_wrapping_is_left_alone():
    value = {"__type__": "datetime", "__value__": "x", "more": 1}
    assert loads_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"[" * 10_000 + b"]" * 10_000),
        ("application/json", b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
        ("application/json", b'["__type__",' + b"[" * 10_000 + b"]" * 10_000 + b"]"),
        ("application/json", b"[" * 100_000),
        ("application/json", b"[NaN," + b"[" * 500 + b"]" * 501),
        ("application/x-msgpack", b"\x91" * 10_000 + b"\x01"),
        ("application/x-msgpack", b"\x81\xa1a" * 10_000 + b"\x01"),
        ("application/x-yaml", b"[" * 10_000 + b"]" * 10_000),
        ("application/x-yaml", b"{a: " * 10_000 + b"}" * 10_000),
        ("application/x-yaml", b"- " * 10_000 + b"x"),
    ],
    ids=range(10),
)
def test_deep_nesting_is_refused_as_too_deep(content_type, body):
    assert reason_of(body, content_type) == "too-deep"


@pytest.mark.parametrize("serializer", ["json", "msgpack", "yaml"])
def test_the_depth_limit_is_exact(serializer):
    def nested(levels):
        value: object = []
        for level in range(levels - 1):
            value = [value] if level % 2 else {"k": value}
        return value

    limits = Limits(depth=50)
    body, content_type, _ = encode(nested(50), serializer)
    assert decode(body, content_type, None, accept=ALL, limits=limits) == nested(50)
    body, content_type, _ = encode(nested(51), serializer)
    assert reason_of(body, content_type, limits=limits) == "too-deep"


def test_many_brackets_that_are_not_deep_are_fine():
    value = [[i, {"k": "[[[{{{"}] for i in range(1000)]
    assert loads_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"9" * 5000),
        ("application/json", b'{"a": [1, -' + b"9" * 309 + b"]}"),
        ("application/json", b'["' + b"x" * 308 + b'", ' + b"9" * 309 + b"]"),
        ("application/x-yaml", b"9" * 5000),
        ("application/x-yaml", b"a: [0x" + b"f" * 5000 + b"]"),
        ("application/x-yaml", b"!!int '" + b"1" * 5000 + b"'"),
        ("application/x-yaml", b"1" + b":10" * 5000),
    ],
    ids=range(7),
)
def test_an_integer_of_too_many_digits_is_refused(content_type, body):
    assert reason_of(body, content_type) == "integer-too-large"


def test_an_integer_of_just_enough_digits_is_read_exactly():
    for sign in ("", "-"):
        text = sign + "9" * 308
        assert loads_json(text.encode()) == int(text)
        assert loads_json(f"[[{text}], 1]".encode()) == [[int(text)], 1]


def test_long_digits_inside_text_and_fractions_are_no_integers():
    digits = "1" * 5000
    assert loads_json(json.dumps([digits]).encode()) == [digits]
    assert loads_json(f"[0.{digits}]".encode()) == [float(f"0.{digits}")]
    assert decode(f"'{digits}'", "application/x-yaml", None, accept=ALL) == digits


@pytest.mark.parametrize("at", range(620))
def test_a_long_run_of_digits_is_found_wherever_it_starts(at):
    body = b'["' + b"x" * at + b'",' + b"7" * 309 + b"]"
    assert reason_of(body) == "integer-too-large"


def test_a_body_beyond_the_limit_is_too_big_whatever_its_type():
    limits = Limits(body_bytes=10)
    for body in (b"[" + b" " * 10, " " * 11, bytearray(11), memoryview(bytes(11)), "ü" * 6):
        assert reason_of(body, limits=limits) == "too-big"
    assert decode(b"[1,2,3,45]", "application/json", None, accept=ALL, limits=limits)


def test_yaml_references_are_read_but_do_not_multiply():
    assert decode("[&a [1], *a]", "application/x-yaml", None, accept=ALL) == [[1], [1]]
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 12):
        refs = ", ".join([f"*a{i - 1}"] * 10)
        lines.append(f"a{i}: &a{i} [{refs}]")
    assert reason_of("\n".join(lines), "application/x-yaml") == "too-big"
    merges = ["a0: &a0 {x: 1}"]
    for i in range(1, 30):
        refs = ", ".join([f"*a{i - 1}"] * 10)
        merges.append(f"a{i}: &a{i} {{<<: [{refs}]}}")
    assert reason_of("\n".join(merges), "application/x-yaml") == "too-big"


def test_yaml_references_cannot_hide_depth_or_contain_themselves():
    lines = ["a0: &a0 " + "[" * 90 + "]" * 90]
    lines.extend(f"a{i}: &a{i} " + "[" * 90 + f"*a{i - 1}" + "]" * 90 for i in range(1, 5))
    assert reason_of("\n".join(lines), "application/x-yaml") == "too-deep"
    assert reason_of("&a [*a]", "application/x-yaml") == "undecodable"
    assert reason_of("*nowhere", "application/x-yaml") == "undecodable"


@pytest.mark.parametrize(
    "body",
    [
        "!!python/object/apply:os.system ['true']",
        "!!python/name:os.system",
        "!!python/object/new:tuple [[1]]",
        "a: b: c",
        "%",
        "\x00",
        "{[]: 1}",
        "2026-99-99",
        "--- 1\n--- 2",
    ],
)
def test_yaml_never_makes_anything_but_plain_values(body):
    assert reason_of(body, "application/x-yaml") == "undecodable"


def test_big_yaml_is_refused_before_it_is_parsed():
    assert reason_of(b" " * 100, "application/x-yaml", limits=Limits(yaml_bytes=99)) == "too-big"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xdd\x7f\xff\xff\xff\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffx",
        b"\xa1\xff",
    ],
)
def test_msgpack_that_promises_more_than_it_has_is_undecodable(body):
    assert reason_of(body, "application/x-msgpack") == "undecodable"
