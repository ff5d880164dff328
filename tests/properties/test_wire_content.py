"""For all values: what is written is read. For all bytes: a value or a refusal."""

from __future__ import annotations

import json
import math
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st
from kombu import serialization

from umbel.wire.compression import compress, decompress
from umbel.wire.content import accept_set, decode, dumps_json, encode, loads_json
from umbel.wire.limits import Limits, Refusal
from umbel.wire.reprs import safe_repr

ALL = accept_set(["json", "msgpack", "yaml"])
TYPES = st.sampled_from(sorted(ALL))
METHODS = st.sampled_from(["gzip", "bzip2", "lzma", "brotli"])
SMALL = Limits(body_bytes=10_000, depth=8, integer_digits=20, alias_nodes=100)

texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts
)
plain = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20
)
rich = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**300), 10**300)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.datetimes()
    | st.dates()
    | st.times()
    | st.uuids()
    | st.decimals(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
).filter(lambda value: "__type__" not in repr(value))


@given(rich)
def test_json_survives_between_us_and_peers_in_every_direction(value):
    assert loads_json(dumps_json(value)) == value
    theirs = serialization.dumps(value, "json")[2]
    assert loads_json(theirs.encode()) == value
    assert serialization.loads(dumps_json(value), "application/json", "utf-8") == value


@given(plain)
def test_msgpack_survives_between_us_and_peers_in_every_direction(value):
    ours = encode(value, "msgpack")
    assert decode(*ours, accept=ALL) == value
    assert serialization.loads(*ours, accept={"application/x-msgpack"}) == value
    theirs = serialization.dumps(value, "msgpack")[2]
    assert decode(theirs, "application/x-msgpack", "binary", accept=ALL) == value


@settings(max_examples=50)
@given(plain)
def test_yaml_survives_between_us_and_peers_in_every_direction(value):
    ours = encode(value, "yaml")
    assert decode(*ours, accept=ALL) == value
    assert serialization.loads(*ours, accept={"application/x-yaml"}) == value
    theirs = serialization.dumps(value, "yaml")[2]
    assert decode(theirs, "application/x-yaml", "utf-8", accept=ALL) == value


@given(st.binary() | st.text(), TYPES, st.sampled_from([Limits(), SMALL]))
def test_no_bytes_make_reading_raise_anything_but_a_refusal(body, content_type, limits):
    with suppress(Refusal):
        decode(body, content_type, "utf-8", accept=ALL, limits=limits)


JSONISH = st.text(
    st.sampled_from('[]{}",:0123456789.eE+-\\u dtrfalsnNIiy_\n&*<!|>#%@`?')
    | st.sampled_from("\ud800\u2603\x00")
)


@settings(max_examples=300)
@given(JSONISH, TYPES)
def test_nearly_valid_text_is_read_or_refused(body, content_type):
    with suppress(Refusal):
        decode(body, content_type, "utf-8", accept=ALL, limits=SMALL)


@settings(max_examples=300)
@given(JSONISH)
def test_what_we_read_as_json_is_what_python_reads(text):
    try:
        ours = loads_json(text.encode())
    except (Refusal, UnicodeEncodeError):
        return
    assert repr(ours) == repr(json.loads(text)) or math.isnan(json.loads(text))


@given(st.binary(max_size=5000), METHODS)
def test_compression_survives(body, method):
    packed, content_type = compress(body, method)
    assert decompress(packed, content_type, len(body)) == body


@given(st.binary(), METHODS, st.integers(0, 100))
def test_no_bytes_make_decompression_raise_anything_but_a_refusal(body, method, limit):
    with suppress(Refusal):
        assert len(decompress(body, method, limit)) <= limit


@given(rich, st.integers(0, 200), st.integers(0, 5))
def test_a_repr_is_bounded_and_can_be_encoded(value, chars, depth):
    text = safe_repr(value, chars, depth)
    assert len(text) <= chars
    text.encode("utf-8")


@given(st.recursive(st.integers(), st.lists, max_leaves=5))
def test_a_shallow_repr_is_pythons(value):
    assert safe_repr(value, 10_000, 1000) == repr(value)
