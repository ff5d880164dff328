"""Reading AMQP frames: the same as py-amqp reads, however the bytes are cut."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from amqp import spec
from amqp.basic_message import Message
from amqp.exceptions import FrameError, FrameSyntaxError, UnexpectedFrame
from amqp.method_framing import frame_handler
from amqp.serialization import dumps
from hypothesis import given
from hypothesis import strategies as st

from umbel.broker.amqp.frames import BODY_BYTES_MAX, Event, Reader
from umbel.broker.amqp.shapes import ALIKE_MAX, Shapes

FRAME_MAX = 4096
TASK = {
    "lang": "py", "task": "tasks.add", "id": "0" * 36, "shadow": None, "retries": 0,
    "timelimit": [None, 3.5], "argsrepr": "(1, 2)", "ignore_result": False, "stamps": {},
}  # fmt: skip


def frame(kind: int, channel_id: int, payload: bytes, end: int = 0xCE) -> bytes:
    return struct.pack(">BHI", kind, channel_id, len(payload)) + payload + bytes((end,))


def deliver(consumer: str = "c1", tag: int = 1, again: bool = False) -> bytes:
    arguments = dumps("sLbss", (consumer, tag, again, "exchange", "key"))
    return struct.pack(">HH", *spec.Basic.Deliver) + arguments


def header(size: int, properties: bytes = b"\0\0", class_id: int = 60) -> bytes:
    return struct.pack(">HHQ", class_id, 0, size) + properties


def written(**properties: Any) -> bytes:
    written: bytes = Message(**properties)._serialize_properties()
    return written


def message(channel_id: int, method: bytes, properties: bytes, body: bytes) -> list[bytes]:
    parts = [body[at : at + FRAME_MAX - 8] for at in range(0, len(body), FRAME_MAX - 8)]
    return [
        frame(1, channel_id, method),
        frame(2, channel_id, header(len(body), properties)),
        *(frame(3, channel_id, part) for part in parts),
    ]


def read(reader: Reader, *chunks: bytes) -> list[Event]:
    events = []
    for chunk in chunks:
        reader.feed(chunk)
        while (event := reader.read()) is not None:
            events.append(event)
    return events


def by_pyamqp(data: bytes) -> list[Any]:
    """What py-amqp's own handler hands over."""

    class Connection:
        bytes_recv = 0

    events: list[Any] = []
    handle = frame_handler(Connection(), lambda *event: events.append(event))
    at = 0
    while at < len(data):
        kind, channel_id, size = struct.unpack_from(">BHI", data, at)
        handle((kind, channel_id, data[at + 7 : at + 7 + size]))
        at += size + 8
    return events


def seen(event: Any) -> tuple[Any, ...]:
    channel_id, signature, payload, content = event
    if content is None:
        return channel_id, signature, payload
    properties = repr(content.properties)  # nan is not equal to itself
    return channel_id, signature, payload, properties, content.body


# -- what may come -----------------------------------------------------------------------

names = st.text(max_size=8)
texts = st.one_of(st.text(max_size=20), st.sampled_from(["", "a\0b", "\ud800", "ü" * 40]))
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), texts, st.floats(), st.integers(-(2**63), 2**63 - 1),
        st.decimals(-1000, 1000, places=2), st.binary(max_size=9),
        st.datetimes().map(lambda when: when.replace(year=max(1971, when.year))),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip
# Types that py-amqp reads and does not write, and text that is none; names may come twice.
raw_values = st.one_of(
    st.tuples(st.sampled_from("bBUuIilLfdtDT"), st.binary(min_size=8, max_size=8)).map(
        lambda drawn: drawn[0].encode() + drawn[1][: dict(zip("bBUuIilLfdtDT",
            (1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 1, 5, 8), strict=True))[drawn[0]]]
    ),
    st.tuples(st.sampled_from([b"S", b"x"]), st.binary(max_size=6)).map(
        lambda drawn: drawn[0] + struct.pack(">I", len(drawn[1])) + drawn[1]
    ),
    st.just(b"V"),
)  # fmt: skip
raw_tables = st.lists(
    st.tuples(st.binary(min_size=1, max_size=2), raw_values).map(
        lambda drawn: bytes((len(drawn[0]),)) + drawn[0] + drawn[1]
    ),
    max_size=5,
).map(b"".join)
properties_of_pyamqp = st.fixed_dictionaries(
    {},
    optional={
        "content_type": st.just("application/json"),
        "content_encoding": st.sampled_from(["utf-8", "binary"]),
        "application_headers": st.dictionaries(names, values, max_size=6)
        | st.builds(lambda **more: {**TASK, **more}, argsrepr=texts, id=texts),
        "delivery_mode": st.integers(1, 2),
        "priority": st.integers(0, 255),
        "correlation_id": st.text(max_size=20),
        "reply_to": st.text(max_size=5),
        "expiration": st.just("1000"),
        "message_id": st.text(max_size=5),
        "timestamp": st.integers(0, 2**64 - 1),
        "type": st.text(max_size=5),
        "user_id": st.just("guest"),
        "app_id": st.just("app"),
        "cluster_id": st.just(""),
    },
)
property_lists = st.one_of(
    properties_of_pyamqp.map(lambda given: written(**given)),
    raw_tables.map(lambda table: b"\x20\0" + struct.pack(">I", len(table)) + table),
)
bodies = st.one_of(st.binary(max_size=30), st.just(b""), st.just(b"x" * 9_000))
METHODS = [
    struct.pack(">HH", *spec.Basic.QosOk),
    struct.pack(">HH", *spec.Basic.Ack) + dumps("Lb", (7, True)),
    struct.pack(">HH", *spec.Queue.DeclareOk) + dumps("sll", ("queue", 3, 1)),
]
RETURN = struct.pack(">HH", *spec.Basic.Return) + dumps("Bsss", (312, "NO_ROUTE", "", "key"))
GET_OK = struct.pack(">HH", *spec.Basic.GetOk) + dumps("Lbssl", (3, False, "", "key", 0))


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Frames of a few channels, mixed as the rules allow."""
    queues: list[list[bytes]] = []
    for channel_id in range(1, draw(st.integers(1, 3)) + 1):
        frames: list[bytes] = []
        for _ in range(draw(st.integers(0, 5))):
            method = draw(
                st.sampled_from([*METHODS, "deliver", "deliver", "deliver", RETURN, GET_OK])
            )
            if method in METHODS:
                frames.append(frame(1, channel_id, method))
                continue
            if method == "deliver":
                consumer = draw(st.text(max_size=5))
                method = deliver(consumer, draw(st.integers(0, 2**64 - 1)), draw(st.booleans()))
            frames += message(channel_id, method, draw(property_lists), draw(bodies))
        queues.append(frames)
    queues.append([frame(8, 0, b"")] * draw(st.integers(0, 2)))
    mixed: list[bytes] = []
    while any(queues):
        mixed.append(draw(st.sampled_from([queue for queue in queues if queue])).pop(0))
    return b"".join(mixed)


@given(streams(), st.data())
def test_every_stream_is_read_as_by_pyamqp(stream: bytes, data: st.DataObject) -> None:
    try:
        expected = [seen(event) for event in by_pyamqp(stream)]
    except Exception:
        expected = []  # something in a table that it does not read: see below
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    reader = Reader(FRAME_MAX)
    for _ in range(3):  # what it has seen before is read in another way
        events = read(reader, *chunks)
        if any(e.message is not None and e.message.unreadable for e in events):
            assert not expected
        else:
            assert [seen(event) for event in events] == expected
        assert not reader.ready


def test_ten_thousand_messages_byte_by_byte_are_those_of_large_chunks() -> None:
    count, parts = 10_000, []
    for number in range(count):
        headers = {**TASK, "argsrepr": f"({number},)"}
        properties = written(application_headers=headers, content_type="application/json")
        parts += message(1 + number % 3, deliver(tag=number), properties, b"[%d]" % number)
    stream = b"".join(parts)
    large = read(
        Reader(FRAME_MAX), *(stream[at : at + 65_536] for at in range(0, len(stream), 65_536))
    )
    small = read(Reader(FRAME_MAX), *(stream[at : at + 1] for at in range(200_000)))
    assert [seen(event) for event in large] == [seen(event) for event in by_pyamqp(stream)]
    assert [seen(event) for event in small] == [seen(event) for event in large[: len(small)]]
    assert len(small) > 500
    assert large[41].message.delivery_info == {
        "consumer_tag": "c1", "delivery_tag": 41, "redelivered": False,
        "exchange": "exchange", "routing_key": "key",
    }  # fmt: skip


def test_equal_shapes_with_other_names_or_types_are_told_apart() -> None:
    reader = Reader(FRAME_MAX)
    for headers in (
        {"aa": "1", "b": "22"}, {"a": "11", "bb": "2"}, {"aa": "2", "c": "22"},
        {"aa": "", "b": "222"}, {"a": 5}, {"b": 5}, {"a": -5}, {"aa": None, "b": "222222"},
        {"a": [None, None]}, {"a": [True, 1]}, {"a": "x\0y", "b": "x"}, {"a": "x", "b": "y\0z"},
    ):  # fmt: skip
        stream = b"".join(message(1, deliver(), written(application_headers=headers), b"x"))
        for _ in range(4):
            (event,) = read(reader, stream)
            assert event.message.properties == {"application_headers": headers}
    assert all(len(known) <= ALIKE_MAX for known in reader._shapes._known.values())


def test_shapes_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.broker.amqp.shapes.LENGTHS_MAX", 20)
    monkeypatch.setattr("umbel.broker.amqp.shapes.FORGET_AFTER", 500)
    shapes, most = Shapes(), 0
    for number in range(1_000):
        headers = {**TASK, "argsrepr": "x" * (number % 50)}
        payload = header(1, written(application_headers=headers))
        assert shapes.read(payload) == {"application_headers": headers}
        most = max(most, len(shapes._known))
    assert most == 20
    assert len(shapes._seen) <= 50


def test_what_is_read_is_nobody_elses() -> None:
    """Shapes are kept: nothing that a message is given may be a part of them."""
    reader = Reader(FRAME_MAX)
    stream = b"".join(message(1, deliver(), written(application_headers=TASK), b"x"))
    for _ in range(4):
        (event,) = read(reader, stream)
        assert event.message.properties == {"application_headers": TASK}
        assert "more" not in event.message.delivery_info
        event.message.properties["application_headers"]["stamps"]["x"] = 1
        event.message.properties["application_headers"]["timelimit"].append(1)
        event.message.properties["more"] = 1
        event.message.delivery_info["more"] = 1


def test_a_message_whose_properties_can_not_be_read_is_delivered_as_such() -> None:
    """The broker would deliver it again to a consumer that hangs up on it."""
    reader = Reader(FRAME_MAX)
    table = b"\1a?"  # there is no such type
    deep = b""
    for _ in range(1_100):
        deep = b"\1a" + b"F" + struct.pack(">I", len(deep)) + deep
    stamp = b"\1aT" + b"\xff" * 8
    for items in (table, deep, stamp):
        properties = b"\x20\0" + struct.pack(">I", len(items)) + items
        stream = b"".join(
            [*message(1, deliver(tag=5), properties, b"body"), frame(1, 1, METHODS[0])]
        )
        unreadable, following = read(reader, stream)
        assert unreadable.message.unreadable is not None
        assert unreadable.message.properties == {}
        assert unreadable.message.delivery_info["delivery_tag"] == 5
        assert following.signature == spec.Basic.QosOk


def test_names_that_are_no_text_do_not_end_the_connection() -> None:
    method = struct.pack(">HH", *spec.Basic.Deliver) + b"\1c" + bytes(8) + b"\0" + b"\0\2\xff\xfe"
    (event,) = read(Reader(FRAME_MAX), b"".join(message(1, method, b"\0\0", b"")))
    assert event.message.delivery_info["routing_key"] == "\\xff\\xfe"


BROKEN = {
    "end mark": (frame(1, 1, METHODS[0], end=0), UnexpectedFrame),
    "unknown type": (frame(5, 1, METHODS[0]), UnexpectedFrame),
    "unknown type, cut off": (b"HTTP/1.1 400 Bad Request", UnexpectedFrame),
    "protocol header": (b"AMQP\0\0\x09\x01", UnexpectedFrame),
    "header without method": (frame(2, 1, header(0)), UnexpectedFrame),
    "body without method": (frame(3, 1, b"x"), UnexpectedFrame),
    "method in a message": (frame(1, 1, deliver()) + frame(1, 1, METHODS[0]), UnexpectedFrame),
    "two deliveries": (frame(1, 1, deliver()) * 2, UnexpectedFrame),
    "body before header": (frame(1, 1, deliver()) + frame(3, 1, b"x"), UnexpectedFrame),
    "body too long": (
        frame(1, 1, deliver()) + frame(2, 1, header(2)) + frame(3, 1, b"xxx"), UnexpectedFrame,
    ),
    "short method": (frame(1, 1, b"\0"), FrameSyntaxError),
    "short header": (frame(1, 1, deliver()) + frame(2, 1, b"\0\x3c"), FrameSyntaxError),
    "other class": (frame(1, 1, deliver()) + frame(2, 1, header(1, class_id=50)), FrameSyntaxError),
    "huge body": (
        frame(1, 1, deliver()) + frame(2, 1, header(BODY_BYTES_MAX + 1)), FrameSyntaxError,
    ),
    "cut delivery": (frame(1, 1, deliver()[:9]) + frame(2, 1, header(0)), FrameSyntaxError),
    "large frame": (struct.pack(">BHI", 1, 1, 2**31) + b"x", FrameError),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_stream_raises_and_stays_broken(kind: str) -> None:
    stream, error = BROKEN[kind]
    good = b"".join(message(1, deliver(), b"\0\0", b"x"))
    for size in (1, 5, len(stream) + len(good)):
        reader = Reader(FRAME_MAX)
        whole = good + stream
        with pytest.raises(error) as raised:
            read(reader, *(whole[at : at + size] for at in range(0, len(whole), size)))
        assert reader.ready
        reader.feed(good)
        with pytest.raises(error) as again:
            reader.read()
        assert again.value is raised.value


@given(st.binary(max_size=200), st.integers(1, 200))
def test_rubbish_ends_in_connection_errors_only(rubbish: bytes, size: int) -> None:
    reader = Reader(FRAME_MAX)
    try:
        read(reader, *(rubbish[at : at + size] for at in range(0, len(rubbish), size)))
    except (UnexpectedFrame, FrameSyntaxError, FrameError):
        assert reader.ready


def test_what_is_announced_is_not_reserved_and_cut_frames_are_joined_once() -> None:
    reader = Reader(2**17)
    body = bytes(100_000)
    stream = b"".join([frame(1, 1, deliver()), frame(2, 1, header(len(body))), frame(3, 1, body)])
    reader.feed(stream[:500])
    assert reader.read() is None
    assert reader.wanted == len(stream) - 500
    for at in range(500, len(stream) - 1, 1000):
        reader.feed(stream[at : min(at + 1000, len(stream) - 1)])
        assert len(reader._buffer) == 500  # the rest waits until it is whole
        assert not reader.ready
    reader.feed(stream[-1:])
    event = reader.read()
    assert event is not None
    assert event.message.body == body
