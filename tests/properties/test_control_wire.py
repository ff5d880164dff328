"""For all control messages: read back as sent, believed as signed. For all rubbish: a refusal."""

from __future__ import annotations

import json
import re
import warnings
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.wire.content import accept_set
from umbel.wire.control import (
    ReplyTo,
    Request,
    is_expired,
    is_for,
    read_reply,
    read_request,
    write_reply,
    write_request,
)
from umbel.wire.limits import Refusal
from umbel.wire.patterns import matches
from umbel.wire.signing import (
    NONCE,
    SIGNATURE,
    SIGNED_AT,
    WINDOW_S,
    Challenges,
    Distrust,
    Nonces,
    sign,
    verify,
)

ACCEPT = accept_set(["json", "msgpack", "yaml"])
KEY = b"0123456789abcdef"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = texts.filter(lambda text: 0 < len(text.encode()) <= 255)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    ["method", "arguments", "destination", "pattern", "matcher", "ticket", "reply_to",
     "exchange", "routing_key", "glob", "pcre"]
)  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | fields,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        | st.dictionaries(fields, inner, max_size=6)
    ),
    max_leaves=10,
)
header_names = st.sampled_from(
    ["clock", "expires", "ticket", "compression", SIGNATURE, SIGNED_AT, NONCE]
)
headers = st.none() | st.lists(st.integers()) | st.dictionaries(header_names, anything, max_size=7)
requests = st.builds(
    Request,
    method=names,
    arguments=st.dictionaries(texts, values, max_size=4),
    destination=st.none() | st.lists(names, max_size=3).map(tuple),
    pattern=st.just("w[a-z]*"),
    matcher=st.sampled_from(["glob", "pcre"]),
    ticket=names,
    reply_to=st.builds(ReplyTo, names, names),
    clock=st.integers(0, 2**53 - 1),
    expires=st.floats(0.001, 2**40),
)


@given(request=requests, serializer=st.sampled_from(["json", "msgpack", "yaml"]))
def test_a_request_is_read_as_it_was_written(request, serializer):
    written = write_request(request, serializer)
    found = read_request(
        written.body,
        written.content_type,
        written.content_encoding,
        json.loads(json.dumps(written.headers)),
        accept=ACCEPT,
    )
    assert found == request


@given(hostname=names, value=values, ticket=names, clock=st.integers(0, 2**53 - 1))
def test_a_reply_is_read_as_it_was_written(hostname, value, ticket, clock):
    written = write_reply(hostname, value, ticket=ticket, clock=clock)
    found = read_reply(*written[:1], *written[2:], written.headers, accept=ACCEPT)
    assert found == (hostname, value, ticket, clock)


@settings(max_examples=120)
@given(content=anything, headers=headers)
def test_well_formed_rubbish_is_refused_or_usable(content, headers):
    body = json.dumps(content).encode()
    with suppress(Refusal):
        request = read_request(body, "application/json", "utf-8", headers, accept=ACCEPT)
        assert is_for(request, "w1@h") in (True, False)
        assert is_expired(request, 1.0) in (True, False)
        write_request(request)
    with suppress(Refusal):
        read_reply(body, "application/json", "utf-8", headers, accept=ACCEPT)
    with suppress(Distrust):
        verify(body, headers, KEY, 1.0, Nonces(since=0))


@settings(max_examples=120)
@given(
    body=st.binary(max_size=60) | st.text(max_size=60) | st.none() | st.integers(),
    content_type=st.sampled_from([*ACCEPT, "application/x-python-serialize", "", None]),
    headers=headers,
)
def test_rubbish_raises_nothing_but_refusals(body, content_type, headers):
    for reader in (read_request, read_reply):
        with suppress(Refusal):
            reader(body, content_type, "utf-8", headers, accept=ACCEPT)
    with suppress(Distrust):
        verify(body, headers, KEY, 1.0, Nonces(since=0), content_type=content_type)


@given(request=requests, now=st.floats(0, 2**40), where=st.integers(0), bit=st.integers(0, 7))
def test_a_signed_request_is_believed_and_any_changed_bit_is_noticed(request, now, where, bit):
    written = write_request(request)
    signed = json.loads(json.dumps(sign(written.body, written.headers, KEY, now, "n")))
    verify(written.body, signed, KEY, now, Nonces(since=0))
    changed = bytearray(written.body)
    changed[where % len(changed)] ^= 1 << bit
    with suppress(Distrust):
        verify(bytes(changed), signed, KEY, now, Nonces(since=0))
        raise AssertionError("a changed message was believed")


@given(
    signed_at=st.dictionaries(st.integers(0, 5), st.floats(0, 200), min_size=1),
    received=st.lists(st.tuples(st.integers(0, 5), st.floats(0, 300)), max_size=60),
    count_max=st.integers(1, 6),
)
def test_no_message_is_obeyed_twice(signed_at, received, count_max):
    seen, obeyed = Nonces(since=0, count_max=count_max), set()
    for number, now in sorted(received, key=lambda one: one[1]):
        message = sign(b"{}", {}, KEY, signed_at.get(number, 100.0), f"n{number}")
        with suppress(Distrust):
            verify(b"{}", message, KEY, now, seen)
            assert number not in obeyed
            obeyed.add(number)
        assert len(seen) <= count_max


@settings(max_examples=300)
@given(
    sent=st.lists(
        st.tuples(st.floats(0, 200), st.floats(-WINDOW_S, WINDOW_S)), min_size=1, max_size=8
    ),
    starts=st.lists(st.floats(0, 200), min_size=1, max_size=4),
    deliveries=st.lists(st.tuples(st.integers(0, 7), st.floats(0, 300)), max_size=40),
)
def test_a_message_is_obeyed_once_over_all_lives_of_a_node(sent, starts, deliveries):
    """`sent` are send times and by how much the sender's clock is ahead of the node's."""
    lives = [(since, Nonces(since)) for since in sorted(starts)]
    obeyed: set[int] = set()
    for number, now in sorted(deliveries, key=lambda one: one[1]):
        running = [life for life in lives if life[0] <= now]
        number %= len(sent)  # noqa: PLW2901 - one of those that were sent
        sent_at, ahead_s = sent[number]
        if not running or now < sent_at:
            continue
        since, seen = running[-1]
        message = sign(b"{}", {}, KEY, sent_at + ahead_s, f"n{number}")
        with suppress(Distrust):
            if verify(b"{}", message, KEY, now, seen, challenges=Challenges(b"s")):
                assert number not in obeyed
                assert sent_at >= since - 1e-6
                obeyed.add(number)


@settings(max_examples=300)
@given(
    pattern=st.text(st.sampled_from("ab1@*+?.(){}[]|^$\\dws,-2"), max_size=12),
    name=st.text(st.sampled_from("ab1@{}-,\n"), max_size=8),
)
def test_an_expression_matches_what_python_matches(pattern, name):
    try:
        found = matches(name, pattern, "pcre")
    except Refusal:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found == (re.match(pattern, name) is not None)
