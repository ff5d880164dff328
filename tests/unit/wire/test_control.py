"""Control messages as peers write and read them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from umbel.wire.compression import compress
from umbel.wire.content import accept_set, encode
from umbel.wire.control import (
    CONTROL_LIMITS,
    Reply,
    ReplyTo,
    Request,
    clock_difference_s,
    exchange_name,
    is_expired,
    is_for,
    leased_exchange_name,
    node_queue_name,
    read_reply,
    read_request,
    reply_exchange_name,
    reply_queue_name,
    write_reply,
    write_request,
)
from umbel.wire.limits import (
    CONTENT_DISALLOWED,
    CONTENT_UNKNOWN,
    TOO_BIG,
    UNDECODABLE,
    UNKNOWN_MESSAGE,
    Limits,
    Refusal,
)

ACCEPT = accept_set(["json", "msgpack"])
JSON = "application/json"
# As a Celery worker of 5.7 sent it.
HELLO = (
    b'{"method": "hello", "arguments": {"from_node": "w1@wire", "revoked": []}, '
    b'"destination": null, "pattern": null, "matcher": null, "ticket": "9d49", '
    b'"reply_to": {"exchange": "reply.celery.pidbox", "routing_key": "6d46"}}'
)


def read(message: Any, headers: Any = None, **options: Any) -> Request:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return read_request(body, JSON, "utf-8", headers, accept=ACCEPT, **options)


def refusal_of(message: Any, headers: Any = None, **options: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(message, headers, **options)
    return caught.value


# -- requests ------------------------------------------------------------------------------


def test_a_request_of_a_celery_worker_is_read():
    request = read(HELLO, {"clock": 1, "expires": 1794771516.12})
    assert request == Request(
        method="hello",
        arguments={"from_node": "w1@wire", "revoked": []},
        ticket="9d49",
        reply_to=ReplyTo("reply.celery.pidbox", "6d46"),
        clock=1,
        expires=1794771516.12,
    )


def test_a_request_is_written_as_peers_write_it():
    request = read(HELLO, {"clock": 1, "expires": 1794771516.12})
    written = write_request(request)
    assert json.loads(written.body) == json.loads(HELLO)
    assert written.headers == {"clock": 1, "expires": 1794771516.12}
    assert (written.content_type, written.content_encoding) == (JSON, "utf-8")


def test_a_request_without_reply_has_neither_ticket_nor_address():
    written = write_request(Request(method="ping"))
    assert json.loads(written.body) == {
        "method": "ping",
        "arguments": {},
        "destination": None,
        "pattern": None,
        "matcher": None,
    }
    assert written.headers == {"clock": 0, "expires": 0}


def test_another_serializer_is_named_in_the_message():
    written = write_request(Request(method="ping"), "msgpack")
    assert written.content_type == "application/x-msgpack"
    read_back = read_request(*written[:1], *written[2:], written.headers, accept=ACCEPT)
    assert read_back.method == "ping"


def test_a_request_with_the_method_alone_is_one():
    assert read({"method": "ping"}) == Request(method="ping")


@pytest.mark.parametrize(
    "change",
    [
        {"method": None},
        {"method": ""},
        {"method": 7},
        {"method": "x" * 201},
        {"arguments": [1]},
        {"arguments": "a=1"},
        {"destination": "w1@wire"},
        {"destination": {"w1@wire": 1}},
        {"destination": [1]},
        {"destination": ["a"] * 20_001},
        {"pattern": 3},
        {"pattern": "x" * 1001},
        {"pattern": "w*", "matcher": "sql"},
        {"pattern": "(", "matcher": "pcre"},
        {"pattern": "x" * 300, "matcher": "glob"},
        {"ticket": 5},
        {"ticket": "x" * 256},
        {"ticket": "\ud800"},
        {"reply_to": "reply.celery.pidbox"},
        {"reply_to": {}},
        {"reply_to": {"exchange": "", "routing_key": "celery"}},
        {"reply_to": {"exchange": "e", "routing_key": None}},
        {"reply_to": {"exchange": "e", "routing_key": "ä" * 128}},
        {"reply_to": {"exchange": "\ud800", "routing_key": "k"}},
    ],
    ids=repr,
)
def test_what_is_not_a_request_is_refused(change):
    refusal = refusal_of({"method": "ping", **change})
    assert refusal.reason == UNKNOWN_MESSAGE
    assert len(refusal.text) < 400


@pytest.mark.parametrize("body", [[], "ping", 1, None, True])
def test_a_message_that_is_no_mapping_is_refused(body):
    assert refusal_of(body).reason == UNKNOWN_MESSAGE


@pytest.mark.parametrize(
    "expires", ["soon", True, [], float("nan"), float("inf"), 10**300, 10**400]
)
def test_an_expiry_that_is_no_time_is_refused(expires):
    assert refusal_of({"method": "ping"}, {"expires": expires}).reason == UNKNOWN_MESSAGE


@pytest.mark.parametrize("clock", [None, "1", True, -1, 2**53, 1.5])
def test_a_clock_that_is_none_is_a_missing_one(clock):
    assert read({"method": "ping"}, {"clock": clock}).clock is None


@pytest.mark.parametrize("headers", [None, [], "x", 3])
def test_headers_that_are_none_are_missing_ones(headers):
    assert read({"method": "ping"}, headers) == Request(method="ping")


def test_content_is_looked_at_before_it_is_decoded():
    def reason(body: Any, content_type: Any) -> str:
        with pytest.raises(Refusal) as caught:
            read_request(body, content_type, "utf-8", {}, accept=accept_set(["json"]))
        return caught.value.reason

    assert reason(b"{}", "application/x-python-serialize") == CONTENT_DISALLOWED
    assert reason(b"{}", "application/x-msgpack") == CONTENT_DISALLOWED
    assert reason(b"{}", None) == CONTENT_UNKNOWN
    assert reason(b"{", JSON) == UNDECODABLE
    assert reason(b" " * (CONTROL_LIMITS.body_bytes + 1), JSON) == TOO_BIG


def test_a_compressed_request_is_read_within_the_limit():
    body, content_type = compress(json.dumps({"method": "ping"}).encode(), "gzip")
    assert read(body, {"compression": content_type}).method == "ping"
    bomb, content_type = compress(b" " * 100_000, "gzip")
    refusal = refusal_of(bomb, {"compression": content_type}, limits=Limits(body_bytes=10_000))
    assert refusal.reason == TOO_BIG


# -- who is meant --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "meant"),
    [
        ({}, True),
        ({"destination": []}, True),
        ({"destination": ["w1@h"]}, True),
        ({"destination": ["w2@h"]}, False),
        ({"destination": ["w1@host"]}, False),
        ({"destination": ["w2@h"], "pattern": "w1@h", "matcher": "glob"}, False),
        ({"pattern": "w*@h", "matcher": "glob"}, True),
        ({"pattern": "w[2-9]@h", "matcher": "glob"}, False),
        ({"pattern": "w", "matcher": "pcre"}, True),
        ({"pattern": "w$", "matcher": "pcre"}, False),
        ({"pattern": r"w\d+@", "matcher": "pcre"}, True),
        ({"pattern": "w2", "matcher": None}, True),
        ({"pattern": None, "matcher": "glob"}, True),
        ({"pattern": "", "matcher": "glob"}, True),
    ],
    ids=repr,
)
def test_a_node_knows_whether_it_is_meant(to, meant):
    assert is_for(read({"method": "ping", **to}), "w1@h") is meant


def test_a_request_expires_at_its_time_and_not_before():
    request = read({"method": "ping"}, {"expires": 100.0})
    assert not is_expired(request, 100.0)
    assert is_expired(request, 100.1)
    assert not is_expired(request, 100.1, grace_s=5.0)


@pytest.mark.parametrize("headers", [{}, {"expires": 0}, {"expires": None}])
def test_a_request_without_an_expiry_never_expires(headers):
    assert not is_expired(read({"method": "ping"}, headers), 10.0**12)


HOURS_2 = 7_200.0


@pytest.mark.parametrize(
    ("sent_at", "waited_s", "expired"),
    [
        (1_000.0, 0.1, False),  # at once, and the clocks agree
        (940.0, 61.0, True),  # it waited for a minute: nobody waits for the reply
        (1_000.0 - HOURS_2, 0.1, False),  # the sender's clock is behind
        (1_000.0 + HOURS_2, 0.1, False),  # the sender's clock is ahead
        (1_000.0 - HOURS_2, 60.0, True),  # the same, and it may have waited for a minute
        (1_000.0 + HOURS_2, 60.0, True),
        (980.0, 0.1, False),  # twenty seconds behind
        (1_000.0 - HOURS_2, None, True),  # nobody knows how long it waited: its own time counts
        (1_000.0 + HOURS_2, None, False),
    ],
)
def test_whether_a_request_has_expired_is_judged_by_how_long_it_can_have_waited(
    sent_at, waited_s, expired
):
    headers = {"expires": sent_at + 1.0, "umbel_sent_at": sent_at}
    request = read({"method": "ping"}, headers)
    assert is_expired(request, 1_000.0, 5.0, waited_s=waited_s) is expired


def test_times_of_a_clock_that_is_off_are_moved_and_others_are_not():
    def difference(sent_at: Any, waited_s: float | None = 0.5) -> float:
        request = read({"method": "ping"}, {"umbel_sent_at": sent_at})
        return clock_difference_s(request, 1_000.0, waited_s, 1.0)

    assert difference(999.0) == difference(1_000.9) == difference(998.6) == 0.0
    assert difference(990.0) == 10.0
    assert difference(1_000.0 + HOURS_2) == -HOURS_2
    assert difference(990.0, waited_s=15.0) == 0.0, "it may have waited"
    assert difference(990.0, waited_s=None) == 0.0
    for nothing in (None, "now", float("nan"), True, 1e300):
        assert difference(nothing) == 0.0


def test_the_send_time_and_an_answered_challenge_travel_in_headers():
    plain = write_request(Request(method="ping", clock=1, expires=5.0))
    assert set(plain.headers) == {"clock", "expires"}
    sent = write_request(Request(method="ping", sent_at=4.5, challenge="c"))
    assert sent.headers["umbel_sent_at"] == 4.5
    assert sent.headers["umbel_challenge"] == "c"
    assert read({"method": "ping"}, sent.headers).sent_at == 4.5


# -- replies -------------------------------------------------------------------------------


def read_answer(written: Any) -> Reply:
    return read_reply(
        written.body,
        written.content_type,
        written.content_encoding,
        written.headers,
        accept=ACCEPT,
    )


def test_a_reply_is_read_as_it_was_written():
    written = write_reply("w1@h", {"ok": "pong"}, ticket="9d49", clock=7)
    assert json.loads(written.body) == {"w1@h": {"ok": "pong"}}
    assert written.headers == {"ticket": "9d49", "clock": 7}
    assert read_answer(written) == Reply("w1@h", {"ok": "pong"}, "9d49", 7)


def test_a_reply_that_can_not_be_written_says_so():
    reply = read_answer(write_reply("w1@h", object(), ticket="t"))
    assert set(reply.value) == {"error"}
    assert "object" in reply.value["error"]


@pytest.mark.parametrize("ticket", [None, 3, "", "x" * 256, ["t"]])
def test_a_reply_with_a_ticket_that_is_none_has_none(ticket):
    encoded = encode({"w1@h": 1})
    reply = read_reply(*encoded, {"ticket": ticket}, accept=ACCEPT)
    assert reply.ticket is None


@pytest.mark.parametrize("content", [{}, {"a": 1, "b": 2}, {"": 1}, [], "a", {"x" * 1001: 1}])
def test_what_is_not_a_reply_is_refused(content):
    with pytest.raises(Refusal) as caught:
        read_reply(*encode(content), {"ticket": "t"}, accept=ACCEPT)
    assert caught.value.reason == UNKNOWN_MESSAGE


# -- names ---------------------------------------------------------------------------------


def test_exchanges_and_queues_have_the_names_that_peers_give_them():
    assert exchange_name("celery") == "celery.pidbox"
    assert reply_exchange_name("celery") == "reply.celery.pidbox"
    assert node_queue_name("w1@h", "celery") == "w1@h.celery.pidbox"
    assert reply_queue_name("6d46", "celery") == "6d46.reply.celery.pidbox"
    assert leased_exchange_name("celery") != reply_exchange_name("celery")
