"""Signed control messages: what is believed and what is not."""

from __future__ import annotations

import json

import pytest

from umbel.wire.control import Request, write_request
from umbel.wire.limits import Refusal
from umbel.wire.signing import (
    BAD_SIGNATURE,
    CHALLENGE,
    EVENT,
    NONCE,
    NONCES_FULL,
    OUT_OF_TIME,
    REPLAYED,
    REPLY,
    REQUEST,
    SENT_AT,
    SIGNATURE,
    SIGNED_AT,
    UNSIGNED,
    WINDOW_S,
    Challenges,
    Distrust,
    Nonces,
    check_signature,
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
    **form: str,
) -> str:
    known = nonces() if seen is None else seen
    with pytest.raises(Distrust) as caught:
        verify(body, headers, KEY, now, known, exchange=exchange, **form)
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
        {SENT_AT: NOW},
        {CHALLENGE: "c" * 32},
        {SIGNED_AT: NOW + 1},
        {NONCE: "n2"},
        {SIGNATURE: "0" * 64},
        {SIGNATURE: "ö"},
        {SIGNATURE: 7},
        {SIGNED_AT: "now"},
        {SIGNED_AT: float("nan")},
        {SIGNED_AT: 10**400},
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
    assert reason_of(WRITTEN.body, signed(), content_encoding="utf-7") == BAD_SIGNATURE


@pytest.mark.parametrize("purpose", [REQUEST, REPLY, EVENT])
@pytest.mark.parametrize("other", [REQUEST, REPLY, EVENT])
def test_a_signature_is_valid_for_one_kind_of_message_only(purpose, other):
    headers = sign(b"{}", {}, KEY, NOW, "n", exchange="e", purpose=purpose)
    if other == purpose:
        assert check_signature(b"{}", headers, KEY, exchange="e", purpose=other) == (NOW, "n")
        return
    with pytest.raises(Distrust) as caught:
        check_signature(b"{}", headers, KEY, exchange="e", purpose=other)
    assert caught.value.reason == BAD_SIGNATURE


def test_the_ticket_of_a_reply_and_the_sender_of_an_event_are_covered():
    for purpose, name in ((REPLY, "ticket"), (EVENT, "hostname")):
        headers = sign(b"{}", {name: "a"}, KEY, NOW, "n", purpose=purpose)
        with pytest.raises(Distrust, match="changed on its way"):
            check_signature(b"{}", {**headers, name: "b"}, KEY, purpose=purpose)


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


# -- after the start -------------------------------------------------------------------------


def answered(challenge: str | None, *, now: float = NOW, nonce: str = "again") -> dict[str, object]:
    headers = {**WRITTEN.headers, CHALLENGE: challenge}
    return sign(WRITTEN.body, headers, KEY, now, nonce, exchange=EXCHANGE)


def is_new(headers: dict[str, object], now: float, seen: Nonces, asked: Challenges) -> bool:
    return verify(WRITTEN.body, headers, KEY, now, seen, exchange=EXCHANGE, challenges=asked)


@pytest.mark.parametrize(
    ("since", "known_to_be_new"),
    [(NOW, False), (NOW - 1, False), (NOW - 29.9, False), (NOW - 30, True), (NOW - 100, True)],
)
def test_a_message_is_known_to_be_new_one_window_after_the_start(since, known_to_be_new):
    asked = Challenges(b"secret")
    assert is_new(signed(), NOW, Nonces(since), asked) is known_to_be_new
    # By a clock that is ahead it may have been signed as long before.
    assert is_new(signed(), NOW - 29, Nonces(since), asked) is known_to_be_new


def test_what_may_be_a_copy_is_taken_note_of_all_the_same():
    seen = Nonces(since=NOW)
    assert not is_new(signed(), NOW, seen, Challenges(b"secret"))
    assert reason_of(WRITTEN.body, signed(), seen=seen) == REPLAYED


def test_who_answers_the_challenge_is_believed_whatever_its_clock_shows():
    asked = Challenges(b"secret")
    for number, clock in enumerate((NOW, NOW - 7_200, NOW + 7_200)):
        headers = answered(asked.current(NOW), now=clock, nonce=f"n{number}")
        assert is_new(headers, NOW + 1, Nonces(since=NOW), asked)


def test_a_refusal_tells_whether_a_challenge_would_help():
    with pytest.raises(Distrust) as caught:
        is_new(signed(now=NOW - 5), NOW, Nonces(since=NOW), Challenges(b"secret"))
    assert (caught.value.reason, caught.value.provable) == (OUT_OF_TIME, True)
    with pytest.raises(Distrust) as caught:
        is_new(signed(now=NOW - 31), NOW, nonces(), Challenges(b"secret"))
    assert (caught.value.reason, caught.value.provable) == (OUT_OF_TIME, False)


@pytest.mark.parametrize("answer", [None, "", "0" * 32, 7, True, ["x"]])
def test_a_wrong_answer_proves_nothing(answer):
    asked = Challenges(b"secret")
    assert not asked.is_answered(answer, NOW)
    assert not asked.is_answered(Challenges(b"of another life").current(NOW), NOW)


def test_a_challenge_is_valid_for_a_while_and_each_answer_once():
    asked, seen = Challenges(b"secret"), Nonces(since=NOW)
    challenge = asked.current(NOW)
    headers = answered(challenge, now=NOW - 7_200)
    assert is_new(headers, NOW, seen, asked)
    later = NOW
    while asked.is_answered(challenge, later):
        with pytest.raises(Distrust) as caught:
            is_new(headers, later, seen, asked)
        assert caught.value.reason == REPLAYED
        later += 1
    assert WINDOW_S <= later - NOW <= 2 * WINDOW_S
    assert asked.current(later) != challenge
