"""Signed control messages: what is believed and what is not."""

from __future__ import annotations

import json

import pytest

from umbel.wire.control import Request, write_request
from umbel.wire.limits import Refusal
from umbel.wire.signing import (
    BAD_SIGNATURE,
    NONCE,
    NONCES_FULL,
    OUT_OF_TIME,
    REPLAYED,
    SIGNATURE,
    SIGNED_AT,
    UNSIGNED,
    Distrust,
    Nonces,
    is_signed,
    sign,
    verify,
)

KEY = b"a key of sixteen bytes or more"
NOW = 1_794_771_516.25
WRITTEN = write_request(Request(method="shutdown", destination=("w1@h",), clock=4, expires=NOW + 1))
EXCHANGE = "celery.pidbox"


def signed(*, now: float = NOW, nonce: str = "n1", key: bytes = KEY) -> dict[str, object]:
    return sign(WRITTEN.body, WRITTEN.headers, key, now, nonce, exchange=EXCHANGE)


def nonces() -> Nonces:
    return Nonces(since=NOW - 100)


def reason_of(
    body: object,
    headers: object,
    *,
    now: float = NOW,
    seen: Nonces | None = None,
    exchange: str = EXCHANGE,
    content_type: str = "application/json",
) -> str:
    known = nonces() if seen is None else seen
    with pytest.raises(Distrust) as caught:
        verify(body, headers, KEY, now, known, exchange=exchange, content_type=content_type)
    assert isinstance(caught.value, Refusal)
    assert KEY.decode() not in caught.value.text
    return caught.value.reason


def test_a_signed_message_is_believed():
    verify(WRITTEN.body, signed(), KEY, NOW, nonces(), exchange=EXCHANGE)


def test_a_signature_leaves_the_other_headers_alone():
    assert WRITTEN.headers.items() <= signed().items()
    assert is_signed(signed())
    assert not is_signed(WRITTEN.headers)


def test_a_signature_survives_a_transport_that_writes_headers_as_json():
    headers = json.loads(json.dumps(signed()))
    headers["clock"] = float(headers["clock"])  # a peer in another language
    verify(WRITTEN.body, headers, KEY, NOW, nonces(), exchange=EXCHANGE)


def test_a_body_that_came_as_text_or_view_is_the_same_body():
    for body in (WRITTEN.body.decode(), memoryview(WRITTEN.body), bytearray(WRITTEN.body)):
        verify(body, signed(), KEY, NOW, nonces(), exchange=EXCHANGE)


@pytest.mark.parametrize("headers", [None, {}, WRITTEN.headers, {SIGNATURE: None}])
def test_an_unsigned_message_is_refused(headers):
    assert reason_of(WRITTEN.body, headers) == UNSIGNED


@pytest.mark.parametrize(
    "change",
    [
        {"clock": 5},
        {"expires": NOW + 1000},
        {"expires": None},
        {"compression": "application/x-gzip"},
        {SIGNED_AT: NOW + 1},
        {NONCE: "n2"},
        {SIGNATURE: "0" * 64},
        {SIGNATURE: "ö"},
        {SIGNATURE: 7},
        {SIGNED_AT: "now"},
        {SIGNED_AT: float("nan")},
        {NONCE: ""},
        {NONCE: "x" * 65},
        {NONCE: None},
        {"clock": [1]},
        {"clock": True},
        {"clock": 10**400},
    ],
    ids=repr,
)
def test_a_changed_header_is_noticed(change):
    assert reason_of(WRITTEN.body, {**signed(), **change}) == BAD_SIGNATURE


def test_a_changed_body_is_noticed():
    body = WRITTEN.body.replace(b"w1@h", b"w2@h")
    assert reason_of(body, signed()) == BAD_SIGNATURE
    assert reason_of(None, signed()) == BAD_SIGNATURE


def test_another_key_another_exchange_and_another_format_are_noticed():
    assert reason_of(WRITTEN.body, signed(key=b"some other key")) == BAD_SIGNATURE
    assert reason_of(WRITTEN.body, signed(), exchange="other.pidbox") == BAD_SIGNATURE
    assert reason_of(WRITTEN.body, signed(), content_type="application/x-yaml") == BAD_SIGNATURE


def test_parts_can_not_be_moved_between_each_other():
    one = sign(b"ab", {"expires": "x"}, KEY, NOW, "n", exchange="e")
    other = sign(b"b", {"expires": "xa"}, KEY, NOW, "n", exchange="e")
    assert one[SIGNATURE] != other[SIGNATURE]


def test_a_signature_holds_for_its_window_only():
    verify(WRITTEN.body, signed(), KEY, NOW + 30, nonces(), exchange=EXCHANGE)
    verify(WRITTEN.body, signed(), KEY, NOW - 30, nonces(), exchange=EXCHANGE)
    assert reason_of(WRITTEN.body, signed(), now=NOW + 30.1) == OUT_OF_TIME
    assert reason_of(WRITTEN.body, signed(), now=NOW - 30.1) == OUT_OF_TIME


def test_what_was_signed_before_the_listener_began_is_refused():
    assert reason_of(WRITTEN.body, signed(), seen=Nonces(since=NOW + 1)) == OUT_OF_TIME


def test_a_replayed_message_is_refused():
    seen = nonces()
    verify(WRITTEN.body, signed(), KEY, NOW, seen, exchange=EXCHANGE)
    for later in (0.0, 1.0, 30.0):
        assert reason_of(WRITTEN.body, signed(), now=NOW + later, seen=seen) == REPLAYED
    verify(WRITTEN.body, signed(nonce="n2"), KEY, NOW, seen, exchange=EXCHANGE)


def test_a_forged_message_uses_up_no_nonce():
    seen = nonces()
    reason_of(WRITTEN.body, {**signed(), "clock": 9}, seen=seen)
    assert len(seen) == 0
    verify(WRITTEN.body, signed(), KEY, NOW, seen, exchange=EXCHANGE)


def test_nonces_are_forgotten_when_their_signatures_hold_no_more():
    seen = nonces()
    for number in range(50):
        moment = NOW + number * 10
        headers = signed(now=moment, nonce=f"n{number}")
        verify(WRITTEN.body, headers, KEY, moment, seen, exchange=EXCHANGE)
        assert len(seen) <= 5


def test_a_full_table_refuses_rather_than_forgets():
    seen = Nonces(since=0, count_max=2)
    for nonce in ("a", "b"):
        verify(WRITTEN.body, signed(nonce=nonce), KEY, NOW, seen, exchange=EXCHANGE)
    assert reason_of(WRITTEN.body, signed(nonce="c"), seen=seen) == NONCES_FULL
    assert reason_of(WRITTEN.body, signed(nonce="a"), seen=seen) == REPLAYED
    later = NOW + 61
    verify(WRITTEN.body, signed(now=later, nonce="c"), KEY, later, seen, exchange=EXCHANGE)
