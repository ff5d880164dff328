"""Events: ours are read, a peer's are read, and all others are refused by reason."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from celery.app.base import Celery

from umbel.wire import events
from umbel.wire.compression import compress
from umbel.wire.content import accept_set
from umbel.wire.events import BATCH_MAX, Reading, check, encode, read, routing_key
from umbel.wire.limits import Limits

ACCEPT = accept_set(["json", "msgpack"])
JSON = ("application/json", "utf-8")
HEARTBEAT = {
    "hostname": "w1@wire",
    "utcoffset": 0.0,
    "pid": 13711,
    "clock": 3,
    "freq": 2.0,
    "active": 0,
    "processed": 0,
    "loadavg": [0.77, 0.54, 0.41],
    "sw_ident": "py-celery",
    "sw_ver": "5.7.0",
    "sw_sys": "Linux",
    "timestamp": 1794771517.12,
    "type": "worker-heartbeat",
}
STARTED = {**HEARTBEAT, "type": "task-started", "uuid": "9eab"}


def read_json(value: Any, **options: Any) -> Reading:
    return read(json.dumps(value).encode(), *JSON, accept=ACCEPT, **options)


# -- what is read ----------------------------------------------------------------------------


def test_one_event_and_a_list_of_them_are_read_in_order() -> None:
    assert read_json(HEARTBEAT) == ([HEARTBEAT], [])
    assert read_json([STARTED, HEARTBEAT, STARTED]) == ([STARTED, HEARTBEAT, STARTED], [])
    assert read_json([]) == ([], [])


def test_what_we_write_is_what_we_read_and_a_peer_reads() -> None:
    app = Celery(set_as_current=False)
    for value in (HEARTBEAT, [STARTED, STARTED]):
        body = encode(value)
        assert read(body, *JSON, accept=ACCEPT).events == (
            value if isinstance(value, list) else [value]
        )
        assert json.loads(body) == value
    receiver = app.events.Receiver(app.connection("memory://"))
    assert receiver.event_from_message(json.loads(encode(HEARTBEAT)))[0] == "worker-heartbeat"


def test_a_null_clock_is_a_missing_one() -> None:
    (event,), refused = read_json({**HEARTBEAT, "clock": None})
    assert "clock" not in event
    assert refused == []


def test_an_event_without_clock_pid_and_offset_is_one() -> None:
    bare = {"type": "custom", "hostname": "h", "timestamp": 5}
    assert read_json(bare) == ([bare], [])
    assert read_json({**bare, "pid": None}).refused == []


def test_fields_that_nobody_knows_are_kept() -> None:
    event = {**HEARTBEAT, "mine": {"deep": [1, None, "x"]}, "id": 7}
    assert read_json(event).events == [event]


def test_types_are_published_under_dotted_keys() -> None:
    assert routing_key("worker-elect-ack") == "worker.elect.ack"


def test_msgpack_is_read_where_it_is_accepted() -> None:
    body = msgspec.msgpack.encode(HEARTBEAT)
    label = ("application/x-msgpack", "binary")
    assert read(body, *label, accept=ACCEPT).events == [HEARTBEAT]
    assert read(body, *label, accept=accept_set(["json"])).refused == ["content-disallowed"]


@pytest.mark.parametrize("method", ["gzip", "bzip2", "lzma"])
def test_compressed_events_are_read_up_to_the_cap(method: str) -> None:
    packed, label = compress(json.dumps(HEARTBEAT).encode(), method)
    assert read(packed, *JSON, accept=ACCEPT, compression=label).events == [HEARTBEAT]
    small = Limits(body_bytes=100)
    assert read(packed, *JSON, accept=ACCEPT, compression=label, limits=small) == ([], ["too-big"])


@pytest.mark.parametrize("body", ["text", bytearray(b"bytes"), memoryview(b"view")])
def test_a_body_may_be_any_kind_of_bytes(body: Any) -> None:
    assert read(body, *JSON, accept=ACCEPT).refused == ["undecodable"]
    text = json.dumps(HEARTBEAT)
    for kind in (str, lambda t: bytearray(t.encode()), lambda t: memoryview(t.encode())):
        assert read(kind(text), *JSON, accept=ACCEPT).events == [HEARTBEAT]


# -- what is refused -------------------------------------------------------------------------

BAD_FIELDS = [
    *(("type", value, "bad-type") for value in (None, "", 5, [], "x" * 1001)),
    *(("hostname", value, "bad-hostname") for value in (None, "", 5, {}, "x" * 1001)),
    *(("timestamp", value, "bad-timestamp") for value in (None, "1", True, [], 2**53, -(2**60))),
    *(("clock", value, "bad-clock") for value in (-1, 1.0, "5", True, [], 2**53, 10**30)),
    *(("uuid", value, "bad-uuid") for value in (None, "", 5, [], "x" * 1001)),
    *(("pid", value, "bad-number") for value in (-1, "7", 1.5, True, [], 2**53)),
    *(("seq", value, "bad-number") for value in (None, -1, "7", 1.5, True, [], 2**53)),
    *(("umbel_series", value, "bad-number") for value in (None, -1, "7", 1.5, True, [], 2**53)),
    *(("inc", value, "bad-number") for value in (None, -1, "7", 1.5, True, [], 2**53)),
    *(("utcoffset", value, "bad-number") for value in (None, "0", 49, -49, True, [])),
]


@pytest.mark.parametrize(("name", "value", "reason"), BAD_FIELDS)
def test_a_field_that_can_not_be_believed_refuses_the_event(
    name: str, value: Any, reason: str
) -> None:
    event = {**STARTED, name: value}
    assert check(dict(event)) == reason
    assert read_json(event) == ([], [reason])


@pytest.mark.parametrize("name", ["type", "hostname", "timestamp", "uuid"])
def test_a_field_that_is_needed_refuses_the_event_by_its_absence(name: str) -> None:
    event = {key: value for key, value in STARTED.items() if key != name}
    assert read_json(event).refused == [f"bad-{name}"]


def test_a_worker_event_needs_no_task() -> None:
    assert read_json({**HEARTBEAT, "uuid": 5}).refused == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_times_and_numbers_that_are_none_are_refused(value: float) -> None:
    for name in ("timestamp", "clock", "utcoffset", "pid", "seq"):
        reading = read_json({**HEARTBEAT, name: value})
        assert reading.events == []
        assert len(reading.refused) == 1


def test_the_good_events_of_a_list_are_read_and_the_others_are_told() -> None:
    reading = read_json([STARTED, 5, {**STARTED, "clock": -1}, [STARTED], HEARTBEAT, None])
    assert reading.events == [STARTED, HEARTBEAT]
    assert reading.refused == ["not-an-event", "bad-clock", "not-an-event", "not-an-event"]


@pytest.mark.parametrize("value", [None, 5, "text", True, 1.5])
def test_what_is_neither_event_nor_list_is_refused(value: Any) -> None:
    assert read_json(value) == ([], ["not-an-event"])


def test_a_list_that_is_too_long_is_refused_as_a_whole() -> None:
    bare = {"type": "x", "hostname": "h", "timestamp": 1}
    assert len(read_json([bare] * BATCH_MAX).events) == BATCH_MAX
    assert read_json([bare] * (BATCH_MAX + 1)) == ([], ["too-many"])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "undecodable"),
        (b"\xff\xfe", "undecodable"),
        (b"{", "undecodable"),
        (b"[" * 100_000, "too-deep"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "too-deep"),
        (b'{"clock": ' + b"9" * 400 + b"}", "integer-too-large"),
        (b" " * (8 * 2**20 + 1), "too-big"),
        (None, "undecodable"),
        (5, "undecodable"),
    ],
)
def test_bodies_beyond_the_caps_are_refused_by_reason(body: Any, reason: str) -> None:
    assert read(body, *JSON, accept=ACCEPT) == ([], [reason])


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("application/x-python-serialize", "content-disallowed"),
        ("application/x-yaml", "content-disallowed"),
        ("text/plain", "content-unknown"),
        ("", "content-unknown"),
        (None, "not-an-event"),
        (["application/json"], "not-an-event"),
    ],
)
def test_content_types_that_are_not_accepted_are_refused_unread(label: Any, reason: str) -> None:
    assert read(b"{}", label, "utf-8", accept=ACCEPT) == ([], [reason])


def test_pickle_is_not_read_even_where_somebody_accepts_it() -> None:
    pickle = "application/x-python-serialize"
    assert read(b"N.", pickle, "binary", accept=frozenset({pickle})).events == []


@pytest.mark.parametrize("method", ["nonsense", 5, [], {}, True, ""])
def test_unknown_compression_is_refused(method: Any) -> None:
    reading = read(b"{}", *JSON, accept=ACCEPT, compression=method)
    assert reading == ([], ["bad-compression"])


def test_an_encoding_that_is_none_does_no_harm() -> None:
    for encoding in (None, 5, [], "\0", "utf-16"):
        body = json.dumps(HEARTBEAT).encode()
        assert read(body, JSON[0], encoding, accept=ACCEPT).events == [HEARTBEAT]


# -- what is written -------------------------------------------------------------------------


class Odd:
    def __repr__(self) -> str:
        return "odd\ud800"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.inf, None),  # JSON has no other word for it
        (10**30, 10**30),
        ("\ud800", "\\ud800"),
        (Odd(), "odd\\ud800"),
        ({1, 2}, [1, 2]),
        ({"\ud800": 1}, {"\\ud800": 1}),
    ],
)
def test_what_json_lacks_is_replaced_and_never_refused(value: Any, written: Any) -> None:
    assert json.loads(encode({"x": value}))["x"] == written


def test_an_endless_value_is_cut() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert b"..." in encode({**HEARTBEAT, "x": loop})


def test_the_exchange_is_the_one_that_peers_use() -> None:
    assert Celery(set_as_current=False).conf.event_exchange == events.EVENT_EXCHANGE
