"""What is published: the bytes of py-amqp, and who was confirmed."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from amqp import spec
from amqp.basic_message import Message
from amqp.exceptions import FrameSyntaxError
from amqp.method_framing import frame_writer
from amqp.serialization import dumps
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.broker.test_amqp_frames import bodies, properties_of_pyamqp
from umbel.broker.amqp import tables
from umbel.broker.amqp.batches import written
from umbel.broker.amqp.confirms import Confirms
from umbel.broker.amqp.publishing import ADDRESSES_MAX, Writer
from umbel.broker.tasks.batches import Parcel
from umbel.wire.outgoing import Letterhead

FRAME_MAX = 4096


class Wire:
    """Stands in for py-amqp's connection and transport."""

    frame_max = FRAME_MAX
    bytes_sent = 0

    def __init__(self) -> None:
        self.bytes = b""

    def write(self, data: Any) -> None:
        self.bytes += bytes(data)


def by_pyamqp(message: Message, exchange: str, key: str, mandatory: bool, now: bool) -> bytes:
    wire = Wire()
    arguments = dumps("Bssbb", (0, exchange, key, mandatory, now))
    frame_writer(wire, wire)(1, 7, spec.Basic.Publish, arguments, message)
    return wire.bytes


@given(
    properties_of_pyamqp, bodies | st.text(max_size=5),
    st.text(max_size=9), st.text(max_size=9), st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_message_is_written_as_by_pyamqp(
    properties: dict[str, Any], body: Any, exchange: str, key: str, mandatory: bool, now: bool
) -> None:
    assume(isinstance(body, bytes) or properties.get("content_encoding") != "binary")
    expected = by_pyamqp(Message(body, **properties), exchange, key, mandatory, now)
    writer = Writer(7)
    for _ in range(2):
        given = Message(body, **properties)
        assert writer.content(given, exchange, key, mandatory, now, FRAME_MAX) == expected


def test_headers_of_every_type_are_written_as_by_pyamqp() -> None:
    headers = {
        "text": "ü\ud800", "bytes": b"\xff", "true": True, "small": -5, "large": 2**40,
        "least": -(2**31), "float": 0.5, "decimal": Decimal("-1.25"), "nothing": None,
        "when": dt.datetime(2026, 11, 16), "list": [1, "a", None, [True]],  # noqa: DTZ001
        "table": {"inner": {"deep": 1}}, "subclass": type("Text", (str,), {})("x"), "tuple": (1,),
    }  # fmt: skip
    expected = by_pyamqp(Message(b"x", application_headers=headers), "", "q", False, False)
    message = Message(b"x", application_headers=headers)
    assert Writer(7).content(message, "", "q", False, False, FRAME_MAX) == expected


@pytest.mark.parametrize(
    "properties",
    [
        {"application_headers": {"a": object()}},
        {"application_headers": {"a": 2**70}},
        {"application_headers": {"x" * 300: 1}},
        {"correlation_id": "x" * 256},
        {"priority": 256},
        {"priority": "high"},
        {"expiration": 5},
        {"timestamp": -1},
    ],
)
def test_what_can_not_be_written_is_named(properties: dict[str, Any]) -> None:
    (name,) = properties
    with pytest.raises(FrameSyntaxError) as raised:
        tables.properties(properties)
    assert name in str(raised.value) or "header" in str(raised.value)


def test_addresses_and_names_are_kept_up_to_a_bound() -> None:
    writer = Writer(1)
    for number in range(3 * ADDRESSES_MAX):
        writer.address("", f"queue-{number}")
        tables.table({f"header-{number}": 1})
    assert len(writer._addresses) <= ADDRESSES_MAX
    assert len(tables._names) <= tables.NAMES_MAX


def test_a_parcel_is_written_as_kombu_writes_it() -> None:
    headers = {"task": "tasks.add", "id": "1", "retries": 0, "stamps": {}}
    properties = {"correlation_id": "1", "expiration": "5000"}
    parcel = Parcel(b"[]", headers, properties, "application/json", "utf-8", "", "celery")
    expected = Message(
        application_headers=headers, content_type="application/json", content_encoding="utf-8",
        delivery_mode=2, priority=0, **properties,
    )._serialize_properties()  # fmt: skip
    assert written(parcel) == expected


@given(
    st.dictionaries(
        st.text(max_size=5), st.none() | st.text(max_size=9) | st.integers(-(2**63), 2**63 - 1)
    ),
    st.fixed_dictionaries(
        {"correlation_id": st.text(max_size=70)},
        optional={
            "delivery_mode": st.none() | st.integers(1, 2),
            "priority": st.none() | st.integers(0, 255),
            "reply_to": st.none() | st.text(max_size=9),
            "message_id": st.text(max_size=9),
        },
    ),
)
def test_any_parcel_with_a_letterhead_is_written_as_kombu_writes_it(
    own: dict[str, Any], properties: dict[str, Any]
) -> None:
    letterhead = Letterhead({"task of ours": "tasks.add", "retries of it": 0})
    parcel = Parcel(b"[]", own, properties, "application/json", "utf-8", "", "celery", letterhead)
    told = {"delivery_mode": 2, "priority": 0, **properties}
    expected = Message(
        application_headers={**letterhead.headers, **own}, content_type="application/json",
        content_encoding="utf-8", **{name: v for name, v in told.items() if v is not None},
    )._serialize_properties()  # fmt: skip
    for _ in range(2):
        assert written(parcel) == expected


@pytest.mark.parametrize("wrong", [{"priority": []}, {"priority": "high"}, {"reply_to": {1}}])
def test_a_parcel_with_a_property_that_is_none_says_which(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    parcel = Parcel(b"[]", {}, {"correlation_id": "1", **wrong}, "application/json", "utf-8")
    with pytest.raises(FrameSyntaxError, match=name):
        written(parcel)


@given(st.data())
def test_confirms_are_known_in_any_order(data: st.DataObject) -> None:
    confirms, waiting, refused = Confirms(), set(), set()
    confirms.published()  # before the broker counts
    confirms.begin()
    with confirms.watched() as nacked:
        for _ in range(data.draw(st.integers(0, 40))):
            if data.draw(st.booleans()) or not waiting:
                confirms.published()
                waiting.add(confirms.last)
                continue
            number, multiple = data.draw(st.sampled_from(sorted(waiting))), data.draw(st.booleans())
            told = {n for n in waiting if n <= number} if multiple else {number}
            if data.draw(st.booleans()):
                confirms.confirmed(number, multiple)
            else:
                confirms.refused(number, multiple)
                refused |= told
            waiting -= told
            first = data.draw(st.integers(1, confirms.last))
            last = data.draw(st.integers(first, confirms.last))
            assert confirms.settled(first, last) == waiting.isdisjoint(range(first, last + 1))
        assert nacked == refused
    assert len(confirms._above) <= confirms.last
    confirms.confirmed(0, True)
    assert confirms.settled(1, confirms.last)
    assert confirms._above == set()
    assert confirms._watches == []
