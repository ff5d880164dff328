"""Base64: the text that kombu writes, and only where it writes one."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection, Producer, Queue
from kombu.transport.virtual.base import Base64

from umbel.broker.base64text import QuickBase64, decode, quicken


def as_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def read_by(reader: Callable[[Any], bytes], text: str) -> bytes | None:
    try:
        return reader(text)
    except ValueError:
        return None


@given(st.binary(max_size=200) | st.text(st.characters(codec="utf-8"), max_size=50))
def test_the_text_is_that_of_kombu_and_is_read_back(body: bytes | str) -> None:
    text = QuickBase64().encode(body)
    assert text == Base64().encode(body)
    assert QuickBase64().decode(text) == Base64().decode(text)


@given(st.text(alphabet="AQgw/+9=\n -_é", max_size=12) | st.binary(max_size=60).map(as_text))
def test_whatever_text_it_is_pythons_own_reader_says_the_same(text: str) -> None:
    assert read_by(decode, text) == read_by(binascii.a2b_base64, text)


def test_what_is_no_text_is_refused_as_by_pythons_own_reader() -> None:
    for value in (None, 5, ["QQ=="]):
        with pytest.raises(TypeError):
            decode(value)


def test_only_the_channel_that_is_told_to_uses_it(tmp_path: Path) -> None:
    folders = {"data_folder_in": str(tmp_path), "data_folder_out": str(tmp_path)}
    with Connection("filesystem://", transport_options=folders) as connection:
        one, other = connection.channel(), connection.channel()
        quicken(one)
        assert isinstance(one.codecs["base64"], QuickBase64)
        assert not isinstance(other.codecs["base64"], QuickBase64)
        assert one.encode_body(b"x", "base64") == other.encode_body(b"x", "base64")


def test_every_message_has_a_tag_of_its_own() -> None:
    with Connection("memory://") as connection:
        one, other = connection.channel(), connection.channel()
        quicken(one)
        quicken(other)
        tags = {channel._next_delivery_tag() for channel in (one, other) for _ in range(50)}
    assert len(tags) == 100


def test_in_memory_bodies_stay_as_they_are_and_everybody_reads_them() -> None:
    with Connection("memory://") as connection:
        one, other = connection.channel(), connection.channel()
        quicken(one)
        queue = Queue("q-base64text", channel=other)
        queue.declare()
        for channel in (one, other):
            Producer(channel).publish({"é": 1}, routing_key=queue.name, serializer="json")
        raw = [other._get(queue.name) for _ in range(2)]
        assert [type(message["body"]) for message in raw] == [str, str]
        assert raw[0]["body"] == '{"\\u00e9": 1}' != raw[1]["body"]
        for message in raw:
            other._put(queue.name, message)
        for _ in range(2):
            message = queue.get()
            assert message.payload == {"é": 1}
            message.reject(requeue=True)
        assert [queue.get().payload for _ in range(2)] == [{"é": 1}] * 2


def test_a_channel_without_base64_stays_as_it_is() -> None:
    plain = SimpleNamespace()
    quicken(plain)
    assert not vars(plain)
