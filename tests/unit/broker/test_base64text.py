"""Base64: the text that kombu writes, and only where it writes one."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection
from kombu.transport.virtual.base import Base64

from umbel.broker.base64text import QuickBase64, quicken


@given(st.binary(max_size=200) | st.text(st.characters(codec="utf-8"), max_size=50))
def test_the_text_is_that_of_kombu_and_is_read_back(body: bytes | str) -> None:
    text = QuickBase64().encode(body)
    assert text == Base64().encode(body)
    assert QuickBase64().decode(text) == Base64().decode(text)


def test_only_the_channel_that_is_told_to_uses_it() -> None:
    with Connection("memory://") as connection:
        one, other = connection.channel(), connection.channel()
        quicken(one)
        assert isinstance(one.codecs["base64"], QuickBase64)
        assert not isinstance(other.codecs["base64"], QuickBase64)
        assert one.encode_body(b"x", "base64") == other.encode_body(b"x", "base64")


def test_a_channel_without_base64_stays_as_it_is() -> None:
    plain = SimpleNamespace()
    quicken(plain)
    assert not vars(plain)
